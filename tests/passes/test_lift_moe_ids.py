"""Ids that the graph shows to be no distinct numbers of experts: the site is left alone, and compiled equals eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from small_graphs import traced
from torch import Tensor

from k3rewrite.backend import Backend
from k3rewrite.passes.moe.neighbourhood import is_down_projection
from k3rewrite.passes.moe.sites import Site, site_around
from k3rewrite.passes.moe.tables import region_values

TOKENS, INNER, WIDTH, EXPERTS = 5, 32, 16, 6


@torch.library.custom_op("k3_test_ids::any_number", mutates_args=())
def _any_number(ids: Tensor) -> Tensor:
    return ids - 1


@_any_number.register_fake
def _(ids: Tensor) -> Tensor:
    return torch.empty_like(ids)


BF16 = torch.bfloat16
Model = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _activated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def _gathered(x: Tensor, ids: Tensor, shares: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    flat = ids.flatten()
    rows = x.repeat_interleave(ids.shape[1], 0).unsqueeze(2)
    out = torch.bmm(w2[flat], _activated(torch.bmm(w13[flat], rows).squeeze(2)).unsqueeze(2)).squeeze(2)
    return (out.view(*shares.shape, -1) * shares.unsqueeze(-1)).sum(1)


def _scattered(pick: Callable[[Tensor], Tensor]) -> Model:
    """Every expert for every token, weighted by shares that are scattered: of two to one place, the last stays."""

    def model(x: Tensor, ids: Tensor, shares: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        dense = torch.zeros(TOKENS, EXPERTS, dtype=shares.dtype).scatter(1, pick(x[:, :EXPERTS].float()), shares)
        every = torch.einsum("tei,eni->ten", _activated(torch.einsum("tk,eik->tei", x, w13)), w2)
        return torch.einsum("ten,te->tn", every, dense)

    return model


def _of(change: Callable[[Tensor], Tensor]) -> Model:
    return lambda x, ids, shares, w13, w2: _gathered(x, change(ids), shares, w13, w2)


def _one_more(change: Callable[[Tensor], Tensor]) -> Model:
    def model(x: Tensor, ids: Tensor, shares: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return _gathered(x, change(ids), torch.cat([shares, shares.new_ones(ids.shape[0], 1)], 1), w13, w2)

    return model


REPEATED = {
    "one id, expanded": _scattered(lambda logits: logits.topk(1).indices.expand(-1, 2)),
    "a slice, expanded": _scattered(lambda logits: logits.topk(3).indices[:, 1:2].expand(-1, 2)),
    "one place taken twice": _scattered(lambda logits: logits.topk(2).indices[:, [0, 0]]),
}
NEGATIVE = {
    "a column of -1": _one_more(lambda ids: torch.cat([ids, ids.new_full((ids.shape[0], 1), -1)], 1)),
    "padded with -1": _one_more(lambda ids: F.pad(ids, (0, 1), value=-1)),
    "times -1": _of(lambda ids: ids * -1),
    "at most -1": _of(lambda ids: ids.clamp(max=-1)),
    "between -3 and -1": _of(lambda ids: torch.clamp(ids, -3, -1)),
    "the smaller of it and -1": _of(lambda ids: torch.minimum(ids, torch.full_like(ids, -1))),
    "remainder of a negative number": _of(lambda ids: ids.remainder(-EXPERTS)),
    "all bits turned": _of(lambda ids: torch.bitwise_xor(ids, -1)),
    "divided by -1": _of(lambda ids: torch.div(ids, -1, rounding_mode="trunc")),
    "added -1 times": _of(lambda ids: torch.add(torch.zeros_like(ids), ids, alpha=-1)),
}
NEGATIVE |= {
    "wrapped in 8 bits": _of(lambda ids: (ids + 254).to(torch.int8).long() % EXPERTS - 2),
    "wrapped in 16 bits": _of(lambda ids: (ids + 65530).to(torch.int16).long()),
    "an input in 8 bits": _of(lambda ids: ids.to(torch.int8).long()),
    "what a custom op gives": _of(lambda ids: torch.ops.k3_test_ids.any_number(ids)),
    "a number of the program": _of(lambda ids: torch.where(ids > 2, ids, torch.tensor(-1))),
    "counted down": _of(lambda ids: torch.arange(1, -1, -1).expand(ids.shape[0], 2) - 1),
}
NOT_NEGATIVE = {
    "half of them": _of(lambda ids: ids // 2),
    "some bits": _of(lambda ids: torch.bitwise_and(ids, 3)),
    "a difference, at least 0": _of(lambda ids: (ids - 1).clamp(min=0)),
    "remainder of a difference": _of(lambda ids: (ids - 1).remainder(EXPERTS)),
    "at most the last": _of(lambda ids: ids.clamp(max=EXPERTS - 1)),
}


def _arguments() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.3).to(BF16)

    x, shares = normal(TOKENS, INNER), torch.rand(TOKENS, 2, generator=generator).to(BF16)
    ids = torch.randn(TOKENS, EXPERTS, generator=generator).topk(2).indices
    return x, ids, shares, normal(EXPERTS, 2 * WIDTH, INNER), normal(EXPERTS, INNER, WIDTH)


def _compiled_and_eager(model: Model) -> tuple[Tensor, Tensor, int]:
    arguments = _arguments()
    backend = Backend({"target": "h200", "finalise": "eager"})
    torch._dynamo.reset()
    with torch.no_grad():
        got, want = torch.compile(model, backend=backend, fullgraph=True)(*arguments), model(*arguments)
    return got, want, next(p.matched for p in backend.reports[0].passes if p.name == "lift_moe")


@pytest.mark.parametrize("model", [*REPEATED.values(), *NEGATIVE.values()], ids=[*REPEATED, *NEGATIVE])
def test_left_alone_and_equal(model: Model) -> None:
    got, want, matched = _compiled_and_eager(model)
    assert matched == 0 and torch.equal(got, want)


AS_THEY_ARE = {"scattered": _scattered(lambda logits: logits.topk(2).indices), "gathered": _gathered}


@pytest.mark.parametrize("model", [*AS_THEY_ARE.values(), *NOT_NEGATIVE.values()], ids=[*AS_THEY_ARE, *NOT_NEGATIVE])
def test_distinct_numbers_of_experts_are_lifted(model: Model) -> None:
    got, want, matched = _compiled_and_eager(model)
    assert matched == 1
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_regions_are_run_with_ids_that_stand_twice_where_the_model_allows_it() -> None:
    """A reading that lost one of two equal ids would be found by `verify: regions`."""
    drawn = {}
    for name, model in AS_THEY_ARE.items():
        graph = traced(model, _arguments()).graph
        outcomes = [outcome for node in graph.nodes if is_down_projection(node) for outcome in site_around(node)]
        site = next(outcome for outcome in outcomes if isinstance(outcome, Site))
        rows = [region_values(site, seed)[site.ids].sort(-1).values for seed in range(3)]
        drawn[name] = [bool((row.diff(dim=-1) == 0).any()) for row in rows]
    assert drawn == {"gathered": [False, False, True], "scattered": [False, False, False]}
