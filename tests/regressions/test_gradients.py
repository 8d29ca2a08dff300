"""Inference only: one clear error for what needs gradients, wherever they are switched; what needs none is compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from against_eager import check
from torch import Tensor

MESSAGE, REMEDY = "compiled with gradients enabled", "torch.no_grad()"


def _linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8)


def _error(function: Callable[..., Tensor], x: Tensor, context: Callable[[], AbstractContextManager[None]]) -> str:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="k3rewrite", options={"finalise": "eager"})
    with context(), pytest.raises(Exception) as caught:
        compiled(x)
    return str(caught.value)


def test_gradients_that_are_switched_on_inside() -> None:
    """It was compiled as if for training, and the results carried a graph of gradients."""
    linear = _linear()

    def function(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return linear(x)

    error = _error(function, torch.ones(2, 8), torch.no_grad)
    assert MESSAGE in error and REMEDY in error


@pytest.mark.parametrize("x", [torch.ones(2, 8), torch.ones(2, 8, requires_grad=True)])
def test_parameters_and_inputs_that_need_gradients(x: Tensor) -> None:
    error = _error(_linear(), x, torch.enable_grad)
    assert MESSAGE in error and REMEDY in error


def test_gradients_that_are_switched_off_inside() -> None:
    """Nothing of the result needs a gradient: that was refused."""
    linear = _linear()

    def inside(x: Tensor) -> Tensor:
        with torch.no_grad():
            return linear(x)

    check(inside, (torch.ones(2, 8),), context=torch.enable_grad)
    check(lambda x: linear(x).argmax(-1), (torch.ones(2, 8),), context=torch.enable_grad)
    check(linear.requires_grad_(False), (torch.ones(2, 8),), context=torch.enable_grad)


def test_a_parameter_that_is_returned_keeps_its_gradient() -> None:
    linear = _linear()
    (report,) = check(lambda x: (linear(x), linear.weight, linear.weight.t()), (torch.ones(2, 8),))
    assert not report.error
