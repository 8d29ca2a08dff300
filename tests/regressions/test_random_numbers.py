"""Compiled models draw the random numbers that eager draws. With Inductor they did not compile at all."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from against_eager import check
from torch import Tensor


def _draws(x: Tensor) -> tuple[Tensor, ...]:
    noisy = F.dropout(x, 0.3, training=True) + torch.rand(8) + torch.randn_like(x)
    chosen = torch.multinomial(noisy.softmax(-1), 2)
    return noisy, chosen, torch.randperm(8), torch.randint(0, 5, (3,)), torch.bernoulli(torch.full((9,), 0.5))


@pytest.mark.parametrize("finalise", ["eager", "inductor"])
def test_the_same_numbers_in_the_same_order(finalise: str) -> None:
    x = torch.linspace(-1, 1, 32).view(4, 8)
    check(_draws, (x,), (x,), options={"finalise": finalise}, tolerance=1e-6)
    after = torch.rand(4)
    torch.manual_seed(0)
    _draws(x)
    assert torch.equal(after, torch.rand(4)), "and as many of them"


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(self.drop(x), (8,))


def test_training_mode_under_no_grad() -> None:
    check(_Net().train(), (torch.ones(4, 8),), options={"finalise": "inductor"})
