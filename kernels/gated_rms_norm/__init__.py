"""`k3::gated_rms_norm` (meaning in op.py; no kernel of its own yet)."""

from k3rewrite.kernels.gated_rms_norm.op import OPS

__all__ = ["OPS"]
