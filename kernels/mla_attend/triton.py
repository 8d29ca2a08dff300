"""The Triton kernels of `k3::mla_attend`: parts of the history side by side, then their sums together.

    first     of a row's queries up to BLOCK_M, of its keys a part: tiles of BLOCK_N keys, each read once for scores and
              values, sums rescaled as the largest score grows; leaves sums / weight and log2 of the weight
    second    sums of all parts by their weights; only where there are several

Scores are in base two. A part without a key that a query sees leaves zeros and -inf.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def mla_attend_part(
    query, cache, table, lengths, cache_scale, out, lse, scale, query_row, query_token, query_head, cache_page,
    cache_position, table_row, tokens, heads, page_size, pages, parts,
    VALUES: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_PAGE: tl.constexpr,
    FP8: tl.constexpr, MULTIPLY: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of queries, parts). MULTIPLY: the dtype of what matrix products take. WHOLE: one part, whose
    sums are results: out in its own dtype, lse natural."""
    narrow = tl.float32 if MULTIPLY == "fp32" else (tl.bfloat16 if MULTIPLY == "bf16" else tl.float16)
    row, block, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    queries = tokens * heads
    token = m // heads
    wanted = m < queries
    length = tl.load(lengths + row)
    first_sees = tl.minimum(tl.maximum(length, 0), pages * page_size).to(tl.int32)
    sees = tl.where((length > 0) & wanted, tl.minimum(first_sees + token, pages * page_size), 0)  # keys of each query
    longest = tl.where(length > 0, tl.minimum(first_sees + tokens - 1, pages * page_size), 0)
    size = tl.cdiv(tl.cdiv(longest, parts), BLOCK_N) * BLOCK_N
    begin, end = part * size, tl.minimum((part + 1) * size, longest)

    v, r, n = tl.arange(0, VALUES), tl.arange(0, REST), tl.arange(0, BLOCK_N)
    places = query + row * query_row + token[:, None] * query_token + (m % heads)[:, None] * query_head
    q = tl.load(places + v[None, :], mask=wanted[:, None], other=0.0).to(narrow)
    q_rest = tl.load(places + VALUES + r[None, :], mask=wanted[:, None], other=0.0).to(narrow)
    factor = scale * LOG2_E
    if FP8:
        kept = tl.load(cache_scale)
        factor = factor * kept

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, VALUES], tl.float32)
    for tile in range(begin, end, BLOCK_N):
        position = tile + n
        if ONE_PAGE:
            page = tl.load(table + row * table_row + tile // page_size).to(tl.int64)
            there = position < tl.where(page >= 0, end, 0)
            keys = cache + tl.maximum(page, 0) * cache_page + (position % page_size)[:, None] * cache_position
        else:
            page = tl.load(table + row * table_row + position // page_size, mask=position < end, other=-1).to(tl.int64)
            there = page >= 0
            keys = cache + (tl.maximum(page, 0) * cache_page + (position % page_size) * cache_position)[:, None]
        k = tl.load(keys + v[None, :], mask=there[:, None], other=0.0).to(narrow)
        k_rest = tl.load(keys + VALUES + r[None, :], mask=there[:, None], other=0.0).to(narrow)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee") * factor
        scores = tl.where(there[None, :] & (position[None, :] < sees[:, None]), scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        still = tl.where(higher == float("-inf"), 0.0, higher)  # of a query that has seen nothing yet
        shrunk = tl.exp2(top - still)
        p = tl.exp2(scores - still[:, None])
        weight = weight * shrunk + tl.sum(p, 1)
        sums = tl.dot(p.to(narrow), k, sums * shrunk[:, None], input_precision="ieee")
        top = higher

    some = weight > 0
    some = some | (weight != weight)  # what is no number stays so
    mean = sums / tl.where(some, weight, 1.0)[:, None]
    if FP8:
        mean = mean * kept
    log = tl.where(some, top + tl.log2(tl.where(some, weight, 1.0)), float("-inf"))
    at = (row * queries + m) * parts + part
    if WHOLE:
        log = log * LN_2
    tl.store(lse + at, log, mask=wanted)
    tl.store(out + at[:, None] * VALUES + v[None, :], mean.to(out.dtype.element_ty), mask=wanted[:, None])


@triton.jit
def mla_attend_merge(
    partial, partial_lse, out, lse, parts, VALUES: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (queries of all rows, VALUES // WIDTH). PARTS: a power of two, at least as many as there are."""
    at, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, v = tl.arange(0, PARTS), piece * WIDTH + tl.arange(0, WIDTH)
    logs = tl.load(partial_lse + at * parts + n, mask=n < parts, other=float("-inf"))
    top = tl.max(logs, 0)
    still = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(logs - still)
    total = tl.sum(weights, 0)
    sums = tl.zeros([WIDTH], tl.float32)
    for i in range(parts):
        log = tl.load(partial_lse + at * parts + i)
        sums += tl.exp2(log - still) * tl.load(partial + (at * parts + i) * VALUES + v)
    some = total != 0.0
    mean = sums / tl.where(some, total, 1.0)
    tl.store(out + at * VALUES + v, mean.to(out.dtype.element_ty))
    if piece == 0:
        tl.store(lse + at, tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN_2, float("-inf")))
