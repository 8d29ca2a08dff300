"""The error measure and the acceptance rule at their edges: NaN, infinities, nothing, zeros, one in a million."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3rewrite.checks.errors import FACTOR, FLOORS, Error, acceptable, measure, measure_both, pooled

INF, NAN = math.inf, math.nan
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def _numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=FP64)


@given(
    st.lists(st.integers(-999, 999).map(lambda v: v / 8), min_size=1, max_size=20),
    st.floats(0.01, 100),
    st.integers(0, 9),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_measure_is_its_definition_and_has_no_unit(values: list[float], unit: float, seed: int) -> None:
    exact = _numbers(*values)
    value = exact + torch.randn(exact.shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)
    rms = math.sqrt(sum(v * v for v in values) / len(values))
    deviations = (value - exact).tolist()
    error = measure(value, exact)
    scale = rms or 1.0
    assert error.rms == pytest.approx(math.sqrt(sum(d * d for d in deviations) / len(values)) / scale)
    assert error.worst == pytest.approx(max(map(abs, deviations)) / scale)
    if rms:
        scaled = measure(value * unit, exact * unit)
        assert scaled.rms == pytest.approx(error.rms, rel=1e-9)


@pytest.mark.parametrize(
    ("value", "exact", "finite"),
    [
        ([1, NAN], [1, NAN], True), ([1, INF], [1, INF], True), ([NAN, NAN], [NAN, NAN], True),
        ([1, NAN], [1, 2], False), ([1, 2], [1, NAN], False), ([1, INF], [1, 2], False), ([1, 2], [1, -INF], False),
        ([1, INF], [1, -INF], False), ([1, NAN], [1, INF], False), ([1, INF], [1, NAN], False), ([INF], [INF], True),
    ],
)  # fmt: skip
def test_what_is_not_finite_must_be_so_in_the_same_way(value: list[float], exact: list[float], finite: bool) -> None:
    error = measure(_numbers(*value), _numbers(*exact))
    assert error == (Error(0.0, 0.0) if finite else Error(INF, INF))


def test_nothing_and_zeros() -> None:
    assert measure(torch.empty(0, 3), torch.empty(0, 3, dtype=FP64)) == Error(0.0, 0.0)
    assert measure(torch.zeros(4), torch.zeros(4, dtype=FP64)) == Error(0.0, 0.0)
    assert measure(_numbers(0, 0, 0, 2), torch.zeros(4, dtype=FP64)) == Error(1.0, 2.0), "deviations as they are"


def test_another_shape_is_wrong_even_if_it_broadcasts() -> None:
    assert measure(torch.ones(1, 3), torch.ones(4, 3, dtype=FP64)) == Error(INF, INF)
    assert measure(torch.ones(3, 0), torch.ones(0, 3, dtype=FP64)) == Error(INF, INF)


def test_the_largest_numbers_do_not_hide_the_rest() -> None:
    """A square of fp64's largest number is infinite, and everything would be right."""
    exact = _numbers(-torch.finfo(FP64).max, 1.0)
    assert measure(exact.clone(), exact).rms == 0.0
    assert measure(exact * _numbers(0.5, 1.0), exact).rms == pytest.approx(0.5)
    assert measure(_numbers(1.0, 1.0), exact).worst > 1


@pytest.mark.parametrize("dtype", FLOORS)
def test_one_wrong_element_in_a_million_is_seen(dtype: torch.dtype) -> None:
    exact = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0), dtype=FP64)
    old = exact.to(dtype)
    new = old.clone()
    new[123_456] += 3.0
    error_old, error_new = measure(old, exact), measure(new, exact)
    assert acceptable(error_old, error_old, dtype)
    assert not acceptable(error_new, error_old, dtype)
    if dtype is BF16:  # the root mean square alone does not see it: only the worst element does
        assert error_new.rms <= FACTOR * error_old.rms + FLOORS[dtype]


@pytest.mark.parametrize("dtype", FLOORS)
def test_the_rule_is_the_documented_inequality(dtype: torch.dtype) -> None:
    floor = FLOORS[dtype]
    old = Error(3 * floor, 5 * floor)
    assert acceptable(Error(1.5 * old.rms + floor, 0.0), old, dtype)
    assert not acceptable(Error(1.5 * old.rms + 1.01 * floor, 0.0), old, dtype)
    assert acceptable(Error(0.0, 3 * old.worst + 8 * floor), old, dtype)
    assert not acceptable(Error(0.0, 3 * old.worst + 8.01 * floor), old, dtype)
    assert acceptable(Error(0.0, 0.0), Error(0.0, 0.0), dtype)


def test_a_result_that_is_wrong_is_not_accepted_because_it_is_nan() -> None:
    assert not acceptable(Error(NAN, NAN), Error(0.1, 0.1), FP32)
    assert not acceptable(Error(INF, INF), Error(0.1, 0.1), FP32)
    assert not acceptable(Error(0.5, 0.5), Error(0.0, 0.0), torch.float8_e4m3fn), "no floor for what has none"


def test_an_overflow_of_the_original_hides_nothing_elsewhere() -> None:
    """fp16 overflows at one element: there nothing can be said, and everywhere else the rule holds."""
    exact = _numbers(1e5, 1.0, 2.0)
    old = exact.half()
    assert measure(old, exact) == Error(INF, INF)
    for new, fine in (([INF, 1.0, 2.0], True), ([1e5, 1.0, 2.0], True), ([1e5, 1.0, 7.0], False),
                      ([INF, NAN, 2.0], False), ([NAN, 1.0, 2.0], True)):  # fmt: skip
        error_old, error_new = measure_both(old, exact, _numbers(*new), exact)
        assert error_old.rms == 0.0
        assert acceptable(error_new, error_old, torch.float16) is fine, new


def test_both_runs_are_measured_against_their_own_exact_values() -> None:
    error_old, error_new = measure_both(_numbers(1, 2), _numbers(1, 2), _numbers(3, 4), _numbers(3, 4.5))
    assert error_old.rms == 0.0 and error_new.worst == pytest.approx(0.5 / math.sqrt((9 + 4.5**2) / 2))
    wrong_shape = measure_both(_numbers(1, 2), _numbers(1, 2), _numbers(1), _numbers(1, 2))
    assert wrong_shape == (Error(0.0, 0.0), Error(INF, INF))


def test_pooled() -> None:
    assert pooled([]) == Error(0.0, 0.0)
    assert pooled([Error(3.0, 1.0), Error(4.0, 9.0)]) == Error(math.sqrt(12.5), 9.0)
    assert pooled([Error(0.0, 0.0), Error(INF, INF)]) == Error(INF, INF)
