"""Choices of the k best of many: whether they are such a choice at all, and how far below the best ones they lie.

    scores [6, 5, 3, 0], k = 2      ids [0, 1] -> 0.0      ids [0, 2] -> (5 - 3) / 6      ids [0, 0] -> none: twice 0

A choice is compared rank by rank: its best with the best of all, its second best with the second best. That the worst
of it is good enough would say nothing: the best one taken four times is as good by that measure.
"""

from __future__ import annotations

import torch
from torch import Tensor


def choice_fault(ids: Tensor, own: Tensor, dim: int, experts: int) -> str | None:
    """Why `ids` are no choice like `own`, the ids that the run itself found among `experts` along `dim`; else None."""
    if ids.dtype != own.dtype or ids.shape != own.shape:
        return f"ids are {ids.dtype} {list(ids.shape)}, eager's are {own.dtype} {list(own.shape)}"
    if not ids.numel():
        return None
    if not 0 <= int(ids.min()) <= int(ids.max()) < experts:
        return f"ids reach from {int(ids.min())} to {int(ids.max())}, and there are {experts} to choose from"
    if ids.dim() and bool((ids.sort(dim).values.diff(dim=dim) == 0).any()):
        return "one id stands several times in a row of ids"
    return None


def shortfall(scores: Tensor, ids: Tensor, dim: int = -1, largest: bool = True) -> float:
    """How far the scores of `ids`, distinct along `dim`, lie below (above, unless `largest`) those of the best ones: at
    the worst rank of the worst row, as a share of the spread of the row's finite scores.

    Infinite if something that is not finite was taken where a number was to be had, or the other way round.
    """
    if not ids.numel():
        return 0.0
    scores = scores.double() if largest else -scores.double()
    if not scores.dim():
        return 0.0
    best = scores.topk(ids.shape[dim], dim).values
    taken = scores.gather(dim, ids).sort(dim, descending=True).values
    finite = scores.isfinite()
    high = scores.masked_fill(~finite, -torch.inf).amax(dim, keepdim=True)
    low = scores.masked_fill(~finite, torch.inf).amin(dim, keepdim=True)
    spread = (high - low).clamp_min(torch.finfo(torch.float32).tiny)
    lost = (best - taken).abs() / spread
    same = (best == taken) | (best.isnan() & taken.isnan())
    return float(lost.masked_fill(same, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf).max())
