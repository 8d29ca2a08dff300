"""`k3::kda_window` (meaning in op.py; no kernel of its own: `k3::kda_verify` has it inside)."""

from k3rewrite.kernels.kda_window.op import OPS

__all__ = ["OPS"]
