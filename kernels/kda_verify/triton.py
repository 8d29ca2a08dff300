"""`k3::kda_verify` in Triton: two launches.

    kda_verify_tile     a program takes some values of one head of one sequence, with all keys, through the window
        start           state[start], once, into registers
        each token      q, k, v convolved and normalised, decay and rate; decay, predict, update, read out, store
    kda_verify_close    a program takes one head of one sequence: output norm and gate of every token; the line moves on

What a token needs beside the state depends on no other token's state. With READY (windows of one length, narrow tiles)
all of it is loaded and made ready before the first state is stored, since a compiler moves no load over a store that
may hit it: it is done while the first state is on its way. Otherwise a loop loads one token ahead.

Both dot products of a token are taken of the decayed state, S q = S' q + u (k · q), so that their sums over lanes are
one latency and not two.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from k3rewrite.kernels.triton_math import rounded, within


@triton.jit
def convolved(w0, w1, w2, w3, x0, x1, x2, x3, INNER: tl.constexpr):
    """SiLU of four products."""
    total = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
    return rounded(total * tl.sigmoid(total), INNER)


@triton.jit
def taps_of(weight, channels, channel, tap):
    """The four taps of some channels. Whole lines of memory where a tap's channels lie together (`channel` is 1)."""
    at = weight + channels * channel
    return tl.load(at), tl.load(at + tap), tl.load(at + 2 * tap), tl.load(at + 3 * tap)


@triton.jit
def columns_of(line, c0, c1, c2, channels, live):
    """The three past inputs of some channels."""
    x0 = tl.load(line + c0 + channels, mask=live, other=0.0)
    x1 = tl.load(line + c1 + channels, mask=live, other=0.0)
    x2 = tl.load(line + c2 + channels, mask=live, other=0.0)
    return x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32)


@triton.jit
def inputs_of(x, f, b, q_at, k_at, v_at, left, RAGGED: tl.constexpr):
    """What one token brings: raw q, k, v of the convolution, decay and rate. None are `left`: zeros."""
    if RAGGED:
        live, some = q_at * 0 + left > 0, v_at * 0 + left > 0
        q, k = tl.load(x + q_at, mask=live, other=0.0), tl.load(x + k_at, mask=live, other=0.0)
        v, moved = tl.load(x + v_at, mask=some, other=0.0), tl.load(f + q_at, mask=live, other=0.0)
        rate = tl.load(b, mask=left > 0, other=0.0)
    else:
        q, k, v = tl.load(x + q_at), tl.load(x + k_at), tl.load(x + v_at)
        moved, rate = tl.load(f + q_at), tl.load(b)
    return q.to(tl.float32), k.to(tl.float32), v.to(tl.float32), moved.to(tl.float32), rate


@triton.jit
def gates_of(moved, raw_rate, bias, speed, bound):
    """Decay of each key, rate of the update."""
    return tl.exp(tl.sigmoid(speed * (moved + bias)) * bound), tl.sigmoid(raw_rate.to(tl.float32))


@triton.jit
def unit(x, eps):
    """1 over the length of x."""
    return tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit
def stepped(rows, q, k, v, decay, rate):
    """The state [values, keys] after a token, and what it reads."""
    rows = rows * decay[None, :]
    predicted, seen = tl.sum(rows * k[None, :], 1), tl.sum(rows * q[None, :], 1)
    update = rate * (v - predicted)
    rows += update[:, None] * k[None, :]
    return rows, seen + update * tl.sum(k * q, 0)


@triton.jit
def kda_verify_tile(
    qkv, f, b, conv_weight, a_log, dt_bias, conv_state, state, start, table, history, lengths, read,
    qkv_row, qkv_token, f_row, f_token, b_row, b_token, conv_slot, conv_column, state_slot, state_head, table_row,
    history_row, weight_channel, weight_tap, bound, q_scale, l2_eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, READY: tl.constexpr,
    RAGGED: tl.constexpr, NULL: tl.constexpr, INNER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: sequences x heads x tiles of WIDTH values. `read` [B, N, H, V] gets what the recurrence gives."""
    if PDL:  # weights too may come from the kernel before: taps are put together in every step
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    TILES: tl.constexpr = SIZE // WIDTH
    pid = tl.program_id(0)
    tile, head, row = pid % TILES, pid // TILES % HEADS, (pid // (TILES * HEADS)).to(tl.int64)
    first: tl.constexpr = 1 if NULL else 0  # slots from here on are somebody's
    inside, values = tl.arange(0, SIZE), tile * WIDTH + tl.arange(0, WIDTH)
    q_at, k_at = head * SIZE + inside, (HEADS + head) * SIZE + inside
    v_at = (2 * HEADS + head) * SIZE + values
    bias, speed = tl.load(dt_bias + q_at), tl.exp(tl.load(a_log + head))
    qw0, qw1, qw2, qw3 = taps_of(conv_weight, q_at, weight_channel, weight_tap)
    kw0, kw1, kw2, kw3 = taps_of(conv_weight, k_at, weight_channel, weight_tap)
    vw0, vw1, vw2, vw3 = taps_of(conv_weight, v_at, weight_channel, weight_tap)

    slots, past = table + row * table_row, history + row * history_row
    begin, own = tl.load(start + row).to(tl.int64), tl.load(slots).to(tl.int64)
    c0, c1, c2 = tl.load(past) * conv_column, tl.load(past + 1) * conv_column, tl.load(past + 2) * conv_column
    count = TOKENS
    if RAGGED:
        count = within(tl.load(lengths + row), TOKENS)
    x, moved, rates = qkv + row * qkv_row, f + row * f_row, b + row * b_row + head
    xq, xk, xv, xf, xb = inputs_of(x, moved, rates, q_at, k_at, v_at, count, RAGGED)
    raw = (xq, xk, xv, xf, xb)
    if READY:
        for i in tl.static_range(1, TOKENS):
            xq, xk, xv, xf, xb = inputs_of(
                x + i * qkv_token, moved + i * f_token, rates + i * b_token, q_at, k_at, v_at, 1, RAGGED
            )
            raw += (xq, xk, xv, xf, xb)
    begin = tl.where(own >= first, begin, -1)  # a row of nobody reads none, whatever it holds
    cells = values[:, None] * SIZE + inside[None, :]
    pool, line = state + head * state_head, conv_state + own * conv_slot
    rows = tl.load(pool + begin * state_slot + cells, mask=cells * 0 + begin >= first, other=0.0)
    q0, q1, q2 = columns_of(line, c0, c1, c2, q_at, q_at * 0 + own >= first)
    k0, k1, k2 = columns_of(line, c0, c1, c2, k_at, q_at * 0 + own >= first)
    v0, v1, v2 = columns_of(line, c0, c1, c2, v_at, v_at * 0 + own >= first)
    out = read + (row * TOKENS * HEADS + head) * SIZE + values

    if not READY:
        for i in range(count):
            later = i + 1
            yq, yk, yv, yf, yb = inputs_of(
                x + later * qkv_token, moved + later * f_token, rates + later * b_token, q_at, k_at, v_at,
                count - later, True,
            )  # fmt: skip
            place = tl.where(own >= first, tl.load(slots + i).to(tl.int64), -1)
            q = convolved(qw0, qw1, qw2, qw3, q0, q1, q2, xq, INNER)
            k = convolved(kw0, kw1, kw2, kw3, k0, k1, k2, xk, INNER)
            v = convolved(vw0, vw1, vw2, vw3, v0, v1, v2, xv, INNER)
            q, k = q * (unit(q, l2_eps) * q_scale), k * unit(k, l2_eps)
            decay, rate = gates_of(xf, xb, bias, speed, bound)
            rows, seen = stepped(rows, q, k, v, decay, rate)
            tl.store(pool + place * state_slot + cells, rows, mask=cells * 0 + place >= first)
            tl.store(out + i * HEADS * SIZE, seen)
            q0, q1, q2, k0, k1, k2, v0, v1, v2 = q1, q2, xq, k1, k2, xk, v1, v2, xv
            xq, xk, xv, xf, xb = yq, yk, yv, yf, yb
    else:
        ready = ()
        for i in tl.static_range(TOKENS):
            xq, xk, xv = raw[5 * i], raw[5 * i + 1], raw[5 * i + 2]
            q = convolved(qw0, qw1, qw2, qw3, q0, q1, q2, xq, INNER)
            k = convolved(kw0, kw1, kw2, kw3, k0, k1, k2, xk, INNER)
            v = convolved(vw0, vw1, vw2, vw3, v0, v1, v2, xv, INNER)
            q, k = q * (unit(q, l2_eps) * q_scale), k * unit(k, l2_eps)
            decay, rate = gates_of(raw[5 * i + 3], raw[5 * i + 4], bias, speed, bound)
            ready += (q, k, v, decay, rate, tl.where(own >= first, tl.load(slots + i).to(tl.int64), -1))
            q0, q1, q2, k0, k1, k2, v0, v1, v2 = q1, q2, xq, k1, k2, xk, v1, v2, xv
        for i in tl.static_range(TOKENS):
            rows, seen = stepped(
                rows, ready[6 * i], ready[6 * i + 1], ready[6 * i + 2], ready[6 * i + 3], ready[6 * i + 4]
            )
            place = ready[6 * i + 5]
            tl.store(pool + place * state_slot + cells, rows, mask=cells * 0 + place >= first)
            tl.store(out + i * HEADS * SIZE, seen)


@triton.jit
def kda_verify_close(
    qkv, gate, norm_weight, conv_state, table, history, lengths, read, out, qkv_row, qkv_token, gate_row, gate_token,
    gate_head, conv_slot, conv_column, table_row, history_row, norm_eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr, RAGGED: tl.constexpr, NULL: tl.constexpr,
    SILU: tl.constexpr, INNER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences, heads)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first: tl.constexpr = 1 if NULL else 0
    place = tl.load(table + row * table_row).to(tl.int64)
    count = TOKENS
    if RAGGED:
        count = within(tl.load(lengths + row), TOKENS)
    count = tl.where(place >= first, count, 0)
    ROOM: tl.constexpr = triton.next_power_of_2(TOKENS)
    i, inside = tl.arange(0, ROOM)[:, None], tl.arange(0, SIZE)[None, :]
    there, live = (i < TOKENS) & (inside >= 0), (i < count) & (inside >= 0)
    at = ((row * TOKENS + i) * HEADS + head) * SIZE + inside
    y = rounded(tl.load(read + at, mask=live, other=0.0), INNER)
    z = tl.load(gate + row * gate_row + i * gate_token + head * gate_head + inside, mask=live, other=0.0).to(tl.float32)

    q_at = head * SIZE + tl.arange(0, SIZE)
    line, past = conv_state + place * conv_slot, history + row * history_row
    moves = q_at * 0 + count > 0
    c1, c2 = tl.load(past + 1), tl.load(past + 2)
    c1, c2 = tl.where(count > 0, c1, 0) * conv_column, tl.where(count > 0, c2, 0) * conv_column
    q1, q2 = tl.load(line + c1 + q_at, mask=moves, other=0.0), tl.load(line + c2 + q_at, mask=moves, other=0.0)
    k_at, v_at = HEADS * SIZE + q_at, 2 * HEADS * SIZE + q_at
    k1, k2 = tl.load(line + c1 + k_at, mask=moves, other=0.0), tl.load(line + c2 + k_at, mask=moves, other=0.0)
    v1, v2 = tl.load(line + c1 + v_at, mask=moves, other=0.0), tl.load(line + c2 + v_at, mask=moves, other=0.0)
    x = qkv + row * qkv_row + i * qkv_token + q_at[None, :]
    kind = conv_state.dtype.element_ty
    xq = tl.load(x, mask=live, other=0.0).to(kind)
    xk = tl.load(x + HEADS * SIZE, mask=live, other=0.0).to(kind)
    xv = tl.load(x + 2 * HEADS * SIZE, mask=live, other=0.0).to(kind)

    scale = tl.rsqrt(tl.sum(y * y, 1) / SIZE + norm_eps)[:, None] * tl.load(norm_weight + inside)
    activated = z * tl.sigmoid(z) if SILU else tl.sigmoid(z)
    tl.store(out + at, tl.where(live, y * scale * activated, 0.0).to(out.dtype.element_ty), mask=there)

    tl.debug_barrier()  # every thread has read the columns that others write
    tl.store(line + q_at, q1, mask=moves)
    tl.store(line + k_at, k1, mask=moves)
    tl.store(line + v_at, v1, mask=moves)
    tl.store(line + conv_column + q_at, q2, mask=moves)
    tl.store(line + conv_column + k_at, k2, mask=moves)
    tl.store(line + conv_column + v_at, v2, mask=moves)
    moved = line + (i + 2) * conv_column + q_at[None, :]
    tl.store(moved, xq, mask=live)
    tl.store(moved + HEADS * SIZE, xk, mask=live)
    tl.store(moved + 2 * HEADS * SIZE, xv, mask=live)
