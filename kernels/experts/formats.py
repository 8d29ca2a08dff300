"""How experts' weights are stored, and what the stored bytes mean.

    dense   [E, rows, columns] in a floating-point dtype
    mxfp4   bytes [E, rows, columns / 2]: two E2M1 values each, the even column in the low nibble
    mxfp8   E4M3 values [E, rows, columns] (float8_e4m3fn)

The MX formats (OCP Microscaling Formats v1.0) have a scale byte s for 32 consecutive columns, E8M0: 2^(s - 127), and
NaN for s = 255. Everything is exact in fp32 except 6 * 2^127, which is infinite there.
"""

from __future__ import annotations

import torch
from torch import Tensor

FORMATS = ("dense", "mxfp4", "mxfp8")
GROUP = 32
"""columns that share a scale"""


def dequantised(weight: Tensor, scale: Tensor | None, group: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """The matrices [R, rows, columns] of the experts `group` [R] in `dtype`, fp32 or wider."""
    stored = weight[group]
    if format == "dense":
        return stored.to(dtype)
    assert scale is not None, "the shape function has refused a missing scale"
    values = e2m1_values(stored, dtype) if format == "mxfp4" else stored.to(dtype)
    factors = e8m0_values(scale[group], dtype).unsqueeze(-1)
    return (values.unflatten(-1, (-1, GROUP)) * factors).flatten(-2)


def e2m1_values(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [..., n] -> values [..., 2 n]: 0, 0.5, 1, 1.5, 2, 3, 4, 6 by the low three bits, the sign in the fourth."""
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).to(torch.int32)
    exponent, mantissa = (codes >> 1) & 3, (codes & 1).to(dtype)
    normal = (1 + 0.5 * mantissa) * (1 << (exponent - 1).clamp_min(0)).to(dtype)
    magnitude = torch.where(exponent == 0, 0.5 * mantissa, normal)
    return torch.where(codes >= 8, -magnitude, magnitude)


def e8m0_values(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """2^(s - 127) of bytes s: put into the exponent of an fp64, where none is subnormal; NaN for 255."""
    value = ((scale.long() + (1023 - 127)) << 52).view(torch.float64)
    return value.masked_fill(scale == 255, torch.nan).to(dtype)
