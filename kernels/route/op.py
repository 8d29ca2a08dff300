"""`k3::route`: from router logits to expert ids and routing weights.

    s = sigmoid(logits) | softmax(logits)            ("topk_softmax": s = logits, softmax over the selected only)
    ids = top-k of s + bias                          (the bias selects, it does not weigh)
    w = s[ids];  renormalise: w / (sum(w) + eps);  times scale

`ordered` says whether the selected come in falling order of s + bias; else the order is that of `torch.topk`, which
also decides ties, on the device at hand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3rewrite.ops.vocabulary import Cost, Op, size_hint, tensor_bytes

SCORES = ("sigmoid", "softmax", "topk_softmax")


def route(
    logits: Tensor, bias: Tensor | None, top_k: int, score: str, renormalise: bool, eps: float, scale: float,
    ordered: bool, compute_dtype: torch.dtype, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """logits [T, E], bias [E] or None -> weights [T, k] in `out_dtype`, ids [T, k] int64."""
    wide = logits.to(compute_dtype)
    scores = {"sigmoid": torch.sigmoid, "softmax": lambda v: v.softmax(-1), "topk_softmax": lambda v: v}[score](wide)
    ids = (scores if bias is None else scores + bias).topk(top_k, dim=-1, sorted=ordered).indices
    weights = scores.gather(-1, ids)
    if score == "topk_softmax":
        weights = weights.softmax(-1)
    if renormalise:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + eps if eps else total)
    if scale != 1.0:
        weights = weights * scale
    return weights.to(out_dtype), ids


def route_fake(
    logits: Tensor, bias: Tensor | None, top_k: int, score: str, renormalise: bool, eps: float, scale: float,
    ordered: bool, compute_dtype: torch.dtype, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if score not in SCORES:
        raise ValueError(f"k3::route: score {score!r}; known: {', '.join(SCORES)}")
    shape = (*logits.shape[:-1], top_k)
    return logits.new_empty(shape, dtype=out_dtype), logits.new_empty(shape, dtype=torch.int64)


def _cost(logits: Tensor, bias: Tensor | None, top_k: int, *rest: object) -> Cost:
    rows = tensor_bytes(logits) // max(1, logits.element_size() * size_hint(logits.shape[-1]))
    return Cost(1, tensor_bytes(logits, bias), rows * top_k * 12)


OP = Op(
    name="route",
    schema=(
        "(Tensor logits, Tensor? bias, int top_k, str score, bool renormalise, float eps, float scale, "
        "bool ordered, ScalarType compute_dtype, ScalarType out_dtype) -> (Tensor, Tensor)"
    ),
    reference=route,
    fake=route_fake,
    cost=_cost,
    traits=frozenset({"row_independent"}),
)
OPS = (OP,)
