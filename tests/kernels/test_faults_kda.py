"""Faults of fused recurrent decode in the op itself, with which kernels are compared.

All rows: backend/test_faults_kda_steps.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from kda_decode_cases import make_call

from k3rewrite.kernels.kda_decode.op import kda_decode


def test_a_pad_does_not_land_in_slot_0() -> None:
    """Slots 3, 1, 2 are written, -1 is nobody's; clamped to 0 it would write a live slot."""
    call = make_call([3, 1, 2, -1], 2, 16)
    call["state"][:] = 0.0
    _, lines, states = kda_decode(**call)
    touched = [not torch.equal(states[slot], call["state"][slot]) for slot in range(4)]
    assert touched == [False, True, True, True]
    kept = [torch.equal(lines[slot].nan_to_num(7.0), call["conv_state"][slot].nan_to_num(7.0)) for slot in range(4)]
    assert kept == [True, False, False, False]


@pytest.mark.parametrize("bound", [-1.0, None], ids=["bounded", "softplus"])
def test_two_steps_of_a_log_decay_of_one(bound: float | None) -> None:
    """A state of ones without an update: e^-1 after a step, e^-2 after two; to the base two it would be 0.5, 0.25."""
    call = make_call([1, 2], 2, 16, bound=bound)
    call["b"] = torch.full_like(call["b"], -100.0)  # beta 0
    call["a_log"][:], call["f"] = (10.0 if bound else 0.0), torch.zeros_like(call["f"])
    call["dt_bias"][:] = 10.0 if bound else math.log(math.e - 1)  # softplus of it is 1
    call["state"][:] = 1.0
    for steps in (1, 2):
        _, call["conv_state"], call["state"] = kda_decode(**call)
        torch.testing.assert_close(call["state"][1:3], torch.full((2, 2, 16, 16), math.exp(-steps)))
