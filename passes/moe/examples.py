"""Examples and counterexamples of `lift_moe`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3rewrite.patterns import CounterExample, Example

T, K, WIDTH, E, TOP = 5, 32, 16, 6, 2


def inputs() -> tuple[Tensor, ...]:
    """x, ids, weights, w13 [E, 2 * width, K], w2 [E, K, width]."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    ids = normal(T, E).topk(TOP).indices
    return normal(T, K), ids, torch.rand(T, TOP, generator=generator), normal(E, 2 * WIDTH, K), normal(E, K, WIDTH)


def bf16_inputs() -> tuple[Tensor, ...]:
    x, ids, weights, w13, w2 = inputs()
    return x.bfloat16(), ids, weights, w13.bfloat16() * 0.2, w2.bfloat16() * 0.2


def _activate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _weighted(routes: Tensor, weights: Tensor) -> Tensor:
    return (routes.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


def grouped(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    ends = flat.new_zeros(E).scatter_add(0, flat, torch.ones_like(flat)).cumsum(0, dtype=torch.int32)
    hidden = _activate(F.grouped_mm(x[order // TOP], w13.transpose(1, 2), offs=ends))
    return _weighted(F.grouped_mm(hidden, w2.transpose(1, 2), offs=ends)[order.argsort()].float(), weights).to(x.dtype)


def gathered(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    flat = ids.flatten()
    hidden = _activate(torch.bmm(w13[flat], x.repeat_interleave(TOP, 0).unsqueeze(2)).squeeze(2))
    return _weighted(torch.bmm(w2[flat], hidden.unsqueeze(2)).squeeze(2), weights)


def masked(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    every = torch.einsum("tei,eni->ten", _activate(torch.einsum("tk,eik->tei", x, w13)), w2)
    dense = torch.zeros(x.shape[0], E).scatter_add(1, ids, weights)
    return torch.einsum("ten,te->tn", every, dense)


def stacked(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    hidden = _activate(torch.einsum("tk,tjik->tji", x, w13[ids]))
    return torch.einsum("tji,tjni,tj->tn", hidden, w2[ids], weights)


def loop(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        share = torch.where(ids == e, weights, 0.0).sum(-1, keepdim=True)
        out = out + F.linear(_activate(F.linear(x, w13[e])), w2[e]) * share
    return out


def _biased(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    flat = ids.flatten()
    hidden = _activate(torch.bmm(w13[flat], x.repeat_interleave(TOP, 0).unsqueeze(2)).squeeze(2))
    return _weighted(torch.bmm(w2[flat], hidden.unsqueeze(2)).squeeze(2) + w13[0, 0], weights)


def _weighed_before(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    flat = ids.flatten()
    hidden = _activate(torch.bmm(w13[flat], x.repeat_interleave(TOP, 0).unsqueeze(2)).squeeze(2))
    hidden = hidden * weights.flatten().unsqueeze(1)
    return torch.bmm(w2[flat], hidden.unsqueeze(2)).view(T, TOP, K).sum(1)


def _gelu(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    flat = ids.flatten()
    gate, up = torch.bmm(w13[flat], x.repeat_interleave(TOP, 0).unsqueeze(2)).squeeze(2).chunk(2, -1)
    return _weighted(torch.bmm(w2[flat], (F.gelu(gate) * up).unsqueeze(2)).squeeze(2), weights)


def _clamped(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    flat = ids.flatten()
    gate, up = torch.bmm(w13[flat], x.repeat_interleave(TOP, 0).unsqueeze(2)).squeeze(2).chunk(2, -1)
    hidden = F.silu(gate.clamp(max=7.0)) * up.clamp(-7.0, 7.0)
    return _weighted(torch.bmm(w2[flat], hidden.unsqueeze(2)).squeeze(2), weights)


def _order_twice(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    ends = flat.new_zeros(E).scatter_add(0, flat, torch.ones_like(flat)).cumsum(0, dtype=torch.int32)
    hidden = _activate(F.grouped_mm(x[order // TOP], w13.transpose(1, 2), offs=ends))
    return _weighted(F.grouped_mm(hidden, w2.transpose(1, 2), offs=ends)[order], weights).to(x.dtype)


def _other_offsets(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    flat, other = ids.flatten(), (E - 1 - ids).flatten()
    order = flat.argsort(stable=True)
    ends = other.new_zeros(E).scatter_add(0, other, torch.ones_like(other)).cumsum(0, dtype=torch.int32)
    hidden = _activate(F.grouped_mm(x[order // TOP], w13.transpose(1, 2), offs=ends))
    return _weighted(F.grouped_mm(hidden, w2.transpose(1, 2), offs=ends)[order.argsort()], weights).to(x.dtype)


def _seen(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    flat = ids.flatten()
    hidden = _activate(torch.bmm(w13[flat], x.repeat_interleave(TOP, 0).unsqueeze(2)).squeeze(2))
    return _weighted(torch.bmm(w2[flat], hidden.unsqueeze(2)).squeeze(2), weights), hidden.amax(-1)


EXAMPLES = (
    Example("sorted and grouped", grouped, bf16_inputs),
    Example("gathered matrices", gathered, inputs),
    Example("stacked matrices, einsum", stacked, inputs),
    Example("every expert and a mask", masked, inputs),
    Example("a loop over the experts", loop, inputs),
)
COUNTEREXAMPLES = (
    CounterExample("a bias", _biased, inputs, "have a bias"),
    CounterExample("weighed before the down projection", _weighed_before, inputs, "before the down projection"),
    CounterExample("GELU", _gelu, inputs, "gelu"),
    CounterExample("a clamped unit", _clamped, inputs, "clamped"),
    CounterExample("sorted twice", _order_twice, bf16_inputs, "not the inverse of the permutation"),
    CounterExample("offsets of other ids", _other_offsets, bf16_inputs, "other ids"),
    CounterExample("an activation that is used elsewhere", _seen, inputs, "is also used by"),
)
