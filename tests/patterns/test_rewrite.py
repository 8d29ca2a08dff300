"""Rules on graphs that try to break them: users outside, places, contract, failures. A refusal changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sine_rules import ANCHOR, CAST, COS, EXP, NEG, SIN, Built, cos_of_sin, exposing, unchanged
from small_graphs import Hand, aten, rewritten, targets, traced

from k3rewrite.graph.purity import eliminate_dead_code
from k3rewrite.patterns import Builder, Cast, Item, Match, Named, Var, call

# ------------------------------------------------------------------------------------------------ users outside


def test_an_inner_value_with_a_user_outside_is_a_refusal_that_names_the_user() -> None:
    """Kind 68: b = cos(sin(x)); return b + sin(x)."""
    hand = Hand()
    sine = hand.call(SIN, hand.input("x", torch.randn(3)), line=1)
    module = hand.returns(hand.call(aten.add.Tensor, hand.call(COS, sine, line=2), sine, line=3))
    (reason,) = unchanged(module, cos_of_sin())
    assert reason == (
        "the inner value sin 'sin_default' (net.py:1 in forward) is also used by add 'add_tensor' (net.py:3 in forward)"
    )


def test_an_inner_value_that_is_returned_is_one() -> None:
    hand = Hand()
    sine = hand.call(SIN, hand.input("x", torch.randn(3)), line=1)
    (reason,) = unchanged(hand.returns(hand.call(COS, sine), sine), cos_of_sin())
    assert "is also used by the output of the graph" in reason


def test_an_exposable_value_becomes_an_output_of_the_replacement() -> None:
    hand = Hand()
    sine = hand.call(SIN, hand.input("x", torch.randn(3)))
    early = hand.call(aten.mul.Tensor, sine, 2)
    module = hand.returns(hand.call(COS, sine), early)
    assert rewritten(cos_of_sin(exposing, exposable=["anchor"]), module).matched == 1
    assert targets(module) == ["exp", "neg", "mul"]
    (a, b), (x,) = hand.run(module)
    assert torch.equal(a, x.exp()) and torch.equal(b, -x * 2)


def test_any_of_several_names_of_a_node_may_be_the_exposable_one() -> None:
    """A node bound as a call and as a named value has two names."""
    hand = Hand()
    sine = hand.call(SIN, hand.input("x", torch.randn(3)))
    module = hand.returns(hand.call(COS, sine), sine)
    rule = cos_of_sin(exposing, call(COS, Named(ANCHOR, "again")), exposable=["anchor"])
    assert rewritten(rule, module).matched == 1


def test_a_rule_that_forgets_an_exposed_value_is_refused() -> None:
    hand = Hand()
    sine = hand.call(SIN, hand.input("x", torch.randn(3)))
    module = hand.returns(hand.call(COS, sine), sine)
    assert unchanged(module, cos_of_sin(exposable=["anchor"])) == ["the rule builds no replacement for 'anchor'"]


def test_one_of_two_results_unused() -> None:
    """Kind 71: a call with two results of which only one is taken; the other must not keep anything alive."""

    def build(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        node = builder.call(aten.sort.default, match["x"])
        return {name: builder.item(node, 1 if name == "anchor[1]" else 0) for name in ("root", *sorted(exposed))}

    pattern = call(NEG, Item(call("topk", Var("x"), 4, name="anchor", open=True), 0))
    for function, matched in (
        (lambda x: -x.topk(4)[0], 1),
        (lambda x: (-x.topk(4)[0], x.topk(4)[1]), 1),
        (lambda x: x.topk(4)[1] * 2, 0),
    ):
        module = traced(function, [torch.randn(3, 4)])
        rule = cos_of_sin(build, pattern, anchors=[aten.topk.default], exposable=["anchor[1]"])
        report = rewritten(rule, module)
        assert report.matched == matched
        if matched:
            assert "sort" in targets(module)

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = x.topk(4)
        return -values, ids

    module = traced(both, [torch.randn(3, 4)])
    assert rewritten(rule, module).matched == 1
    assert targets(module) == ["sort", "getitem", "getitem"]


def test_a_user_that_is_only_waiting_to_be_removed_is_none() -> None:
    """Kind 71, and what an earlier rule of the same pass has left behind."""
    hand = Hand()
    sine = hand.call(SIN, hand.input("x", torch.randn(3)))
    hand.call(NEG, hand.call(EXP, sine))
    module = hand.returns(hand.call(COS, sine))
    assert rewritten(cos_of_sin(), module).matched == 1
    eliminate_dead_code(module.graph)
    assert targets(module) == ["neg", "exp"]


def test_a_user_that_writes_is_one_although_nobody_reads_it() -> None:
    hand = Hand()
    sine = hand.call(SIN, hand.input("x", torch.randn(3)))
    hand.call(aten.add_.Tensor, hand.input("y", torch.randn(3)), sine)
    module = hand.returns(hand.call(COS, sine))
    assert "is also used by add_" in unchanged(module, cos_of_sin())[0]


def test_a_cast_of_an_input_may_have_other_users() -> None:
    hand = Hand()
    wide = hand.call(CAST, hand.input("x", torch.randn(3).bfloat16()), dtype=torch.float32)
    module = hand.returns(hand.call(COS, hand.call(SIN, wide)), hand.call(NEG, wide))
    sine = call(SIN, Cast(Var("x"), "d"), name="anchor")

    def build(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        return {"root": builder.call(EXP, builder.call(CAST, match["x"], dtype=match["d"]))}

    assert rewritten(cos_of_sin(build, call(COS, sine)), module).matched == 1
    assert targets(module) == ["_to_copy", "_to_copy", "exp", "neg"]


# ------------------------------------------------------------------------------------------------ place


def test_no_place_between_a_late_input_and_an_early_use() -> None:
    """Kind 89: the exposed sine is used before the other operand is there."""
    hand = Hand()
    x, y = hand.input("x", torch.randn(3)), hand.input("y", torch.randn(3))
    sine = hand.call(SIN, x, line=1)
    early = hand.call(aten.mul.Tensor, sine, 2, line=2)
    late = hand.call(EXP, y, line=3)
    module = hand.returns(hand.call(aten.mul.Tensor, sine, late, line=4), early)
    rule = cos_of_sin(exposing, call("mul", ANCHOR, Var("y")), exposable=["anchor"])
    (reason,) = unchanged(module, rule)
    assert reason == "no place: exp 'exp_default' (net.py:3 in forward) is computed after the first use of a result"


def test_no_place_when_an_input_depends_on_a_result() -> None:
    hand = Hand()
    sine = hand.call(SIN, hand.input("x", torch.randn(3)))
    module = hand.returns(hand.call(aten.mul.Tensor, sine, hand.call(EXP, hand.call(NEG, sine))))
    rule = cos_of_sin(exposing, call("mul", ANCHOR, Var("y")), exposable=["anchor"])
    (reason,) = unchanged(module, rule)
    assert "no place: exp" in reason


def test_no_place_for_a_value_of_the_match_that_the_replacement_reads_too_late() -> None:
    """A weight whose cast stays is cast after the first use of the exposed statistic."""

    def build(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        root = builder.call(aten.mul.Tensor, match["x"], match["w_used"])
        return {"root": root, **{name: builder.call(NEG, match["x"]) for name in exposed}}

    hand = Hand()
    x, w = hand.input("x", torch.randn(3)), hand.input("w", torch.randn(3).double())
    sine = hand.call(SIN, x)
    early = hand.call(aten.mul.Tensor, sine, 2)
    narrow = hand.call(CAST, w, dtype=torch.float32)
    module = hand.returns(hand.call(aten.mul.Tensor, sine, narrow), early)
    rule = cos_of_sin(build, call("mul", ANCHOR, Named(Cast(Var("w"), "d"), "w_used")), exposable=["anchor"])
    (reason,) = unchanged(module, rule)
    assert "no place: _to_copy" in reason


def test_the_replacement_stands_after_every_input() -> None:
    hand = Hand()
    x, y = hand.input("x", torch.randn(3)), hand.input("y", torch.randn(3))
    sine = hand.call(SIN, x)
    late = hand.call(EXP, y)
    module = hand.returns(hand.call(aten.mul.Tensor, late, sine))

    def build(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        return {"root": builder.call(aten.sub.Tensor, match["x"], match["y"])}

    assert rewritten(cos_of_sin(build, call("mul", ANCHOR, Var("y"))), module).matched == 1
    (got,), (x_value, y_value) = hand.run(module)
    assert torch.equal(got, x_value - y_value.exp())


# ------------------------------------------------------------------------------------------------ contract


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b, x: b.call(CAST, x, dtype=torch.float64), "dtype torch.float32 becomes torch.float64"),
        (lambda b, x: b.call(CAST, x, dtype=torch.bfloat16), "dtype torch.float32 becomes torch.bfloat16"),
        (lambda b, x: b.call(aten.unsqueeze.default, b.call(NEG, x), 0), "shape [3, 4] becomes [1, 3, 4]"),
        (lambda b, x: b.call(aten.sum.dim_IntList, x, [1], True), "shape [3, 4] becomes [3, 1]"),
        (lambda b, x: b.call(aten.clone.default, b.call(aten.expand.default, x, [3, 4]),
                             memory_format=torch.preserve_format), None),
        (lambda b, x: b.call(aten.t.default, b.call(aten.clone.default, b.call(aten.t.default, x),
                             memory_format=torch.contiguous_format)), "stride [4, 1] becomes [1, 3]"),
        (lambda b, x: b.call(CAST, x, device="meta"), "device cpu becomes meta"),
    ],
)  # fmt: skip
def test_a_result_keeps_dtype_shape_stride_and_device(change: Any, reason: str | None) -> None:
    hand = Hand()
    module = hand.returns(hand.call(COS, hand.call(SIN, hand.input("x", torch.randn(3, 4)), line=1), line=2))
    rule = cos_of_sin(lambda match, builder, exposed: {"root": change(builder, match["x"])})
    if reason is None:
        assert rewritten(rule, module).matched == 1
        return
    assert unchanged(module, rule) == [f"contract: output 'root': {reason}"]


def test_a_contract_refusal_stands_apart_from_the_misses() -> None:
    hand = Hand()
    x = hand.input("x", torch.randn(3, 4))
    module = hand.returns(hand.call(COS, hand.call(SIN, x, line=1), line=2), hand.call(NEG, hand.call(SIN, x)))
    rule = cos_of_sin(lambda match, builder, exposed: {"root": builder.call(aten.t.default, match["x"])})
    report = rewritten(rule, module)
    assert [len(report.missed), len(report.refused), report.declined] == [1, 1, 0]
    assert report.refused[0].source == "net.py:2 in forward"


def test_strides_of_dimensions_of_size_one_are_not_seen() -> None:
    hand = Hand()
    module = hand.returns(hand.call(COS, hand.call(SIN, hand.input("x", torch.randn(1, 4)))))

    def build(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        return {"root": builder.call(aten.empty_strided.default, [1, 4], [77, 1])}

    assert rewritten(cos_of_sin(build), module).matched == 1


def test_results_of_a_root_with_several_are_compared_one_by_one() -> None:
    pattern = call("topk", call(NEG, Var("x"), name="anchor"), 2, open=True)

    def with_(count: int, dtype: torch.dtype) -> Any:
        def build(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
            wide = builder.call(CAST, match["x"], dtype=dtype)
            return {"root": builder.call(aten.topk.default, wide, count)}

        return build

    for count, dtype, reason in ((2, torch.float64, "result 0: dtype"), (3, torch.float32, "result 0: shape")):
        module = traced(lambda x: (-x).topk(2)[0], [torch.randn(3, 4)])
        (found,) = unchanged(module, cos_of_sin(with_(count, dtype), pattern, anchors=[NEG]))
        assert reason in found
