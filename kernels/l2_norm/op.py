"""`k3::l2_norm`: vectors of unit length along the last dimension.

    eps_inside:  y = v * rsqrt(sum(v^2) + eps)         (KDA queries and keys: eps 1e-6 inside the sum of squares)
    otherwise:   y = v / max(sqrt(sum(v^2)), eps)      (torch.nn.functional.normalize)

with v = x.to(compute_dtype) and one rounding to out_dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3rewrite.ops.vocabulary import Cost, Op, tensor_bytes


def l2_norm(x: Tensor, eps: float, eps_inside: bool, compute_dtype: torch.dtype, out_dtype: torch.dtype) -> Tensor:
    """x [..., d] -> [..., d] in `out_dtype`."""
    wide = x.to(compute_dtype)
    if eps_inside:
        return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + eps)).to(out_dtype)
    return (wide / torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp_min(eps)).to(out_dtype)


def l2_norm_fake(x: Tensor, eps: float, eps_inside: bool, compute_dtype: torch.dtype, out_dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=out_dtype)


def _cost(x: Tensor, eps: float, eps_inside: bool, compute_dtype: torch.dtype, out_dtype: torch.dtype) -> Cost:
    return Cost(1, tensor_bytes(x), tensor_bytes(torch.empty_like(x, dtype=out_dtype)))


OP = Op(
    name="l2_norm",
    schema="(Tensor x, float eps, bool eps_inside, ScalarType compute_dtype, ScalarType out_dtype) -> Tensor",
    reference=l2_norm,
    fake=l2_norm_fake,
    cost=_cost,
    traits=frozenset({"row_independent"}),
)
OPS = (OP,)
