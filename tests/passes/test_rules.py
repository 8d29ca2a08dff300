"""Every rule on its own examples and counterexamples: matched as often as it says, refused for the reason it says, and
numerically the same as eager within the error rule. What it makes is announced by its pass."""

from __future__ import annotations

import pytest
from rule_checks import check_counterexample, check_example

from k3rewrite.passes import ALL_PASSES
from k3rewrite.patterns.rule import CounterExample, Example, Rule
from k3rewrite.pipeline.pass_base import RulePass

RULES = [(made, rule) for made in ALL_PASSES if issubclass(made, RulePass) for rule in made().rules()]
EXAMPLES = [pytest.param(p, r, e, id=f"{r.name}: {e.name}") for p, r in RULES for e in r.examples()]
COUNTEREXAMPLES = [pytest.param(r, e, id=f"{r.name}: {e.name}") for _, r in RULES for e in r.counterexamples()]


@pytest.mark.parametrize(("made_by", "rule", "example"), EXAMPLES)
def test_example_is_rewritten_and_equal(made_by: type[RulePass], rule: Rule, example: Example) -> None:
    made = check_example(rule, example)
    assert made <= made_by.provides, f"{made_by.name} does not announce {sorted(made - made_by.provides)}"


@pytest.mark.parametrize(("rule", "example"), COUNTEREXAMPLES)
def test_counterexample_is_left_alone_with_its_reason(rule: Rule, example: CounterExample) -> None:
    check_counterexample(rule, example)


def test_a_rule_without_examples_does_not_register() -> None:
    class NoExamples(RULES[0][1].__class__):  # type: ignore[misc, name-defined]
        def examples(self) -> tuple[Example, ...]:
            return ()

    with pytest.raises(TypeError, match="at least one example"):
        NoExamples()
