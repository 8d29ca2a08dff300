"""`k3::kda_chunk`: meaning in op.py and form.py; Triton in triton_*.py, laid out by plan.py, run by launch.py."""

from k3rewrite.kernels.kda_chunk.kernel import KERNELS
from k3rewrite.kernels.kda_chunk.op import OPS

__all__ = ["KERNELS", "OPS"]
