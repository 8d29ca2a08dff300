"""SiTU, the activation of every MLP and expert: both halves are soft-clipped by a tanh."""

from __future__ import annotations

import torch
from torch import Tensor

from k3rewrite.models.kimi_k3.numerics import math_dtype


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """[β·tanh(g/β)·σ(g)] · [λ·tanh(u/λ)], in fp32 with one rounding at the end.

    gate (w1, gate_proj), up (w3, up_proj): same shape and dtype, not interchangeable. Without λ the up half passes
    through. Published values: β = 4, λ = 25.
    """
    gate32, up32 = gate.to(math_dtype(gate.dtype)), up.to(math_dtype(up.dtype))
    gated = torch.tanh(gate32 / beta) * beta * torch.sigmoid(gate32)
    if linear_beta is not None:
        up32 = torch.tanh(up32 / linear_beta) * linear_beta
    return (gated * up32).to(gate.dtype)
