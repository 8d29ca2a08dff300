"""Which dtypes hold which others without loss.

widens(bfloat16, float32) -> True
widens(int64, float32)    -> False: 16777217 is no fp32 number, though torch promotes
"""

from __future__ import annotations

from functools import cache

import torch

from k3rewrite._torch_private.tracing import no_modes


def widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """True if every value of `narrow` is a value of `wide`; False for dtypes without plain numbers (bits, packed)."""
    if narrow == wide:
        return True
    if narrow.is_complex or wide.is_complex:
        return wide.is_complex and widens(_real(narrow), _real(wide))
    if narrow.is_floating_point and 1 in (narrow.itemsize, wide.itemsize):
        return _holds(narrow, wide)
    inner, outer = _range(narrow), _range(wide)
    if inner is None or outer is None or outer[0] > inner[0] or outer[1] < inner[1]:
        return False
    if not wide.is_floating_point:
        return not narrow.is_floating_point
    if not narrow.is_floating_point:
        return 2 / torch.finfo(wide).eps >= inner[1]
    a, b = torch.finfo(narrow), torch.finfo(wide)
    return b.eps <= a.eps and b.smallest_normal * b.eps <= a.smallest_normal * a.eps


@cache
def _holds(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """By trying all values: some 8-bit formats have no infinity or no negative zero, and what torch says of their
    precision is not right for all of them."""
    if narrow.itemsize > 2 or not wide.is_floating_point:
        return False
    with no_modes():  # a graph is rewritten among fake tensors
        codes = torch.arange(256 if narrow.itemsize == 1 else 65536, dtype=torch.int32)
        bits = codes.to(torch.uint8 if narrow.itemsize == 1 else torch.int16)
        try:
            stored = bits.view(narrow)
            values, kept = stored.to(torch.float64), stored.to(wide).to(torch.float64)
        except (TypeError, NotImplementedError, RuntimeError):  # packed, or without arithmetic
            return False
        same = (values == kept) & (values.signbit() == kept.signbit())
        return bool((same | values.isnan() & kept.isnan()).all())


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _range(dtype: torch.dtype) -> tuple[float, float] | None:
    """Smallest and largest value, None for a dtype without arithmetic values."""
    if dtype == torch.bool:
        return 0, 1
    try:
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        return info.min, info.max
    except (TypeError, NotImplementedError):
        return None
