"""MXFP4, the 4-bit format of the routed experts' weights, byte for byte as the checkpoint stores it.

A matrix `[rows, columns]` is two byte arrays:

    packed  [rows, columns / 2]    low nibble = even column, high nibble = odd column; E2M1 with the sign in bit 3
    scale   [rows, columns / 32]   E8M0: 2^(s - 127) for 32 consecutive columns; s = 255 is NaN

Formats: OCP Microscaling Formats (MX) v1.0. Values up-convert exactly to bf16 (one mantissa bit, a power of two).
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3rewrite.errors import UnsupportedError
from k3rewrite.models.kimi_k3.config import MXFP4_GROUP

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_LARGEST_EXPONENT = 2  # 6 = 1.5 * 2^2


def pair_table(dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """`[256, 2]`: the values of a byte's low and high nibble."""
    values = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=dtype, device=device)
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)


def scale_table(dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """`[256]`: the value of an E8M0 byte; 2^-127 is subnormal in fp32 and bf16, and exact in both."""
    exact = [2.0 ** (s - 127) for s in range(255)]
    return torch.tensor([*exact, float("nan")], dtype=dtype, device=device)


def dequantise(packed: Tensor, scale: Tensor, pairs: Tensor, scales: Tensor) -> Tensor:
    """`[..., rows, columns]` in the tables' dtype.

    packed `[..., rows, columns/2]` and scale `[..., rows, columns/32]` uint8; tables as above. The product is exact
    wherever the dtype holds it: 6 * 2^127 is beyond fp32 and bf16, and becomes infinite there.
    """
    groups = (*scale.shape, MXFP4_GROUP)
    return (pairs[packed.int()].view(groups) * scales[scale.int()].unsqueeze(-1)).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 `[..., columns]` -> packed bytes `[..., columns/2]`."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Packed bytes `[..., columns/2]` -> uint8 codes 0..15 `[..., columns]`. Inverse of `pack_nibbles`."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`(packed, scale)` of a floating-point matrix `[..., rows, columns]`, the OCP way.

    The shared exponent is floor(log2(largest magnitude)) - 2, elements round to nearest, ties to even, and saturate at
    ±6. Exact for values that MXFP4 holds. Raises `UnsupportedError` for columns that do not fill groups of 32, and for
    values that are not finite.
    """
    if weight.shape[-1] % MXFP4_GROUP:
        raise UnsupportedError(
            f"{weight.shape[-1]} columns are no multiple of {MXFP4_GROUP}",
            place="mxfp4.quantise",
            remedy="pad the columns with zeros, or keep this matrix in bf16",
        )
    if not bool(torch.isfinite(weight).all()):
        raise UnsupportedError(
            "a value is not finite", place="mxfp4.quantise", remedy="replace infinities and NaN before quantising"
        )
    groups = weight.double().unflatten(-1, (-1, MXFP4_GROUP))
    largest = groups.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT  # frexp: mantissa in [0.5, 1)
    scale = torch.where(largest > 0, exponent.clamp(-127, 127), 0) + 127
    scaled = torch.ldexp(groups, (127 - scale).unsqueeze(-1))
    magnitude = scaled.abs()
    midpoints = torch.tensor(_MIDPOINTS, dtype=torch.float64, device=weight.device)
    code = torch.bucketize(magnitude, midpoints)  # a tie goes to the lower code ...
    tie_up = (magnitude == midpoints[code.clamp(max=6)]) & (code % 2 == 1)  # ... unless that code is odd
    code = (code + tie_up.int() + 8 * torch.signbit(scaled).int()).to(torch.uint8)
    return pack_nibbles(code.flatten(-2)), scale.to(torch.uint8)
