"""What every rule must do on its own examples and counterexamples: the shipped ones, and one that a document shows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from graphs import capture_with_inputs
from torch.fx import Node

from k3rewrite.capture import capture
from k3rewrite.checks.errors import acceptable, measure
from k3rewrite.checks.precise import DecisionInterpreter
from k3rewrite.graph.purity import eliminate_dead_code
from k3rewrite.ops.vocabulary import NAMESPACE
from k3rewrite.passes.canonicalise import merge_equal
from k3rewrite.patterns.rewrite import apply_rule
from k3rewrite.patterns.rule import CounterExample, Example, Policy, Rule
from k3rewrite.report.schema import PassReport


def check_example(rule: Rule, example: Example) -> frozenset[str]:
    """Rewritten as often as it says, and numerically the same as eager: bit-equal where the rule calls each of these
    very matches exact, else within the error rule. The `k3::` ops made."""
    captured, real = capture_with_inputs(example.function, example.inputs())
    report = PassReport(rule.name)
    rewritten = captured.fresh()
    if rule.name not in ("fold_casts", "fold_copy"):
        merge_equal(rewritten.module.graph, PassReport("canonicalise"))
    there = set(rewritten.module.graph.nodes)
    apply_rule(rule, rewritten.module, report, allow_changes_rounding=True)
    eliminate_dead_code(rewritten.module.graph)
    rewritten.module.graph.lint()
    assert report.matched == example.sites, [m.reason for m in [*report.missed, *report.refused]]
    exactly = all(site.policy == Policy.EXACT.value for site in report.sites)
    eager = DecisionInterpreter(captured.module, wide=False)
    old = eager.run_on(real)
    exact = DecisionInterpreter(captured.module, wide=True, forced=eager.routes.ids).run_on(real)
    new = DecisionInterpreter(rewritten.module, wide=False).run_on(real)
    for a, b, e in zip(old, new, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if exactly or not a.dtype.is_floating_point:
            assert torch.equal(a, b)
        else:
            assert acceptable(measure(b, e), measure(a, e), b.dtype)
    return vocabulary_ops(node for node in rewritten.module.graph.nodes if node not in there)


def check_counterexample(rule: Rule, example: CounterExample) -> None:
    """Seen as a candidate, left alone, and every candidate of it for a reason that it says."""
    captured = capture(example.function, example.inputs())
    before = captured.module.graph.python_code("self").src
    report = PassReport(rule.name)
    apply_rule(rule, captured.module, report, allow_changes_rounding=True)
    assert report.matched == 0
    assert report.candidates >= 1, "the anchor does not see this site at all"
    reasons = [m.reason for m in report.missed]
    assert not report.refused and any(example.reason in reason for reason in reasons), [reasons, report.refused]
    expected = (example.reason, *example.others)
    assert all(any(text in reason for text in expected) for reason in reasons), reasons
    assert captured.module.graph.python_code("self").src == before


def vocabulary_ops(nodes: Iterable[Node]) -> frozenset[str]:
    """Names of the `k3::` ops that the nodes call."""
    targets = [node.target for node in nodes if isinstance(node.target, torch._ops.OpOverload)]
    return frozenset(target._opname for target in targets if target.namespace == NAMESPACE)
