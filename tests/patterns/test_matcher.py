"""The matcher on graphs that try to fool it: what matches, what must not, and the reason that a miss gives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from small_graphs import Hand, aten, traced
from torch.fx import Node

from k3rewrite.patterns import LAST_DIM, Anything, Cast, Dims, Item, ListOf, Match, Named, Number, Var, Views, call
from k3rewrite.patterns.match import match_site
from k3rewrite.patterns.pattern import Pattern

BF16, FP32 = torch.bfloat16, torch.float32
SIN = call(aten.sin.default, Var("x"), name="anchor")


def matches(pattern: Pattern, anchor: Node, reach: int = 6) -> list[Match]:
    return list(match_site(pattern, anchor, reach=reach)[0])


def miss(pattern: Pattern, anchor: Node, reach: int = 6) -> str:
    found, attempt = match_site(pattern, anchor, reach=reach)
    assert not list(found)
    assert attempt.reason
    return attempt.reason


def _inputs(hand: Hand, *names: str, shape: tuple[int, ...] = (3, 4), dtype: torch.dtype = FP32) -> list[Node]:
    return [hand.input(name, torch.randn(shape).to(dtype)) for name in names]


@pytest.mark.parametrize("flipped", itertools.product([False, True], repeat=2))
def test_commutative_operators_match_both_ways_at_every_level(flipped: tuple[bool, bool]) -> None:
    """Kind 72: r + relu(x) and relu(x) + r are one."""
    hand = Hand()
    x, y, z = _inputs(hand, "x", "y", "z")
    sine = hand.call(aten.sin.default, x)
    product = hand.call(aten.mul.Tensor, *((y, sine) if flipped[0] else (sine, y)))
    total = hand.call(aten.add.Tensor, *((z, product) if flipped[1] else (product, z)))
    (match,) = matches(call("add", call("mul", SIN, Var("y")), Var("z")), sine)
    assert match.root is total and [match[n] for n in "xyz"] == [x, y, z]


@pytest.mark.parametrize("operator", [aten.sub.Tensor, aten.div.Tensor])
def test_other_operators_keep_their_order(operator: Any) -> None:
    hand = Hand()
    x, y = _inputs(hand, "x", "y")
    sine = hand.call(aten.sin.default, x)
    hand.call(operator, y, sine)
    assert "sin" in miss(call(operator, SIN, Var("y")), sine)
    assert matches(call(operator, Var("y"), SIN), sine)


def test_an_addition_with_a_factor_does_not_commute() -> None:
    hand = Hand()
    x, y = _inputs(hand, "x", "y")
    sine = hand.call(aten.sin.default, x)
    hand.call(aten.add.Tensor, y, sine, alpha=2)
    pattern = call("add", SIN, Var("y"), alpha=Number("alpha"))
    assert miss(pattern, sine)
    assert "alpha=1, found alpha=2" in miss(call("add", Var("y"), SIN), sine)
    (match,) = matches(call("add", Var("y"), SIN, alpha=Number("alpha")), sine)
    assert match["alpha"] == 2


def test_alternatives_are_taken_back_when_they_lead_nowhere() -> None:
    """The first alternative fits here and makes the second operand fail."""
    hand = Hand()
    (v,) = _inputs(hand, "v")
    sine = hand.call(aten.sin.default, v)
    hand.call(aten.mul.Tensor, sine, v)
    pattern = call("mul", Named(Var("x") | call(aten.sin.default, Var("x")), "anchor"), Var("x"))
    (match,) = matches(pattern, sine)
    assert match["x"] is v


def test_backtracking_through_two_levels_and_a_cast() -> None:
    hand = Hand()
    (v,) = _inputs(hand, "v", dtype=BF16)
    wide = hand.call(aten._to_copy.default, v, dtype=FP32)
    sine = hand.call(aten.sin.default, wide)
    hand.call(aten.mul.Tensor, hand.call(aten.neg.default, sine), wide)
    inner = call(aten.sin.default, Cast(Var("x"), "d"), name="anchor")
    pattern = call("mul", call("neg", inner) | inner, Var("x"))
    (match,) = matches(pattern, sine)
    assert match["x"] is wide, "read without stripping the cast, as the other operand demands"


def test_a_root_is_offered_in_every_reading() -> None:
    """With the cast and without: a rule may refuse the first and take the second."""
    hand = Hand()
    (v,) = _inputs(hand, "v")
    narrow = hand.call(aten._to_copy.default, v, dtype=BF16)
    sine = hand.call(aten.sin.default, narrow)
    found = matches(call(aten.sin.default, Cast(Var("x"), "d"), name="anchor"), sine)
    assert [(m["x"], m["d"]) for m in found] == [(v, BF16), (narrow, BF16)]
    assert [m.nodes for m in found] == [{sine, narrow}, {sine}]


def test_readings_that_are_the_same_are_offered_once() -> None:
    hand = Hand()
    (v,) = _inputs(hand, "v")
    sine = hand.call(aten.sin.default, v)
    hand.call(aten.mul.Tensor, sine, sine)
    assert len(matches(call("mul", SIN, SIN), sine)) == 1


def test_larger_roots_come_first() -> None:
    hand = Hand()
    (v,) = _inputs(hand, "v")
    sine = hand.call(aten.sin.default, v)
    narrow = hand.call(aten._to_copy.default, hand.call(aten.neg.default, sine), dtype=BF16)
    found = matches(Cast(call("neg", SIN), "out") | SIN, sine)
    assert [len(m.nodes) for m in found] == [3, 2, 1] and found[0].root is narrow


def test_a_tensor_variable_never_binds_a_number() -> None:
    """Kind 90: x + 3 is no instance of x + n."""
    hand = Hand()
    (x,) = _inputs(hand, "x")
    sine = hand.call(aten.sin.default, x)
    hand.call(aten.add.Tensor, sine, 3)
    assert miss(call("add", SIN, Var("n")), sine) == "expected the tensor 'n', found 3"
    assert matches(call("add", SIN, Number("n")), sine)[0]["n"] == 3


def test_a_number_never_binds_a_tensor() -> None:
    hand = Hand()
    x, y = _inputs(hand, "x", "y")
    sine = hand.call(aten.sin.default, x)
    hand.call(aten.add.Tensor, sine, y)
    assert "expected a number ('n'), found placeholder y" in miss(call("add", SIN, Number("n")), sine)


@pytest.mark.parametrize(
    ("wanted", "given", "fits"),
    [
        (2, 2, True), (2, 2.0, True), (2.0, 2, True), (1e-6, 1e-6, True),
        (1e-6, 1e-5, False), (1, True, False), (True, 1, False), (True, True, True), (0, False, False),
    ],
)  # fmt: skip
def test_demanded_numbers(wanted: Any, given: Any, fits: bool) -> None:
    """Kinds 70 and 73: a literal in a pattern is never a wildcard, and True is not 1."""
    hand = Hand()
    (x,) = _inputs(hand, "x")
    sine = hand.call(aten.sin.default, x)
    hand.graph.call_function(aten.mul.Tensor, (sine, given)).meta["val"] = sine.meta["val"]
    found, attempt = match_site(call("mul", SIN, Number(value=wanted)), sine, reach=2)
    assert bool(list(found)) is fits
    if not fits:
        assert attempt.reason == f"expected the number {wanted:g}, found {given!r}"


def test_one_name_for_two_numbers_needs_one_type() -> None:
    """Kind 73: x * 1 + 1.0 does not use one number twice."""
    for first, second, fits in ((1, 1, True), (1, 1.0, False), (1.0, 1.0, True), (2, 3, False)):
        hand = Hand()
        (x,) = _inputs(hand, "x")
        sine = hand.call(aten.sin.default, x)
        hand.call(aten.add.Tensor, hand.call(aten.mul.Tensor, sine, first), second)
        assert bool(matches(call("add", call("mul", SIN, Number("n")), Number("n")), sine)) is fits


def test_a_captured_number_is_no_truth_value() -> None:
    hand = Hand()
    (x,) = _inputs(hand, "x")
    sine = hand.call(aten.sin.default, x)
    hand.call(aten.mul.Tensor, sine, True)
    assert "found True" in miss(call("mul", SIN, Number("n")), sine)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (([1],), {}), (([-1],), {}), (([1], False), {}), (([1], False), {"dtype": None}),
        ((), {"dim": [1]}), ((), {"dim": [1], "keepdim": False, "dtype": None}),
    ],
)  # fmt: skip
def test_arguments_are_compared_with_defaults_filled_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Kind 72: an optional argument that is written out is no other call."""
    hand = Hand()
    (x,) = _inputs(hand, "x")
    sine = hand.call(aten.sin.default, x)
    hand.call(aten.sum.dim_IntList, sine, *args, **kwargs)
    assert len(matches(call("sum", SIN, LAST_DIM), sine)) == 1
    assert len(matches(call("sum", SIN, dim=LAST_DIM, keepdim=False), sine)) == 1


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"dim": [0]}, "expected a reduction over dim -1, found dims (-2,) (from the end)"),
        ({"dim": [0, 1]}, "found dims (-2, -1)"),
        ({"dim": []}, "found dims ()"),
        ({"dim": None}, "found dims None"),
        ({"dim": [1], "keepdim": True}, "sum with keepdim=False, found keepdim=True"),
        ({"dim": [1], "dtype": torch.float64}, "sum with dtype=None, found dtype=torch.float64"),
    ],
)
def test_arguments_that_differ_are_the_reason(kwargs: dict[str, Any], reason: str) -> None:
    hand = Hand()
    (x,) = _inputs(hand, "x")
    sine = hand.call(aten.sin.default, x)
    hand.call(aten.sum.dim_IntList, sine, **kwargs)
    assert reason in miss(call("sum", SIN, LAST_DIM), sine)


def test_an_open_call_ignores_what_it_does_not_name() -> None:
    hand = Hand()
    (x,) = _inputs(hand, "x")
    sine = hand.call(aten.sin.default, x)
    hand.call(aten.sum.dim_IntList, sine, [1], True, dtype=torch.float64)
    assert matches(call("sum", SIN, LAST_DIM, open=True), sine)


def test_dimensions_are_counted_from_the_end_of_the_reduced_tensor() -> None:
    for shape, dims, wanted, fits in (((2, 3, 4), [1, 2], (-2, -1), True), ((2, 3, 4), [-1, 1], (-2, -1), True),
                                      ((2, 3, 4), [0], (-2,), False), ((4,), [0], (-1,), True)):  # fmt: skip
        hand = Hand()
        (x,) = _inputs(hand, "x", shape=shape)
        sine = hand.call(aten.sin.default, x)
        hand.call(aten.mean.dim, sine, dims)
        assert bool(matches(call("mean", SIN, Dims(wanted)), sine)) is fits, (shape, dims)


def test_a_pattern_with_too_many_parameters_is_a_miss_and_no_wildcard() -> None:
    hand = Hand()
    (x,) = _inputs(hand, "x")
    sine = hand.call(aten.sin.default, x)
    hand.call(aten.neg.default, sine)
    assert "2 parameters" in miss(call("neg", SIN, Anything()), sine)
    assert "a parameter 'dim'" in miss(call("neg", SIN, dim=Anything()), sine)


def test_constants_of_other_kinds_cannot_be_written_into_a_pattern() -> None:
    """`dtype=None` would have matched any number."""
    with pytest.raises(TypeError, match="neither a pattern nor a number"):
        call("sum", Var("x"), LAST_DIM, dtype=None)  # type: ignore[arg-type]


def test_a_cast_is_bound_and_optional() -> None:
    for dtype in (None, torch.float64):
        hand = Hand()
        (x,) = _inputs(hand, "x")
        sine = hand.call(aten.sin.default, x)
        used = sine if dtype is None else hand.call(aten._to_copy.default, sine, dtype=dtype)
        hand.call(aten.neg.default, used)
        (match,) = matches(call("neg", Cast(SIN, "d")), sine)
        assert match["d"] == (dtype or FP32)


@pytest.mark.parametrize(
    "kwargs",
    [{"dtype": BF16, "memory_format": torch.channels_last}, {"dtype": BF16, "device": "meta"}, {"dtype": FP32}],
)
def test_a_copy_that_does_more_than_cast_is_no_cast(kwargs: dict[str, Any]) -> None:
    hand = Hand()
    (x,) = _inputs(hand, "x", shape=(1, 2, 3, 4))
    sine = hand.call(aten.sin.default, x)
    hand.call(aten.neg.default, hand.call(aten._to_copy.default, sine, **kwargs))
    assert "found _to_copy" in miss(call("neg", Cast(SIN, "d")), sine)


def test_two_casts_are_not_one() -> None:
    hand = Hand()
    (x,) = _inputs(hand, "x")
    sine = hand.call(aten.sin.default, x)
    narrow = hand.call(aten._to_copy.default, sine, dtype=BF16)
    hand.call(aten.neg.default, hand.call(aten._to_copy.default, narrow, dtype=FP32))
    assert "_to_copy" in miss(call("neg", Cast(SIN, "d")), sine)


def test_views_are_looked_through_as_long_as_they_keep_the_order() -> None:
    keeps = [
        (aten.view.default, [12]), (aten.unsqueeze.default, 1), (aten.view.default, [4, 3]), (aten.alias.default,),
        (aten.slice.Tensor, 0, 0, 9), (aten.expand.default, [1, 3, 4]),
    ]  # fmt: skip
    moves = [
        (aten.t.default,), (aten.permute.default, [1, 0]), (aten.slice.Tensor, 0, 0, 2), (aten.select.int, 0, 0),
        (aten.expand.default, [2, 3, 4]), (aten.slice.Tensor, 0, 0, 9, 2), (aten.transpose.int, 0, 1),
        (aten.as_strided.default, [3, 4], [4, 1]),
    ]  # fmt: skip
    for steps, fits in ((keeps, True), (moves, False)):
        for target, *args in steps:
            hand = Hand()
            (x,) = _inputs(hand, "x")
            sine = hand.call(aten.sin.default, x)
            viewed = hand.call(target, sine, *args)
            hand.call(aten.neg.default, viewed)
            found = matches(call("neg", Views(SIN, "outer")), sine)
            assert bool(found) is fits, target
            if fits:
                assert found[0]["outer"] is viewed and found[0].nodes >= {viewed, sine}


def test_a_long_chain_of_views_has_an_end() -> None:
    hand = Hand()
    (x,) = _inputs(hand, "x")
    sine = node = hand.call(aten.sin.default, x)
    for _ in range(20):
        node = hand.call(aten.view.default, node, [4, 3])
    hand.call(aten.neg.default, node)
    assert not matches(call("neg", Views(SIN)), sine, reach=30)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_lists(count: int) -> None:
    hand = Hand()
    rows = [hand.input(f"b{i}", torch.randn(4)) for i in range(count)]
    (x,) = _inputs(hand, "x", shape=(4,))
    sine = hand.call(aten.sin.default, x)
    hand.call(aten.stack.default, [*rows, sine])
    (match,) = matches(call("stack", ListOf(each="rows", last=SIN)), sine)
    assert match["rows"] == tuple(rows)
    assert bool(matches(call("stack", ListOf(items=(Var("a"), SIN))), sine)) is (count == 1)
    if count:
        assert "sin" in miss(call("stack", ListOf(each="rows", last=call("neg", SIN))), sine)


def test_an_empty_list_has_no_last_element() -> None:
    hand = Hand()
    (x,) = _inputs(hand, "x")
    sine = hand.call(aten.sin.default, x)
    graph = hand.graph
    graph.call_function(aten.index.Tensor, (sine, [])).meta["val"] = sine.meta["val"]
    assert "that does not fit" in miss(call(aten.index.Tensor, SIN, ListOf(each="rows", last=Var("y"))), sine)


def test_results_of_a_call_with_several_are_told_apart() -> None:
    module = traced(lambda x: x.topk(2)[1] + 0 * x.sin().topk(2)[1], [torch.randn(3, 4)])
    first, second = (n for n in module.graph.nodes if n.target is aten.topk.default)
    top = call("topk", Var("x"), 2, name="anchor", open=True)
    assert [m["x"].op for m in matches(Item(top, 1, "ids"), first)] == ["placeholder"]
    assert matches(call("mul", Item(top, 1), 0), second)
    assert "expected result 0 of topk" in miss(call("mul", Item(top, 0), 0), second)


def test_a_name_used_twice_is_one_node() -> None:
    hand = Hand()
    x, y = _inputs(hand, "x", "y")
    sine = hand.call(aten.sin.default, x)
    hand.call(aten.mul.Tensor, sine, y)
    assert miss(call("mul", SIN, Var("x")), sine) == "'x' is placeholder x in one place and placeholder y in another"


def test_the_deepest_failure_is_kept_through_alternatives_and_argument_orders() -> None:
    hand = Hand()
    x, y = _inputs(hand, "x", "y")
    sine = hand.call(aten.sin.default, x, line=1)
    scaled = hand.call(aten.mul.Tensor, sine, 2, line=2)
    shifted = hand.call(aten.add.Tensor, scaled, 7, line=3)
    hand.call(aten.mul.Tensor, y, hand.call(aten.neg.default, shifted, line=4), line=5)
    shallow = call("mul", call("sqrt", SIN), Var("y"))
    deep = call("mul", call("neg", call("add", call("mul", SIN, 2), 8)), Var("y"))
    for pattern in (shallow | deep, deep | shallow):
        found, attempt = match_site(pattern, sine, reach=6)
        assert not list(found)
        assert attempt.reason == "expected the number 8, found 7"
        assert attempt.node is sine, "the last node that fitted"


def test_what_is_wrong_with_a_neighbour_is_no_reason_for_this_site() -> None:
    """A whole match around another site is deeper than anything here, and says nothing about this site."""
    hand = Hand()
    (x,) = _inputs(hand, "x")
    first = hand.call(aten.sin.default, x, line=1)
    twice = hand.call(aten.mul.Tensor, first, 3, line=2)
    second = hand.call(aten.sin.default, twice, line=3)
    hand.call(aten.neg.default, hand.call(aten.mul.Tensor, second, 2, line=4), line=5)
    pattern = call("neg", call("mul", SIN, 2))
    assert matches(pattern, second)
    assert miss(pattern, first) == "expected this site in the pattern, found a match around another site"
    pattern = call("neg", call("mul", SIN, 2)) | call("mul", SIN, 4)
    assert miss(pattern, first) == "expected the number 4, found 3"


def test_a_site_that_leads_to_no_root_says_where_it_leads() -> None:
    hand = Hand()
    (x,) = _inputs(hand, "x")
    sine = hand.call(aten.sin.default, x, line=1)
    hand.call(aten.neg.default, sine, line=2)
    assert (
        miss(call("mul", SIN, Var("y")), sine)
        == "expected a use in mul.Scalar, mul.Tensor, found neg 'neg_default' (net.py:2 in forward)"
    )
    lonely = hand.call(aten.sin.default, x)
    assert miss(call("mul", SIN, Var("y")), lonely).endswith("found no user")
    hand.returns(lonely)
    assert miss(call("mul", SIN, Var("y")), lonely).endswith("found the output of the graph")


def test_reach_bounds_how_far_a_root_may_lie() -> None:
    hand = Hand()
    (x,) = _inputs(hand, "x")
    sine = node = hand.call(aten.sin.default, x)
    for _ in range(3):
        node = hand.call(aten.neg.default, node)
    pattern = call("neg", call("neg", call("neg", SIN)))
    assert matches(pattern, sine, reach=3)
    assert not matches(pattern, sine, reach=2)


def test_repeated_runs_give_the_same_matches_in_the_same_order() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        s = x.sin()
        return (s * w + w * s) * (s + w)

    seen = set()
    for _ in range(5):
        module = traced(function, [torch.randn(3, 4), torch.randn(3, 4)])
        (sine,) = (n for n in module.graph.nodes if n.target is aten.sin.default)
        pattern = call("add", SIN | call("mul", SIN, Var("w")), Var("r")) | call("mul", SIN, Var("w"))
        found = matches(pattern, sine)
        seen.add(tuple((m.root.name, tuple(sorted(n.name for n in m.nodes)), str(m["x"])) for m in found))
    assert len(seen) == 1
