"""What every generated spelling must satisfy, and what every near miss must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from small_graphs import reasons, rewritten, traced
from torch import Tensor
from torch.fx import Graph, GraphModule

from k3rewrite.checks.errors import acceptable, measure_both
from k3rewrite.checks.precise import DecisionInterpreter
from k3rewrite.checks.regions import region_check
from k3rewrite.graph.purity import eliminate_dead_code
from k3rewrite.passes.canonicalise import merge_equal
from k3rewrite.patterns.rule import Rule
from k3rewrite.report.schema import PassReport

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def random_tensors(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(s, generator=generator).to(d) for s, d in zip(shapes, dtypes, strict=True))


def graph_of(function: Callable[..., Any], inputs: Sequence[Tensor]) -> GraphModule:
    module = traced(function, inputs)
    eliminate_dead_code(module.graph)
    merge_equal(module.graph, PassReport("canonicalise"))
    return module


def copy_of(module: GraphModule) -> GraphModule:
    """The same graph once more, to be changed by itself."""
    graph, copies = Graph(), {}
    graph.output(graph.graph_copy(module.graph, copies))
    for old, new in copies.items():
        new.meta = dict(old.meta)
    return GraphModule(module, graph)


def assert_lifted(
    function: Callable[..., Any], inputs: Sequence[Tensor], rules: Sequence[Rule], *, leaves: Sequence[str]
) -> GraphModule:
    """Each rule finds its one site, the region check agrees, and of the other ops only casts and `leaves` remain.

    Results keep their metadata, and are as near to fp64 as those of the original.
    """
    original = graph_of(function, inputs)
    module = copy_of(original)
    for rule in rules:
        report = rewritten(rule, module, verify=region_check())
        assert (report.candidates, report.matched) == (1, 1), (rule.name, reasons(report), str(original.graph))
        eliminate_dead_code(module.graph)
    rest = {n.target._opname for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
    allowed = {rule.name for rule in rules} | {"_to_copy", *leaves}
    assert rest <= allowed, f"left over: {rest - allowed}\n{original.graph}"

    eager = DecisionInterpreter(original, wide=False)
    old, expected = eager.run_on(inputs), function(*inputs)
    exact = DecisionInterpreter(original, wide=True, forced=eager.routes.ids).run_on(inputs)
    new = DecisionInterpreter(module, wide=False).run_on(inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for a, b, e, user in zip(old, new, exact, expected, strict=True):
        assert (b.dtype, b.shape, b.stride()) == (user.dtype, user.shape, user.stride())
        if b.dtype.is_floating_point:
            error_old, error_new = measure_both(a, e, b, e)
            assert acceptable(error_new, error_old, b.dtype), (error_old, error_new)
        else:
            assert torch.equal(a, b)
    return module


def assert_not_lifted(function: Callable[..., Any], inputs: Sequence[Tensor], rule: Rule) -> list[str]:
    """No site is rewritten, the graph reads as before, and there is a reason for each candidate."""
    module = graph_of(function, inputs)
    before = module.graph.python_code("self").src
    report = rewritten(rule, module)
    assert report.matched == 0, f"lifted:\n{before}"
    assert report.candidates >= 1, "the anchor does not see this at all"
    assert module.graph.python_code("self").src == before
    return reasons(report)
