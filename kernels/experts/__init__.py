"""The routed experts of a mixture."""

from k3rewrite.kernels.experts.op import OPS

__all__ = ["OPS"]
