"""Ranges of numbers, and what dtypes leave of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import inf
from typing import Any, TypeGuard

import torch
from torch.fx import Node

from k3rewrite import _torch_private as private


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`, both included; infinite where there is no bound or none is known."""

    low: float = -inf
    high: float = inf

    def __or__(self, other: Range) -> Range:
        return Range(min(self.low, other.low), max(self.high, other.high))

    def __neg__(self) -> Range:
        return Range(-self.high, -self.low)

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def __mul__(self, other: Range) -> Range:
        ends = [_times(a, b) for a in (self.low, self.high) for b in (other.low, other.high)]
        return Range(min(ends), max(ends))

    @property
    def is_bounded(self) -> bool:
        return self.low > -inf and self.high < inf

    def below(self, other: Range) -> Range:
        """The smaller of each two."""
        return Range(min(self.low, other.low), min(self.high, other.high))

    def above(self, other: Range) -> Range:
        """The larger of each two."""
        return -((-self).below(-other))


ANY, ZERO, BIT = Range(), Range(0, 0), Range(0, 1)


def _times(one: float, other: float) -> float:
    return 0 if one == 0 or other == 0 else one * other


def is_integral(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and not value.dtype.is_floating_point and not value.dtype.is_complex


def of_number(number: Any) -> Range:
    plain = isinstance(number, (int, float)) and math.isfinite(number)
    return Range(number, number) if plain else ANY


def of_dtype(value: Any) -> Range:
    """All numbers that a dtype holds."""
    if not is_integral(value):
        return ANY
    if value.dtype == torch.bool:
        return BIT
    holds = torch.iinfo(value.dtype)
    return Range(holds.min, holds.max)


def held(found: Range, dtype: torch.dtype) -> Range:
    """What is left in that dtype: integers that do not fit wrap, fractions are cut off, floats are rounded."""
    if dtype.is_complex:
        return ANY
    if dtype.is_floating_point:
        with private.no_modes():
            low, high = torch.tensor([found.low, found.high], dtype=torch.float64).to(dtype).tolist()
        return Range(low, high)
    holds = torch.iinfo(dtype)
    if not found.is_bounded or math.trunc(found.low) < holds.min or math.trunc(found.high) > holds.max:
        return Range(holds.min, holds.max)
    return Range(math.trunc(found.low), math.trunc(found.high))


def name_of(node: Node) -> str:
    """The name of an op of torch or of the vocabulary, without namespace and overload; empty for others, of which only
    the name would be known."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    if target.namespace in ("aten", "prims", "_c10d_functional") or (
        target.namespace == "k3" and target._opname == "route"
    ):
        return target._opname
    return ""
