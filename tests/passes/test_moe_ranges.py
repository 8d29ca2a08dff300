"""Ranges of integers that are read off a graph: whatever is computed lies in them, and usual routers' ids from zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import traced
from torch import Tensor

from k3rewrite.capture.constants import KEY
from k3rewrite.passes.moe.ranges import Range, Ranges

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
    "one": (lambda v: v.argmax(-1), Range(0)),
    "the largest of each row": (lambda v: v.max(1).indices, Range(0, 8)),
    "sorted": (lambda v: v.sort(dim=1, descending=True).indices[:, :2], Range(0, 8)),
    "8 bits": (lambda v: v.topk(2).indices.to(torch.int8), Range(0, 8)),
    "bf16": (lambda v: v.topk(2).indices.to(torch.bfloat16).long(), Range(0, 8)),
    "counted by a remainder": (lambda v: (v * 100).long() % 6, Range(0, 5)),
    "of a group": (lambda v: v.view(-1, 3, 3).amax(-1).argmax(-1) * 3 + v[:, :3].argmax(-1), Range(0)),
    "held here": (lambda v: torch.where((ids := v.topk(2).indices) >= 4, ids - 4, 0), Range(0, 4)),
    "held here, added": (lambda v: torch.where((ids := v.topk(2).indices) < 4, 0, ids + -4), Range(0, 4)),
    "held here, of what was shifted": (
        lambda v: torch.where(((here := v.topk(2).indices - 4) >= 0) & (here < 3), here, 0), Range(0, 4)
    ),
    "not held here": (
        lambda v: ((ids := v.topk(2).indices) - 4).masked_fill((ids < 4) | (ids >= 7), 0), Range(0, 4)
    ),
    "of two choices": (lambda v: torch.cat([v.topk(2).indices, v.argmin(-1, keepdim=True)], 1), Range(0)),
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


def test_numbers_of_the_program_and_of_a_table_count() -> None:
    found, _ = _range(lambda v: torch.tensor([3, -2, 7])[v], torch.tensor([0, 1]))
    assert found == Range(-2, 7)
    module = traced(lambda table, at: table[at], (torch.tensor([4, -1]), torch.tensor([0])))
    table, _ = module.graph.find_nodes(op="placeholder")
    (returned,) = next(n for n in module.graph.nodes if n.op == "output").all_input_nodes
    assert Ranges().of(returned) == Range(0)  # an input
    table.meta[KEY] = torch.tensor([4, -1])  # a buffer
    assert Ranges().of(returned) == Range(-1, 4)
