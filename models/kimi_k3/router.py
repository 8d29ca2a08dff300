"""The router: which experts a token goes to, and with which weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from k3rewrite.models.kimi_k3.config import KimiK3Config
from k3rewrite.models.kimi_k3.numerics import math_dtype


class Router(nn.Module):
    """Sigmoid scores; a correction bias takes part in the selection only.

        s = σ(W x)      selected = top-k of (s + bias)      w = s[selected] / (Σ s[selected] + 1e-20) · scale

    Scores are fp32 from operands in the model's dtype. Which of two experts with equal biased scores is taken is left
    to `torch.topk`, which does not say; so is the order of the selected ones.
    """

    def __init__(self, config: KimiK3Config, *, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(
            torch.empty(config.num_experts, config.hidden_size, dtype=dtype, device=device), requires_grad=False
        )
        self.e_score_correction_bias = nn.Parameter(
            torch.empty(config.num_experts, dtype=math_dtype(dtype), device=device), requires_grad=False
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights `[T, k]` fp32, ids `[T, k]` int64) from x `[T, d]`."""
        scores = self.scores(x)
        biased = scores + self.e_score_correction_bias
        ids = torch.topk(biased, self.config.num_experts_per_token, dim=-1, sorted=False)[1]
        return self.weigh(scores, ids), ids

    def scores(self, x: Tensor) -> Tensor:
        """Unbiased scores `[T, E]`."""
        math = math_dtype(x.dtype)
        return torch.sigmoid(F.linear(x.to(math), self.weight.to(math)))

    def weigh(self, scores: Tensor, ids: Tensor) -> Tensor:
        """Weights `[T, k]` of the selected experts."""
        weights = scores.gather(1, ids)
        if self.config.moe_renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.config.routed_scaling_factor
