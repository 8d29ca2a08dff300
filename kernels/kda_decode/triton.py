"""`k3::kda_decode` in Triton: a program takes one head of one row, with all of its state in registers.

    q, k, v   convolved from the line of past inputs, which is moved on; q and k to unit length
    S         loaded, decayed, updated, stored: read once and written once, where nearly all bytes are
    y         read out, normalised over the head, gated

A null row loads no state, stores none, and gives zeros. Pools are written in place. No other program has what a program
writes, but its own threads may read what one of them writes (small tensors are held several times over): all lines are
read before the first is moved on.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from k3rewrite.kernels.triton_math import rounded, softplus


@triton.jit
def line_of(pool, channels, column, channel, live, COLUMNS: tl.constexpr):
    """The past inputs of some channels, the oldest first: [columns, channels]."""
    j = tl.arange(0, triton.next_power_of_2(COLUMNS))[:, None]
    return tl.load(pool + j * column + channels[None, :] * channel, mask=live[None, :] & (j < COLUMNS), other=0.0)


@triton.jit
def convolved(x, weight, line, channels, TAPS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr):
    """SiLU of the convolution of some channels. What is older than the taps may be anything."""
    tap = tl.arange(0, triton.next_power_of_2(COLUMNS))[:, None] - (COLUMNS - TAPS + 1)
    used = (tap >= 0) & (tap < TAPS - 1)
    taps = tl.load(weight + channels[None, :] * TAPS + tap, mask=used & (channels[None, :] >= 0), other=0.0)
    token = tl.load(x + channels).to(tl.float32) * tl.load(weight + channels * TAPS + (TAPS - 1)).to(tl.float32)
    total = token + tl.sum(tl.where(used, line.to(tl.float32) * taps.to(tl.float32), 0.0), 0)
    return rounded(total * tl.sigmoid(total), INNER)


@triton.jit
def move_on(pool, x, line, channels, column, channel, live, COLUMNS: tl.constexpr):
    """The line loses its oldest input and gets the token."""
    j = tl.arange(0, triton.next_power_of_2(COLUMNS))[:, None]
    before = pool + (j - 1) * column + channels[None, :] * channel
    tl.store(before, line, mask=live[None, :] & (j >= 1) & (j < COLUMNS))
    tl.store(
        pool + (COLUMNS - 1) * column + channels * channel, tl.load(x + channels).to(pool.dtype.element_ty), mask=live
    )


@triton.jit
def kda_decode_head(
    qkv, f, b, gate, conv_weight, a_log, dt_bias, norm_weight, conv_state, state, slots, out, qkv_row, f_row, b_row,
    gate_row, gate_head, conv_slot, conv_column, conv_channel, state_slot, state_head, bound, q_scale, l2_eps, norm_eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, TAPS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
    NULL: tl.constexpr, SILU: tl.constexpr, INNER: tl.constexpr, BOUNDED: tl.constexpr, DECAYS: tl.constexpr,
    KEYS_LAST: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, heads). A head has SIZE decays or one; its state lies as values by keys, or as keys by values."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row
    if SLOTS:
        place = tl.load(slots + row).to(tl.int64)
    first: tl.constexpr = 1 if NULL else 0  # slots from here on are somebody's
    at = head * SIZE + tl.arange(0, SIZE)
    alive = at * 0 + place >= first
    x, pool = qkv + row * qkv_row, conv_state + place * conv_slot
    q_at, k_at, v_at = at, HEADS * SIZE + at, 2 * HEADS * SIZE + at
    q_line = line_of(pool, q_at, conv_column, conv_channel, alive, COLUMNS)
    k_line = line_of(pool, k_at, conv_column, conv_channel, alive, COLUMNS)
    v_line = line_of(pool, v_at, conv_column, conv_channel, alive, COLUMNS)
    q = convolved(x, conv_weight, q_line, q_at, TAPS, COLUMNS, INNER)
    k = convolved(x, conv_weight, k_line, k_at, TAPS, COLUMNS, INNER)
    v = convolved(x, conv_weight, v_line, v_at, TAPS, COLUMNS, INNER)
    tl.debug_barrier()  # a thread writes what others read
    move_on(pool, x, q_line, q_at, conv_column, conv_channel, alive, COLUMNS)
    move_on(pool, x, k_line, k_at, conv_column, conv_channel, alive, COLUMNS)
    move_on(pool, x, v_line, v_at, conv_column, conv_channel, alive, COLUMNS)
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + l2_eps) * q_scale)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + l2_eps)
    of = head * DECAYS + tl.arange(0, SIZE) % DECAYS
    moved = tl.load(f + row * f_row + of).to(tl.float32) + tl.load(dt_bias + of).to(tl.float32)
    speed = tl.exp(tl.load(a_log + head).to(tl.float32))
    if BOUNDED:
        decay = tl.exp(tl.sigmoid(speed * moved) * bound)
    else:
        decay = tl.exp(-speed * softplus(moved))
    rate = tl.sigmoid(tl.load(b + row * b_row + head).to(tl.float32))

    inside = tl.arange(0, SIZE)
    cells = inside[:, None] * SIZE + inside[None, :] if KEYS_LAST else inside[None, :] * SIZE + inside[:, None]
    cell = state + place * state_slot + head * state_head + cells
    live = cells * 0 + place >= first
    rows = tl.load(cell, mask=live, other=0.0) * decay[None, :]
    update = rate * (v - tl.sum(rows * k[None, :], 1))
    rows += update[:, None] * k[None, :]
    tl.store(cell, rows, mask=live)

    read = rounded(tl.sum(rows * q[None, :], 1), INNER)
    normed = read * tl.rsqrt(tl.sum(read * read, 0) / SIZE + norm_eps) * tl.load(norm_weight + inside).to(tl.float32)
    z = tl.load(gate + row * gate_row + head * gate_head + inside).to(tl.float32)
    activated = z * tl.sigmoid(z) if SILU else tl.sigmoid(z)
    y = tl.where(alive, normed * activated, 0.0)
    tl.store(out + (row * HEADS + head) * SIZE + inside, y.to(out.dtype.element_ty))
