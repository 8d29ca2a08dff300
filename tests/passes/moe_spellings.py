"""Spellings of routed experts: every function takes x [T, K], ids and weights [T, k] and the weights of the experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from spelling_checks import random_tensors
from torch import Tensor

K, WIDTH, N, E = 32, 16, 24, 4
Halves = Callable[[Tensor], Tensor]
Spelling = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Halves], Tensor]


def silu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def situ(both: Tensor) -> Tensor:
    """As Kimi K3: in fp32, one rounding."""
    gate, up = both.float().split(WIDTH, dim=-1)
    return (4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * (25 * torch.tanh(up / 25))).to(both.dtype)


def wide_silu(both: Tensor) -> Tensor:
    gate, up = both[..., :WIDTH].float(), both[..., WIDTH:].float()
    return (gate * gate.sigmoid() * up).to(both.dtype)


ACTIVATIONS: dict[str, Halves] = {"SiLU": silu, "SiTU": situ, "SiLU in fp32": wide_silu}


def counted(flat: Tensor) -> Tensor:
    return flat.new_zeros(E).scatter_add(0, flat, torch.ones_like(flat)).cumsum(0, dtype=torch.int32)


def binned(flat: Tensor) -> Tensor:
    return torch.histc(flat.sort().values.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)


def searched(flat: Tensor) -> Tensor:
    return torch.searchsorted(flat.sort()[0], torch.arange(E), right=True).to(torch.int32)


def one_hot(flat: Tensor) -> Tensor:
    return (flat.unsqueeze(1) == torch.arange(E)).sum(0).cumsum(0).to(torch.int32)


OFFSETS: dict[str, Callable[[Tensor], Tensor]] = {
    "scatter_add": counted, "histc": binned, "searchsorted": searched, "one-hot": one_hot,
}  # fmt: skip


def put(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return inverse


INVERSES: dict[str, Callable[[Tensor], Tensor]] = {
    "argsort": lambda order: order.argsort(),
    "index_put": put,
    "scatter": lambda order: torch.zeros_like(order).scatter_(0, order, torch.arange(order.shape[0])),
}


def _product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Grouped product; in other dtypes than bf16 one matrix a row."""
    if rows.dtype is torch.bfloat16:
        return F.grouped_mm(rows, matrices.transpose(1, 2), offs=ends)
    group = torch.searchsorted(ends, torch.arange(rows.shape[0], dtype=ends.dtype), right=True)
    return (matrices[group] @ rows.unsqueeze(2)).squeeze(2)


def _combined(routes: Tensor, weights: Tensor, out: torch.dtype) -> Tensor:
    routes = routes.view(*weights.shape, routes.shape[-1])
    return (routes.to(weights.dtype) * weights.unsqueeze(-1)).sum(1).to(out)


def grouped(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, act: Halves,
    offsets: Callable[[Tensor], Tensor] = counted, inverse: Callable[[Tensor], Tensor] = INVERSES["argsort"],
    sorted_weights: bool = False, added: bool = False,
) -> Tensor:  # fmt: skip
    flat, top = ids.flatten(), ids.shape[1]
    order, ends = flat.argsort(stable=True), offsets(flat)
    tokens = order // top
    out = _product(act(_product(x[tokens], w13, ends)), w2, ends)
    if added:
        weighted = out.to(weights.dtype) * weights.flatten()[order].unsqueeze(1)
        return torch.zeros(x.shape[0], w2.shape[1], dtype=weights.dtype).index_add(0, tokens, weighted).to(x.dtype)
    if sorted_weights:
        weighted = out.to(weights.dtype) * weights.reshape(-1)[order][:, None]
        return weighted[inverse(order)].view(*ids.shape, -1).sum(1).to(x.dtype)
    return _combined(out[inverse(order)], weights, x.dtype)


def gathered(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, act: Halves) -> Tensor:
    flat = ids.reshape(-1)
    rows = x.repeat_interleave(ids.shape[1], dim=0)
    hidden = act(torch.bmm(w13[flat], rows.unsqueeze(-1)).squeeze(-1))
    return _combined(torch.bmm(w2[flat], hidden.unsqueeze(2)).squeeze(2), weights, x.dtype)


def gathered_rows_first(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, act: Halves) -> Tensor:
    flat = ids.reshape(-1)
    rows = x[:, None].expand(-1, ids.shape[1], -1).reshape(-1, 1, x.shape[1])
    hidden = act(torch.bmm(rows, w13.index_select(0, flat).transpose(1, 2)))
    return _combined(torch.bmm(hidden, w2[flat].mT).squeeze(1), weights, x.dtype)


def masked(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, act: Halves) -> Tensor:
    every = torch.einsum("tei,eni->ten", act(torch.einsum("tk,eik->tei", x, w13)), w2)
    dense = torch.zeros(x.shape[0], E, dtype=weights.dtype).scatter_add(1, ids, weights)
    return torch.einsum("ten,te->tn", every.to(weights.dtype), dense).to(x.dtype)


def one_hot_masked(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, act: Halves) -> Tensor:
    dense = ((ids.unsqueeze(-1) == torch.arange(E)).to(weights.dtype) * weights.unsqueeze(-1)).sum(1)
    every = act(x @ w13.transpose(1, 2)) @ w2.transpose(1, 2)  # [E, T, N]
    return (every.to(weights.dtype) * dense.t().unsqueeze(-1)).sum(0).to(x.dtype)


def stacked(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, act: Halves) -> Tensor:
    hidden = act(torch.einsum("tk,tjik->tji", x, w13[ids]))
    routes = torch.einsum("tji,tjni->tjn", hidden, w2[ids])
    return torch.einsum("tjn,tj->tn", routes.to(weights.dtype), weights).to(x.dtype)


def loop(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, act: Halves) -> Tensor:
    out = torch.zeros(x.shape[0], w2.shape[1], dtype=weights.dtype)
    for e in range(E):
        share = (weights * (ids == e)).sum(-1, keepdim=True)
        out = out + F.linear(act(F.linear(x, w13[e])), w2[e]).to(weights.dtype) * share
    return out.to(x.dtype)


def added_loop(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, act: Halves) -> Tensor:
    out = torch.zeros(x.shape[0], w2.shape[1], dtype=weights.dtype)
    tokens = torch.arange(x.shape[0])
    for e in range(E):
        share = torch.where(ids == e, weights, 0.0).sum(-1)
        out.index_add_(0, tokens, (act(x @ w13[e].T) @ w2[e].T).to(weights.dtype) * share[:, None])
    return out.to(x.dtype)


SPELLINGS: dict[str, Spelling] = {
    "sorted, grouped": grouped, "gathered": gathered, "gathered, rows first": gathered_rows_first, "masked": masked,
    "one-hot": one_hot_masked, "stacked": stacked, "loop": loop, "loop, index_add": added_loop,
}  # fmt: skip


def example_inputs(
    dtype: torch.dtype = torch.float32, tokens: int = 5, top: int = 2, seed: int = 0
) -> tuple[Tensor, ...]:
    x, w13, w2 = random_tensors([(tokens, K), (E, 2 * WIDTH, K), (E, N, WIDTH)], [dtype] * 3, seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, E, generator=generator).topk(top).indices
    return x, ids, torch.rand(tokens, top, generator=generator), w13 * 0.3, w2 * 0.3
