"""From a rewritten graph to a callable.

prologue.py       what depends on weights alone, once before the first step
decompose.py      expand ops that nobody took, one trace for all equal calls
splice.py         put a traced body in place of a call
takeover.py       may a result take the storage of an argument
replay.py         the views of a graph made again of another tensor
reuse_storage.py  results take over the storage of the arguments that they replace
reinplace.py      writes to parts of inputs without a copy of the whole (for graphs that run as they are)
hazards.py        reads that Inductor must not delay past a write
overlap.py        refuse inputs that overlap where one is written
inductor.py       the rest compiled by Inductor
eager.py          the graph run node by node
compiled.py       what comes out
by_name.py        either of the two, by name
"""

from k3rewrite.finalise.by_name import finalise
from k3rewrite.finalise.compiled import CompiledGraph
from k3rewrite.finalise.decompose import Expansion, decompose
from k3rewrite.finalise.eager import finalise_eager
from k3rewrite.finalise.hazards import Hazard
from k3rewrite.finalise.inductor import finalise_inductor
from k3rewrite.finalise.reinplace import reinplace
from k3rewrite.finalise.reuse_storage import ReuseRecord, reuse_storage

__all__ = [
    "CompiledGraph",
    "Expansion",
    "Hazard",
    "ReuseRecord",
    "decompose",
    "finalise",
    "finalise_eager",
    "finalise_inductor",
    "reinplace",
    "reuse_storage",
]
