"""`k3::kda_step` (meaning in op.py; no kernel of its own yet)."""

from k3rewrite.kernels.kda_step.op import OPS

__all__ = ["OPS"]
