"""Comparing tensor metadata without adding a guard: sizes may be symbolic.

same_size(s0, s0) -> True      same_size(s0, 8) -> False, and nothing is assumed about s0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from k3rewrite import _torch_private as private


def same_size(a: Any, b: Any) -> bool:
    """True if the two sizes are equal for every input; False if that is not known."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return private.statically_known(a == b)


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b, strict=True))


def metadata_difference(old: Any, new: Any) -> str | None:
    """The first of dtype, shape, device, stride in which two values differ, in words; None if in none.

    Strides of dimensions of size one (or of empty tensors) are not observable and not compared. Lists of values are
    compared one by one, sizes by what is known of them, other constants by type and value.
    """
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        if len(old) != len(new):
            return f"{len(old)} results become {len(new)}"
        found = ((index, metadata_difference(a, b)) for index, (a, b) in enumerate(zip(old, new, strict=True)))
        return next((f"result {index}: {difference}" for index, difference in found if difference), None)
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return _constant_difference(old, new)
    if old.dtype != new.dtype:
        return f"dtype {old.dtype} becomes {new.dtype}"
    if not same_sizes(old.shape, new.shape):
        return f"shape {shape_text(old.shape)} becomes {shape_text(new.shape)}"
    if old.device != new.device:
        return f"device {old.device} becomes {new.device}"
    if any(same_size(s, 0) for s in old.shape):
        return None
    for size, before, after in zip(old.shape, old.stride(), new.stride(), strict=True):
        if not same_size(size, 1) and not same_size(before, after):
            return f"stride {shape_text(old.stride())} becomes {shape_text(new.stride())}"
    return None


def _constant_difference(old: Any, new: Any) -> str | None:
    if type(old) is not type(new):
        return f"{type(old).__name__} becomes {type(new).__name__}"
    if isinstance(old, (int, torch.SymInt)):
        return None if same_size(old, new) else f"{old} becomes {new}"
    if isinstance(old, (float, str, type(None))):
        return None if old == new or old != old else f"{old!r} becomes {new!r}"
    return None


def shape_text(sizes: Sequence[Any]) -> str:
    return "[" + ", ".join(str(s) for s in sizes) + "]"
