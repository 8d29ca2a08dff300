"""The prologue of `k3::kda_chunk` in Triton: everything of a chunk that does not need the state before it.

One program takes one chunk of one head, all of them at once. It leaves behind, in bf16 but for the last,

    values   Uᵀ [V, 64]     keys    -W [64, K]        queries   q ⊙ exp G [64, K]
    scores   Q  [64, 64]    ends     k ⊙ exp(G_last - G) [64, K]     decay  exp G_last [K], fp32

with the names of `form.py`. Four things decide whether that is right, and how fast.

Sums of gates. G relative to the first row of a block of 16 is a product with a matrix of zeros and ones. The gates are
split into three bf16 parts that make up the fp32 number, and the sums are fp32: exact to fp32, without a scan.

Exponents. A pair (i, j) is referenced to the first row of i's block of 16 if j is in it too; else to the first row of
i's block if j is in the one before, in the same 32; else to row 32. So no factor exceeds exp(87), and raw keys come
within length 1 before they meet it; those of different blocks do not exceed 1, and none that counts for row i depends
on a token later than i. Each kind is one product of 64 by 64, of which only the fields of that kind are taken.

The inverse. A and T are fp32. The diagonal blocks are inverted by substitution, a column of T in a thread: rows of A
are read as numbers, so that there is neither a reduction nor a barrier in it. Larger blocks are put together from
smaller ones, T₂₁ = -T₂₂ (A₂₁ T₁₁), in fp32 without TF32. Between these steps A and T lie in memory that is overwritten
with the results later on, and so stays in the L2.

Roundings. Operands of products are bf16. The inverse is rounded when it is finished.
"""

# Triton compiles functions from their text; its tuples are put together with +.
# ruff: noqa: RUF005
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from k3rewrite.kernels.kda_chunk.triton_tokens import exp2, gate, rate, row_of_chunk, tokens_of


@triton.jit
def tile_of(rows, K: tl.constexpr):
    """[64, K] of its rows: `rows[r]` is [4, K], row r of each of the four blocks."""
    for _ in tl.static_range(4):
        joined = ()
        for r in tl.static_range(len(rows) // 2):
            joined = joined + (tl.join(rows[r], rows[r + len(rows) // 2]),)
        rows = joined
    return tl.reshape(tl.permute(tl.reshape(rows[0], [4, K, 16]), (0, 2, 1)), [64, K])


@triton.jit
def row_of(at, r, stride: tl.constexpr, behind):
    """Row r of each of the four blocks, fp32; zero for tokens that are not there. `at`: row 0 of each block; the rows
    are constants away from it, which cost no register and no instruction."""
    live = (tl.arange(0, 4)[:, None] * 16 + r < behind) & (tl.arange(0, at.shape[1])[None, :] >= 0)
    return tl.load(at + r * stride, mask=live, other=0.0).to(tl.float32)


@triton.jit
def scaled(
    k,
    q,
    k_token: tl.constexpr,
    q_token: tl.constexpr,
    behind,
    local,
    reference,
    sign,
    NARROW: tl.constexpr,
    PTX: tl.constexpr,
):
    """Rows of keys and queries times exp2(±(local + reference)), in NARROW. They are read again rather than held."""
    right, left = (), ()
    tl.debug_barrier()
    offset = sign * reference
    for r in tl.static_range(16):
        factor = exp2(local[r] * sign + offset, PTX)
        right = right + ((row_of(k, r, k_token, behind) * factor).to(NARROW),)
        left = left + ((row_of(q, r, q_token, behind) * factor).to(NARROW),)
    return right, left


@triton.jit
def unit(x, eps, NORMED: tl.constexpr):
    """Rows of unit length."""
    return x if NORMED else x * inverse_length(x, eps, NORMED)[:, None]


@triton.jit
def inverse_length(x, eps, NORMED: tl.constexpr):
    """Of each row; 1 for rows that come normalised."""
    if NORMED:
        return tl.full([x.shape[0]], 1.0, tl.float32)
    else:
        x = x.to(tl.float32)
        return tl.rsqrt(tl.sum(x * x, 1) + eps)


@triton.jit
def powers(length, NORMED: tl.constexpr):
    """Of reciprocal lengths of raw keys: a power of two that makes none of them longer than 1, at most 1; and its
    reciprocal. exp(86) times a raw key would be beyond fp32. A power of two rounds nothing, so that what a later key is
    has no effect on an earlier token. Keys that are not finite have no say."""
    if NORMED:
        return tl.full([], 1.0, tl.float32), tl.full([], 1.0, tl.float32)
    else:
        least = tl.minimum(tl.min(tl.where(length > 0, length, 1.0), 0), 1.0)
        bits = least.to(tl.int32, bitcast=True) & 0x7F800000
        return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def references(first_gate, step):
    """Of the four blocks, [4, K]: G of the first row; G_last less that; that less G of row 32; and, of the first of a
    pair of blocks, that less G of the second's first row, 0 for a second. `step`: what G grows by up to the first row
    of the next block, or to the end."""
    to, of, steps = tl.arange(0, 4)[:, None, None], tl.arange(0, 4)[None, :, None], step[None, :, :]
    start = tl.sum(tl.where(of < to, steps, 0.0) + tl.where(of == 0, first_gate[None, :, :], 0.0), 1)
    rest = tl.sum(tl.where(of >= to, steps, 0.0), 1)
    half = tl.sum(tl.where((of >= to) & (of < 2), -steps, tl.where((of == 2) & (to == 3), steps, 0.0)), 1)
    return start, rest, half, tl.where(tl.arange(0, 4)[:, None] % 2 == 0, -step, 0.0)


@triton.jit(noinline=True)
def invert_diagonal(a):
    """(I + A)⁻¹ of the four blocks of 16 on the diagonal of [64, 64] in memory, in place, by forward substitution.

    A function of its own in the code too: the compiler looks at every load together with all that it hangs on to, and
    there are 120 here."""
    block, column = tl.arange(0, 4)[:, None], tl.arange(0, 16)[None, :]
    corner = block * (16 * 64 + 16)
    rows = ()
    for i in tl.static_range(16):
        row = tl.where(column + block * 0 == i, 1.0, 0.0)
        for j in tl.static_range(i):
            row -= tl.load(a + corner + i * 64 + j + column * 0) * rows[j]
        rows = rows + (row,)
    tl.debug_barrier()  # all of A is read
    for i in tl.static_range(16):
        tl.store(a + corner + i * 64 + column, rows[i])


@triton.jit
def merge(a, first, SIZE: tl.constexpr):
    """T₂₁ = -T₂₂ (A₂₁ T₁₁) for two neighbouring blocks of SIZE that begin at `first`, in place of A₂₁; all fp32."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    own = first * 65 + i * 64 + j
    above = tl.load(a + own, mask=j // 16 <= i // 16, other=0.0)
    below = tl.load(a + own + SIZE * 65, mask=j // 16 <= i // 16, other=0.0)
    between = tl.load(a + own + SIZE * 64)
    inner = tl.dot(between, above, input_precision="ieee")  # TF32 would keep 11 bits of the 24
    tl.store(a + own + SIZE * 64, -tl.dot(below, inner, input_precision="ieee"))


@triton.jit(do_not_specialize=["rows", "tokens", "chunks"])
def kda_chunk_prologue(
    q, k, v, f, b, a_log, dt_bias, slots, lengths, offsets, values, keys, queries, scores, ends, decay, inverse,
    q_batch, k_batch, v_batch, f_batch, b_batch, rows, tokens, chunks, bound, q_scale, l2_eps,
    q_token: tl.constexpr, k_token: tl.constexpr, v_token: tl.constexpr, f_token: tl.constexpr, b_token: tl.constexpr,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SLAB: tl.constexpr, RAW: tl.constexpr,
    NORMED: tl.constexpr, PACKED: tl.constexpr, LENGTHS: tl.constexpr, SLOTS: tl.constexpr, NULL: tl.constexpr,
    ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Grid: heads · numbers of chunks; only the first number of a grid may be above 65,535. `inverse`: fp32
    [chunks, heads, 64, 64], which may lie in `values`."""
    head, number = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    row, chunk = row_of_chunk(number, offsets, rows, tokens, chunks, PACKED, ROWS)
    batch, first, length, _end, _base, _slot = tokens_of(
        row, slots, lengths, offsets, rows, tokens, chunks, PACKED, LENGTHS, SLOTS, NULL
    )
    skipped = chunk * 64
    if (length > 1) & (skipped >= 0) & (skipped < length):  # one token alone goes another way
        narrow: tl.constexpr = values.dtype.element_ty
        at = tl.arange(0, 64)
        live = at < length - skipped
        token = (first + skipped).to(tl.int64)
        here = number.to(tl.int64) * HEADS + head
        i, j = at[:, None], at[None, :]
        same_half, same_block = i // 32 == j // 32, i // 16 == j // 16
        channels, tiles = tl.arange(0, K), at[:, None] * K + tl.arange(0, K)[None, :]
        k_rows = k + batch * k_batch + token * k_token + head * K
        q_rows = q + batch * q_batch + token * q_token + head * K
        f_rows = f + batch * f_batch + token * f_token + head * K
        inverse_at = inverse + here * 4096
        k_whole = tl.load(k_rows + at[:, None] * k_token + channels[None, :], mask=live[:, None], other=0.0)
        q_whole = tl.load(q_rows + at[:, None] * q_token + channels[None, :], mask=live[:, None], other=0.0)
        k_length = inverse_length(k_whole, l2_eps, NORMED)
        q_length = inverse_length(q_whole, l2_eps, NORMED) * q_scale
        shrink, grow = powers(k_length, NORMED)

        a, p = tl.zeros([64, 64], tl.float32), tl.zeros([64, 64], tl.float32)
        for slab in tl.range(0, K, SLAB, num_stages=1):
            s, c = tl.arange(0, 4)[:, None], (slab + tl.arange(0, SLAB))[None, :]
            behind = length - skipped
            f_at, k_at = f_rows + s * 16 * f_token + c, k_rows + s * 16 * k_token + c
            q_at = q_rows + s * 16 * q_token + c
            local = ()
            total = tl.zeros([4, SLAB], tl.float32)
            for r in tl.static_range(16):
                g = gate(row_of(f_at, r, f_token, behind), head, c, a_log, dt_bias, bound, K, RAW, PTX)
                g = tl.where(s * 16 + r < behind, g, 0.0)
                if r == 0:
                    first_gate = g
                else:
                    total += g
                local = local + (total,)
            next_gate = gate(row_of(f_at, 16, f_token, behind), head, c, a_log, dt_bias, bound, K, RAW, PTX)
            next_gate = tl.where((s < 3) & (s * 16 + 16 < behind), next_gate, 0.0)
            start, rest, half, pair = references(first_gate, total + next_gate)

            sign = tl.where(s < 2, -1.0, 1.0)
            right, left = scaled(k_at, q_at, k_token, q_token, behind, local, half, sign, narrow, PTX)
            right_tile = tile_of(right, SLAB)
            a_part = tl.dot(right_tile, tl.trans(right_tile))
            p_part = tl.dot(tile_of(left, SLAB), tl.trans(right_tile))
            sign = tl.where(s % 2 == 0, -1.0, 1.0)
            right, left = scaled(k_at, q_at, k_token, q_token, behind, local, pair, sign, narrow, PTX)
            right_tile = tile_of(right, SLAB)
            a_part = tl.where(same_half, tl.dot(right_tile, tl.trans(right_tile)), a_part)
            p_part = tl.where(same_half, tl.dot(tile_of(left, SLAB), tl.trans(right_tile)), p_part)
            k_left, q_left, right = (), (), ()
            tl.debug_barrier()
            for r in tl.static_range(16):
                factor = exp2(local[r], PTX)
                k_row = row_of(k_at, r, k_token, behind)
                k_left = k_left + ((k_row * factor).to(narrow),)
                q_left = q_left + ((row_of(q_at, r, q_token, behind) * factor).to(narrow),)
                right = right + ((k_row * shrink * exp2(-local[r], PTX)).to(narrow),)
            right_tile = tl.trans(tile_of(right, SLAB))
            a += tl.where(same_block, tl.dot(tile_of(k_left, SLAB), right_tile) * grow, a_part)
            p += tl.where(same_block, tl.dot(tile_of(q_left, SLAB), right_tile) * grow, p_part)

            k_start, q_start, to_end = (), (), ()
            tl.debug_barrier()
            tl.store(decay + here * K + c + s * 0, exp2(start + rest, PTX), mask=(s == 0) & (c >= 0))
            for r in tl.static_range(16):
                factor = exp2(local[r] + start, PTX)
                k_row = row_of(k_at, r, k_token, behind)
                k_start = k_start + (k_row * factor,)
                q_start = q_start + (row_of(q_at, r, q_token, behind) * factor,)
                to_end = to_end + (k_row * exp2(rest - local[r], PTX),)
            cells = here * (64 * K) + at[:, None] * K + c
            tl.store(queries + cells, (tile_of(q_start, SLAB) * q_length[:, None]).to(narrow))
            tl.store(keys + cells, (tile_of(k_start, SLAB) * k_length[:, None]).to(narrow))
            tl.store(ends + cells, (tile_of(to_end, SLAB) * k_length[:, None]).to(narrow))

        b_at = b + batch * b_batch + token * b_token + head + at * b_token
        beta = tl.where(live, rate(tl.load(b_at, mask=live, other=0.0), RAW), 0.0)
        cells = i * 64 + j
        a = tl.where(i > j, a * (beta * k_length)[:, None] * k_length[None, :], 0.0)
        p = tl.where(i >= j, p * q_length[:, None] * k_length[None, :], 0.0)
        tl.store(inverse_at + cells, a, mask=i // 16 >= j // 16)
        tl.store(scores + here * 4096 + cells, p.to(narrow))
        tl.debug_barrier()
        invert_diagonal(inverse_at)
        tl.debug_barrier()
        merge(inverse_at, 0, 16)
        merge(inverse_at, 32, 16)
        tl.debug_barrier()
        merge(inverse_at, 0, 32)
        tl.debug_barrier()
        solved = tl.load(inverse_at + cells, mask=i // 16 >= j // 16, other=0.0)
        beta = tl.where(live, rate(tl.load(b_at, mask=live, other=0.0), RAW), 0.0)
        solved = (solved * beta[None, :]).to(narrow)
        v_rows = v + batch * v_batch + token * v_token + head * V + at[:, None] * v_token
        v_columns = tl.arange(0, V)
        v_tile = tl.load(v_rows + v_columns[None, :], mask=live[:, None], other=0.0)
        u = tl.dot(tl.trans(v_tile.to(narrow)), tl.trans(solved))
        w = tl.dot(solved, tl.load(keys + here * (64 * K) + tiles))
        tl.debug_barrier()
        tl.store(values + here * (64 * V) + v_columns[:, None] * 64 + at[None, :], u.to(narrow))
        tl.store(keys + here * (64 * K) + tiles, (-w).to(narrow))
