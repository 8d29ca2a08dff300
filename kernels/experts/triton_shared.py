"""Where several tokens of a batch go to one expert, its weights are read once for all of them.

    gate_up_experts   a program owns a tile of rows of one expert, and finds the expert's routes among all ids
    down_experts      the same for the down product, several tiles of rows: routed[route, rows]
    combine_routes    a program owns a tile of one token's output: the weighted sum of its routes, in their order

A program whose expert has no route ends at once. Nothing is sorted: the ids of a decode batch are few, and each program
looks through them. Products run on the matrix units, with the weights as rows and up to TOKENS routes as columns.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from k3rewrite.kernels.experts.triton_tiles import activated, local_expert, tile
from k3rewrite.kernels.triton_math import rounded


@triton.jit
def routes_of(ids, expert, routes, ROUTES: tl.constexpr):
    """For each of ROUTES indices its place among the routes of `expert`, from 1 on, or 0; and how many there are."""
    index = tl.arange(0, ROUTES)
    mine = tl.load(ids + index, mask=index < routes, other=-1).to(tl.int64) == expert
    mine &= index < routes
    return tl.where(mine, tl.cumsum(mine.to(tl.int32), axis=0), 0), tl.sum(mine.to(tl.int32), axis=0)


@triton.jit
def some_routes(places, begin, ROUTES: tl.constexpr, TOKENS: tl.constexpr):
    """The routes at the places begin + 1, ..., begin + TOKENS; 0 where there are none."""
    wanted = begin + 1 + tl.arange(0, TOKENS)
    hit = places[None, :] == wanted[:, None]
    return tl.sum(tl.where(hit, tl.arange(0, ROUTES)[None, :], 0), axis=1)


@triton.jit
def gate_up_experts(
    x, ids, w_gate, w_up, s_gate, s_up, hidden,
    x_stride, w_expert, w_row, s_expert, s_row, first, routes, beta, linear_beta,
    WIDTH: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, ACTIVATION: tl.constexpr,
    LINEAR: tl.constexpr, PRODUCT: tl.constexpr, COMPUTE: tl.constexpr, ROUTES: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [T, INNER] times the gate and up matrices of every route, activated: hidden [routes, WIDTH]."""
    expert = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    places, found = routes_of(ids, expert + first, routes, ROUTES)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (rows < WIDTH)[:, None]
    begin = expert * w_expert + rows.to(tl.int64)[:, None] * w_row
    begin_scale = expert * s_expert + rows.to(tl.int64)[:, None] * s_row
    for begin_route in tl.range(0, found, TOKENS):
        route = some_routes(places, begin_route, ROUTES, TOKENS)
        used = begin_route + tl.arange(0, TOKENS) < found
        source = x + (route // TOP_K).to(tl.int64)[None, :] * x_stride
        gate, up = tl.zeros((ROWS, TOKENS), tl.float32), tl.zeros((ROWS, TOKENS), tl.float32)
        for column in tl.range(0, INNER, COLUMNS, num_stages=STAGES):
            values = tl.load(source + (column + tl.arange(0, COLUMNS))[:, None], mask=used[None, :], other=0.0)
            one = tile(w_gate + begin, s_gate + begin_scale, column, inside, ROWS, COLUMNS, FORMAT)
            gate = tl.dot(one.to(values.dtype), values, gate)
            other = tile(w_up + begin, s_up + begin_scale, column, inside, ROWS, COLUMNS, FORMAT)
            up = tl.dot(other.to(values.dtype), values, up)
        result = activated(gate, up, beta, linear_beta, ACTIVATION, LINEAR, PRODUCT, COMPUTE)
        target = hidden + route.to(tl.int64)[None, :] * WIDTH + rows[:, None]
        tl.store(target, result.to(hidden.dtype.element_ty), mask=inside & used[None, :])


@triton.jit
def down_experts(
    hidden, ids, w_down, s_down, routed,
    w_expert, w_row, s_expert, s_row, first, routes,
    WIDTH: tl.constexpr, OUTER: tl.constexpr, FORMAT: tl.constexpr, ROUTES: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden [routes, WIDTH] times the down matrix of every route: routed [routes, OUTER].

    A program takes BLOCKS tiles of rows one after the other: finding the routes costs as much as reading a small tile.
    """
    expert = tl.program_id(0).to(tl.int64)
    places, found = routes_of(ids, expert + first, routes, ROUTES)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for begin_route in tl.range(0, found, TOKENS):
        route = some_routes(places, begin_route, ROUTES, TOKENS)
        used = begin_route + tl.arange(0, TOKENS) < found
        source = hidden + route.to(tl.int64)[None, :] * WIDTH
        for block in tl.range(0, BLOCKS):
            rows = (tl.program_id(1) * BLOCKS + block) * ROWS + tl.arange(0, ROWS)
            inside = (rows < OUTER)[:, None]
            begin = expert * w_expert + rows.to(tl.int64)[:, None] * w_row
            begin_scale = expert * s_expert + rows.to(tl.int64)[:, None] * s_row
            product = tl.zeros((ROWS, TOKENS), tl.float32)
            for column in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
                values = tl.load(source + (column + tl.arange(0, COLUMNS))[:, None], mask=used[None, :], other=0.0)
                one = tile(w_down + begin, s_down + begin_scale, column, inside, ROWS, COLUMNS, FORMAT)
                product = tl.dot(one.to(values.dtype), values, product)
            target = routed + route.to(tl.int64)[None, :] * OUTER + rows[:, None]
            tl.store(target, product.to(routed.dtype.element_ty), mask=inside & used[None, :])


@triton.jit
def combine_routes(
    routed, ids, weights, out, first, count,
    OUTER: tl.constexpr, TOP_K: tl.constexpr, COMBINE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weighted sum of each token's routes, one after the other: out [T, OUTER]."""
    token = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((ROWS,), tl.float32)
    for j in tl.static_range(TOP_K):
        route = token * TOP_K + j
        if local_expert(ids, route, route >= 0, first, count) >= 0:
            value = tl.load(routed + route.to(tl.int64) * OUTER + rows, mask=rows < OUTER, other=0.0).to(tl.float32)
            share = rounded(tl.load(weights + route).to(tl.float32), COMBINE)
            total += rounded(value * share, COMBINE)
    result = rounded(total, COMBINE).to(out.dtype.element_ty)
    tl.store(out + token.to(tl.int64) * OUTER + rows, result, mask=rows < OUTER)
