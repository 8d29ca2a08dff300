"""What a run leaves behind: the report, the dumps of every pass, the numbered run folder."""

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
