"""Calls of `k3::mla_attend`, and what they should give, in fp64 and position by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


def make_call(
    lengths: Sequence[int], tokens: int, heads: int, values: int = 32, rest: int = 16, *, page: int = 8,
    pages: int | None = None, dtype: torch.dtype = torch.bfloat16, cache_dtype: torch.dtype | None = None,
    ids: torch.dtype = torch.int64, out: torch.dtype | None = None, missing: Sequence[tuple[int, int]] = (),
    seed: int = 0, device: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """Row b sees `lengths[b]` keys with its first query. Pages that nobody sees hold NaN, and so does what a page has
    behind the last key; page 0 is nobody's. `missing`: (row, page of it) that are not there."""
    generator = torch.Generator().manual_seed(seed)
    batch, size = len(lengths), values + rest
    longest = max([length + tokens - 1 for length in lengths if length > 0], default=0)
    pages = pages or max(1, -(-longest // page))
    order = 1 + torch.randperm(batch * pages, generator=generator)
    table = order.view(batch, pages).to(ids)
    cache = torch.randn(1 + batch * pages, page, size, generator=generator)
    dead = torch.ones(cache.shape[:2], dtype=torch.bool)
    for row, length in enumerate(lengths):
        seen = length + tokens - 1 if length > 0 else 0
        for i in range(seen):
            dead[table[row, i // page], i % page] = False
        for i in range(-(-seen // page), pages):
            table[row, i] = -1 if (row + i) % 2 else table[row, i]
    for row, i in missing:
        dead[table[row, i]] = True
        table[row, i] = -7
    cache_dtype = cache_dtype or dtype
    cache_scale = torch.tensor(0.37).to(device) if cache_dtype == FP8 else None
    kept = cache.to(cache_dtype).float().masked_fill(dead.unsqueeze(2), math.nan).to(cache_dtype)
    return {
        "query": torch.randn(batch, tokens, heads, size, generator=generator).to(dtype).to(device),
        "cache": kept.to(device), "table": table.to(device), "lengths": torch.tensor(lengths, dtype=ids).to(device),
        "cache_scale": cache_scale, "scale": 3.0 * size**-0.5, "value_size": values, "out_dtype": out or dtype,
    }  # fmt: skip


def plainly(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp64, written again from the definition: one query after the other."""
    query, cache = call["query"].double().cpu(), call["cache"].to(torch.float32).double().cpu()
    if call["cache_scale"] is not None:
        cache = cache * call["cache_scale"].double().cpu()
    batch, tokens, heads, _ = query.shape
    page, values = cache.shape[1], call["value_size"]
    out = torch.zeros(batch, tokens, heads, values, dtype=torch.float64)
    lse = torch.full((batch, tokens, heads), -math.inf, dtype=torch.float64)
    for row, length in enumerate(call["lengths"].tolist()):
        slots = call["table"][row].tolist()
        for j in range(tokens if length > 0 else 0):
            seen = [i for i in range(min(length + j, len(slots) * page)) if slots[i // page] >= 0]
            if not seen:
                continue
            keys = torch.stack([cache[slots[i // page], i % page] for i in seen])
            scores = query[row, j] @ keys.T * call["scale"]
            lse[row, j] = scores.logsumexp(1)
            out[row, j] = scores.softmax(1) @ keys[:, :values]
    return out, lse


def errors(results: tuple[Tensor, Tensor], call: dict[str, Any]) -> dict[str, float]:
    """Largest differences from `plainly`, of outputs over their root mean square; `unseen`: of queries that see
    nothing, what is not zero and -inf."""
    out, lse = plainly(call)
    got, logs = (result.double().cpu() for result in results)
    alive = lse.isfinite()
    scale = float(out[alive].square().mean().sqrt()) if alive.any() else 1.0
    return {
        "out": float((got - out)[alive].abs().max()) / scale if alive.any() else 0.0,
        "lse": float((logs - lse)[alive].abs().max()) if alive.any() else 0.0,
        "unseen": float(got[~alive].ne(0).sum() + logs[~alive].ne(-math.inf).sum()),
    }
