"""Products in every association and order: generated trees match exactly if the factors and the constant agree."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import Hand, aten
from torch.fx import Node

from k3rewrite.patterns import Product, Var, call
from k3rewrite.patterns.match import match_site

FACTORS = (aten.sin.default, aten.sigmoid.default, aten.tanh.default)
PATTERN = Product(
    (
        call(aten.sin.default, Var("x"), name="anchor"),
        call(aten.sigmoid.default, Var("y")),
        call(aten.tanh.default, Var("z")),
    ),
    "scale",
)
numbers = st.lists(st.sampled_from([2, 0.5, 3, -1.5, 4, 25, 1, 1.0]), max_size=5)


def _tree(hand: Hand, leaves: Sequence[Any], chance: random.Random) -> Node:
    """A random tree of multiplications over shuffled leaves. A number is always the second operand, as ATen has it."""
    pool = list(leaves)
    chance.shuffle(pool)
    while len(pool) > 1 or not isinstance(pool[0], Node):
        a, b = (pool.pop(chance.randrange(len(pool))) for _ in range(2))
        if not isinstance(a, Node) and not isinstance(b, Node):
            pool += [a, b]
            continue
        first, second = (a, b) if isinstance(a, Node) else (b, a)
        pool.append(hand.call(aten.mul.Tensor, first, second))
    return pool[0]


def _leaves(hand: Hand, kinds: Sequence[Any]) -> list[Node]:
    return [hand.call(kind, hand.input(f"v{i}", torch.randn(2, 3))) for i, kind in enumerate(kinds)]


def _found(hand: Hand, root: Node, kinds: Sequence[Any]) -> dict[str, Any] | None:
    anchor = next(n for n in hand.graph.nodes if n.target is aten.sin.default)
    matches = [m for m in match_site(PATTERN, anchor, reach=12)[0] if m.root is root]
    return dict(matches[0].bindings) if matches else None


@given(constants=numbers, seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_association_and_order_matches(constants: list[float], seed: int) -> None:
    hand = Hand()
    leaves = _leaves(hand, FACTORS)
    root = _tree(hand, [*leaves, *constants], random.Random(seed))
    bound = _found(hand, root, FACTORS)
    assert bound is not None
    assert [bound["x"], bound["y"], bound["z"]] == [leaf.args[0] for leaf in leaves]
    assert bound["scale"] == pytest.approx(math.prod(constants))


@given(
    kinds=st.lists(st.sampled_from([*FACTORS, aten.relu.default]), min_size=2, max_size=5),
    constants=numbers,
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_other_factors_do_not_match(kinds: list[Any], constants: list[float], seed: int) -> None:
    hand = Hand()
    leaves = _leaves(hand, [aten.sin.default, *kinds])
    root = _tree(hand, [*leaves, *constants], random.Random(seed))
    fits = sorted(map(str, [aten.sin.default, *kinds])) == sorted(map(str, FACTORS))
    assert (_found(hand, root, kinds) is not None) is fits


@given(constants=st.lists(st.sampled_from([2, 0.5, 3]), min_size=1, max_size=3), seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_a_partial_product_that_is_used_elsewhere_is_a_value_of_its_own(constants: list[float], seed: int) -> None:
    """Flattening through it would make it be computed twice: it counts as one factor."""
    hand = Hand()
    sine, sigmoid, tanh = _leaves(hand, FACTORS)
    shared = hand.call(aten.mul.Tensor, sine, sigmoid)
    root = _tree(hand, [shared, tanh, *constants], random.Random(seed))
    assert _found(hand, root, FACTORS) is not None
    hand.call(aten.neg.default, shared)
    assert _found(hand, root, FACTORS) is None


def test_a_partial_product_in_another_dtype_is_a_value_of_its_own() -> None:
    """bf16 * bf16 rounds before it meets the fp32 factor."""
    hand = Hand()
    sine, sigmoid = (
        hand.call(kind, hand.input(f"v{i}", torch.randn(3).bfloat16())) for i, kind in enumerate(FACTORS[:2])
    )
    tanh = hand.call(aten.tanh.default, hand.input("w", torch.randn(3)))
    root = hand.call(aten.mul.Tensor, hand.call(aten.mul.Tensor, sine, sigmoid), tanh)
    assert _found(hand, root, FACTORS) is None


def test_a_factor_twice_is_two_factors() -> None:
    hand = Hand()
    sine, sigmoid, tanh = _leaves(hand, FACTORS)
    root = hand.call(aten.mul.Tensor, hand.call(aten.mul.Tensor, sine, sigmoid), hand.call(aten.mul.Tensor, tanh, tanh))
    assert _found(hand, root, FACTORS) is None


def test_a_product_pattern_with_one_variable_twice() -> None:
    """g * sigmoid(g) * u: the same g in both places, whatever the association."""
    pattern = Product((Var("g"), call(aten.sigmoid.default, Var("g"), name="anchor"), Var("u")), "scale")
    for same in (True, False):
        hand = Hand()
        g, h, u = (hand.input(n, torch.randn(3)) for n in "ghu")
        sigmoid = hand.call(aten.sigmoid.default, g)
        hand.call(aten.mul.Tensor, hand.call(aten.mul.Tensor, u, g if same else h), sigmoid)
        found = list(match_site(pattern, sigmoid, reach=3)[0])
        assert bool(found) is same
        if same:
            assert (found[0]["g"], found[0]["u"]) == (g, u)
