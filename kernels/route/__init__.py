"""`k3::route` (meaning in op.py; no kernel of its own yet)."""

from k3rewrite.kernels.route.op import OPS

__all__ = ["OPS"]
