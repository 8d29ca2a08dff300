"""`k3::attn_res` (meaning in op.py). Its kernels are those of `attn_res_norm` with the norm left out: kernel.py."""

from k3rewrite.kernels.attn_res.op import OPS

__all__ = ["OPS"]
