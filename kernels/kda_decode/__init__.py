"""`k3::kda_decode` (meaning in op.py; no kernel of its own yet)."""

from k3rewrite.kernels.kda_decode.op import OPS

__all__ = ["OPS"]
