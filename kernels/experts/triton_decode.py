"""Warp decode in Triton: two kernels that own outputs, for few tokens.

    gate_up_routes   a program owns a tile of one route's intermediate row: hidden[route, rows]
    down_tokens      a program owns a tile of one token's output and walks the token's experts: out[token, rows]

Nothing is sorted, padded or gathered, and no two programs write one element. A route outside of the window is skipped
in both: its row of `hidden` is never written, and never read.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from k3rewrite.kernels.experts.triton_tiles import activated, local_expert, tile
from k3rewrite.kernels.triton_math import rounded


@triton.jit
def gate_up_routes(
    x, ids, w_gate, w_up, s_gate, s_up, hidden,
    x_stride, w_expert, w_row, s_expert, s_row, first, count, beta, linear_beta,
    WIDTH: tl.constexpr, INNER: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, ACTIVATION: tl.constexpr,
    LINEAR: tl.constexpr, PRODUCT: tl.constexpr, COMPUTE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [T, INNER] times the gate and up matrices of every route, activated: hidden [T * TOP_K, WIDTH]."""
    route = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    expert = local_expert(ids, route, route >= 0, first, count)
    if expert < 0:
        return
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (rows < WIDTH)[:, None]
    begin = expert * w_expert + rows.to(tl.int64)[:, None] * w_row
    begin_scale = expert * s_expert + rows.to(tl.int64)[:, None] * s_row
    x += (route // TOP_K).to(tl.int64) * x_stride
    gate, up = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for column in tl.range(0, INNER, COLUMNS, num_stages=STAGES):
        values = tl.load(x + column + tl.arange(0, COLUMNS)).to(tl.float32)[None, :]
        gate += values * tile(w_gate + begin, s_gate + begin_scale, column, inside, ROWS, COLUMNS, FORMAT).to(
            tl.float32
        )
        up += values * tile(w_up + begin, s_up + begin_scale, column, inside, ROWS, COLUMNS, FORMAT).to(tl.float32)
    result = activated(
        tl.sum(gate, axis=1), tl.sum(up, axis=1), beta, linear_beta, ACTIVATION, LINEAR, PRODUCT, COMPUTE
    )
    tl.store(hidden + route.to(tl.int64) * WIDTH + rows, result.to(hidden.dtype.element_ty), mask=rows < WIDTH)


@triton.jit
def down_tokens(
    hidden, ids, weights, w_down, s_down, out,
    w_expert, w_row, s_expert, s_row, first, count,
    WIDTH: tl.constexpr, OUTER: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, ROUTE: tl.constexpr,
    COMBINE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The down products of a token's routes, GROUP experts at a time, weighted and summed: out [T, OUTER]."""
    token = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((ROWS,), tl.float32)
    for j in tl.static_range(0, TOP_K, GROUP):
        slots = j + tl.arange(0, GROUP)
        routes = token * TOP_K + slots
        expert = local_expert(ids, routes, slots < TOP_K, first, count)
        taken = expert >= 0
        # [GROUP, ROWS] as one dimension: row r of the tile is row r % ROWS of expert r // ROWS of the group.
        begin = (expert[:, None] * w_expert + rows.to(tl.int64)[None, :] * w_row).reshape(GROUP * ROWS, 1)
        begin_scale = (expert[:, None] * s_expert + rows.to(tl.int64)[None, :] * s_row).reshape(GROUP * ROWS, 1)
        inside = (taken[:, None] & (rows < OUTER)[None, :]).reshape(GROUP * ROWS, 1)
        product = tl.zeros((GROUP * ROWS, COLUMNS), tl.float32)
        for column in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
            columns = column + tl.arange(0, COLUMNS)
            values = tl.load(
                hidden + routes.to(tl.int64)[:, None] * WIDTH + columns[None, :], mask=taken[:, None], other=0.0
            ).to(tl.float32)
            values = tl.broadcast_to(values[:, None, :], (GROUP, ROWS, COLUMNS)).reshape(GROUP * ROWS, COLUMNS)
            product += values * tile(
                w_down + begin, s_down + begin_scale, column, inside, GROUP * ROWS, COLUMNS, FORMAT
            ).to(tl.float32)
        route = rounded(tl.sum(product, axis=1), ROUTE).reshape(GROUP, ROWS)
        share = tl.load(weights + routes, mask=taken, other=0.0).to(tl.float32)
        term = rounded(route * rounded(share, COMBINE)[:, None], COMBINE)
        total += tl.sum(tl.where(taken[:, None], term, 0.0), axis=0)
    result = rounded(total, COMBINE).to(out.dtype.element_ty)
    tl.store(out + token.to(tl.int64) * OUTER + rows, result, mask=rows < OUTER)
