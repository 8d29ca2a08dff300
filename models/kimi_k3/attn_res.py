"""AttnRes: attention over depth, which takes the place of the residual stream.

Per token there is a running prefix P and a list of stored blocks B. A sublayer does not read P; it reads

    s_j = Σ_c v_j[c] · rsqrt(mean(v_j²) + eps) · n[c] · p[c]      for v = B_0 .. B_{m-1}, P
    mix = Σ_j softmax(s)_j · v_j                                   (the sources as they are, not normalised)

all in fp32 and rounded once. Two ways of keeping the blocks are offered, with the same results: a Python list stacked
at every mix (the vendor's spelling), and one bank tensor written by slot and read as a slice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3rewrite.models.kimi_k3.linear import Linear
from k3rewrite.models.kimi_k3.norms import RMSNorm
from k3rewrite.models.kimi_k3.numerics import math_dtype


class BlockList:
    """Stored blocks as a list of `[T, d]` tensors."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []

    def __len__(self) -> int:
        return len(self.blocks)

    def append(self, block: Tensor) -> None:
        self.blocks.append(block)

    def sources(self, prefix: Tensor) -> Tensor:
        """`[T, blocks + 1, d]`, oldest block first, the prefix last."""
        return torch.stack([*self.blocks, prefix], dim=1)


class BlockBank:
    """Stored blocks as one `[T, capacity, d]` tensor. Slots that are not written yet are never read."""

    def __init__(self, like: Tensor, capacity: int) -> None:
        self.bank = like.new_empty(like.shape[0], capacity, like.shape[1])
        self.used = 0

    def __len__(self) -> int:
        return self.used

    def append(self, block: Tensor) -> None:
        self.bank[:, self.used] = block
        self.used += 1

    def sources(self, prefix: Tensor) -> Tensor:
        """`[T, blocks + 1, d]`, oldest block first, the prefix last."""
        return torch.cat([self.bank[:, : self.used], prefix.unsqueeze(1)], dim=1)


Blocks = BlockList | BlockBank


class DepthMix(nn.Module):
    """Mix(n, p; B, P): `norm.weight` is n `[d]`, `proj.weight` is p `[1, d]`."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__()
        self.norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.proj = Linear(size, 1, dtype=dtype, device=device)

    def forward(self, blocks: Blocks, prefix: Tensor) -> Tensor:
        """`[T, d]` in the dtype of `prefix`."""
        return depth_mix(blocks.sources(prefix), self.norm.weight, self.proj.weight, self.norm.eps)


def depth_mix(sources: Tensor, norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """`[T, d]` from sources `[T, m, d]`, norm weight `[d]` and projection row `[1, d]`."""
    math = math_dtype(sources.dtype)
    values = sources.to(math)
    rstd = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    scores = (values * rstd * (norm_weight.to(math) * proj_weight.to(math))).sum(-1, keepdim=True)
    return (scores.softmax(1) * values).sum(1).to(sources.dtype)
