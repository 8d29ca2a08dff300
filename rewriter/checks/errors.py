"""How far a result is from exact arithmetic, and how far it may be.

    error(y) = max |y - y64| / rms(y64)                  per output, against an fp64 run of the original
    accept   = error(new) <= 1.5 * error(old) + floor    floor 1e-6 in fp32, 2e-3 in bf16, 1e-12 in fp64

Errors are compared, not closeness: a rewrite may be nearer to exact arithmetic than what it replaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

FACTOR = 1.5
FLOORS: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 2e-3}
)


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Largest deviation over the root mean square of the exact values; infinite if a value is not finite where the
    exact one is, 0.0 for empty tensors. An exact tensor of zeros counts absolute deviations."""
    if exact.numel() == 0:
        return 0.0
    wide, exact = value.detach().double().cpu(), exact.detach().double().cpu()
    finite = torch.isfinite(exact)
    if not torch.equal(torch.isfinite(wide), finite):
        return float("inf")
    if not finite.any():
        return 0.0
    deviation = (wide - exact)[finite].abs().max().item()
    scale = exact[finite].pow(2).mean().sqrt().item()
    return deviation / scale if scale > 0 else deviation


def acceptable(new: float, old: float, dtype: torch.dtype) -> bool:
    """True if the new error is within the rule for results of `dtype`."""
    return new <= FACTOR * old + FLOORS.get(dtype, 0.0)
