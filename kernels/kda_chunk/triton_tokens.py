"""Triton functions that prologue and scan of `k3::kda_chunk` share: which tokens are whose, and a token's gate.

Chunks are numbered through all rows. In a batch [B, L] row n has the numbers from n · ceil(L / 64) on. In one long line
with offsets it has those from offsets[n] // 64 + n on: enough for its chunks, and found without a sum over rows.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from k3rewrite.kernels.triton_math import within

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_of_chunk(number, offsets, rows, tokens, chunks, PACKED: tl.constexpr, ROWS: tl.constexpr):
    """(row, chunk of it) of a number; ROWS: a power of two, at least as many as there are rows. A chunk below 0: the
    number is no row's."""
    if PACKED:
        n = tl.arange(0, ROWS)
        first = within(tl.load(offsets + n, mask=n < rows, other=0), tokens) // 64 + n
        row = tl.maximum(tl.sum(((first <= number) & (n < rows)).to(tl.int32), 0) - 1, 0)
        return row, number - (within(tl.load(offsets + row), tokens) // 64 + row)
    else:
        return number // chunks, number % chunks


@triton.jit
def tokens_of(
    row, slots, lengths, offsets, rows, tokens, chunks, PACKED: tl.constexpr, LENGTHS: tl.constexpr,
    SLOTS: tl.constexpr, NULL: tl.constexpr,
):  # fmt: skip
    """(batch, first token in it, tokens, end of what the row has to fill, number of its first chunk, slot)."""
    slot = row.to(tl.int64)
    if SLOTS:
        slot = tl.load(slots + row).to(tl.int64)
    if PACKED:
        batch = row * 0
        first = within(tl.load(offsets + row), tokens)
        behind = within(tl.load(offsets + row + 1), tokens)
        length = tl.maximum(behind - first, 0)
        number = first // 64 + row
        end = tl.where(row == rows - 1, tokens, behind) - first
    else:
        batch = row
        first = row * 0
        length = tokens
        if LENGTHS:
            length = within(tl.load(lengths + row), tokens)
        number = row * chunks
        end = tokens
    if NULL:
        length = tl.where(slot > 0, length, 0)
    return batch.to(tl.int64), first, length, end, number, slot


@triton.jit
def exp2(x, PTX: tl.constexpr):
    """2^x; below 2^-126 zero. In PTX one instruction, the compiler's own up to five."""
    if PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.exp2(x)


@triton.jit
def sigmoid(x, factor, PTX: tl.constexpr):
    """Of x times a scalar factor."""
    if PTX:
        x = exp2(x * (factor * -LOG2_E), PTX) + 1.0
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.sigmoid(x * factor)


@triton.jit
def gate(f, head, channels, a_log, dt_bias, bound, SIZE: tl.constexpr, RAW: tl.constexpr, PTX: tl.constexpr):
    """log2 of the decay of values `f` of some channels of a head; their number is f's last dimension."""
    f = f.to(tl.float32)
    if RAW:
        f = f + tl.load(dt_bias + head * SIZE + channels)
        return sigmoid(f, tl.exp(tl.load(a_log + head).to(tl.float32)), PTX) * (bound * LOG2_E)
    else:
        return f * LOG2_E


@triton.jit
def rate(b, RAW: tl.constexpr):
    """beta of its raw value."""
    b = b.to(tl.float32)
    return tl.sigmoid(b) if RAW else b
