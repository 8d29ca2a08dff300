"""`k3::mla_attend`: absorbed latent attention of a step's queries over a cache of one key and value head.

    k_i    = cache[table[b, i // P], i mod P] · cache_scale     [D] key of position i; its first V numbers are the value
    s_ji   = scale · q_jh · k_i                                  for i < lengths[b] + j, and a page that is there
    o_jh   = sum_i softmax_i(s_ji) · k_i[:V]
    lse_jh = log sum_i exp(s_ji)                                 natural logarithm

Query j of a row sees one position more than query j - 1: of a window of tokens all keys are in the cache before any is
attended to, and each sees itself and what is before it. `lengths` counts what the first one sees, itself included; a
row of length <= 0 sees nothing. Pages below zero are not there. What nobody sees may hold anything.

A query that sees nothing gives zeros and -inf: a merge with partial results of other caches weighs it with zero.

A cache with a slot for each sequence is one of a page a slot: P is then the longest context, table [B, 1] the slots.

Scores, weights and sums are in the dtype of the cache's values as they are multiplied, at least fp32, and rounded once.

Sources: DeepSeek-V2 (arXiv 2405.04434) for the absorbed form; FlashDecoding for the merge of partial results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3rewrite.ops.vocabulary import Cost, Op, tensor_bytes


def mla_attend(
    query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, cache_scale: Tensor | None, scale: float,
    value_size: int, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """query [B, N, H, D], cache [pages, P, D], table [B, pages of a row] and lengths [B] of integers, cache_scale a
    number or None -> out [B, N, H, V], lse [B, N, H] in fp32 (fp64 of fp64)."""
    tokens, page_size = query.shape[1], cache.shape[1]
    wide = torch.promote_types(torch.promote_types(query.dtype, torch.float32), _values(cache))
    positions = torch.arange(table.shape[1] * page_size, device=query.device)
    there = (table >= 0).repeat_interleave(page_size, 1)  # [B, C]
    last = lengths.unsqueeze(1) + torch.arange(tokens, device=query.device)  # [B, N]: positions below it are seen
    last = last.masked_fill((lengths <= 0).unsqueeze(1), 0)
    seen = (positions < last.unsqueeze(2)) & there.unsqueeze(1)  # [B, N, C]
    keys = cache[table.clamp(min=0)].flatten(1, 2).to(wide)  # [B, C, D]
    if cache_scale is not None:
        keys = keys * cache_scale.to(wide)
    keys = keys.masked_fill(~seen.any(1).unsqueeze(2), 0)
    scores = torch.einsum("bnhd,bcd->bnhc", query.to(wide), keys) * scale
    scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
    lse = scores.logsumexp(3)
    weights = (scores - lse.masked_fill(lse.isinf(), 0).unsqueeze(3)).exp()
    return torch.einsum("bnhc,bcv->bnhv", weights, keys[..., :value_size]).to(out_dtype), lse


def _values(cache: Tensor) -> torch.dtype:
    """fp8 is multiplied in fp32."""
    return torch.float32 if cache.element_size() == 1 else cache.dtype


def mla_attend_fake(
    query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, cache_scale: Tensor | None, scale: float,
    value_size: int, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wide = torch.float64 if torch.float64 in (query.dtype, cache.dtype) else torch.float32
    out = query.new_empty((*query.shape[:3], value_size), dtype=out_dtype)
    return out, query.new_empty(query.shape[:3], dtype=wide)


def _cost(
    query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, cache_scale: Tensor | None, scale: float,
    value_size: int, out_dtype: torch.dtype,
) -> Cost:  # fmt: skip
    """How long contexts are is not known: every page of the table is read once, by all heads of a row together."""
    batch, tokens, heads, size = query.shape
    keys = table.shape[0] * table.shape[1] * cache.shape[1]
    out, lse = batch * tokens * heads * value_size * out_dtype.itemsize, batch * tokens * heads * 4
    read = tensor_bytes(query, table, lengths, cache_scale) + keys * size * cache.element_size()
    return Cost(2, read, out + lse, 2 * tokens * heads * keys * (size + value_size))


OP = Op(
    name="mla_attend",
    schema=(
        "(Tensor query, Tensor cache, Tensor table, Tensor lengths, Tensor? cache_scale, float scale, int value_size, "
        "ScalarType out_dtype) -> (Tensor, Tensor)"
    ),
    reference=mla_attend,
    fake=mla_attend_fake,
    cost=_cost,
    traits=frozenset({"row_independent"}),
)
OPS = (OP,)
