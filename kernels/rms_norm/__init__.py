"""`k3::rms_norm` and `k3::rms_norm_stat` (meaning in op.py; no kernel of their own yet)."""

from k3rewrite.kernels.rms_norm.op import OPS

__all__ = ["OPS"]
