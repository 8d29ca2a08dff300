"""The scan of `k3::kda_chunk` in Triton: the state through the chunks of a row, in order, and what is read out of it.

A program holds TILE values of one head's state, [TILE, K] in fp32 accumulators. The state and what is new of a chunk
are the left operands of every product, so that they go from accumulators to operands without leaving the registers;
everything else comes from the prologue as it is wanted, two chunks ahead.

    new = Uᵀ - S Wᵀ        oᵀ = S (q ⊙ exp G)ᵀ + new Qᵀ        S <- S ⊙ exp G_last + new (k ⊙ exp(G_last - G))

Rows of a state do not see one another. So the effect of a group of chunks on any state S is S M + B: M is what the
group makes of the unit matrix with U = 0, B what it makes of zero. Where few rows and heads leave the GPU idle

    kda_chunk_groups   M and B of all groups but the last, at once, before any state is known
    kda_chunk_order    the state at the start of each group, group by group
    kda_chunk_scan     all groups at once, each from its own start

else kda_chunk_scan alone takes all chunks of a row. A row of one token is no chunk: it takes the recurrence.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from k3rewrite.kernels.kda_chunk.triton_prologue import unit
from k3rewrite.kernels.kda_chunk.triton_tokens import gate, rate, tokens_of


@triton.jit
def program(TILES: tl.constexpr, HEADS: tl.constexpr):
    """(tile, head, the rest) of a program. One number, for only the first of a grid may be above 65,535."""
    number = tl.program_id(0)
    return number % TILES, number // TILES % HEADS, number // (TILES * HEADS)


@triton.jit
def group_of(length, group, GROUPS: tl.constexpr):
    """(first chunk, the one behind the last) of a group: all alike but the last one, which may be empty."""
    chunks = tl.where(length > 1, (length + 63) // 64, 0)
    size = (chunks + GROUPS - 1) // GROUPS
    if GROUPS > 1:
        size = tl.maximum(size, 4)
    return tl.minimum(group * size, chunks), tl.minimum(group * size + size, chunks)


@triton.jit
def new_of(state, values, keys, here, row, K: tl.constexpr, V: tl.constexpr, mask):
    """What a chunk adds, [TILE, 64], of a state in bf16. `row`: values of the tile."""
    at, channels = tl.arange(0, 64), tl.arange(0, K)
    wanted = tl.load(values + here * (64 * V) + row[:, None] * 64 + at[None, :], mask=mask, other=0.0)
    predicted = tl.load(keys + here * (64 * K) + at[:, None] * K + channels[None, :])
    return tl.dot(state, tl.trans(predicted), wanted.to(tl.float32)).to(state.dtype)


@triton.jit
def moved(state, new, ends, decay, here, K: tl.constexpr):
    """The state behind a chunk."""
    at, channels = tl.arange(0, 64), tl.arange(0, K)
    to_end = tl.load(ends + here * (64 * K) + at[:, None] * K + channels[None, :])
    return tl.dot(new, to_end, state * tl.load(decay + here * K + channels)[None, :])


@triton.jit
def start_of(state, slot, head, row, fresh, n, length, state_slot, state_head, K: tl.constexpr, FRESH: tl.constexpr):
    """Values `row` of a row's state, fp32; zero for a fresh row, and for one without tokens, which is nobody's."""
    channels = tl.arange(0, K)
    cells = row[:, None] * K + channels[None, :]
    kept = length
    if FRESH:
        kept = tl.where(tl.load(fresh + n) != 0, 0, length)
    head_at = head.to(tl.int64) * state_head
    return tl.load(state + slot * state_slot + head_at + cells, mask=cells * 0 + kept > 0, other=0.0)


@triton.jit(do_not_specialize=["rows", "tokens", "chunks", "saves"])
def kda_chunk_scan(
    q, k, v, f, b, a_log, dt_bias, state, slots, fresh, lengths, offsets, checkpoints, starts, values, keys, queries,
    scores, ends, decay, out, q_batch, k_batch, v_batch, f_batch, b_batch, state_slot, state_head, rows, tokens,
    chunks, saves, bound, q_scale, l2_eps,
    q_token: tl.constexpr, k_token: tl.constexpr, v_token: tl.constexpr, f_token: tl.constexpr, b_token: tl.constexpr,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr, RAW: tl.constexpr, NORMED: tl.constexpr,
    PACKED: tl.constexpr, LENGTHS: tl.constexpr, SLOTS: tl.constexpr, NULL: tl.constexpr, FRESH: tl.constexpr,
    SAVES: tl.constexpr, GROUPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: V / TILE · heads · rows · GROUPS. `starts`: fp32 [rows, GROUPS, heads, V, K], with more than one group."""
    tile, head, number = program(V // TILE, HEADS)
    n, group = number // GROUPS, number % GROUPS
    row = tile * TILE + tl.arange(0, TILE)
    at, channels = tl.arange(0, 64), tl.arange(0, K)
    batch, first, length, end, base, slot = tokens_of(
        n, slots, lengths, offsets, rows, tokens, chunks, PACKED, LENGTHS, SLOTS, NULL
    )
    begin, behind = group_of(length, group, GROUPS)
    cells = row[:, None] * K + channels[None, :]
    if GROUPS > 1:
        own = (n.to(tl.int64) * GROUPS + group) * HEADS + head
        s = tl.load(starts + own * (V * K) + cells, mask=cells * 0 + begin < behind + (group == 0), other=0.0)
    else:
        s = start_of(state, slot, head, row, fresh, n, length, state_slot, state_head, K, FRESH)
    head_at = head.to(tl.int64) * state_head  # as far apart as the slots, if all slots of a head lie side by side
    pool = state + slot * state_slot + head_at
    tokens_at = (batch * tokens + first) * (HEADS * V) + head * V

    for chunk in tl.range(begin, behind, num_stages=STAGES):
        here = (base + chunk).to(tl.int64) * HEADS + head
        narrow = s.to(values.dtype.element_ty)
        new = new_of(narrow, values, keys, here, row, K, V, row[:, None] >= 0)
        read = tl.load(queries + here * (64 * K) + at[:, None] * K + channels[None, :])
        score = tl.load(scores + here * 4096 + at[:, None] * 64 + at[None, :])
        o = tl.dot(narrow, tl.trans(read))
        s = moved(s, new, ends, decay, here, K)
        o = tl.dot(new, tl.trans(score), o)
        inside = (chunk * 64 + at < length)[None, :] & (row[:, None] >= 0)
        place = out + tokens_at + (chunk * 64 + at[None, :]).to(tl.int64) * (HEADS * V) + row[:, None]
        tl.store(place, o.to(out.dtype.element_ty), mask=inside)
        if SAVES:
            whole = (chunk * 64 + 64 <= length) & (chunk < saves)
            target = tl.load(checkpoints + n.to(tl.int64) * saves + chunk, mask=whole, other=0).to(tl.int64)
            if target > 0:
                tl.store(state + target * state_slot + head_at + cells, s)

    if (length == 1) & (group == 0):
        token = first.to(tl.int64)
        f_at = tl.load(f + batch * f_batch + token * f_token + head * K + channels)
        k_row = tl.load(k + batch * k_batch + token * k_token + head * K + channels).to(tl.float32)
        q_row = tl.load(q + batch * q_batch + token * q_token + head * K + channels).to(tl.float32)
        k_row = tl.reshape(unit(k_row[None, :], l2_eps, NORMED), [K])
        q_row = tl.reshape(unit(q_row[None, :], l2_eps, NORMED), [K]) * q_scale
        s = s * tl.exp2(gate(f_at, head, channels, a_log, dt_bias, bound, K, RAW, False))[None, :]
        wanted = tl.load(v + batch * v_batch + token * v_token + head * V + row).to(tl.float32)
        beta = rate(tl.load(b + batch * b_batch + token * b_token + head), RAW)
        update = beta * (wanted - tl.sum(s * k_row[None, :], 1))
        s += update[:, None] * k_row[None, :]
        tl.store(out + tokens_at + row, tl.sum(s * q_row[None, :], 1).to(out.dtype.element_ty))

    chunk_count = (length + 63) // 64
    if ((behind == chunk_count) & (begin < behind)) | ((length == 1) & (group == 0)):
        tl.store(pool + cells, s)
    if group == 0:
        for dead in range(length, end, 64):
            place = out + tokens_at + (dead + at[None, :]).to(tl.int64) * (HEADS * V) + row[:, None]
            tl.store(place, tl.zeros([TILE, 64], out.dtype.element_ty), mask=(dead + at < end)[None, :])


@triton.jit(do_not_specialize=["rows", "tokens", "chunks"])
def kda_chunk_groups(
    state, slots, fresh, lengths, offsets, summaries, starts, values, keys, ends, decay, state_slot, state_head,
    rows, tokens, chunks,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr,
    LENGTHS: tl.constexpr, SLOTS: tl.constexpr, NULL: tl.constexpr, FRESH: tl.constexpr, GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (K + V) / TILE · heads · rows · (GROUPS - 1). Rows below K of a summary are M, the others B; of group 0,
    whose start is known, B alone, which is its end. Its start goes to `starts`."""
    tile, head, number = program((K + V) // TILE, HEADS)
    n, group = number // (GROUPS - 1), number % (GROUPS - 1)
    row = tile * TILE + tl.arange(0, TILE)
    tl.static_assert(K % TILE == 0 and V % TILE == 0, "no tile has rows of M and of B")
    transform = tile * TILE < K
    _batch, _first, length, _end, base, slot = tokens_of(
        n, slots, lengths, offsets, rows, tokens, chunks, PACKED, LENGTHS, SLOTS, NULL
    )
    begin, behind = group_of(length, group, GROUPS)
    channels = tl.arange(0, K)
    if (group > 0) | (not transform):
        value = tl.where(transform, 0, row - K)
        s = tl.where((row[:, None] == channels[None, :]) & transform, 1.0, 0.0)
        if group == 0:
            s = start_of(state, slot, head, value, fresh, n, length, state_slot, state_head, K, FRESH)
            own = n.to(tl.int64) * GROUPS * HEADS + head
            tl.store(starts + own * (V * K) + value[:, None] * K + channels[None, :], s)
        for chunk in tl.range(begin, behind, num_stages=STAGES):
            here = (base + chunk).to(tl.int64) * HEADS + head
            new = new_of(s.to(values.dtype.element_ty), values, keys, here, value, K, V, (row >= K)[:, None])
            s = moved(s, new, ends, decay, here, K)
        own = (n.to(tl.int64) * (GROUPS - 1) + group) * HEADS + head
        if begin < behind:
            tl.store(summaries + own * ((K + V) * K) + row[:, None] * K + channels[None, :], s)


@triton.jit(do_not_specialize=["rows", "tokens", "chunks"])
def kda_chunk_order(
    lengths, slots, offsets, summaries, starts, rows, tokens, chunks,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr,
    LENGTHS: tl.constexpr, SLOTS: tl.constexpr, NULL: tl.constexpr, GROUPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: V / TILE · heads · rows. Starts of groups 1 and later: S <- S M + B. PRECISION: of fp32 products; TF32,
    where there is such a thing, is finer than the bf16 states that made M."""
    tile, head, n = program(V // TILE, HEADS)
    row, channels = tile * TILE + tl.arange(0, TILE), tl.arange(0, K)
    _batch, _first, length, _end, _base, _slot = tokens_of(
        n, slots, lengths, offsets, rows, tokens, chunks, PACKED, LENGTHS, SLOTS, NULL
    )
    cells, square = row[:, None] * K + channels[None, :], channels[:, None] * K + channels[None, :]
    s = tl.zeros([TILE, K], tl.float32)
    for group in range(1, GROUPS):
        begin, behind = group_of(length, group, GROUPS)
        if begin < behind:  # the one before is full then
            before = summaries + ((n.to(tl.int64) * (GROUPS - 1) + group - 1) * HEADS + head) * ((K + V) * K)
            added = tl.load(before + K * K + cells)
            if group > 1:
                added = tl.dot(s, tl.load(before + square), added, input_precision=PRECISION)
            s = added
            tl.store(starts + ((n.to(tl.int64) * GROUPS + group) * HEADS + head) * (V * K) + cells, s)
