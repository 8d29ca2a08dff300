"""Small Triton kernels for the tests of k3rewrite.emit."""

import triton
import triton.language as tl

from k3rewrite.ops.kernel import TritonUnit

SCALE = tl.constexpr(2.0)


@triton.jit
def scaled(value):
    return value * SCALE


@triton.jit
def row_sum(x, out, columns, stride, BLOCK: tl.constexpr):
    """out[row] = 2 * sum(x[row, :columns])"""
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + offsets, mask=offsets < columns, other=0.0).to(tl.float32)
    tl.store(out + row, scaled(tl.sum(values)))


@triton.jit
def product(a, b, out, SIZE: tl.constexpr):
    """One SIZE x SIZE matrix product: matrix instructions and LDS."""
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    left = tl.load(a + rows * SIZE + columns)
    right = tl.load(b + rows * SIZE + columns)
    tl.store(out + rows * SIZE + columns, tl.dot(left, right))


@triton.jit
def multiply_add(x, out):
    """out[0] = x[0] * x[1] + x[2]"""
    tl.store(out, tl.load(x) * tl.load(x + 1) + tl.load(x + 2))


@triton.jit
def does_not_compile(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK * 2)))


def row_sum_unit(**changes) -> TritonUnit:
    fields = {
        "function": row_sum,
        "signature": {"x": "*bf16", "out": "*fp32", "columns": "i32", "stride": "i32", "BLOCK": "constexpr"},
        "constants": {"BLOCK": 2048},
        "aligned": frozenset({"x", "columns", "stride"}),
    }
    return TritonUnit(**{**fields, **changes})


def product_unit(size: int, **changes) -> TritonUnit:
    signature = {"a": "*bf16", "b": "*bf16", "out": "*fp32", "SIZE": "constexpr"}
    fields = {"function": product, "signature": signature, "constants": {"SIZE": size}, "aligned": frozenset("ab")}
    return TritonUnit(**{**fields, **changes})
