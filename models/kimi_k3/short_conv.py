"""The short convolution of a KDA layer: causal, depthwise, four taps, SiLU, with its window of past inputs.

    y_t[c] = SiLU( Σ_{j=0..3} w[c, j] · x_{t-3+j}[c] )        w[:, 3] multiplies the current token

The state holds raw inputs. In a plain step they are columns 0..2 of a sequence's line. A verify window that starts
from `accepted = a` reads columns a-1 .. a+1 and leaves behind (columns a .. a+1, its own N inputs), so that whatever
the next window accepts, its history is contiguous again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from k3rewrite.models.kimi_k3.inputs import DecodePlan, PrefillPlan, VerifyPlan
from k3rewrite.models.kimi_k3.numerics import math_dtype


def convolve(window: Tensor, weight: Tensor) -> Tensor:
    """`[B, L, C]` from a window `[B, taps - 1 + L, C]` and weight `[C, taps]`; fp32 sums, rounded after the SiLU."""
    taps = window.to(math_dtype(window.dtype)).unfold(1, weight.shape[1], 1)
    return F.silu((taps * weight).sum(-1)).to(window.dtype)


def conv_decode(x: Tensor, weight: Tensor, pool: Tensor, plan: DecodePlan) -> Tensor:
    """One token: x `[B, C]` -> `[B, C]`; the line moves by one, columns past the history stay as they are."""
    history = weight.shape[1] - 1
    past = pool[:, :history] if pool.shape[1] > history else pool
    window = torch.cat([past[plan.slots].masked_fill(plan.dead, 0), x.unsqueeze(1)], dim=1)
    past[plan.slots] = torch.where(plan.dead, past[0], window[:, 1:])
    return convolve(window, weight).squeeze(1)


def conv_verify(x: Tensor, weight: Tensor, pool: Tensor, plan: VerifyPlan) -> Tensor:
    """A window of N tokens: x `[B, N, C]` -> `[B, N, C]`."""
    past = pool[plan.slots.unsqueeze(1), plan.history].masked_fill(plan.dead, 0)
    window = torch.cat([past, x], dim=1)
    kept = window.shape[1] - 1
    line = pool[:, :kept] if pool.shape[1] > kept else pool
    line[plan.slots] = torch.where(plan.dead, line[0], window[:, 1:])
    return convolve(window, weight)


def conv_prefill(x: Tensor, weight: Tensor, pool: Tensor, plan: PrefillPlan) -> Tensor:
    """A prompt: x `[B, L, C]` -> `[B, L, C]`; the line ends at the last real input, wherever that is in the row."""
    history = weight.shape[1] - 1
    past = pool[:, :history] if pool.shape[1] > history else pool
    window = torch.cat([past[plan.slots].masked_fill(plan.fresh, 0), x], dim=1)
    tail = window.take_along_dim(plan.tail.unsqueeze(2), dim=1)
    past[plan.slots] = torch.where(plan.dead, past[0], tail)
    return convolve(window, weight)
