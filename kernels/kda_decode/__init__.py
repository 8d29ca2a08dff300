"""`k3::kda_decode`: meaning in op.py, Triton kernel in triton.py, run by launch.py, described in kernel.py."""

from k3rewrite.kernels.kda_decode.kernel import KERNELS
from k3rewrite.kernels.kda_decode.op import OPS

__all__ = ["KERNELS", "OPS"]
