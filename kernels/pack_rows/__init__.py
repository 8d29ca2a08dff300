"""Weights stacked by rows."""

from k3rewrite.kernels.pack_rows.op import OPS

__all__ = ["OPS"]
