"""`k3::l2_norm` (meaning in op.py; no kernel of its own yet)."""

from k3rewrite.kernels.l2_norm.op import OPS

__all__ = ["OPS"]
