"""`widens` against the numbers themselves: all of a narrow dtype, the telling ones of a wide one."""

from __future__ import annotations

import itertools

import pytest
import torch

from k3rewrite.graph.dtypes import widens

EIGHT = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
SMALL = [torch.float16, torch.bfloat16, *EIGHT]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [torch.bool, *INTEGERS, *SMALL, torch.float32, torch.float64]


def _numbers(dtype: torch.dtype) -> torch.Tensor:
    """Values of a dtype: each of them if there are few, else powers of two, their neighbours and the extremes."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype in SMALL or dtype.itemsize < 4:
        bits = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int64)
        raw = bits.to(torch.int16 if dtype.itemsize == 2 else torch.uint8)
        return raw.view(dtype) if dtype.is_floating_point else raw.to(dtype)
    if dtype in INTEGERS:
        width = 8 * dtype.itemsize - 1
        powers = [2**k + d for k in range(2, width) for d in (-1, 0, 1)]
        return torch.tensor([*powers, *(-p for p in powers), 2**width - 1, -(2**width)], dtype=dtype)
    info = torch.finfo(dtype)
    powers = torch.tensor([2.0**k for k in range(-1074, 1024)], dtype=torch.float64).to(dtype)
    powers = powers[(powers != 0) & powers.isfinite()]
    near = torch.cat([powers, torch.nextafter(powers, torch.zeros_like(powers))])
    return torch.cat([near, -near, torch.tensor([info.max, info.min, 0.0], dtype=dtype)])


def _is_exact(values: torch.Tensor, wide: torch.dtype) -> bool:
    if values.dtype.is_floating_point:
        if not wide.is_floating_point:
            return False
        before, after = values.to(torch.float64), values.to(wide).to(torch.float64)
        same = (before == after) & (before.signbit() == after.signbit())  # infinities and -0 too
        return bool((same | before.isnan() & after.isnan()).all())
    if wide == torch.bool:
        return values.dtype == torch.bool
    there = values.to(wide)
    if not values.dtype.is_floating_point and wide.is_floating_point:
        return all(w == int(v) for w, v in zip(there.double().tolist(), values.tolist(), strict=True))
    as_numbers = torch.float64 if wide.is_floating_point else torch.int64
    return bool((there.to(as_numbers) == values.to(as_numbers)).all())


@pytest.mark.parametrize(("narrow", "wide"), itertools.product(DTYPES, DTYPES), ids=lambda d: str(d)[6:])
def test_against_the_values(narrow: torch.dtype, wide: torch.dtype) -> None:
    assert widens(narrow, wide) is _is_exact(_numbers(narrow), wide)


@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2])
def test_a_cast_through_e5m2fnuz_rounds(narrow: torch.dtype) -> None:
    """torch tells a finer precision of it than it has, and it has no infinity."""
    assert not widens(narrow, torch.float8_e5m2fnuz)


def test_a_lossy_cast_is_not_folded() -> None:
    def through(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float8_e5m2fnuz).to(torch.float8_e4m3fn).float()

    x = torch.tensor([0.017578125, 1.125, 240.0]).to(torch.float8_e4m3fn)
    with torch.no_grad():
        got = torch.compile(through, backend="k3rewrite", options={"finalise": "eager"})(x)
    assert torch.equal(got, through(x))


def test_promotion_is_no_proof() -> None:
    assert torch.promote_types(torch.int64, torch.float32) is torch.float32
    assert not widens(torch.int64, torch.float32) and not widens(torch.int32, torch.float32)
    assert torch.tensor(16777217).float().item() == 16777216


def test_complex_numbers_and_dtypes_without_numbers() -> None:
    assert widens(torch.float32, torch.complex64) and not widens(torch.complex64, torch.float32)
    assert widens(torch.complex64, torch.complex128) and not widens(torch.float64, torch.complex64)
    packed = torch.float4_e2m1fn_x2
    assert widens(packed, packed) and not widens(packed, torch.float32) and not widens(torch.bool, packed)
