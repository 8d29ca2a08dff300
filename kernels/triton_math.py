"""Triton functions that the kernels of several ops share: roundings, and what Triton lacks or has too coarse."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """The fp32 `value` after a round trip through DTYPE ("fp32" rounds nothing)."""
    if DTYPE == "bf16":
        return value.to(tl.bfloat16).to(tl.float32)
    elif DTYPE == "fp16":
        return value.to(tl.float16).to(tl.float32)
    else:
        return value


@triton.jit
def within(n, tokens):
    """A length or an offset, not below 0 and not above the number of tokens; int32. What stands elsewhere in memory is
    out of reach so, whatever a caller's tensors hold."""
    return tl.minimum(tl.maximum(n, 0), tokens).to(tl.int32)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) of an fp32, and x above 20 as torch has it: a series where 1 + exp(x) would lose digits."""
    e = tl.exp(tl.minimum(x, 20.0))
    near = e * (1.0 - e * (1 / 2 - e * (1 / 3 - e / 4)))
    return tl.where(x > 20.0, x, tl.where(e < 1 / 64, near, tl.log(1.0 + e)))


@triton.jit
def tanh(x):
    """Hyperbolic tangent of an fp32, relative error below 3e-7: a series near 0, where the quotient cancels."""
    square = x * x
    near = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(square < 0.09, near, tl.where(x < 0, -far, far))
