"""What the checks of every rule's examples hold a rule to: they fail where a rule is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rule_checks import check_counterexample, check_example
from small_graphs import LineRule, aten
from torch import Tensor

from k3rewrite.patterns import CounterExample, Example, Match, Policy, Refusal, Var, call

_SUM = call("mul", call("add", Var("a"), Var("b")), Var("c"), name="anchor")


def _inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(64, generator=generator) for _ in range(3))


EXAMPLE = Example("a sum times c", lambda a, b, c: (a + b) * c, _inputs)


class Distribute(LineRule):
    """(a + b) * c -> a * c + b * c, right but for the rounding. What it calls its matches is given."""

    def __init__(self, policy: Policy, of_match: Policy) -> None:
        def build(match, builder, exposed):  # type: ignore[no-untyped-def]
            a, b = (builder.call(aten.mul.Tensor, match[name], match["c"]) for name in "ab")
            return {"root": builder.call(aten.add.Tensor, a, b)}

        self.of_match = of_match
        super().__init__(_SUM, build, anchors=[aten.mul.Tensor], policy=policy)

    def policy_of(self, match: Match) -> Policy:
        return self.of_match


def test_a_match_that_the_rule_calls_exact_is_held_to_every_bit() -> None:
    check_example(Distribute(Policy.REASSOCIATES, Policy.REASSOCIATES), EXAMPLE)
    check_example(Distribute(Policy.EXACT, Policy.REASSOCIATES), EXAMPLE)
    with pytest.raises(AssertionError):
        check_example(Distribute(Policy.REASSOCIATES, Policy.EXACT), EXAMPLE)


def test_a_counterexample_says_the_reason_of_every_candidate() -> None:
    def check(match: Match) -> Refusal:
        return Refusal("two rows" if match.value("c").dim() == 2 else "one row")

    rule = LineRule(_SUM, lambda *_: {}, anchors=[aten.mul.Tensor], check=check)
    both = CounterExample("two", lambda a, b, c: ((a + b) * c, (a + b) * c[None]), _inputs, "two rows")
    with pytest.raises(AssertionError, match="one row"):
        check_counterexample(rule, both)
    with pytest.raises(AssertionError, match="two rows"):
        check_counterexample(rule, replace(both, reason="three rows", others=("one row", "two rows")))
    check_counterexample(rule, replace(both, others=("one row",)))
