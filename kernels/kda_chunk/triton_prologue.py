"""The prologue of `k3::kda_chunk` in Triton: everything of a chunk that does not need the state before it.

One program takes one chunk of one head, all of them at once. It leaves behind, in bf16 but for the last,

    values   Uᵀ [V, 64]     keys    -W [64, K]        queries   q ⊙ exp G [64, K]
    scores   Q  [64, 64]    ends     k ⊙ exp(G_last - G) [64, K]     decay  exp G_last [K], fp32

with the names of `form.py`. Four things decide whether that is right, and how fast.

Sums of gates. G relative to the first row of a block of 16 is a product with a matrix of zeros and ones. The gates are
split into three bf16 parts that make up the fp32 number, and the sums are fp32: exact to fp32, without a scan.

Exponents. A pair (i, j) is referenced to the first row of i's block of 16 if j is in it too; else to the first row of
i's block if j is in the one before, in the same 32; else to row 32. So no factor exceeds exp(75), those of different
blocks do not exceed 1, and none that counts for row i depends on a token later than i. Each kind is one product of 64
by 64, of which only the fields of that kind are taken.

The inverse. A and T are fp32. The diagonal blocks are inverted by substitution, a column of T in a thread: rows of A are
read as numbers, so that there is neither a reduction nor a barrier in it. Larger blocks are put together from smaller
ones, T₂₁ = -T₂₂ (A₂₁ T₁₁), in fp32 without TF32. Between these steps A and T lie in memory that is overwritten with
the results later on, and so never leaves the L2.

Roundings. Operands of products are bf16. The inverse is rounded when it is finished.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from k3rewrite.kernels.kda_chunk.triton_tokens import gate, rate, row_of_chunk, tokens_of


@triton.jit
def times(left, right, NARROW: tl.constexpr):
    """A product of narrow operands with an fp32 sum."""
    return tl.dot(left.to(NARROW), right.to(NARROW))


@triton.jit
def sums(coefficients, gates, NARROW: tl.constexpr):
    """`coefficients` (zeros and ones) times fp32 `gates`, as exact as fp32 sums are: three bf16 parts of 8 bits."""
    high = gates.to(NARROW)
    rest = gates - high.to(tl.float32)
    middle = rest.to(NARROW)
    low = (rest - middle.to(tl.float32)).to(NARROW)
    coefficients = coefficients.to(NARROW)
    return tl.dot(coefficients, high, tl.dot(coefficients, middle, tl.dot(coefficients, low)))


@triton.jit
def by_block(vector, K: tl.constexpr):
    """[4, K] -> [64, K]: each block's own row, 16 times."""
    return tl.reshape(tl.broadcast_to(vector[:, None, :], [4, 16, K]), [64, K])


@triton.jit
def unit(x, eps, NORMED: tl.constexpr):
    """Rows of unit length."""
    return x if NORMED else x * tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None]


@triton.jit
def invert_diagonal(scores, inverse):
    """(I + A)⁻¹ of the four blocks of 16 on the diagonal, by forward substitution; both are [64, 64] in memory."""
    block, column = tl.arange(0, 4)[:, None], tl.arange(0, 16)[None, :]
    corner = block * (16 * 64 + 16)
    rows = ()
    for i in tl.static_range(16):
        row = tl.where(column + block * 0 == i, 1.0, 0.0)
        for j in tl.static_range(i):
            row -= tl.load(scores + corner + i * 64 + j + column * 0) * rows[j]
        rows = rows + (row,)  # noqa: RUF005
    for i in tl.static_range(16):
        tl.store(inverse + corner + i * 64 + column, rows[i])


@triton.jit
def merge(scores, inverse, first, SIZE: tl.constexpr):
    """T₂₁ = -T₂₂ (A₂₁ T₁₁) for two neighbouring blocks of SIZE, the first at `first`, all fp32."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    own = first * 65 + i * 64 + j
    above = tl.load(inverse + own, mask=j // 16 <= i // 16, other=0.0)
    below = tl.load(inverse + own + SIZE * 65, mask=j // 16 <= i // 16, other=0.0)
    between = tl.load(scores + own + SIZE * 64)
    inner = tl.dot(between, above, input_precision="ieee")
    tl.store(inverse + own + SIZE * 64, -tl.dot(below, inner, input_precision="ieee"))


@triton.jit
def kda_chunk_prologue(
    q, k, v, f, b, a_log, dt_bias, slots, lengths, offsets, values, keys, queries, scores, ends, decay, lower, inverse,
    q_batch, q_token, k_batch, k_token, v_batch, v_token, f_batch, f_token, b_batch, b_token, rows, tokens, chunks,
    bound, q_scale, l2_eps,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RAW: tl.constexpr, NORMED: tl.constexpr,
    PACKED: tl.constexpr, LENGTHS: tl.constexpr, SLOTS: tl.constexpr, NULL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: (heads, numbers of chunks). `lower`, `inverse`: fp32 [chunks, heads, 64, 64], may lie in results."""
    head, number = tl.program_id(0), tl.program_id(1)
    row, chunk = row_of_chunk(number, offsets, rows, chunks, PACKED, ROWS)
    batch, first, length, end, base, slot = tokens_of(
        row, slots, lengths, offsets, rows, tokens, chunks, PACKED, LENGTHS, SLOTS, NULL
    )
    skipped = chunk * 64
    if (length > 1) & (skipped < length):  # one token alone goes another way
        narrow: tl.constexpr = values.dtype.element_ty
        at = tl.arange(0, 64)
        live = at < length - skipped
        channels, columns = tl.arange(0, K), tl.arange(0, V)
        token = (first + skipped).to(tl.int64)
        here = number.to(tl.int64) * HEADS + head

        f_at = f + batch * f_batch + token * f_token + head * K
        f_tile = tl.load(f_at + at[:, None] * f_token + channels[None, :], mask=live[:, None], other=0.0)
        gates = tl.where(live[:, None], gate(f_tile, head, channels[None, :], a_log, dt_bias, bound, K, RAW), 0.0)
        same_block = at[:, None] // 16 == at[None, :] // 16
        after_first = same_block & (at[None, :] <= at[:, None]) & (at[None, :] % 16 > 0)
        local = sums(after_first, gates, narrow)  # G relative to the first row of the block

        # Of each block: the gate of its first row, and of the next one's; all between these two, `step`.
        s = tl.arange(0, 4)
        has_next = (s[:, None] < 3) & (s[:, None] * 16 + 16 < length - skipped)
        f_next = tl.load(f_at + (s[:, None] * 16 + 16) * f_token + channels[None, :], mask=has_next, other=0.0)
        next_gate = tl.where(has_next, gate(f_next, head, channels[None, :], a_log, dt_bias, bound, K, RAW), 0.0)
        is_last = tl.arange(0, 16)[None, :, None] == 15
        step = tl.sum(tl.where(is_last, tl.reshape(local, [4, 16, K]), 0.0), 1) + next_gate
        first_gate = gate(tl.load(f_at + channels), head, channels, a_log, dt_bias, bound, K, RAW)
        to, of = s[:, None, None], s[None, :, None]
        steps = step[None, :, :]
        start = first_gate[None, :] + tl.sum(tl.where(of < to, steps, 0.0), 1)  # G of first rows
        rest = tl.sum(tl.where(of >= to, steps, 0.0), 1)  # G_last less that
        half = tl.sum(tl.where((of >= to) & (of < 2), -steps, tl.where((of == 2) & (to == 3), steps, 0.0)), 1)
        pair = tl.where(s[:, None] % 2 == 0, -step, 0.0)  # G of first rows, less that of the next or one's own

        k_at = k + batch * k_batch + token * k_token + head * K
        q_at = q + batch * q_batch + token * q_token + head * K
        k_tile = tl.load(k_at + at[:, None] * k_token + channels[None, :], mask=live[:, None], other=0.0)
        q_tile = tl.load(q_at + at[:, None] * q_token + channels[None, :], mask=live[:, None], other=0.0)
        k_tile = unit(k_tile.to(tl.float32), l2_eps, NORMED)
        q_tile = unit(q_tile.to(tl.float32), l2_eps, NORMED) * q_scale

        i, j = at[:, None], at[None, :]
        factor = tl.exp2(tl.where(i < 32, -1.0, 1.0) * (local + by_block(half, K)))
        right = k_tile * factor
        a = times(right, tl.trans(right), narrow)
        p = times(q_tile * factor, tl.trans(right), narrow)
        factor = tl.exp2(tl.where(i // 16 % 2 == 0, -1.0, 1.0) * (local + by_block(pair, K)))
        right = k_tile * factor
        same_half = i // 32 == j // 32
        a = tl.where(same_half, times(right, tl.trans(right), narrow), a)
        p = tl.where(same_half, times(q_tile * factor, tl.trans(right), narrow), p)
        factor = tl.exp2(local)
        right = tl.trans(k_tile * tl.exp2(-local))
        a = tl.where(same_block, times(k_tile * factor, right, narrow), a)
        p = tl.where(same_block, times(q_tile * factor, right, narrow), p)

        b_at = b + batch * b_batch + token * b_token + head
        beta = tl.where(live, rate(tl.load(b_at + at * b_token, mask=live, other=0.0), RAW), 0.0)
        cells = i * 64 + j
        a_at, t_at = lower + here * 4096, inverse + here * 4096
        tl.store(a_at + cells, tl.where(i > j, a * beta[:, None], 0.0), mask=i // 16 >= j // 16)
        tl.store(scores + here * 4096 + cells, tl.where(i >= j, p, 0.0).to(narrow))
        tiles = at[:, None] * K + channels[None, :]
        factor *= tl.exp2(by_block(start, K))
        tl.store(queries + here * (64 * K) + tiles, (q_tile * factor).to(narrow))
        to_end = k_tile * tl.exp2(by_block(rest, K) - local)
        tl.store(ends + here * (64 * K) + tiles, to_end.to(narrow))
        decayed = tl.exp2(tl.sum(tl.where(s[:, None] == 0, start + rest, 0.0), 0))
        tl.store(decay + here * K + channels, decayed)

        tl.debug_barrier()
        invert_diagonal(a_at, t_at)
        tl.debug_barrier()
        merge(a_at, t_at, 0, 16)
        merge(a_at, t_at, 32, 16)
        tl.debug_barrier()
        merge(a_at, t_at, 0, 32)
        tl.debug_barrier()
        solved = tl.load(t_at + cells, mask=i // 16 >= j // 16, other=0.0)
        beta = tl.where(live, rate(tl.load(b_at + at * b_token, mask=live, other=0.0), RAW), 0.0)
        solved = solved * beta[None, :]
        v_at = v + batch * v_batch + token * v_token + head * V
        v_tile = tl.load(v_at + at[:, None] * v_token + columns[None, :], mask=live[:, None], other=0.0)
        u = times(tl.trans(v_tile), tl.trans(solved), narrow)
        w = times(solved, k_tile * factor, narrow)
        tl.debug_barrier()
        tl.store(values + here * (64 * V) + columns[:, None] * 64 + at[None, :], u.to(narrow))
        tl.store(keys + here * (64 * K) + tiles, (-w).to(narrow))
