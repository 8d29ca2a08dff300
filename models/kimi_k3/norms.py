"""The norms: RMSNorm, its gated form on KDA heads, and the L2 norm of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3rewrite.models.kimi_k3.numerics import math_dtype


class RMSNorm(nn.Module):
    """y = round(x · rsqrt(mean(x²) + eps)) · weight, over the last dimension, as the vendor's code rounds it.

    x, weight and y have the model's dtype; the statistic and the scaling are fp32, rounded before the weight.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.to(math_dtype(x.dtype))
        variance = x32.pow(2).mean(-1, keepdim=True)
        return (x32 * torch.rsqrt(variance + self.eps)).to(x.dtype) * self.weight


class GatedRMSNorm(nn.Module):
    """y = x · rsqrt(mean(x²) + eps) · weight · sigmoid(gate), fp32 throughout, rounded once at the end.

    The weight is fp32 `[size]` and shared by all heads; `x` and `gate` are `[..., size]` in the model's dtype.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=math_dtype(dtype), device=device), requires_grad=False)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x32 = x.to(math_dtype(x.dtype))
        variance = x32.pow(2).mean(-1, keepdim=True)
        normed = x32 * torch.rsqrt(variance + self.eps) * self.weight
        return (normed * torch.sigmoid(gate.to(normed.dtype))).to(x.dtype)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x · rsqrt(Σx² + eps) over the last dimension, in fp32 and left in fp32. eps is inside the *sum* of squares."""
    x32 = x.to(math_dtype(x.dtype))
    return x32 * torch.rsqrt(x32.pow(2).sum(-1, keepdim=True) + eps)
