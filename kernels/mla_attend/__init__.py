"""`k3::mla_attend`: meaning in op.py, number of parts in splits.py, tiles in tiles.py, Triton kernels in triton.py, run
by launch.py, described in kernel.py."""

from k3rewrite.kernels.mla_attend.kernel import KERNELS
from k3rewrite.kernels.mla_attend.op import OPS

__all__ = ["KERNELS", "OPS"]
