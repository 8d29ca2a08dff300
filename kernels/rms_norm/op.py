"""`k3::rms_norm`: root-mean-square norm over the last dimension, with every rounding point in the schema.

    v = x.to(compute_dtype)
    y = ((v * rsqrt(mean(v^2) + eps)).to(scale_dtype) * weight).to(out_dtype)

`scale_dtype` is where spellings differ: narrow (the weight multiplies after the downcast, as in Llama-style code) or
the compute dtype (before it). `rms_norm_stat` returns the statistics as well, for graphs that read them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3rewrite.ops.vocabulary import Cost, Op, tensor_bytes


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, compute_dtype: torch.dtype, scale_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """x [..., d], weight [d] (or broadcastable to x) or None -> [..., d] in `out_dtype`."""
    wide = x.to(compute_dtype)
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(scale_dtype)
    if weight is not None:
        normed = normed * weight
    return normed.to(out_dtype)


def rms_norm_fake(
    x: Tensor, weight: Tensor | None, eps: float, compute_dtype: torch.dtype, scale_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return torch.empty_like(x, dtype=out_dtype)


def rms_norm_stat(
    x: Tensor, weight: Tensor | None, eps: float, compute_dtype: torch.dtype, scale_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `rms_norm`, with mean(v^2) and its reciprocal root, both [..., 1] in `compute_dtype`."""
    wide = x.to(compute_dtype)
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    rstd = torch.rsqrt(mean_square + eps)
    normed = (wide * rstd).to(scale_dtype)
    if weight is not None:
        normed = normed * weight
    return normed.to(out_dtype), mean_square, rstd


def rms_norm_stat_fake(
    x: Tensor, weight: Tensor | None, eps: float, compute_dtype: torch.dtype, scale_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    statistic = (*x.shape[:-1], 1)
    return (
        torch.empty_like(x, dtype=out_dtype),
        x.new_empty(statistic, dtype=compute_dtype),
        x.new_empty(statistic, dtype=compute_dtype),
    )


def _cost(
    x: Tensor, weight: Tensor | None, eps: float, compute_dtype: torch.dtype, scale_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Cost:  # fmt: skip
    return Cost(1, tensor_bytes(x, weight), tensor_bytes(rms_norm_fake(x, None, 0, x.dtype, x.dtype, out_dtype)))


_ARGUMENTS = (
    "(Tensor x, Tensor? weight, float eps, ScalarType compute_dtype, ScalarType scale_dtype, ScalarType out_dtype)"
)

RMS_NORM = Op(
    name="rms_norm",
    schema=f"{_ARGUMENTS} -> Tensor",
    reference=rms_norm,
    fake=rms_norm_fake,
    cost=_cost,
    traits=frozenset({"row_independent"}),
)
RMS_NORM_STAT = Op(
    name="rms_norm_stat",
    schema=f"{_ARGUMENTS} -> (Tensor, Tensor, Tensor)",
    reference=rms_norm_stat,
    fake=rms_norm_stat_fake,
    cost=_cost,
    traits=frozenset({"row_independent"}),
)
OPS = (RMS_NORM, RMS_NORM_STAT)
