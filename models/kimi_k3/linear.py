"""A bias-free linear layer whose weight is left uninitialised: the loader or the factory fills it."""

from __future__ import annotations

import torch
from torch import nn


class Linear(nn.Linear):
    """y = x · Wᵀ, weight `[outputs, inputs]`. No layer of the decoder has a bias."""

    def __init__(self, inputs: int, outputs: int, *, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=dtype, device=device)
        self.weight.requires_grad_(False)

    def reset_parameters(self) -> None:
        """Drawing 2.78 T numbers that are overwritten at once would take hours."""
