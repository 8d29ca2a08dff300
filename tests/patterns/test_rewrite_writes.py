"""Rules on graphs with writes in place: no rewrite across one, and no result that becomes an alias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sine_rules import ANCHOR, CAST, COS, EXP, NEG, SIN, Built, cos_of_sin, exposing, unchanged
from small_graphs import Hand, aten, reasons, rewritten, targets

from k3rewrite.patterns import Builder, Cast, Match, Var, call

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
    for rule in (cos_of_sin(), cos_of_sin(exposing, exposable=["anchor"])):
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
