"""Grouped matrix product: consecutive rows with their group's matrix. The expert-centric MoE runs on it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def grouped_mm(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """`[R, N]`: row r of x `[R, K]` times the transpose of the matrix `[N, K]` of its group.

    weights `[G, N, K]`; offsets `[G]` int32, ascending: the row behind each group. Same dtype in and out.
    """
    if x.dtype is torch.bfloat16:
        return F.grouped_mm(x, weights.transpose(1, 2), offs=offsets)
    # torch's op takes no fp64 and is captured in bf16 only: one matrix a row, the same value.
    rows = torch.arange(x.shape[0], dtype=offsets.dtype, device=x.device)
    group = torch.searchsorted(offsets, rows, right=True)
    return (weights[group] @ x.unsqueeze(2)).squeeze(2)
