"""`k3::short_conv` (meaning in op.py; no kernel of its own yet)."""

from k3rewrite.kernels.short_conv.op import OPS

__all__ = ["OPS"]
