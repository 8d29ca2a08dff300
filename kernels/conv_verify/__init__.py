"""`k3::conv_verify` (meaning in op.py; no kernel of its own: `k3::kda_verify` has it inside)."""

from k3rewrite.kernels.conv_verify.op import OPS

__all__ = ["OPS"]
