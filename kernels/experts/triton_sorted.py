"""The expert-centric path, for many tokens: routes in order of their experts, then two products in tiles.

    count_routes     routes of each expert
    place_routes     order[position] = route, experts one after the other, routes of an expert in their own order
    gate_up_sorted   a program owns TOKENS positions of one expert and a tile of rows: hidden[position, rows]
    down_sorted      the same for the down product, put back: routed[route, rows]

What follows is `combine_routes`. Each expert's program counts and places its own routes, so there is nothing to
synchronise and the order never changes. A tile of positions never crosses an expert; positions past an expert's end are
masked, not padded.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from k3rewrite.kernels.experts.triton_tiles import activated, tile


@triton.jit
def count_routes(ids, counts, first, routes, CHUNK: tl.constexpr):
    """counts[e]: how many of the `routes` ids mean expert e of the window."""
    expert = tl.program_id(0)
    found = tl.zeros((CHUNK,), tl.int32)
    for begin in tl.range(0, routes, CHUNK):
        index = begin + tl.arange(0, CHUNK)
        named = tl.load(ids + index, mask=index < routes, other=-1).to(tl.int64) - first
        found += ((named == expert) & (index < routes)).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, axis=0))


@triton.jit
def place_routes(ids, counts, order, first, routes, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """order[position] = route, for the routes of one expert."""
    expert = tl.program_id(0)
    others = tl.arange(0, EXPERTS)
    position = tl.sum(tl.load(counts + others, mask=others < expert, other=0), axis=0)
    for begin in tl.range(0, routes, CHUNK):
        index = begin + tl.arange(0, CHUNK)
        named = tl.load(ids + index, mask=index < routes, other=-1).to(tl.int64) - first
        mine = (named == expert) & (index < routes)
        tl.store(order + position + tl.cumsum(mine.to(tl.int32), axis=0) - 1, index, mask=mine)
        position += tl.sum(mine.to(tl.int32), axis=0)


@triton.jit
def block_of(counts, block, count, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """(expert, first position, one past the last position) of a block of positions; the expert is `count` if there is
    no such block."""
    experts = tl.arange(0, EXPERTS)
    each = tl.load(counts + experts, mask=experts < count, other=0)
    blocks = tl.cdiv(each, TOKENS)
    ends = tl.cumsum(blocks, axis=0)
    expert = tl.minimum(tl.sum((ends <= block).to(tl.int32), axis=0), count)
    before = tl.sum(tl.where(experts < expert, each, 0), axis=0)
    earlier = tl.sum(tl.where(experts < expert, blocks, 0), axis=0)
    own = tl.sum(tl.where(experts == expert, each, 0), axis=0)
    begin = before + (block - earlier) * TOKENS
    return expert, begin, tl.minimum(begin + TOKENS, before + own)


@triton.jit
def gate_up_sorted(
    x, order, counts, w_gate, w_up, s_gate, s_up, hidden,
    x_stride, w_expert, w_row, s_expert, s_row, count, beta, linear_beta,
    WIDTH: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, ACTIVATION: tl.constexpr,
    LINEAR: tl.constexpr, PRODUCT: tl.constexpr, COMPUTE: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x [T, INNER] times the gate and up matrices, activated: hidden [positions, WIDTH]."""
    expert, begin_position, end = block_of(counts, tl.program_id(0), count, EXPERTS, TOKENS)
    if expert >= count:
        return
    position = begin_position + tl.arange(0, TOKENS)
    used = (position < end)[:, None]
    route = tl.load(order + position, mask=position < end, other=0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (rows < WIDTH)[:, None]
    begin = expert.to(tl.int64) * w_expert + rows.to(tl.int64)[:, None] * w_row
    begin_scale = expert.to(tl.int64) * s_expert + rows.to(tl.int64)[:, None] * s_row
    source = x + (route // TOP_K).to(tl.int64)[:, None] * x_stride
    gate, up = tl.zeros((TOKENS, ROWS), tl.float32), tl.zeros((TOKENS, ROWS), tl.float32)
    for column in tl.range(0, INNER, COLUMNS, num_stages=STAGES):
        values = tl.load(source + (column + tl.arange(0, COLUMNS))[None, :], mask=used, other=0.0)
        one = tile(w_gate + begin, s_gate + begin_scale, column, inside, ROWS, COLUMNS, FORMAT)
        gate = tl.dot(values, tl.trans(one.to(values.dtype)), gate)
        other = tile(w_up + begin, s_up + begin_scale, column, inside, ROWS, COLUMNS, FORMAT)
        up = tl.dot(values, tl.trans(other.to(values.dtype)), up)
    result = activated(gate, up, beta, linear_beta, ACTIVATION, LINEAR, PRODUCT, COMPUTE)
    target = hidden + position.to(tl.int64)[:, None] * WIDTH + rows[None, :]
    tl.store(target, result.to(hidden.dtype.element_ty), mask=used & (rows < WIDTH)[None, :])


@triton.jit
def down_sorted(
    hidden, order, counts, w_down, s_down, routed,
    w_expert, w_row, s_expert, s_row, count,
    WIDTH: tl.constexpr, OUTER: tl.constexpr, FORMAT: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """hidden [positions, WIDTH] times the down matrices: routed [routes, OUTER]."""
    expert, begin_position, end = block_of(counts, tl.program_id(0), count, EXPERTS, TOKENS)
    if expert >= count:
        return
    position = begin_position + tl.arange(0, TOKENS)
    used = (position < end)[:, None]
    route = tl.load(order + position, mask=position < end, other=0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (rows < OUTER)[:, None]
    begin = expert.to(tl.int64) * w_expert + rows.to(tl.int64)[:, None] * w_row
    begin_scale = expert.to(tl.int64) * s_expert + rows.to(tl.int64)[:, None] * s_row
    source = hidden + position.to(tl.int64)[:, None] * WIDTH
    product = tl.zeros((TOKENS, ROWS), tl.float32)
    for column in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
        values = tl.load(source + (column + tl.arange(0, COLUMNS))[None, :], mask=used, other=0.0)
        one = tile(w_down + begin, s_down + begin_scale, column, inside, ROWS, COLUMNS, FORMAT)
        product = tl.dot(values, tl.trans(one.to(values.dtype)), product)
    target = routed + route.to(tl.int64)[:, None] * OUTER + rows[None, :]
    tl.store(target, product.to(routed.dtype.element_ty), mask=used & (rows < OUTER)[None, :])
