"""`k3::kda_verify`: meaning in op.py, tile rule in tiles.py, Triton kernels in triton.py, run by launch.py, described
in kernel.py."""

from k3rewrite.kernels.kda_verify.kernel import KERNELS
from k3rewrite.kernels.kda_verify.op import OPS

__all__ = ["KERNELS", "OPS"]
