"""`k3::mlp` (meaning in op.py; no kernel of its own yet)."""

from k3rewrite.kernels.mlp.op import OPS

__all__ = ["OPS"]
