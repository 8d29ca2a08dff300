"""The region check: catches a wrong rule at its site, on random inputs of any layout, and passes a right one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import capture_with_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import Hand, LineRule, aten, reasons, rewritten, traced
from torch.fx import GraphModule, Node

from k3rewrite import _torch_private as private
from k3rewrite.checks.regions import _keep, compare, random_value, region_check
from k3rewrite.errors import ConfigError, VerificationError
from k3rewrite.patterns import Builder, Item, Match, Var, call
from k3rewrite.patterns.rewrite import apply_rule
from k3rewrite.report.schema import PassReport

SIN, COS, EXP = (op.default for op in (aten.sin, aten.cos, aten.exp))
PATTERN = call(COS, call(SIN, Var("x"), name="anchor"))


def caught(rule: LineRule, module: GraphModule, folder: Path | None = None) -> str:
    """The error of a wrong rule, which must leave the graph as it was."""
    before = module.graph.python_code("self").src
    with pytest.raises(VerificationError) as error:
        apply_rule(rule, module, PassReport("a_pass"), verify=region_check(folder=folder))
    assert module.graph.python_code("self").src == before
    assert error.value.exit_code == 1
    return str(error.value)


def rule_making(make: Any, pattern: Any = PATTERN, **options: Any) -> LineRule:
    return LineRule(pattern, lambda match, builder, exposed: {"root": make(match, builder)}, **options)


def right(match: Match, builder: Builder) -> Node:
    return builder.call(COS, builder.call(SIN, match["x"]))


def wrong(match: Match, builder: Builder) -> Node:
    return builder.call(COS, builder.call(EXP, match["x"]))


def slightly_wrong(match: Match, builder: Builder) -> Node:
    return builder.call(aten.mul.Tensor, right(match, builder), 1.0001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_wrong_rule_is_refused_at_its_site_and_both_results_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    hand = Hand()
    x = hand.input("x", torch.randn(3, 4).to(dtype))
    cosine = hand.call(COS, hand.call(SIN, x, line=1), line=2)
    module = hand.returns(cosine)
    text = caught(rule_making(wrong, name="bad_rule"), module, tmp_path)
    assert text.startswith("cos_default (net.py:2 in forward): rule bad_rule: verification")
    assert "output 'root': error" in text and "against fp64, the original has" in text
    (file,) = tmp_path.iterdir()
    assert file.name == "bad_rule-cos_default.pt"
    saved = torch.load(file)
    (given,), (old,), (new,), (exact,) = (saved[k] for k in ("inputs", "old", "new", "exact"))
    assert torch.equal(old, given.sin().cos()) and torch.equal(new, given.exp().cos())
    assert exact.dtype == torch.float64 and torch.equal(exact, given.double().sin().cos())


def test_nothing_is_written_when_nothing_is_wrong(tmp_path: Path) -> None:
    module = traced(lambda x: x.sin().cos(), [torch.randn(3)])
    report = rewritten(rule_making(right), module, verify=region_check(folder=tmp_path / "mismatches"))
    assert report.matched == 1 and not list(tmp_path.iterdir())


def test_errors_are_compared_and_not_closeness() -> None:
    """1e-4 off is far off in fp32 and nothing in bf16."""
    module = traced(lambda x: x.sin().cos(), [torch.randn(64)])
    assert "error 1.0" in caught(rule_making(slightly_wrong), module)
    module = traced(lambda x: x.sin().cos(), [torch.randn(64).bfloat16()])
    assert rewritten(rule_making(slightly_wrong), module, verify=region_check()).matched == 1


def test_a_rule_that_is_nearer_to_exact_arithmetic_is_accepted() -> None:
    def wide(match: Match, builder: Builder) -> Node:
        cast = builder.call(aten._to_copy.default, match["x"], dtype=torch.float64)
        result = builder.call(COS, builder.call(SIN, cast))
        return builder.call(aten._to_copy.default, result, dtype=torch.bfloat16)

    module = traced(lambda x: x.sin().cos(), [torch.randn(64).bfloat16()])
    assert rewritten(rule_making(wide), module, verify=region_check()).matched == 1


def test_every_result_is_compared() -> None:
    """A root with several results, and a wrong one among them."""
    pattern = call("topk", call(aten.neg.default, Var("x"), name="anchor"), 2, open=True)

    def making(largest: bool) -> LineRule:
        def make(match: Match, builder: Builder) -> Node:
            return builder.call(aten.topk.default, builder.call(aten.neg.default, match["x"]), 2, -1, largest)

        return rule_making(make, pattern, anchors=[aten.neg.default])

    module = traced(lambda x: (-x).topk(2)[0], [torch.randn(3, 6)])
    assert "output 'root[0]'" in caught(making(False), module)
    assert rewritten(making(True), module, verify=region_check()).matched == 1


def test_integers_must_be_equal() -> None:
    pattern = Item(call("topk", call(aten.neg.default, Var("x"), name="anchor"), 2, open=True), 1)

    def make(match: Match, builder: Builder) -> Node:
        node = builder.call(aten.topk.default, match["x"], 2)
        return builder.item(node, 1)

    module = traced(lambda x: (-x).topk(2)[1], [torch.randn(3, 6)])
    rule = rule_making(make, pattern, anchors=[aten.neg.default])
    assert "integer results differ" in caught(rule, module)


def test_exposed_values_are_compared_too() -> None:
    def build(match: Match, builder: Builder, exposed: frozenset[str]) -> dict[str, Node]:
        return {"root": right(match, builder), **{name: builder.call(EXP, match["x"]) for name in exposed}}

    hand = Hand()
    sine = hand.call(SIN, hand.input("x", torch.randn(3)))
    module = hand.returns(hand.call(COS, sine), sine)
    rule = LineRule(PATTERN, build, exposable=["anchor"])
    assert "output 'anchor'" in caught(rule, module)


def test_a_rule_that_reads_above_its_match_is_given_the_same_values() -> None:
    """The operands of a stack: both sides must see the same numbers in them."""

    def make(match: Match, builder: Builder) -> Node:
        first, second = match["x"].args[0].args[0]
        stacked = builder.call(aten.stack.default, [first, second])
        wide = builder.call(aten._to_copy.default, stacked, dtype=torch.float32)
        return builder.call(COS, builder.call(SIN, wide))

    hand = Hand()
    a, b = (hand.input(n, torch.randn(3).bfloat16()) for n in "ab")
    wide = hand.call(aten._to_copy.default, hand.call(aten.stack.default, [a, b]), dtype=torch.float32)
    module = hand.returns(hand.call(COS, hand.call(SIN, wide)))
    assert rewritten(rule_making(make), module, verify=region_check()).matched == 1


@st.composite
def layouts(draw: Any) -> torch.Tensor:
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=0, max_size=3)))
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint8]
    value = torch.zeros(shape, dtype=draw(st.sampled_from(dtypes)))
    how = draw(
        st.sampled_from(["plain", "transposed", "expanded", "sliced", "strided", "overlapping", "scalar expanded"])
    )
    if how == "transposed" and value.dim() >= 2:
        return value.transpose(0, -1)
    if how == "expanded":
        return value.unsqueeze(0).expand(3, *shape)
    if how == "scalar expanded":
        return torch.zeros((), dtype=value.dtype).expand(2, 3)
    if how == "sliced" and value.dim():
        return torch.zeros((*shape, 4), dtype=value.dtype)[..., 1]
    if how == "strided":
        return torch.zeros(50, dtype=value.dtype).as_strided((3, 4), (9, 2))
    if how == "overlapping":
        return torch.zeros(50, dtype=value.dtype).as_strided((3, 4), (1, 1))
    return value


@given(value=layouts(), seed=st.integers(0, 99))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_random_inputs_of_every_layout(value: torch.Tensor, seed: int) -> None:
    fake = private.FakeTensorMode().from_tensor(value)
    made = random_value(fake, seed)
    assert (made.dtype, made.shape) == (value.dtype, value.shape)
    overlapping = value.dim() == 2 and value.stride() == (1, 1) and min(value.shape) > 1
    if not overlapping and value.numel():
        assert made.stride() == value.stride()
    again = random_value(fake, seed)
    assert torch.equal(
        made.double() if not made.is_complex() else made, again.double() if not made.is_complex() else again
    )


def test_an_error_that_shows_only_with_small_or_large_inputs_is_seen() -> None:
    """A dropped epsilon is nothing beside numbers around 1, a saturation nothing below it."""

    def with_(eps: float, bound: float) -> Any:
        def make(match: Match, builder: Builder) -> Node:
            return builder.call(aten.add.Tensor, builder.call(aten.clamp.default, match["x"], -bound, bound), eps)

        return make

    pattern = call("add", call(aten.clamp.default, Var("x"), -50, 50, name="anchor"), 1e-6)
    for eps, bound, right_one in ((0.0, 50, False), (1e-6, 8, False), (1e-6, 50, True)):
        module = traced(lambda x: x.clamp(-50, 50) + 1e-6, [torch.randn(64)])
        rule = rule_making(with_(eps, bound), pattern, anchors=[aten.clamp.default])
        if right_one:
            assert rewritten(rule, module, verify=region_check()).matched == 1
        else:
            assert f"size {2.0**-10 if eps == 0.0 else 32:g}" in caught(rule, module)


def test_other_values() -> None:
    assert random_value(3, 0) == 3 and random_value(None, 0) is None
    pair = random_value((torch.zeros(2), [torch.zeros(3)]), 0)
    assert [pair[0].shape, pair[1][0].shape] == [(2,), (3,)]


def test_an_expanded_input_is_no_obstacle() -> None:
    module = traced(lambda x: x.expand(4, 3).sin().cos(), [torch.randn(1, 3)])
    assert rewritten(rule_making(right), module, verify=region_check()).matched == 1


def test_symbolic_sizes_take_their_hints_and_no_guard() -> None:
    """Kind 75: int() of a symbolic size would make the graph one for this batch only."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0] * 2, -1).sin().cos() * x.shape[0]

    captured, _ = capture_with_inputs(function, [torch.randn(6, 4)], dynamic=True)
    module = captured.module
    mode = private.graph_fake_mode(module.graph)
    guards = private.guard_count(mode)
    caught(rule_making(wrong), module)
    report = PassReport("rule")
    apply_rule(rule_making(right), module, report, verify=region_check())
    assert report.matched == 1, reasons(report)
    assert private.guard_count(mode) == guards


def test_compare_of_what_is_no_tensor() -> None:
    assert compare("n", 3, 3, 3) is None and "3 became 4" in (compare("n", 3, 4, 3) or "")
    pair = [torch.ones(2), torch.tensor([1, 2])]
    assert compare("p", pair, pair, [torch.ones(2).double(), pair[1]]) is None
    found = compare("p", pair, [pair[0], pair[1] + 1], [torch.ones(2).double(), pair[1]])
    assert found == "output 'p[1]': integer results differ"


def test_a_mismatch_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/mismatches: 'a\.pt' cannot be written: Not a directory"):
        _keep({}, tmp_path / "file" / "mismatches", "a.pt")
    (tmp_path / "a.pt").mkdir()
    with pytest.raises(ConfigError, match=r"'a\.pt' cannot be written: "):
        _keep({}, tmp_path, "a.pt")
