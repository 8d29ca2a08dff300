"""The depth mix in Triton, one program a row: two schedules of the same arithmetic.

    attn_res_resident   every source of the row stays in registers: all loads are in flight at once, one reduction
                        gives all scores, and the mix reads registers. For few rows, where time is latency.
    attn_res_streamed   one source at a time with an online softmax, loads running ahead of the arithmetic. For many
                        rows, where time is bandwidth, and for rows that do not fit in registers.

Both take up to 15 blocks, each a pointer and a row stride in elements; only the last dimension must be contiguous. The
prefix is the last source and separate, because it may be updated and stored.

Optional parts are chosen at compile time: DELTA (prefix + delta, rounded to the prefix's dtype), STORE (the new
prefix is written), NORM (the output norm; MIX and SCALE name the dtypes of its two roundings, "fp32" rounds nothing).
"""

# Triton does not unpack tuples inside a tuple, and compiles functions from their text, without Python types.
# ruff: noqa: RUF005
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from k3rewrite.kernels.triton_math import rounded

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def widened_again(value, PTX: tl.constexpr):
    """fp32 of a bf16, fp16 or fp32 `value` that was converted before, for its score.

    bf16 in another way than then: the compiler would merge the two conversions and keep the fp32 value, twice as many
    registers, alive from the scores to the mix. In PTX it is one instruction an element, the compiler's own up to two.
    """
    if value.dtype == tl.bfloat16:
        if PTX:
            return tl.inline_asm_elementwise(
                "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [value], tl.float32, True, 2
            )
        else:
            return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def new_prefix(prefix, delta, row, prefix_stride, delta_stride, columns, inside, DELTA: tl.constexpr):
    """The row's prefix, with delta added and the sum rounded to the prefix's dtype."""
    value = tl.load(prefix + row * prefix_stride + columns, mask=inside, other=0.0)
    if DELTA:
        added = tl.load(delta + row * delta_stride + columns, mask=inside, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def score_weight(score_norm, score_proj, columns, inside):
    norm = tl.load(score_norm + columns, mask=inside, other=0.0).to(tl.float32)
    return norm * tl.load(score_proj + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def row_sums(terms):
    """The sum of each tensor of the tuple `terms`: a power of two of them, reduced together by one tree."""
    for _ in tl.static_range(5):
        if len(terms) > 1:
            pairs = ()
            for i in tl.static_range(len(terms) // 2):
                pairs = pairs + (tl.join(terms[2 * i], terms[2 * i + 1]),)
            terms = pairs
    sums = (tl.sum(terms[0], axis=0),)
    for _ in tl.static_range(5):
        if len(sums[0].shape) > 0:
            halves = ()
            for i in tl.static_range(len(sums)):
                low, high = tl.split(sums[i])
                halves = halves + (low, high)
            sums = halves
    return sums


@triton.jit
def score(wide, weight, eps, D: tl.constexpr):
    """One source's score in units of log2(e), for exp2."""
    sums = row_sums((wide * wide, wide * weight))
    return sums[1] * tl.rsqrt(sums[0] * (1.0 / D) + eps) * LOG2_E


@triton.jit
def finish(
    mix, row, columns, inside, norm_weight, norm_eps, out, out_stride,
    D: tl.constexpr, NORM: tl.constexpr, MIX: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Output norm and store of the result."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if NORM:
        mix = rounded(mix, MIX)
        scaled = mix * tl.rsqrt(tl.sum(mix * mix, axis=0) * (1.0 / D) + norm_eps)
        weight = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
        mix = rounded(scaled, SCALE) * weight
    tl.store(out + row * out_stride + columns, mix.to(out.dtype.element_ty), mask=inside)


@triton.jit
def attn_res_resident(
    b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14,
    r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, r10, r11, r12, r13, r14,
    prefix, prefix_stride, delta, delta_stride, new_prefix_ptr, new_prefix_stride,
    score_norm, score_proj, norm_weight, out, out_stride, rows, score_eps, norm_eps,
    BLOCKS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, DELTA: tl.constexpr, STORE: tl.constexpr,
    NORM: tl.constexpr, MIX: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    blocks = (b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14)
    row_strides = (r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, r10, r11, r12, r13, r14)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < D

    values = ()
    for j in tl.static_range(BLOCKS):
        values = values + (tl.load(blocks[j] + row * row_strides[j] + columns, mask=inside, other=0.0),)
    updated = new_prefix(prefix, delta, row, prefix_stride, delta_stride, columns, inside, DELTA)
    values = values + (updated,)
    weight = score_weight(score_norm, score_proj, columns, inside)

    # Groups of 16, 8, 4, 2 and 1 sources are reduced together: fewer barriers than one source at a time.
    scores = ()
    for step in tl.static_range(5):
        if len(values) - len(scores) >= 16 >> step:
            terms = ()
            for i in tl.static_range(16 >> step):
                value = values[len(scores) + i].to(tl.float32)
                terms = terms + (value * value, value * weight)
            sums = row_sums(terms)
            for i in tl.static_range(16 >> step):
                scores = scores + (sums[2 * i + 1] * tl.rsqrt(sums[2 * i] * (1.0 / D) + score_eps) * LOG2_E,)

    largest = scores[0]
    for j in tl.static_range(1, len(scores)):
        largest = tl.maximum(largest, scores[j])
    total = 0.0
    mix = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(len(values)):
        share = tl.exp2(scores[j] - largest)
        total += share
        mix += share * widened_again(values[j], PTX)
    if STORE:
        # After the reductions: lanes that share an element have all read it, so it may go where the old one was.
        tl.store(new_prefix_ptr + row * new_prefix_stride + columns, updated, mask=inside)
    finish(
        mix * (1.0 / total), row, columns, inside, norm_weight, norm_eps, out, out_stride, D, NORM, MIX, SCALE, PDL,
    )  # fmt: skip


@triton.jit
def attn_res_streamed(
    b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14,
    r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, r10, r11, r12, r13, r14,
    prefix, prefix_stride, delta, delta_stride, new_prefix_ptr, new_prefix_stride,
    score_norm, score_proj, norm_weight, out, out_stride, rows, score_eps, norm_eps,
    BLOCKS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, DELTA: tl.constexpr, STORE: tl.constexpr,
    NORM: tl.constexpr, MIX: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr, PTX: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    blocks = (b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14)
    row_strides = (r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, r10, r11, r12, r13, r14)
    if PDL:
        tl.extra.cuda.gdc_wait()
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    weight = score_weight(score_norm, score_proj, columns, inside)
    for program_row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(program_row, tl.int64)
        updated = new_prefix(prefix, delta, row, prefix_stride, delta_stride, columns, inside, DELTA)
        mix = updated.to(tl.float32)
        largest = score(mix, weight, score_eps, D)
        total = 1.0
        if STORE:
            # After the reduction: lanes that share an element have all read it, so it may go where the old one was.
            tl.store(new_prefix_ptr + row * new_prefix_stride + columns, updated, mask=inside)
        if BLOCKS > 0:
            for j in tl.range(0, BLOCKS, num_stages=STAGES):
                # Where source j lies: scalar selects, a few instructions a source.
                address = blocks[0] + row * row_strides[0]
                for i in tl.static_range(1, BLOCKS):
                    address = tl.where(j == i, blocks[i] + row * row_strides[i], address)
                value = tl.load(address + columns, mask=inside, other=0.0, eviction_policy="evict_first")
                new_score = score(value.to(tl.float32), weight, score_eps, D)
                new_largest = tl.maximum(largest, new_score)
                keep = tl.exp2(largest - new_largest)
                share = tl.exp2(new_score - new_largest)
                total = total * keep + share
                mix = mix * keep + share * widened_again(value, PTX)
                largest = new_largest
        finish(
            mix * (1.0 / total), row, columns, inside, norm_weight, norm_eps, out, out_stride,
            D, NORM, MIX, SCALE, PDL,
        )  # fmt: skip
