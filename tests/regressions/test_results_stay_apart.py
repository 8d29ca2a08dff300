"""Two results are two tensors for the caller, also where they hold the same elements: one may be resized alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from finalised import FINALISERS
from small_graphs import aten, traced
from torch import Tensor

from k3rewrite.backend import Backend
from k3rewrite.passes.canonicalise import merge_equal
from k3rewrite.report.schema import PassReport


def two_views(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    return y.view(2, 4), y.view(2, 4)


def three_views(x: Tensor) -> tuple[Tensor, ...]:
    y = x + 1
    return y.view(2, 4), y.view(2, 4), y.view(2, 4).view(8)


@pytest.mark.parametrize("finalise", ["eager", "inductor"])
@pytest.mark.parametrize("function", [two_views, three_views])
def test_a_result_that_is_resized_leaves_the_other_as_it_is(function: Callable[..., Any], finalise: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=Backend({"finalise": finalise, "target": "cpu"}))
    x = torch.arange(8.0)
    with torch.no_grad():
        got, expected = compiled(x), function(x)
    got[0].unsqueeze_(0)
    got[0].add_(1)
    expected[0].unsqueeze_(0)
    expected[0].add_(1)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.shape == theirs.shape and torch.equal(mine, theirs)


def test_equal_views_that_are_both_returned_are_not_merged() -> None:
    module = traced(two_views, [torch.arange(8.0)])
    report = PassReport("canonicalise")
    merge_equal(module.graph, report)
    assert [miss.reason for miss in report.missed] == ["both are returned: they must stay two tensors"]
    assert report.matched == 0


def test_equal_views_of_which_the_caller_gets_one_are_merged() -> None:
    module = traced(lambda x: ((x + 1).view(2, 4), (x + 1).view(2, 4).sin()), [torch.arange(8.0)])
    first, second = module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    second.replace_all_uses_with(first)
    report = PassReport("canonicalise")
    merge_equal(module.graph, report)
    assert report.matched == 1


@pytest.mark.parametrize("how", FINALISERS)
def test_a_value_that_a_graph_returns_twice_is_two_tensors(how: str) -> None:
    x = torch.arange(8.0)
    module = traced(lambda x: (x + 1, x * 2), [x])
    output = module.graph.output_node()
    output.args = ((output.args[0][0], output.args[0][0]),)  # type: ignore[index]
    module.graph.eliminate_dead_code()
    module.recompile()
    compiled = FINALISERS[how](module, [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")])
    with torch.no_grad():
        first, second = compiled([x])
    first.unsqueeze_(0)
    assert first.shape == (1, 8) and second.shape == (8,) and torch.equal(second, x + 1)
