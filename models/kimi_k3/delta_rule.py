"""The gated delta rule, one token at a time. State S is `[B, H, V, K]`, per head and key channel decayed.

    S' = S · diag(exp(g))      u = β (v - S' k)      S ← S' + u kᵀ      o = S q

The prediction uses the decayed state and the output the updated one. Everything here is in the state's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o `[B, H, V]`, new state). q, k, g `[B, H, K]`, v `[B, H, V]`, beta `[B, H]`; q is normalised and scaled."""
    state, k = state * torch.exp(g).unsqueeze(2), k.unsqueeze(2)
    predicted = (state * k).sum(-1)
    update = beta.unsqueeze(2) * (v - predicted)
    state = state + update.unsqueeze(3) * k
    return (state * q.unsqueeze(2)).sum(-1), state
