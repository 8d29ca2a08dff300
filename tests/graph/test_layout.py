"""`keeps_order` against the numbers: a view that is said to keep the order must show 0, 1, 2, ... as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import Hand, aten
from torch.fx import Node

from k3rewrite import _torch_private as private
from k3rewrite.graph.layout import keeps_order, permutation


@st.composite
def views(draw: Any) -> tuple[tuple[int, ...], Any, tuple[Any, ...]]:
    """A shape with many ones, and one view of it."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 1, 2, 3]), min_size=1, max_size=4)))
    rank, dim = len(shape), draw(st.integers(0, len(shape) - 1))
    negative = draw(st.sampled_from([0, rank]))
    kinds: dict[Any, tuple[Any, ...]] = {
        aten.permute.default: (draw(st.permutations(range(rank))),),
        aten.transpose.int: (dim - negative, draw(st.integers(0, rank - 1))),
        aten.unsqueeze.default: (dim,),
        aten.squeeze.dim: (dim - negative,),
        aten.squeeze.default: (),
        aten.view.default: ([-1],),
        aten.slice.Tensor: (dim - negative, 0, draw(st.integers(0, 4)), draw(st.integers(1, 2))),
        aten.select.int: (dim - negative, 0),
        aten.expand.default: ([draw(st.integers(1, 2)), *(s if s > 1 else draw(st.integers(1, 2)) for s in shape)],),
        aten.alias.default: (),
        aten.diagonal.default: (),
        aten.as_strided.default: ([1], [1]),
    }
    if rank <= 2:
        kinds[aten.t.default] = ()
    target = draw(st.sampled_from([k for k in kinds if rank > 1 or k is not aten.diagonal.default]))
    return shape, target, kinds[target]


@given(case=views())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_what_keeps_the_order_keeps_it(case: tuple[tuple[int, ...], Any, tuple[Any, ...]]) -> None:
    shape, target, args = case
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    hand = Hand()
    node = hand.call(target, hand.input("x", numbers), *args)
    seen = target(numbers, *args).flatten().tolist()
    same = seen == numbers.flatten().tolist()
    said = keeps_order(node)
    assert same or not said, "a wrong proof"
    if target not in (aten.diagonal.default, aten.as_strided.default, aten.slice.Tensor):
        assert said is same, "no proof where there is one"


@pytest.mark.parametrize("target", [aten.neg.default, aten.clone.default, aten.relu.default])
def test_ops_that_compute_are_no_views(target: Any) -> None:
    hand = Hand()
    assert not keeps_order(hand.call(target, hand.input("x", torch.randn(3))))
    assert not keeps_order(hand.input("y", torch.randn(3)))


def test_a_view_as_another_dtype_is_another_value() -> None:
    hand = Hand()
    assert not keeps_order(hand.call(aten.view.dtype, hand.input("x", torch.randn(4)), torch.int32))


def test_symbolic_sizes_are_not_guessed() -> None:
    """[s, 1] transposed keeps the order whatever s is; [s, t] does not; and no guard is added by asking."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = private.FakeTensorMode(shape_env=ShapeEnv())
    graph = torch.fx.Graph()
    for shape, kept in (((5, 1), True), ((5, 6), False)):
        x = graph.placeholder("x")
        x.meta["val"] = mode.from_tensor(torch.randn(shape))
        node: Node = graph.call_function(aten.t.default, (x,))
        with mode:
            node.meta["val"] = x.meta["val"].t()
        guards = private.guard_count(mode)
        assert keeps_order(node) is kept
        assert private.guard_count(mode) == guards


def test_permutations_are_read_off_every_spelling() -> None:
    hand = Hand()
    x = hand.input("x", torch.randn(2, 3))
    for target, *args in (
        (aten.t.default,), (aten.transpose.int, 0, 1), (aten.transpose.int, -1, -2), (aten.permute.default, [1, 0]),
        (aten.permute.default, [-1, 0]),
    ):  # fmt: skip
        assert permutation(hand.call(target, x, *args)) == [1, 0]
    assert permutation(hand.call(aten.permute.default, x, [0, 1])) == [0, 1]
    assert permutation(hand.call(aten.neg.default, x)) is None and permutation(x) is None
