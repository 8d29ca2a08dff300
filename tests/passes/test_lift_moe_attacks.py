"""Graphs that look like routed experts and compute something else, found by trying to have them lifted wrongly.

Each either stays as it is, for a reason, or computes what it computed before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from moe_spellings import WIDTH, E, K, N, counted, example_inputs, gathered, grouped, loop, silu
from small_graphs import reasons, rewritten
from spelling_checks import graph_of
from torch import Tensor

from k3rewrite.backend import Backend
from k3rewrite.models.kimi_k3.mxfp4 import dequantise, pair_table, scale_table
from k3rewrite.passes.lift_moe import LiftMoe

Function = Callable[..., Any]


def _routes(x: Tensor, flat: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    rows = x.repeat_interleave(flat.shape[0] // x.shape[0], 0).unsqueeze(2)
    return torch.bmm(w2[flat], silu(torch.bmm(w13[flat], rows).squeeze(2)).unsqueeze(2)).squeeze(2)


def _summed(routes: Tensor, weights: Tensor) -> Tensor:
    return (routes.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


def _searched(group: Callable[[Tensor], Tensor], ends: Callable[[Tensor], Tensor] = counted) -> Function:
    """Sorted rows, one matrix a row; the group of a row is searched for among some ends."""

    def function(x: Tensor, ids: Tensor, w: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        among = group(ends(flat)).contiguous()
        chosen = torch.searchsorted(among, torch.arange(flat.shape[0], dtype=among.dtype), right=True)
        hidden = silu((w13[chosen] @ x[order // ids.shape[1]].unsqueeze(2)).squeeze(2))
        return _summed((w2[chosen] @ hidden.unsqueeze(2)).squeeze(2)[order.argsort()], w)

    return function


def _ends_of_sorted(flat: Tensor) -> Tensor:
    part = flat.sort()[0][:6]
    return part.new_zeros(E).scatter_add(0, part, torch.ones_like(part)).cumsum(0)


def _ends_of_every_other(flat: Tensor) -> Tensor:
    return torch.searchsorted(flat.sort()[0][::2].contiguous(), torch.arange(E), right=True)


def _ends_of_hit(flat: Tensor) -> Tensor:
    return flat.new_zeros(E).scatter_add(0, flat, torch.ones_like(flat)).bool().cumsum(0)


def _looped(added: Callable[[Tensor, Tensor], Tensor]) -> Function:
    def function(x: Tensor, ids: Tensor, w: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], N)
        for e in range(E):
            routes = F.linear(silu(F.linear(x, w13[e])), w2[e])
            out = added(out, routes * (w * (ids == e)).sum(-1, keepdim=True))
        return out

    return function


def _tokens(out: Tensor, rows: int = 5, columns: int = N) -> Tensor:
    return torch.arange(out.shape[0])[:rows, None].expand(-1, columns)


def _combined(summed: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Function:
    def function(x: Tensor, ids: Tensor, w: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        tokens, group = order // ids.shape[1], flat[order]
        hidden = silu((w13[group] @ x[tokens].unsqueeze(2)).squeeze(2))
        weighted = (w2[group] @ hidden.unsqueeze(2)).squeeze(2) * w.flatten()[order].unsqueeze(1)
        return summed(torch.zeros(x.shape[0], N), tokens, weighted)

    return function


def _every(w13: Tensor, w2: Tensor, x: Tensor) -> Tensor:
    return silu(x @ w13.transpose(1, 2)) @ w2.transpose(1, 2)


def _scattered(choose: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Function:
    def function(x: Tensor, ids: Tensor, w: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        weights, chosen = choose(x[:, :E])
        dense = torch.zeros(chosen.shape[0], E).scatter(1, chosen, weights)
        return (_every(w13, w2, x[: chosen.shape[0]]) * dense.t().unsqueeze(-1)).sum(0)

    return function


def _window(first: int, count: int) -> Function:
    """The experts of one rank; ids are those of the window."""

    def function(x: Tensor, ids: Tensor, w: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        dense = ((ids.unsqueeze(-1) == torch.arange(count)).to(w.dtype) * w.unsqueeze(-1)).sum(1)
        part = slice(first, first + count)
        return (_every(w13[part], w2[part], x) * dense.t().unsqueeze(-1)).sum(0)

    return function


def _double(act: Callable[[Tensor], Tensor]) -> Function:
    def function(x: Tensor, ids: Tensor, w: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return gathered(x.double(), ids, w.double(), w13.double(), w2.double(), act)

    return function


NOT_INVERSE = "not the inverse of the permutation"
LEFT: dict[str, tuple[Function, str]] = {
    "ends without the first": (_searched(lambda ends: ends[1:]), NOT_INVERSE),
    "ends of the first two": (_searched(lambda ends: ends[:2]), "among the ends of 2, of 4 experts"),
    "counts of two experts": (
        _searched(lambda ends: ends, lambda f: (f.unsqueeze(1) == torch.arange(2)).sum(0).cumsum(0)), "ends of 2",
    ),
    "a histogram of two experts": (
        _searched(lambda ends: ends, lambda f: torch.histc(f.float(), 2, 0, 1).cumsum(0).long()), "ends of 2",
    ),
    "two experts searched for": (
        _searched(lambda ends: ends, lambda f: torch.searchsorted(f.sort()[0], torch.arange(2), right=True)),
        "ends of 2",
    ),
    "counts of the first rows": (_searched(lambda ends: ends[:3], _ends_of_sorted), NOT_INVERSE),
    "counts of every other row": (_searched(lambda ends: ends[:3], _ends_of_every_other), NOT_INVERSE),
    "whether an expert is hit, summed up": (_searched(lambda ends: ends[:3], _ends_of_hit), NOT_INVERSE),
    "one number put everywhere": (
        lambda x, ids, w, w13, w2: grouped(
            x, ids, w, w13, w2, silu,
            inverse=lambda order: torch.empty_like(order).index_put((order,), torch.arange(1)),
        ), NOT_INVERSE,
    ),
    "an order of the first routes": (
        lambda x, ids, w, w13, w2: grouped(
            x, ids, w, w13, w2, silu,
            inverse=lambda order: torch.zeros_like(order).scatter(0, order[:8], torch.arange(8)),
        ), NOT_INVERSE,
    ),
    "ids as truth values": (
        lambda x, ids, w, w13, w2: _summed(_routes(x, ids.flatten().bool().long(), w13, w2), w), "not one of the ids",
    ),
    "ids as bf16": (
        lambda x, ids, w, w13, w2: _summed(_routes(x, ids.flatten().bfloat16().long(), w13, w2), w), "one of the ids",
    ),
    "ids as truth values in a loop": (
        lambda x, ids, w, w13, w2: loop(x, ids.bool().int(), w, w13, w2, silu), "whose id is the expert",
    ),
    "ids that count from the last": (
        lambda x, ids, w, w13, w2: _summed(_routes(x, (ids - 2).flatten(), w13, w2), w), "may be negative",
    ),
    "-1 for a dropped id": (
        lambda x, ids, w, w13, w2: _summed(_routes(x, torch.where(w > 0.5, ids, -1).flatten(), w13, w2), w),
        "may be negative",
    ),
    "sums at columns": (_looped(lambda out, y: out.scatter_add(1, _tokens(out), y)), "not one of the ids"),
    "sums of some columns": (
        _looped(lambda out, y: out.scatter_add(0, _tokens(out, columns=N // 2), y)), "not one of the ids",
    ),
    "sums of some rows": (_looped(lambda out, y: out.scatter_add(0, _tokens(out, rows=3), y)), "not one of the ids"),
    "one row at several places": (
        _looped(lambda out, y: out.index_put((torch.arange(5),), y[:1], accumulate=True)), "one row at several places",
    ),
    "sums into wider rows": (
        _combined(lambda out, at, y: torch.zeros(5, N + 8).scatter_add(0, at[:, None].expand(-1, N), y)), "wider ones",
    ),
    "sums of the first routes": (
        _combined(lambda out, at, y: out.scatter_add(0, at[:6, None].expand(-1, N), y)), NOT_INVERSE,
    ),
    "the largest of each expert": (
        _scattered(lambda scores: torch.topk(scores, E, dim=0)), "replaces another",
    ),
    "two tokens in a row": (
        _scattered(lambda scores: tuple(t[:4].reshape(2, 4) for t in scores.topk(2))),  # type: ignore[arg-type,return-value]
        "replaces another",
    ),
    "matrices beside the ids": (_window(1, 2), "share of another expert"),
    "fp64 products, rounded to fp32": (_double(lambda both: silu(both.float()).double()), "float64 -> torch.float32"),
    "a weight that does not promote": (
        lambda x, ids, w, w13, w2: _routes(x[:1].half(), ids[0, :1], w13.half(), w2.half()) * w[0, 0],
        "are applied in torch.float16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", LEFT)
def test_what_computes_something_else_is_left_alone(how: str) -> None:
    function, expected = LEFT[how]
    module = graph_of(function, example_inputs())
    report = rewritten(LiftMoe(), module)
    assert (report.candidates, report.matched) == (1, 0), str(module.graph)
    assert any(expected in reason for reason in reasons(report)), reasons(report)


def _transposed(x: Tensor, ids: Tensor, w: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """x [S, B, K], of which rows of [B, S] are no view."""
    turned, ids, w = x.view(5, 1, K).expand(5, 2, K).transpose(0, 1), ids.expand(2, 5, 2), w.expand(2, 5, 2)
    hidden = silu(torch.einsum("bsk,bsjik->bsji", turned, w13[ids]))
    return (torch.einsum("bsji,bsjni->bsjn", hidden, w2[ids]) * w.unsqueeze(-1)).sum(2)


LIFTED: dict[str, Function] = {
    "the first two experts": _window(0, 2),
    "the first three, of scattered weights": lambda x, ids, w, w13, w2: (
        _every(w13[:3], w2[:3], x) * torch.zeros(5, E).scatter_add(1, ids, w)[:, :3].t().unsqueeze(-1)
    ).sum(0),
    "a part of the sum over experts": lambda x, ids, w, w13, w2: (
        _every(w13, w2, x) * torch.zeros(5, E).scatter_add(1, ids, w).t().unsqueeze(-1)
    )[:3].sum(0),
    "ends without the last": _searched(lambda ends: ends[:-1]),
    "rows that are no view": _transposed,
    "weights that are cast after they are shaped": lambda x, ids, w, w13, w2: (
        _routes(x, ids.flatten(), w13, w2).view(5, 2, N) * w.unsqueeze(-1).half().float()
    ).sum(1),
    "sums at rows": _looped(lambda out, y: out.scatter_add(0, _tokens(out), y)),
    "sums by scatter_add": _combined(lambda out, at, y: out.scatter_add(0, at[:, None].expand(-1, N), y)),
    "scattered weights of a top-k": _scattered(lambda scores: scores.topk(2)),
}


@pytest.mark.parametrize("how", LIFTED)
def test_what_is_lifted_computes_what_it_did(how: str) -> None:
    inputs = example_inputs()
    module = graph_of(LIFTED[how], inputs)
    report = rewritten(LiftMoe(), module)
    assert report.matched == 1, reasons(report)
    torch.testing.assert_close(module(*inputs)[0], LIFTED[how](*inputs), rtol=1e-5, atol=1e-5)


def test_products_in_fp64_of_fp32_weights_stay_in_fp64() -> None:
    inputs = example_inputs()
    module = graph_of(_double(silu), inputs)
    assert rewritten(LiftMoe(), module).matched == 1
    torch.testing.assert_close(module(*inputs)[0], _double(silu)(*inputs), rtol=1e-13, atol=1e-13)


# ------------------------------------------------------------------ the whole pipeline

PIPELINE = {"version": 1, "extends": "default", "passes": [{"lift_moe": {"leave_without_kernel": False}}]}


def _compiled(model: Function, *inputs: Tensor) -> tuple[Tensor, Any]:
    """(the result, the report of lift_moe)"""
    torch._dynamo.reset()
    backend = Backend({"pipeline": PIPELINE, "target": "h200", "finalise": "eager"})
    with torch.no_grad():
        got = torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    (run,) = backend.reports
    return got, next(p for p in run.passes if p.name == "lift_moe")


def test_loops_of_two_layers_with_the_same_weights_are_lifted_each() -> None:
    """Not as MLPs of single experts, and not as one loop."""
    x, ids, w, w13, _ = example_inputs()
    w2 = torch.randn(E, K, WIDTH, generator=torch.Generator().manual_seed(1)) * 0.3

    def model(x: Tensor) -> Tensor:
        x = x + loop(x, ids, w, w13, w2, silu)
        return x + loop(x, ids.flip(0), w, w13, w2, silu)

    got, report = _compiled(model, x)
    assert report.matched == 2, reasons(report)
    torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-5)


class _Packed(torch.nn.Module):
    """Experts in MXFP4."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def stored(low: int, high: int, *shape: int) -> torch.nn.Buffer:
            return torch.nn.Buffer(torch.randint(low, high, shape, generator=generator).to(torch.uint8))

        self.p13, self.s13 = stored(0, 256, E, 64, K // 2), stored(120, 128, E, 64, 1)
        self.p2, self.s2 = stored(0, 256, E, N, 16), stored(120, 128, E, N, 1)
        self.pairs = torch.nn.Buffer(pair_table(torch.float32))
        self.scales = torch.nn.Buffer(scale_table(torch.float32))

    def forward(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        flat, rows = ids.flatten(), x.repeat_interleave(ids.shape[1], 0).unsqueeze(2)
        w13 = dequantise(self.p13[flat], self.s13[flat], self.pairs, self.scales)
        w2 = dequantise(self.p2[flat], self.s2[flat], self.pairs, self.scales)
        return _summed(torch.bmm(w2, silu(torch.bmm(w13, rows).squeeze(2)).unsqueeze(2)).squeeze(2), w)


@pytest.mark.parametrize(
    ("table", "entry", "value"),
    [("scales", 255, -1.0), ("scales", 0, 0.0), ("scales", 254, torch.inf), ("pairs", 300, 0.25)],
)
def test_one_entry_of_a_table_that_is_another_is_seen(table: str, entry: int, value: float) -> None:
    x, ids, w, _, _ = example_inputs()
    model = _Packed()
    got, report = _compiled(model, x, ids, w)
    assert report.matched == 1, reasons(report)
    torch.testing.assert_close(got, model(x, ids, w), rtol=1e-5, atol=1e-5)
    getattr(model, table).view(-1)[entry] = value
    _, report = _compiled(model, x, ids, w)
    assert report.matched == 0 and f"does not hold {'E' + ('8M0' if table == 'scales' else '2M1')}" in str(
        reasons(report)
    )


@pytest.mark.parametrize("gate", [slice(-56, -WIDTH), slice(-1000, WIDTH), slice(None, WIDTH)])
def test_a_slice_that_begins_before_the_beginning(gate: slice) -> None:
    """torch cuts such a start off at 0."""

    def function(x: Tensor, ids: Tensor, w: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        flat = ids.flatten()
        both = torch.bmm(w13[flat], x.repeat_interleave(ids.shape[1], 0).unsqueeze(2)).squeeze(2)
        hidden = F.silu(both[:, gate]) * both[:, WIDTH:]
        return _summed(torch.bmm(w2[flat], hidden.unsqueeze(2)).squeeze(2), w)

    inputs = example_inputs()
    module = graph_of(function, inputs)
    with torch.no_grad():
        report = rewritten(LiftMoe(), module)
        assert report.matched == 1, reasons(report)
        (got,) = module(*inputs)
        torch.testing.assert_close(got, function(*inputs), rtol=1e-4, atol=1e-4)
