"""How far a result is from exact arithmetic, and how far it may be.

    rms    = rms(y - y64) / rms(y64)          worst = max |y - y64| / rms(y64)       against an fp64 run of the original
    accept = rms(new) <= 1.5 * rms(old) + floor  and  worst(new) <= 3 * worst(old) + 8 * floor
    floor    1e-6 in fp32, 2e-3 in bf16, 1e-12 in fp64; eps / 2 in fp8

Errors are compared, not closeness: a rewrite may be nearer to exact arithmetic than what it replaces. The worst element
is looked at too, because one wrong element in a million does not move the root mean square; a maximum scatters more
between two correct runs, so its factor is larger.

Where the old run overflows (or is NaN) and exact arithmetic does not, there is no error to compare with. A few such
elements are left out; if they are more than a hundredth of a result, nothing can be said about it, unless the new run
gives the very same values there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

FACTOR = 1.5
WORST_FLOORS = 8.0
MAX_UNSOUND = 0.01
"""largest share of elements that may be left out of a comparison, because the old run overflows where fp64 does not"""
FLOORS: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 2e-3}
)


@dataclass(frozen=True)
class Error:
    """Deviation from exact arithmetic over the rms of the exact values: its rms and its largest element."""

    rms: float
    worst: float


def measure(value: Tensor, exact: Tensor) -> Error:
    """Infinite if the shapes differ, or a value is not finite exactly where the exact one is not, or not finite in
    another way (NaN, the sign of an infinity); 0 for empty tensors. If all exact values are zero, deviations count as
    they are."""
    if value.shape != exact.shape:
        return Error(math.inf, math.inf)
    if exact.numel() == 0:
        return Error(0.0, 0.0)
    wide, exact = _wide(value), _wide(exact)
    if bool(_other_kind(wide, exact).any()):
        return Error(math.inf, math.inf)
    finite = torch.isfinite(exact)
    if not finite.any():
        return Error(0.0, 0.0)
    deviation = (wide - exact)[finite]
    scale = _rms(exact[finite]) or 1.0
    return Error(_rms(deviation) / scale, deviation.abs().max().item() / scale)


def measure_both(old: Tensor, exact_old: Tensor, new: Tensor, exact_new: Tensor) -> tuple[Error, Error]:
    """The errors of two runs, each against its own exact values, at the elements at which the old run is finite where
    it should be: what overflows in the original must not hide what is wrong elsewhere in the new one."""
    if not old.shape == new.shape == exact_old.shape == exact_new.shape:
        return measure(old, exact_old), measure(new, exact_new)
    old, exact_old, new, exact_new = (_wide(value) for value in (old, exact_old, new, exact_new))
    sound = ~_other_kind(old, exact_old)
    return measure(old[sound], exact_old[sound]), measure(new[sound], exact_new[sound])


def unsound_share(old: Tensor, exact_old: Tensor, new: Tensor) -> float:
    """Share of the elements that `measure_both` leaves out and that are not equal in both runs: they may be anything.
    0 for other shapes, which `measure_both` finds wrong by themselves."""
    if not old.shape == new.shape == exact_old.shape or not old.numel():
        return 0.0
    old, exact_old, new = _wide(old), _wide(exact_old), _wide(new)
    equal = (old == new) | (old.isnan() & new.isnan())
    return (_other_kind(old, exact_old) & ~equal).double().mean().item()


def is_vacuous(old: Tensor, exact_old: Tensor, exact_new: Tensor) -> bool:
    """Whether there are elements and none of them is finite in all three, so that `measure_both` finds no error in
    whatever is as infinite, or NaN, as they are."""
    if not old.shape == exact_old.shape == exact_new.shape or not old.numel():
        return False
    finite = [torch.isfinite(_wide(value)) for value in (old, exact_old, exact_new)]
    return not bool((finite[0] & finite[1] & finite[2]).any())


def _wide(value: Tensor) -> Tensor:
    """As fp64 on the CPU (fp8 can do little more than be converted); a complex number as its two parts."""
    value = value.detach().cpu()
    return torch.view_as_real(value.to(torch.complex128).resolve_conj()) if value.is_complex() else value.double()


def floor_of(dtype: torch.dtype) -> float:
    """The floor of results of `dtype`; a complex one has that of its parts."""
    if dtype.is_complex:
        dtype = torch.float64 if dtype == torch.complex128 else torch.float32
    if dtype in FLOORS or not dtype.is_floating_point:
        return FLOORS.get(dtype, 0.0)
    return torch.finfo(dtype).eps / 2


def is_inexact(dtype: torch.dtype) -> bool:
    """True for dtypes whose values are rounded, and are therefore measured and not compared bit by bit."""
    return dtype.is_floating_point or dtype.is_complex


def _other_kind(value: Tensor, exact: Tensor) -> Tensor:
    """Where one is a number and the other is not, or they are different infinities or NaN."""
    both_finite = torch.isfinite(value) & torch.isfinite(exact)
    return ~(both_finite | (value == exact) | (value.isnan() & exact.isnan()))


def _rms(values: Tensor) -> float:
    """Root mean square, without the overflow of a square (masks hold the largest number of their dtype)."""
    largest = values.abs().max().item()
    return largest * (values / largest).pow(2).mean().sqrt().item() if largest else 0.0


def acceptable(new: Error, old: Error, dtype: torch.dtype, factor: float = FACTOR) -> bool:
    """True if the new error is within the rule for results of `dtype`."""
    floor = floor_of(dtype)
    rms = new.rms <= factor * old.rms + floor
    return rms and new.worst <= 2 * factor * old.worst + WORST_FLOORS * floor


def pooled(errors: Sequence[Error]) -> Error:
    """Root mean square of several errors, and the largest element among them."""
    if not errors:
        return Error(0.0, 0.0)
    return Error(math.sqrt(sum(e.rms**2 for e in errors) / len(errors)), max(e.worst for e in errors))
