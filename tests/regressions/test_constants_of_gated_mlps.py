"""A captured constant of 0 is a constant, not one that is missing: tanh(0) is part of the model."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import capture_with_inputs
from torch import Tensor

from k3rewrite.passes.lift_mlp import LiftMlp
from k3rewrite.patterns.rewrite import apply_rule
from k3rewrite.report.schema import PassReport

Activation = Callable[[Tensor, Tensor], Tensor]


def _gate(g: Tensor) -> Tensor:
    return 4 * torch.tanh(g / 4) * torch.sigmoid(g)


def _lifted(activation: Activation) -> tuple[PassReport, Tensor, Tensor]:
    """The report of the rule, and results before and after it."""

    def function(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        return F.linear(activation(F.linear(x, w_gate), F.linear(x, w_up)), w_down)

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=generator) for s in ((5, 32), (48, 32), (48, 32), (32, 48))]
    captured, real = capture_with_inputs(function, inputs)
    (before,) = captured.module(*real)
    report = PassReport("lift_mlp")
    apply_rule(LiftMlp(), captured.module, report)
    captured.module.recompile()
    (after,) = captured.module(*real)
    return report, before, after


@pytest.mark.parametrize(
    ("activation", "reason"),
    [
        pytest.param(lambda g, u: _gate(g) * torch.tanh(u * 0), "the scale of the up half is inf", id="up times 0"),
        pytest.param(lambda g, u: _gate(g) * torch.tanh(u / 0.0), "the scale of the up half is 0", id="up by 0"),
        pytest.param(lambda g, u: _gate(g) * torch.tanh(u * math.inf), "up half is 0", id="up times infinity"),
        pytest.param(lambda g, u: _gate(g) * torch.tanh(u * 5e-324), "up half is inf", id="up times almost nothing"),
        pytest.param(lambda g, u: torch.tanh(g / 0.0) * torch.sigmoid(g) * u, "gate half is 0", id="gate by 0"),
        pytest.param(
            lambda g, u: math.inf * torch.tanh(g * 0) * torch.sigmoid(g) * u, "gate half is inf", id="gate times 0"
        ),
        pytest.param(
            lambda g, u: torch.tanh(g / math.nan) * torch.sigmoid(g) * u, "gate half is nan", id="gate by nothing"
        ),
    ],
)
def test_a_scale_of_zero_or_infinity_is_no_situ(activation: Activation, reason: str) -> None:
    report, before, after = _lifted(activation)
    assert report.matched == 0 and reason in report.missed[0].reason
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("up", [1.0, -3.0])
def test_a_scale_that_is_there_is_lifted(up: float) -> None:
    report, before, after = _lifted(lambda g, u: _gate(g) * (up * torch.tanh(u / up)))
    assert report.matched == 1
    torch.testing.assert_close(after, before)
    report, before, after = _lifted(lambda g, u: _gate(g) * u)
    assert report.matched == 1
    torch.testing.assert_close(after, before)
