"""`k3::kda_decode` in Triton: a program takes one head of one row, with all of its state in registers.

    q, k, v   convolved from the line of past inputs, which is moved on; q and k to unit length
    S         loaded, decayed, updated, stored: read once and written once, where nearly all bytes are
    y         read out, normalised over the head, gated

A null row loads no state, stores none, and gives zeros. Pools are written in place: a program reads all of its columns
of a line before it writes one, and no other program has them.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from k3rewrite.kernels.triton_math import rounded


@triton.jit
def convolved(x, weight, line, channels, column, live, TAPS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr):
    """SiLU of the convolution of some channels; their line moves on by one."""
    token = tl.load(x + channels)
    total = token.to(tl.float32) * tl.load(weight + channels * TAPS + (TAPS - 1))
    for j in tl.static_range(TAPS - 1):
        past = tl.load(line + (COLUMNS - TAPS + 1 + j) * column + channels, mask=live, other=0.0)
        total += past.to(tl.float32) * tl.load(weight + channels * TAPS + j)
    for j in tl.static_range(COLUMNS - 1):
        younger = tl.load(line + (j + 1) * column + channels, mask=live, other=0.0)
        tl.store(line + j * column + channels, younger, mask=live)
    tl.store(line + (COLUMNS - 1) * column + channels, token.to(line.dtype.element_ty), mask=live)
    return rounded(total * tl.sigmoid(total), INNER)


@triton.jit
def kda_decode_head(
    qkv, f, b, gate, conv_weight, a_log, dt_bias, norm_weight, conv_state, state, slots, out, qkv_row, f_row, b_row,
    gate_row, gate_head, conv_slot, conv_column, state_slot, state_head, bound, q_scale, l2_eps, norm_eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, TAPS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
    NULL: tl.constexpr, SILU: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, heads)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row
    if SLOTS:
        place = tl.load(slots + row).to(tl.int64)
    first: tl.constexpr = 1 if NULL else 0  # slots from here on are somebody's
    at = head * SIZE + tl.arange(0, SIZE)
    alive = at * 0 + place >= first
    x, line = qkv + row * qkv_row, conv_state + place * conv_slot
    q = convolved(x, conv_weight, line, at, conv_column, alive, TAPS, COLUMNS, INNER)
    k = convolved(x, conv_weight, line, HEADS * SIZE + at, conv_column, alive, TAPS, COLUMNS, INNER)
    v = convolved(x, conv_weight, line, 2 * HEADS * SIZE + at, conv_column, alive, TAPS, COLUMNS, INNER)
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + l2_eps) * q_scale)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + l2_eps)
    moved = tl.load(f + row * f_row + at).to(tl.float32) + tl.load(dt_bias + at)
    decay = tl.exp(tl.sigmoid(tl.exp(tl.load(a_log + head)) * moved) * bound)
    rate = tl.sigmoid(tl.load(b + row * b_row + head).to(tl.float32))

    inside = tl.arange(0, SIZE)
    cells = inside[:, None] * SIZE + inside[None, :]
    pool = state + place * state_slot + head * state_head
    live = cells * 0 + place >= first
    rows = tl.load(pool + cells, mask=live, other=0.0) * decay[None, :]
    update = rate * (v - tl.sum(rows * k[None, :], 1))
    rows += update[:, None] * k[None, :]
    tl.store(pool + cells, rows, mask=live)

    read = rounded(tl.sum(rows * q[None, :], 1), INNER)
    normed = read * tl.rsqrt(tl.sum(read * read, 0) / SIZE + norm_eps) * tl.load(norm_weight + inside)
    z = tl.load(gate + row * gate_row + head * gate_head + inside).to(tl.float32)
    activated = z * tl.sigmoid(z) if SILU else tl.sigmoid(z)
    y = tl.where(alive, normed * activated, 0.0)
    tl.store(out + (row * HEADS + head) * SIZE + inside, y.to(out.dtype.element_ty))
