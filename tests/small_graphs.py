"""Small ATen graphs without Dynamo: written node by node, or traced from a function. Rules made of a few lines.

hand = Hand()
x = hand.input("x", torch.randn(3, 4))
module = hand.returns(hand.call(aten.cos.default, hand.call(aten.sin.default, x)))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from k3rewrite import _torch_private as private
from k3rewrite.patterns import Builder, CounterExample, Example, Match, Pattern, Policy, Refusal, Rule
from k3rewrite.patterns.rewrite import SiteCheck, apply_rule
from k3rewrite.report.schema import PassReport

aten = torch.ops.aten


class Hand:
    """A graph written node by node; writes may stand anywhere in it, as they do not in a captured one."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.values: list[Tensor] = []
        self._mode = private.FakeTensorMode(allow_non_fake_inputs=True)

    def input(self, name: str, value: Tensor) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self._mode.from_tensor(value)
        self.values.append(value)
        return node

    def call(self, target: Any, *args: Any, line: int | None = None, **kwargs: Any) -> Node:
        """A call; `line` is where net.py has it."""
        node = self.graph.call_function(target, args, kwargs)
        with self._mode:
            values = map_arg((args, kwargs), lambda n: n.meta["val"])
            node.meta["val"] = target(*values[0], **values[1])
        if line is not None:
            node.meta["stack_trace"] = f'  File "net.py", line {line}, in forward\n    ...'
        return node

    def returns(self, *nodes: Node) -> GraphModule:
        self.graph.output(tuple(nodes))
        return GraphModule({}, self.graph)

    def run(self, module: GraphModule) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Outputs, and the inputs as they are afterwards."""
        values = tuple(v.clone() for v in self.values)
        outputs = module(*values)
        return tuple(v.clone() for v in outputs), values


def traced(function: Callable[..., Any], inputs: Sequence[Tensor]) -> GraphModule:
    """The functional ATen graph of a function, with the tuple of its results as output."""

    def tupled(*values: Tensor) -> tuple[Any, ...]:
        result = function(*values)
        return result if isinstance(result, tuple) else (result,)

    mode = private.FakeTensorMode()
    return private.trace(tupled, [mode.from_tensor(v) for v in inputs], {}, mode, functionalise=True)


class LineRule(Rule):
    """A rule from a pattern and a function that builds; the examples are there because a rule must have some."""

    anchors = frozenset({aten.sin.default})

    def __init__(
        self,
        pattern: Pattern,
        build: Callable[[Match, Builder, frozenset[str]], Mapping[str, Node]],
        *,
        anchors: Any = None,
        name: str = "line_rule",
        check: Callable[[Match], Refusal | None] = lambda match: None,
        exposable: Sequence[str] = (),
        policy: Policy = Policy.EXACT,
        reach: int = 4,
    ) -> None:
        self.pattern, self._build, self._check = pattern, build, check  # type: ignore[misc]
        self.name, self.policy, self.reach = name, policy, reach  # type: ignore[misc]
        self.exposable = frozenset(exposable)  # type: ignore[misc]
        if anchors is not None:
            self.anchors = frozenset(anchors)  # type: ignore[misc]
        super().__init__()

    def check(self, match: Match) -> Refusal | None:
        return self._check(match)

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        return self._build(match, builder, exposed)

    def examples(self) -> Sequence[Example]:
        return (Example("none", torch.sin, lambda: (torch.ones(1),)),)

    def counterexamples(self) -> Sequence[CounterExample]:
        return (CounterExample("none", torch.cos, lambda: (torch.ones(1),), ""),)


def rewritten(rule: Rule, module: GraphModule, *, verify: SiteCheck | None = None, allow: bool = False) -> PassReport:
    """`rule` applied to `module`; checks that every candidate is accounted for and that the graph is well-formed."""
    report = PassReport(rule.name)
    apply_rule(rule, module, report, allow_changes_rounding=allow, verify=verify)
    module.graph.lint()
    module.recompile()
    assert report.candidates == report.matched + len(report.missed) + len(report.refused)
    assert len(report.sites) == report.matched
    assert all(miss.reason for miss in [*report.missed, *report.refused])
    return report


def reasons(report: PassReport) -> list[str]:
    return [miss.reason for miss in [*report.missed, *report.refused]]


def targets(module: GraphModule) -> list[str]:
    """Names of the ops in a graph, in order."""
    calls = [n.target for n in module.graph.nodes if n.op == "call_function"]
    return [getattr(target, "_opname", None) or target.__name__ for target in calls]
