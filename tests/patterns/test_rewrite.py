"""Rules on graphs that try to break them: order, writes, storage, contract. A refusal leaves the graph as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from small_graphs import Hand, LineRule, aten, reasons, rewritten, targets, traced
from torch.fx import GraphModule, Node

from k3rewrite.errors import UnsupportedError, VerificationError
from k3rewrite.graph.provenance import ORIGIN_KEY
from k3rewrite.graph.purity import eliminate_dead_code
from k3rewrite.patterns import Builder, Cast, Item, Match, Named, Policy, Refusal, Var, call
from k3rewrite.patterns.pattern import Pattern

SIN, COS, NEG, EXP = (op.default for op in (aten.sin, aten.cos, aten.neg, aten.exp))
CAST = aten._to_copy.default
ANCHOR = call(SIN, Var("x"), name="anchor")
Built = Mapping[str, Node]


def cos_of_sin(
    build: Callable[[Match, Builder, frozenset[str]], Built] | None = None,
    pattern: Pattern = call(COS, ANCHOR),  # noqa: B008  a pattern is a value
    **options: Any,
) -> LineRule:
    """cos(sin(x)) -> exp(neg(x)): other numbers, so that a rewrite can be seen in them."""

    def plain(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        return {"root": builder.call(EXP, builder.call(NEG, match["x"]))}

    return LineRule(pattern, build or plain, **options)


def unchanged(module: GraphModule, rule: LineRule, **options: Any) -> list[str]:
    """The reasons of a rule that must leave the graph exactly as it is."""
    before = module.graph.python_code("self").src, [dict(n.meta) for n in module.graph.nodes]
    report = rewritten(rule, module, **options)
    assert report.matched == 0
    assert (module.graph.python_code("self").src, [dict(n.meta) for n in module.graph.nodes]) == before
    return reasons(report)


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


def _exposing(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
    new = {"root": builder.call(EXP, match["x"])}
    return {**new, **{name: builder.call(NEG, match["x"]) for name in exposed}}


def test_an_exposable_value_becomes_an_output_of_the_replacement() -> None:
    hand = Hand()
    sine = hand.call(SIN, hand.input("x", torch.randn(3)))
    early = hand.call(aten.mul.Tensor, sine, 2)
    module = hand.returns(hand.call(COS, sine), early)
    assert rewritten(cos_of_sin(_exposing, exposable=["anchor"]), module).matched == 1
    assert targets(module) == ["exp", "neg", "mul"]
    (a, b), (x,) = hand.run(module)
    assert torch.equal(a, x.exp()) and torch.equal(b, -x * 2)


def test_any_of_several_names_of_a_node_may_be_the_exposable_one() -> None:
    """A node bound as a call and as a named value has two names."""
    hand = Hand()
    sine = hand.call(SIN, hand.input("x", torch.randn(3)))
    module = hand.returns(hand.call(COS, sine), sine)
    rule = cos_of_sin(_exposing, call(COS, Named(ANCHOR, "again")), exposable=["anchor"])
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
    rule = cos_of_sin(_exposing, call("mul", ANCHOR, Var("y")), exposable=["anchor"])
    (reason,) = unchanged(module, rule)
    assert reason == "no place: exp 'exp_default' (net.py:3 in forward) is computed after the first use of a result"


def test_no_place_when_an_input_depends_on_a_result() -> None:
    hand = Hand()
    sine = hand.call(SIN, hand.input("x", torch.randn(3)))
    module = hand.returns(hand.call(aten.mul.Tensor, sine, hand.call(EXP, hand.call(NEG, sine))))
    rule = cos_of_sin(_exposing, call("mul", ANCHOR, Var("y")), exposable=["anchor"])
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


# ------------------------------------------------------------------------------------------------ writes


@pytest.mark.parametrize("through", ["itself", "a view", "an out-variant"])
def test_no_rewrite_across_a_write_to_what_it_reads(through: str) -> None:
    """Kinds 17 and 99: the sine is of the old x, and its replacement would read the new one."""
    hand = Hand()
    x = hand.input("x", torch.randn(4))
    sine = hand.call(SIN, x, line=1)
    if through == "itself":
        hand.call(aten.add_.Tensor, x, 1, line=2)
    elif through == "a view":
        hand.call(aten.add_.Tensor, hand.call(aten.slice.Tensor, x, 0, 0, 2), 1, line=2)
    else:
        hand.call(aten.add.out, x, 1, out=x, line=2)
    module = hand.returns(hand.call(COS, sine, line=3))
    before = hand.run(module)
    (reason,) = unchanged(module, cos_of_sin())
    assert "writes what sin_default reads" in reason
    assert torch.equal(hand.run(module)[0][0], before[0][0])


@pytest.mark.parametrize("through", ["itself", "a view"])
def test_no_rewrite_if_an_inner_value_is_written_before_it_is_read(through: str) -> None:
    """The sine is changed in place on its way to the cosine: the cast and the sine alone do not give it."""
    hand = Hand()
    sine = hand.call(SIN, hand.input("x", torch.randn(4)), line=1)
    target = sine if through == "itself" else hand.call(aten.slice.Tensor, sine, 0, 0, 2)
    hand.call(aten.add_.Tensor, target, 1, line=2)
    module = hand.returns(hand.call(COS, sine, line=3))
    for rule in (cos_of_sin(), cos_of_sin(_exposing, exposable=["anchor"])):
        (reason,) = unchanged(module, rule)
        assert "add__tensor writes" in reason or "is also used by" in reason


def test_a_cast_that_is_written_before_it_is_read_is_more_than_a_cast() -> None:
    """A cast may have other users; one that changes it in place makes it another value."""
    sine = call(SIN, Cast(Var("x"), "d"), name="anchor")

    def build(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        return {"root": builder.call(EXP, builder.call(CAST, match["x"], dtype=match["d"]))}

    for written in (True, False):
        hand = Hand()
        wide = hand.call(CAST, hand.input("x", torch.randn(3).bfloat16()), dtype=torch.float32)
        if written:
            hand.call(aten.add_.Tensor, wide, 2, line=5)
        module = hand.returns(hand.call(COS, hand.call(SIN, wide)), hand.call(NEG, wide))
        before = hand.run(module)[0]
        report = rewritten(cos_of_sin(build, call(COS, sine)), module)
        after = hand.run(module)[0]
        assert torch.equal(before[1], after[1])
        assert report.matched == 1
        if written:  # read without the cast: the changed value is the input
            assert torch.equal(after[0], before[1].neg().exp())


def test_writes_elsewhere_and_before_and_after_do_no_harm() -> None:
    hand = Hand()
    x, other = hand.input("x", torch.randn(4)), hand.input("other", torch.randn(4))
    hand.call(aten.add_.Tensor, x, 1)
    sine = hand.call(SIN, x)
    hand.call(aten.add_.Tensor, other, 1)
    cosine = hand.call(COS, sine)
    hand.call(aten.mul_.Tensor, x, 0)
    module = hand.returns(cosine)
    assert rewritten(cos_of_sin(), module).matched == 1
    (got,), (x_after, _) = hand.run(module)
    assert torch.equal(got, (-(hand.values[0] + 1)).exp()) and not x_after.any()


def test_a_node_that_writes_is_no_part_of_a_match() -> None:
    hand = Hand()
    sine = hand.call(SIN, hand.input("x", torch.randn(4)), line=1)
    module = hand.returns(hand.call(aten.cos_.default, sine, line=2))
    (reason,) = unchanged(module, cos_of_sin(pattern=call(aten.cos_.default, ANCHOR)))
    assert "cos_" in reason and "writes its argument self" in reason


def test_a_write_that_an_earlier_rewrite_made_counts() -> None:
    """Kind 69: pass 1 puts y.copy_(x) between sine and cosine; pass 2 must not fuse across it."""
    hand = Hand()
    x, y = hand.input("x", torch.randn(4)), hand.input("y", torch.randn(4))
    sine = hand.call(SIN, x)
    marked = hand.call(NEG, y)
    module = hand.returns(hand.call(COS, sine), marked)

    def writes_x(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        builder.call(aten.copy_.default, x, match["x"])
        return {"root": builder.call(NEG, match["x"])}

    first = cos_of_sin(writes_x, call(NEG, Var("x"), name="anchor"), anchors=[NEG], name="writer")
    assert rewritten(first, module).matched == 1
    (reason,) = unchanged(module, cos_of_sin())
    assert "copy__default writes what" in reason


def test_a_write_that_the_same_rule_made_at_an_earlier_site_counts() -> None:
    hand = Hand()
    x, y = hand.input("x", torch.randn(4)), hand.input("y", torch.randn(4))
    first = hand.call(SIN, y)
    second = hand.call(SIN, x)
    module = hand.returns(hand.call(COS, first), hand.call(COS, second))

    def writes_x(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        builder.call(aten.copy_.default, x, y)
        return {"root": builder.call(EXP, match["x"])}

    report = rewritten(cos_of_sin(writes_x), module)
    assert (report.candidates, report.matched) == (2, 1)
    assert report.missed[0].site == second.name
    assert "inside the match, copy__default writes what" in reasons(report)[0]


def test_a_rule_that_looks_above_its_match_does_not_look_across_a_write() -> None:
    """A stack copies its operands: reading them later is not the same once one of them was written."""

    def build(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        first, second = match["x"].args[0]
        return {"root": builder.call(aten.stack.default, [second, first])}

    for written in ("placeholder x", "stack 'stack_default'", "z", None):
        hand = Hand()
        x, y, z = (hand.input(n, torch.randn(3)) for n in "xyz")
        stacked = hand.call(aten.stack.default, [x, y])
        if written:
            hand.call(aten.add_.Tensor, {"placeholder x": x, "z": z}.get(written, stacked), 1, line=7)
        module = hand.returns(hand.call(COS, hand.call(SIN, stacked)))
        if written not in ("z", None):
            (reason,) = unchanged(module, cos_of_sin(build))
            assert reason.startswith(f"add_ 'add__tensor' (net.py:7 in forward) writes {written}")
            assert reason.endswith("through which the replacement looks")
        else:
            assert rewritten(cos_of_sin(build), module).matched == 1


# ------------------------------------------------------------------------------------------------ storage


def _forwarding(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
    return {"root": match["x"]}


def _viewing(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
    return {"root": builder.call(aten.view.default, match["x"], list(match.value("x").shape))}


ONE = call("mul", Var("x"), 1, name="anchor")


@pytest.mark.parametrize("build", [_forwarding, _viewing])
@pytest.mark.parametrize("returned", ["itself", "a view of it"])
def test_a_result_that_is_returned_never_becomes_an_alias_of_an_input(build: Any, returned: str) -> None:
    """Kinds 65 and 78: x * 1 is a tensor of its own."""
    hand = Hand()
    same = hand.call(aten.mul.Tensor, hand.input("x", torch.randn(2, 3)), 1)
    module = hand.returns(same if returned == "itself" else hand.call(aten.view.default, same, [6]))
    rule = cos_of_sin(build, ONE, anchors=[aten.mul.Tensor])
    (reason,) = unchanged(module, rule)
    assert reason == "the result is returned and would share storage with placeholder x"


@pytest.mark.parametrize("build", [_forwarding, _viewing])
def test_a_result_that_is_only_read_may_be_an_existing_value(build: Any) -> None:
    hand = Hand()
    same = hand.call(aten.mul.Tensor, hand.input("x", torch.randn(2, 3)), 1)
    module = hand.returns(hand.call(NEG, same))
    assert rewritten(cos_of_sin(build, ONE, anchors=[aten.mul.Tensor]), module).matched == 1


@pytest.mark.parametrize("build", [_forwarding, _viewing])
@pytest.mark.parametrize(
    "written", ["the result", "the result, and nothing else", "the source", "the source, at the last read"]
)
def test_neither_is_written_while_the_other_is_read(build: Any, written: str) -> None:
    hand = Hand()
    x = hand.input("x", torch.randn(2, 3))
    same = hand.call(aten.mul.Tensor, x, 1)
    if written == "the result":
        hand.call(aten.add_.Tensor, same, 5)
        result = hand.call(NEG, same)
    elif written == "the result, and nothing else":
        result = hand.call(aten.add_.Tensor, same, 5)
    elif written == "the source":
        hand.call(aten.add_.Tensor, x, 5)
        result = hand.call(NEG, same)
    else:
        hand.call(aten.add_.Tensor, x, 5)
        result = hand.call(aten.mul_.Tensor, x, same)
    module = hand.returns(hand.call(NEG, result))
    before = hand.run(module)
    (reason,) = unchanged(module, cos_of_sin(build, ONE, anchors=[aten.mul.Tensor]))
    assert "writes while the result is read" in reason
    assert all(torch.equal(a, b) for a, b in zip(hand.run(module)[1], before[1], strict=True))


def test_a_result_that_is_copied_into_something_else_may_be_an_existing_value() -> None:
    hand = Hand()
    x, y = hand.input("x", torch.randn(3)), hand.input("y", torch.randn(3))
    hand.call(aten.copy_.default, y, hand.call(aten.mul.Tensor, x, 1))
    module = hand.returns(hand.call(NEG, x))
    assert rewritten(cos_of_sin(_forwarding, ONE, anchors=[aten.mul.Tensor]), module).matched == 1
    (_,), (x_value, y_value) = hand.run(module)
    assert torch.equal(x_value, y_value)


def test_a_view_may_become_another_view_of_the_same() -> None:
    hand = Hand()
    x = hand.input("x", torch.randn(2, 3))
    twice = hand.call(aten.view.default, hand.call(aten.view.default, x, [6]), [3, 2])
    module = hand.returns(twice)

    def build(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        return {"root": builder.call(aten.view.default, match["x"], [3, 2])}

    pattern = call("view", call("view", Var("x"), open=True), open=True, name="anchor")
    assert rewritten(cos_of_sin(build, pattern, anchors=[aten.view.default]), module).matched == 1
    assert targets(module)[-1] == "view"


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
    assert [len(report.missed), len(report.refused)] == [1, 1]
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


# ------------------------------------------------------------------------------------------------ rules that fail


def test_a_replacement_that_does_not_take_its_arguments_is_a_miss() -> None:
    hand = Hand()
    module = hand.returns(hand.call(COS, hand.call(SIN, hand.input("x", torch.randn(3)))))

    def build(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        builder.call(NEG, match["x"])
        raise UnsupportedError("5 sources are too many", place="k3::some_op", remedy="none")

    assert unchanged(module, cos_of_sin(build)) == [
        "the replacement does not take these arguments: 5 sources are too many"
    ]


def test_a_rule_that_is_wrong_ends_the_run_and_leaves_the_graph() -> None:
    """Kind 93: nothing half-written, whatever happens."""
    hand = Hand()
    module = hand.returns(hand.call(COS, hand.call(SIN, hand.input("x", torch.randn(3)))))
    before = str(module.graph)

    def build(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        return {"root": builder.call(aten.mm.default, builder.call(NEG, match["x"]), match["x"])}

    with pytest.raises(RuntimeError):
        rewritten(cos_of_sin(build), module)
    assert str(module.graph) == before


def test_a_refusal_of_the_last_condition_leaves_the_graph() -> None:
    hand = Hand()
    module = hand.returns(hand.call(COS, hand.call(SIN, hand.input("x", torch.randn(3)))))
    before = module.graph.python_code("self").src
    with pytest.raises(VerificationError, match="rule line_rule: not today"):
        rewritten(cos_of_sin(), module, verify=lambda rewrite: Refusal("not today"))
    assert module.graph.python_code("self").src == before
    assert unchanged(module, cos_of_sin(check=lambda match: Refusal("no", match["anchor"]))) == ["no"]


def test_a_replacement_that_reads_what_it_replaces_is_refused() -> None:
    hand = Hand()
    sine = hand.call(SIN, hand.input("x", torch.randn(3)))
    module = hand.returns(hand.call(aten.mul.Tensor, sine, hand.call(COS, sine)))

    def build(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        return {"root": builder.call(aten.mul.Tensor, builder.call(SIN, match["x"]), match["gate"])}

    (reason,) = unchanged(module, cos_of_sin(build, call("mul", ANCHOR, call(COS, Var("gate")))))
    assert "the replacement reads sin" in reason and "which it replaces" in reason


def test_the_next_reading_is_tried_when_a_rule_refuses_one() -> None:
    hand = Hand()
    narrow = hand.call(CAST, hand.input("x", torch.randn(3)), dtype=torch.bfloat16)
    module = hand.returns(hand.call(COS, hand.call(SIN, narrow)))

    def no_narrowing(match: Match) -> Refusal | None:
        return Refusal("narrowed") if match.value("x").dtype != match["d"] else None

    rule = cos_of_sin(pattern=call(COS, call(SIN, Cast(Var("x"), "d"), name="anchor")), check=no_narrowing)
    assert rewritten(rule, module).matched == 1
    assert targets(module) == ["_to_copy", "neg", "exp"]


# ------------------------------------------------------------------------------------------------ policy, claims


@pytest.mark.parametrize("allow", [False, True])
def test_a_change_of_rounding_must_be_switched_on(allow: bool) -> None:
    hand = Hand()
    module = hand.returns(hand.call(COS, hand.call(SIN, hand.input("x", torch.randn(3)))))
    rule = cos_of_sin(policy=Policy.CHANGES_ROUNDING)
    if allow:
        report = rewritten(rule, module, allow=True)
        assert [s.policy for s in report.sites] == ["changes_rounding"]
    else:
        (reason,) = unchanged(module, rule)
        assert "switch it on with 'allow_changes_rounding: true'" in reason


def test_sites_that_overlap_are_counted_and_told() -> None:
    hand = Hand()
    a, b = (hand.call(SIN, hand.input(n, torch.randn(3)), line=i) for i, n in enumerate("xy", 1))
    module = hand.returns(hand.call(aten.add.Tensor, a, b))

    def build(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        return {"root": builder.call(aten.sub.Tensor, match["x"], match["y"])}

    report = rewritten(cos_of_sin(build, call("add", ANCHOR, call(SIN, Var("y")))), module)
    assert (report.candidates, report.matched) == (2, 1)
    (claimed,) = report.refused
    assert (claimed.reason, claimed.source) == ("already part of the site at sin_default", "net.py:2 in forward")


def test_every_candidate_is_counted_and_in_graph_order() -> None:
    hand = Hand()
    sines = [hand.call(SIN, hand.input(f"x{i}", torch.randn(3))) for i in range(4)]
    results = [hand.call(COS if i != 1 else NEG, s) for i, s in enumerate(sines)]
    module = hand.returns(*results)
    report = rewritten(cos_of_sin(), module)
    assert (report.candidates, report.matched, len(report.missed)) == (4, 3, 1)
    assert [s.site for s in report.sites] == ["sin_default", "sin_default_2", "sin_default_3"]


# ------------------------------------------------------------------------------------------------ provenance


def test_new_nodes_say_where_they_come_from() -> None:
    hand = Hand()
    sine = hand.call(SIN, hand.input("x", torch.randn(3)), line=11)
    cosine = hand.call(COS, sine, line=12)
    for node in (sine, cosine):
        node.meta["nn_module_stack"] = {"1": ("L['self'].layers.3.mlp", object)}
        node.meta["from_node"] = [node.name]
    module = hand.returns(cosine)
    old = cosine.meta["val"]
    rewritten(cos_of_sin(name="a_rule"), module)
    made = [n for n in module.graph.nodes if n.op == "call_function"]
    for node in made:
        assert "line 12" in node.meta["stack_trace"], "the line that produced the result"
        assert node.meta["nn_module_stack"] == {"1": ("L['self'].layers.3.mlp", object)}
        assert node.meta["from_node"] == ["sin_default", "cos_default"]
        assert node.meta[ORIGIN_KEY] == (
            "sin_default @ net.py:11 in forward",
            "cos_default @ net.py:12 in forward",
        )
        assert node.meta["k3_made_by"] == "a_rule"
    assert made[-1].meta["val"] is not old and len({id(n.meta["val"]) for n in made}) == len(made)


def test_origins_survive_a_second_rewrite() -> None:
    hand = Hand()
    module = hand.returns(hand.call(COS, hand.call(SIN, hand.input("x", torch.randn(3)), line=1), line=2))
    rewritten(cos_of_sin(), module)
    second = LineRule(
        call(EXP, call(NEG, Var("x"), name="anchor")),
        lambda match, builder, exposed: {"root": builder.call(aten.tanh.default, match["x"])},
        anchors=[NEG],
    )
    rewritten(second, module)
    (node,) = (n for n in module.graph.nodes if n.op == "call_function")
    assert [entry.split(" @ ")[1] for entry in node.meta[ORIGIN_KEY]] == ["net.py:1 in forward", "net.py:2 in forward"]
