"""What a run leaves behind: the report, the dumps of every pass, the numbered run folder.

schema.py      the classes behind report.json, which passes and stages fill
run_folder.py  the numbered folder of a run
versions.py    when, from which commit and with which versions
dump.py        the graph after each pass, as dump_text.py and dump_svg.py show it
fold.py        a large graph folded into a drawing's worth of blocks
table.py       the table at the end of a run
explain.py     what each pass matched and missed, from a report alone
"""

from k3rewrite.report.schema import (
    Decomposed,
    EndToEnd,
    KernelReport,
    Miss,
    PassReport,
    RunInfo,
    RunReport,
    Site,
    Timings,
)

__all__ = [
    "Decomposed",
    "EndToEnd",
    "KernelReport",
    "Miss",
    "PassReport",
    "RunInfo",
    "RunReport",
    "Site",
    "Timings",
]
