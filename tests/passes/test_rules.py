"""Every rule on its own examples and counterexamples: matched as often as it says, refused for the reason it says, and
numerically the same as eager within the error rule."""

from __future__ import annotations

import pytest
import torch
from graphs import capture_with_inputs

from k3rewrite.capture import capture
from k3rewrite.checks.errors import acceptable, measure
from k3rewrite.checks.precise import DecisionInterpreter
from k3rewrite.graph.purity import eliminate_dead_code
from k3rewrite.passes import ALL_PASSES
from k3rewrite.passes.canonicalise import merge_equal
from k3rewrite.patterns.rewrite import apply_rule
from k3rewrite.patterns.rule import CounterExample, Example, Policy, Rule
from k3rewrite.pipeline.pass_base import RulePass
from k3rewrite.report.schema import PassReport

RULES = [rule for made in ALL_PASSES if issubclass(made, RulePass) for rule in made().rules()]
EXAMPLES = [pytest.param(r, e, id=f"{r.name}: {e.name}") for r in RULES for e in r.examples()]
COUNTEREXAMPLES = [pytest.param(r, e, id=f"{r.name}: {e.name}") for r in RULES for e in r.counterexamples()]


@pytest.mark.parametrize(("rule", "example"), EXAMPLES)
def test_example_is_rewritten_and_equal(rule: Rule, example: Example) -> None:
    captured, real = capture_with_inputs(example.function, example.inputs())
    report = PassReport(rule.name)
    rewritten = captured.fresh()
    if rule.name not in ("fold_casts", "fold_copy"):
        merge_equal(rewritten.module.graph, PassReport("canonicalise"))
    apply_rule(rule, rewritten.module, report, allow_changes_rounding=True)
    eliminate_dead_code(rewritten.module.graph)
    rewritten.module.graph.lint()
    assert report.matched == example.sites, [m.reason for m in report.missed]
    eager = DecisionInterpreter(captured.module, wide=False)
    old = eager.run_on(real)
    exact = DecisionInterpreter(captured.module, wide=True, forced=eager.routes.ids).run_on(real)
    new = DecisionInterpreter(rewritten.module, wide=False).run_on(real)
    for a, b, e in zip(old, new, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if not a.dtype.is_floating_point or rule.policy is Policy.EXACT:
            assert torch.equal(a, b)
        else:
            assert acceptable(measure(b, e), measure(a, e), b.dtype)


@pytest.mark.parametrize(("rule", "example"), COUNTEREXAMPLES)
def test_counterexample_is_left_alone_with_its_reason(rule: Rule, example: CounterExample) -> None:
    captured = capture(example.function, example.inputs())
    before = captured.module.graph.python_code("self").src
    report = PassReport(rule.name)
    apply_rule(rule, captured.module, report, allow_changes_rounding=True)
    assert report.matched == 0
    assert report.candidates >= 1, "the anchor does not see this site at all"
    reasons = [m.reason for m in report.missed]
    assert any(example.reason in reason for reason in reasons), reasons
    assert captured.module.graph.python_code("self").src == before


def test_a_rule_without_examples_does_not_register() -> None:
    class NoExamples(RULES[0].__class__):  # type: ignore[misc, name-defined]
        def examples(self) -> tuple[Example, ...]:
            return ()

    with pytest.raises(TypeError, match="at least one example"):
        NoExamples()
