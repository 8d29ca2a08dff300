"""What the experts' Triton kernels are made of: the expert that a route means, weights as numbers, the activation."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from k3rewrite.kernels.triton_math import rounded, tanh


@triton.jit
def local_expert(ids, index, inside, first, count):
    """Places in the weight stacks of the experts at `index`, as int64; -1 for what is not `inside` or in the window."""
    expert = tl.load(ids + index, mask=inside, other=-1).to(tl.int64) - first
    return tl.where(inside & (expert >= 0) & (expert < count), expert, -1)


@triton.jit
def e2m1(code):
    """fp32 of a 4-bit code: its three magnitude bits read as the low exponent and high mantissa bits of a bf16 are the
    value times 2^-126, subnormal for 0.5."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e4m3(code):
    """fp32 of an E4M3 byte, the same way: the value times 2^-120. 0x7f and 0xff are NaN."""
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e8m0(code):
    """2^(code - 127) as fp32; NaN for 255."""
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def tile(weight, scale, column, inside, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr):
    """A tile [ROWS, COLUMNS] of matrices, from column `column` on: as it is stored for "dense", else fp32.

    `weight` and `scale` point at the beginnings of the rows, and `inside` says which rows are read, [ROWS, 1] each. The
    columns must be there: COLUMNS divides the matrices' number of columns.
    """
    if FORMAT == "dense":
        return tl.load(weight + (column + tl.arange(0, COLUMNS))[None, :], mask=inside, other=0.0)
    elif FORMAT == "mxfp8":
        columns = (column + tl.arange(0, COLUMNS))[None, :]
        values = e4m3(tl.load(weight + columns, mask=inside, other=0).to(tl.int32))
        return values * e8m0(tl.load(scale + columns // 32, mask=inside, other=0).to(tl.int32))
    else:
        pairs = (column // 2 + tl.arange(0, COLUMNS // 2))[None, :]
        stored = tl.load(weight + pairs, mask=inside, other=0).to(tl.int32)
        factor = e8m0(tl.load(scale + pairs // 16, mask=inside, other=0).to(tl.int32))
        return tl.join(e2m1(stored & 0xF) * factor, e2m1(stored >> 4) * factor).reshape(ROWS, COLUMNS)


@triton.jit
def activated(
    gate, up, beta, linear_beta, ACTIVATION: tl.constexpr, LINEAR: tl.constexpr, PRODUCT: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """The gated activation of two fp32 products. PRODUCT is the rounding of the products, COMPUTE that of each operator
    of a SiLU; SiTU is computed in fp32. LINEAR: the up half goes through a tanh of its own."""
    gate, up = rounded(gate, PRODUCT), rounded(up, PRODUCT)
    if ACTIVATION == "silu":
        return rounded(rounded(gate * tl.sigmoid(gate), COMPUTE) * up, COMPUTE)
    else:
        if LINEAR:
            up = linear_beta * tanh(up / linear_beta)
        return beta * tanh(gate / beta) * tl.sigmoid(gate) * up
