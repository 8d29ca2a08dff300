"""Ranges of integers that are read off a graph: whatever is computed lies in them, and usual routers' ids from zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import traced
from torch import Tensor
from torch.fx import GraphModule, Node

from k3rewrite.capture.constants import RANGE_KEY, integer_range
from k3rewrite.passes.moe.intervals import Range
from k3rewrite.passes.moe.ranges import Ranges

Step = Callable[[Tensor, Tensor], Tensor]
"""One more step of a computation: from what there is, and from the first numbers."""

NUMBERS = st.integers(-5, 300)
STEPS = st.one_of(
    st.builds(lambda n: lambda v, ids: v + n, NUMBERS),
    st.builds(lambda n: lambda v, ids: v - n, NUMBERS),
    st.builds(lambda n: lambda v, ids: n - v, NUMBERS),
    st.builds(lambda n: lambda v, ids: v * n, NUMBERS),
    st.builds(lambda n: lambda v, ids: v.clamp(min=n), NUMBERS),
    st.builds(lambda n: lambda v, ids: v.clamp(max=n), NUMBERS),
    st.builds(lambda n: lambda v, ids: v.clamp(n, n + 3), NUMBERS),
    st.builds(lambda n: lambda v, ids: v.remainder(n or 1), NUMBERS),
    st.builds(lambda n: lambda v, ids: torch.fmod(v, n or 1), NUMBERS),
    st.builds(lambda n: lambda v, ids: v // (n or 1), NUMBERS),
    st.builds(lambda n: lambda v, ids: torch.div(v, n or 1, rounding_mode="trunc"), NUMBERS),
    st.builds(lambda n: lambda v, ids: torch.where(ids > 2, v, n), NUMBERS),
    st.builds(lambda n: lambda v, ids: v.masked_fill(ids > 2, n), NUMBERS),
    st.builds(lambda n: lambda v, ids: torch.bitwise_and(v, n), NUMBERS),
    st.builds(lambda n: lambda v, ids: torch.bitwise_or(v, n), NUMBERS),
    st.builds(lambda n: lambda v, ids: torch.bitwise_xor(v, n), NUMBERS),
    st.builds(lambda n: lambda v, ids: torch.add(ids, v, alpha=n), NUMBERS),
    st.builds(lambda n: lambda v, ids: torch.minimum(v, torch.full_like(v, n)), NUMBERS),
    st.builds(lambda n: lambda v, ids: torch.nn.functional.pad(v, (1, 0), value=n)[:, 1:], NUMBERS),
    st.builds(lambda n: lambda v, ids: torch.cat([v, v.new_full((4, 1), n)], 1)[:, -3:], NUMBERS),
    st.sampled_from([
        lambda v, ids: -v, lambda v, ids: v.abs(), lambda v, ids: ~v, lambda v, ids: v * ids, lambda v, ids: v + ids,
        lambda v, ids: torch.maximum(v, ids), lambda v, ids: v.cumsum(1), lambda v, ids: v >> 1,
        lambda v, ids: v.to(torch.int8).long(), lambda v, ids: v.to(torch.uint8).long(),
        lambda v, ids: v.to(torch.int16).long(), lambda v, ids: v.int().long(), lambda v, ids: v.flip(0),
        lambda v, ids: v.float().floor().long(), lambda v, ids: v.sort(1).values, lambda v, ids: v.sort(1).indices,
        lambda v, ids: v.argsort(1), lambda v, ids: v.topk(3).values, lambda v, ids: v.amax(1, keepdim=True) + ids,
        lambda v, ids: v.gather(1, ids % 3), lambda v, ids: v.scatter(1, ids % 3, ids), lambda v, ids: v.square(),
        lambda v, ids: torch.ops.aten.index_put(v, (torch.arange(4),), ids), lambda v, ids: (v > 2).long(),
        lambda v, ids: torch.where(v > 2, v - 3, ids), lambda v, ids: torch.where(v < 2, ids, v - 2),
        lambda v, ids: (v - 4).masked_fill(~(v >= 4) | (ids < 3), 1), lambda v, ids: torch.where(v <= 2, v, v - 2),
        lambda v, ids: v.scatter_add(1, ids % 3, ids), lambda v, ids: v.unsqueeze(2).expand(-1, -1, 2).sum(2),
    ]),
)  # fmt: skip


def _range(function: Callable[[Tensor], Tensor], ids: Tensor) -> tuple[Range, Tensor]:
    module = traced(function, (ids,))
    (returned,) = next(n for n in module.graph.nodes if n.op == "output").all_input_nodes
    return Ranges().of(returned), function(ids)


@settings(deadline=None, max_examples=300)
@given(steps=st.lists(STEPS, min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_what_is_computed_lies_in_its_range(steps: list[Step], seed: int) -> None:
    ids = torch.rand(4, 9, generator=torch.Generator().manual_seed(seed)).topk(3).indices

    def computed(ids: Tensor) -> Tensor:
        value = ids
        for step in steps:
            value = step(value, ids)
        return value

    found, values = _range(computed, ids)
    if values.abs().max() < 2**40:  # beyond, 64 bits may have wrapped where the range is not known
        assert found.low <= values.min() and values.max() <= found.high


FROM_ZERO: dict[str, tuple[Callable[[Tensor], Tensor], Range]] = {
    "top-k": (lambda v: v.topk(2).indices, Range(0, 8)),
    "one": (lambda v: v.argmax(-1), Range(0, 8)),
    "the largest of each row": (lambda v: v.max(1).indices, Range(0, 8)),
    "sorted": (lambda v: v.sort(dim=1, descending=True).indices[:, :2], Range(0, 8)),
    "8 bits": (lambda v: v.topk(2).indices.to(torch.int8), Range(0, 8)),
    "bf16": (lambda v: v.topk(2).indices.to(torch.bfloat16).long(), Range(0, 8)),
    "counted by a remainder": (lambda v: (v * 100).long() % 6, Range(0, 5)),
    "of a group": (lambda v: v.view(-1, 3, 3).amax(-1).argmax(-1) * 3 + v[:, :3].argmax(-1), Range(0, 8)),
    "held here": (lambda v: torch.where((ids := v.topk(2).indices) >= 4, ids - 4, 0), Range(0, 4)),
    "held here, added": (lambda v: torch.where((ids := v.topk(2).indices) < 4, 0, ids + -4), Range(0, 4)),
    "held here, of what was shifted": (
        lambda v: torch.where(((here := v.topk(2).indices - 4) >= 0) & (here < 3), here, 0), Range(0, 4)
    ),
    "not held here": (
        lambda v: ((ids := v.topk(2).indices) - 4).masked_fill((ids < 4) | (ids >= 7), 0), Range(0, 4)
    ),
    "of two choices": (lambda v: torch.cat([v.topk(2).indices, v.argmin(-1, keepdim=True)], 1), Range(0, 8)),
    "split": (lambda v: v.topk(2).indices.split(1, dim=1)[1], Range(0, 8)),
    "routed by an op": (lambda v: torch.ops.k3.route(v, None, 2, "softmax", True, 0.0, 1.0, True, v.dtype, v.dtype)[1],
                        Range(0, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", FROM_ZERO)
def test_ids_of_routers(name: str) -> None:
    function, expected = FROM_ZERO[name]
    found, values = _range(function, torch.randn(5, 9))
    assert found == expected
    assert found.low <= values.min() and values.max() <= found.high


def _output(module: GraphModule) -> Node:
    (returned,) = next(n for n in module.graph.nodes if n.op == "output").all_input_nodes
    return returned


def test_numbers_of_the_program_and_of_a_table_count() -> None:
    found, _ = _range(lambda v: torch.tensor([3, -2, 7])[v], torch.tensor([0, 1]))
    assert found == Range(-2, 7)
    module = traced(lambda table, at: table[at], (torch.tensor([4, -1]), torch.tensor([0])))
    table, _ = module.graph.find_nodes(op="placeholder")
    assert Ranges().of_ids(_output(module)).low < 0  # what another input holds
    table.meta[RANGE_KEY] = integer_range(torch.tensor([4, -1]))  # a buffer
    assert Ranges().of_ids(_output(module)) == Range(-1, 4)


INPUTS: dict[str, tuple[Callable[..., Tensor], int, bool]] = {
    "as it is": (lambda ids: ids, 1, True),
    "seen otherwise": (lambda ids: ids.t()[:1].int().flatten(), 1, True),
    "halved": (lambda ids: ids // 2, 1, True),
    "moved": (lambda ids: ids - 1, 1, False),
    "moved by another input": (lambda ids, by: ids + by, 2, False),
    "looked up in another input": (lambda ids, table: table.flatten()[ids], 2, False),
    "narrowed": (lambda ids: ids.to(torch.int8), 1, False),
}


@pytest.mark.parametrize("name", INPUTS)
def test_only_an_input_that_stands_alone_is_taken_for_ids(name: str) -> None:
    function, count, trusted = INPUTS[name]
    module = traced(function, tuple(torch.zeros(2, 2, dtype=torch.int64) for _ in range(count)))
    assert (Ranges().of_ids(_output(module)).low >= 0) is trusted


@torch.library.custom_op("k3_test_ranges::sub", mutates_args=())
def _sub(ids: Tensor, by: int) -> Tensor:
    return ids - by


@_sub.register_fake
def _(ids: Tensor, by: int) -> Tensor:
    return torch.empty_like(ids)


NOT_FROM_ZERO: dict[str, Callable[[Tensor], Tensor]] = {
    "an op of somebody else's with a known name": lambda v: torch.ops.k3_test_ranges.sub(v.topk(2).indices, 1),
    "a fraction above a bound": lambda v: torch.where((p := v * 4) > 0, p - 1, 0).floor().long(),
    "a fraction that is cut off": lambda v: v.clamp(min=0.5, max=2).long() * 2 - 1,
    "a remainder of floats": lambda v: (2 - ((v * 10) % 3)).mul(3).long(),
    "rounded to tens": lambda v: torch.round(v.clamp(4.0, 4.5), decimals=-1).long() - 4,
    "half an integer": lambda v: torch.full((2,), 0.5, dtype=torch.int64) * 2 - 1,
    "wrapped while it was filled": lambda v: v.new_full((5, 1), 255, dtype=torch.uint8).to(torch.int8).long(),
    "wrapped before it is chosen": lambda v: torch.where(
        (i := (v.topk(2).indices * 20).to(torch.int8)) >= 0, i + 100, 0
    ),
    "a hash": lambda v: ((v.topk(2).indices + 5) * 6364136223846793005) >> 61,
    "the bits of a float": lambda v: v.clamp(min=0.1).double().view(torch.int32) >> 30,
    "no number": lambda v: v.topk(2).indices.float().masked_fill(v[:, :2] > 2, torch.nan).long(),
    "a quotient of zeros": lambda v: torch.div(torch.zeros(2), v[0, :2]).long(),
    "places of repetitions": lambda v: torch.repeat_interleave(torch.full((2,), 5), output_size=10) - 5,
    "a product that wraps": lambda v: torch.fmod(v.topk(2).indices.int() * 1000003 * 1000, 8),
}


@pytest.mark.parametrize("name", NOT_FROM_ZERO)
def test_what_may_be_below_zero(name: str) -> None:
    found, values = _range(NOT_FROM_ZERO[name], torch.randn(5, 9))
    assert found.low < 0 and found.low <= values.min() and values.max() <= found.high


@pytest.mark.parametrize("function", [torch.remainder, torch.fmod, lambda a, b: torch.div(a, b, rounding_mode="floor")])
def test_what_may_be_divided_by_zero(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """An error on a CPU, any integer on a GPU: traced, not computed."""
    by_itself = traced(lambda v: function(ids := v.topk(2).indices, ids), (torch.randn(5, 9),))
    by_more = traced(lambda v: function(ids := v.topk(2).indices, ids + 1), (torch.randn(5, 9),))
    assert Ranges().of(_output(by_itself)).low < 0 <= Ranges().of(_output(by_more)).low


LOCAL: dict[str, Callable[[Tensor], Tensor]] = {
    "times a mask": lambda ids: (ids - 4) * (ids >= 4),
    "others set to zero": lambda ids: torch.ops.aten.index_put(here := ids - 4, (here < 0,), torch.tensor(0)),
    "one taken out": lambda ids: torch.where((here := ids - 1) != -1, here, 0),
    "a shared expert behind them": lambda ids: torch.slice_scatter(
        torch.zeros(5, 3, dtype=torch.int64), torch.ops.aten.copy(torch.zeros_like(ids), ids), 1, 0, 2
    ),
}


@pytest.mark.parametrize("name", LOCAL)
def test_usual_masks_of_local_experts(name: str) -> None:
    found, values = _range(lambda v: LOCAL[name](v.topk(2).indices), torch.randn(5, 9))
    assert found.low == 0 <= values.min()
