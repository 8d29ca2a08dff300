"""Rules that rewrite cos(sin(x)), for tests of how rules are applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from small_graphs import LineRule, aten, reasons, rewritten
from torch.fx import GraphModule, Node

from k3rewrite.patterns import Builder, Match, Var, call
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


def exposing(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
    """exp(x) for the root and -x for whatever is exposed."""
    new = {"root": builder.call(EXP, match["x"])}
    return {**new, **{name: builder.call(NEG, match["x"]) for name in exposed}}
