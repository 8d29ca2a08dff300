"""`k3::experts`: the routed experts of a mixture, on ids and weights that a router chose.

    g = x Wg[e]^T      u = x Wu[e]^T      a = activation(g, u)      r = a Wd[e]^T     for each of the k ids e of a token
    y = sum over the k ids of  w * r

Every rounding point is an argument, in this order: g and u leave their products in `product_dtype`, the activation is
computed in `compute_dtype` and leaves in `hidden_dtype`, r in `route_dtype`, w * r and the sum in `combine_dtype`, y in
`out_dtype`. Accumulation inside a product and inside the sum is fp32 or wider.

An id e means the expert e - first. One outside of 0 <= e - first < E (-1, or an expert of another rank) has no part:
nothing of it is computed into y, whatever its weight is, and a token without any gets zeros. An id that stands twice
in a row counts twice.

Weights are stacked over experts: Wg, Wu [E, I, K] and Wd [E, N, I], of any strides (halves of one tensor, every other
row of one, transposed). Formats: "dense" (the dtype of x), "mxfp4" and "mxfp8" (see `formats.py`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3rewrite.kernels.experts.formats import FORMATS, dequantised
from k3rewrite.kernels.mlp.op import ACTIVATIONS, gated_activation
from k3rewrite.ops.vocabulary import Cost, Op, size_hint, static_numel, tensor_bytes


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, s_gate: Tensor | None,
    s_up: Tensor | None, s_down: Tensor | None, format: str, activation: str, beta: float, linear_beta: float,
    first: int, product_dtype: torch.dtype, compute_dtype: torch.dtype, hidden_dtype: torch.dtype,
    route_dtype: torch.dtype, combine_dtype: torch.dtype, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """x [T, K], ids [T, k] of an integer dtype, weights [T, k] -> [T, N] in `out_dtype`.

    Scales are None for "dense", else uint8 E8M0, one for 32 columns: s_gate, s_up [E, I, K / 32], s_down
    [E, N, I / 32].
    """
    _demand(ids, weights, w_gate, w_up, w_down, s_gate, s_up, s_down, format, activation)
    count, top_k = w_gate.shape[0], ids.shape[-1]
    if isinstance(count, int) and isinstance(top_k, int) and 0 in (count, top_k):
        return x.new_zeros((ids.shape[0], w_down.shape[1]), dtype=out_dtype)
    local = ids.flatten().long() - first
    inside = (local >= 0) & (local < count)
    group = torch.where(inside, local, count - 1)  # what is outside is computed with the last expert, and dropped
    rows = x.repeat_interleave(top_k, dim=0) if top_k != 1 else x
    gate = product(rows, w_gate, s_gate, group, format, product_dtype)
    up = product(rows, w_up, s_up, group, format, product_dtype)
    hidden = gated_activation(gate.to(compute_dtype), up.to(compute_dtype), activation, beta, linear_beta)
    hidden = hidden.to(hidden_dtype)
    route = product(hidden, w_down, s_down, group, format, route_dtype).to(combine_dtype)
    weighted = (route * weights.flatten().unsqueeze(-1).to(combine_dtype)).masked_fill(~inside.unsqueeze(-1), 0.0)
    return weighted.view(-1, top_k, weighted.shape[-1]).sum(1).to(out_dtype)


def product(
    rows: Tensor, weight: Tensor, scale: Tensor | None, group: Tensor, format: str, dtype: torch.dtype
) -> Tensor:
    """Each row [R, K] times the transpose of its group's matrix [N, K], in `dtype`, accumulated in that or in fp32,
    whichever is wider."""
    if rows.dtype == weight.dtype == dtype == torch.bfloat16 and format == "dense" and _grouped_mm_takes(weight):
        order = group.argsort(stable=True)
        counts = group.new_zeros(weight.shape[0]).scatter_add(0, group, torch.ones_like(group))
        ends = counts.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(rows[order], weight.transpose(1, 2), offs=ends)[order.argsort()]
    wide = torch.promote_types(torch.promote_types(rows.dtype, dtype), torch.float32)
    matrices = dequantised(weight, scale, group, format, wide)
    return torch.bmm(matrices, rows.to(wide).unsqueeze(2)).squeeze(2).to(dtype)


def _grouped_mm_takes(weight: Tensor) -> bool:
    """torch's grouped product wants one dimension of a matrix dense and all others at multiples of 16 bytes."""
    step = 16 // weight.element_size()
    columns, strides = weight.shape[2], weight.stride()
    return 1 in strides[1:] and all(s == 1 or (s > 0 and s % step == 0) for s in (*strides, columns))


def experts_fake(
    x: Tensor, ids: Tensor, weights: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, s_gate: Tensor | None,
    s_up: Tensor | None, s_down: Tensor | None, format: str, activation: str, beta: float, linear_beta: float,
    first: int, product_dtype: torch.dtype, compute_dtype: torch.dtype, hidden_dtype: torch.dtype,
    route_dtype: torch.dtype, combine_dtype: torch.dtype, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    _demand(ids, weights, w_gate, w_up, w_down, s_gate, s_up, s_down, format, activation)
    return x.new_empty((ids.shape[0], w_down.shape[1]), dtype=out_dtype)


def _demand(
    ids: Tensor, weights: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, s_gate: Tensor | None,
    s_up: Tensor | None, s_down: Tensor | None, format: str, activation: str,
) -> None:  # fmt: skip
    """Raises ValueError for arguments that mean nothing. Symbolic sizes are not compared, which would add guards."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"k3::experts: activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    if format not in FORMATS:
        raise ValueError(f"k3::experts: format {format!r}; known: {', '.join(FORMATS)}")
    scales = (s_gate, s_up, s_down)
    if any(scale is not None for scale in scales) if format == "dense" else None in scales:
        raise ValueError(f"k3::experts: format {format!r} with {'scales' if format == 'dense' else 'missing scales'}")
    if ids.dtype.is_floating_point or ids.dtype is torch.bool:
        raise ValueError(f"k3::experts: ids are {ids.dtype}; numbers of experts are integers")
    for what, one, other in (
        ("weights and ids", weights.shape, ids.shape),
        ("w_up and w_gate", w_up.shape, w_gate.shape),
        ("experts of w_down and w_gate", w_down.shape[:1], w_gate.shape[:1]),
    ):
        known = all(isinstance(size, int) for size in (*one, *other))
        if len(one) != len(other) or (known and tuple(one) != tuple(other)):
            raise ValueError(f"k3::experts: {what} have the shapes {list(one)} and {list(other)}")


def _cost(
    x: Tensor, ids: Tensor, weights: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, s_gate: Tensor | None,
    s_up: Tensor | None, s_down: Tensor | None, *rest: object, **named: object,
) -> Cost:  # fmt: skip
    """Two launches; the matrices of as many experts as the ids can name at most, each read once."""
    routes, count = static_numel(ids), size_hint(w_gate.shape[0])
    stored = tensor_bytes(w_gate, w_up, w_down, s_gate, s_up, s_down)
    read = tensor_bytes(x, ids, weights) + stored * min(routes, count) // max(1, count)
    width, latent, out = size_hint(w_gate.shape[1]), size_hint(x.shape[-1]), size_hint(w_down.shape[1])
    hidden = routes * width * x.element_size()
    written = size_hint(x.shape[0]) * out * x.element_size()
    return Cost(2, read + hidden, written + hidden, 2 * routes * width * (2 * latent + out))


OP = Op(
    name="experts",
    schema=(
        "(Tensor x, Tensor ids, Tensor weights, Tensor w_gate, Tensor w_up, Tensor w_down, Tensor? s_gate, "
        "Tensor? s_up, Tensor? s_down, str format, str activation, float beta, float linear_beta, int first, "
        "ScalarType product_dtype, ScalarType compute_dtype, ScalarType hidden_dtype, ScalarType route_dtype, "
        "ScalarType combine_dtype, ScalarType out_dtype) -> Tensor"
    ),
    reference=experts,
    fake=experts_fake,
    cost=_cost,
    traits=frozenset({"row_independent"}),
)
OPS = (OP,)
