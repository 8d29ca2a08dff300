"""The end-to-end check on models that do more than matrix products: it judged right results wrong, or broke off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import check
from graphs import capture_with_inputs
from torch import Tensor

from k3rewrite.backend import Backend
from k3rewrite.checks.end_to_end import EndToEndCheck
from k3rewrite.checks.errors import FLOORS, Error, acceptable, floor_of, measure, measure_both
from k3rewrite.checks.precise import DecisionInterpreter
from k3rewrite.errors import VerificationError
from k3rewrite.report.schema import EndToEnd

ALL = {"verify": "all"}


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _verified(function: Callable[..., Any], *inputs: Any) -> tuple[EndToEnd, dict[str, int]]:
    """What the end-to-end check says, and the sites that each pass has rewritten."""
    (report,) = check(function, inputs, options=ALL)
    assert report.end_to_end is not None
    return report.end_to_end, {entry.name: entry.matched for entry in report.passes}


# ------------------------------------------------------------------------------------------------ routers


@pytest.mark.parametrize("experts", [(16, 16), (16, 12)])
def test_routers_that_are_finished_in_the_other_order(experts: tuple[int, int]) -> None:
    """A rewritten router stands where its weights were finished, not where its top-k stood."""

    def function(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        first, first_ids = a.softmax(-1).topk(4, -1)
        second, second_ids = b.softmax(-1).topk(4, -1)
        second = second / second.sum(-1, keepdim=True)
        first = first / first.sum(-1, keepdim=True)
        return first, second, first_ids, second_ids

    a, b = _random(5, experts[0]), _random(5, experts[1])
    result, matched = _verified(function, a, b)
    assert result.passed and matched["lift_route"] == 2


def test_a_router_beside_a_top_k_of_its_own_scores() -> None:
    def function(logits: Tensor) -> tuple[Tensor, ...]:
        scores = logits.sigmoid()
        ids = (scores + 0.1 * torch.arange(16)).topk(4, -1).indices
        also = scores.topk(2, -1).indices
        weights = scores.gather(-1, ids)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, also, ids

    result, matched = _verified(function, _random(5, 16))
    assert result.passed and matched["lift_route"] == 0, "the other top-k needs the scores themselves"
    assert result.eager_rel_error_vs_fp64 < 0.05, "the fp64 run computed something else"


# ------------------------------------------------------------------------------------------------ kinds of op


def _factories(x: Tensor) -> tuple[Tensor, ...]:
    """Constants of the default dtype beside values that an fp64 run has widened."""
    frame = torch.zeros(4, 8)
    frame.index_put_((torch.tensor([0, 1]),), torch.ones(2, 8), accumulate=True)
    kernel = torch.ones(4, 1, 3)
    return frame + x, F.conv1d(x[None], kernel, groups=4), torch.addmm(torch.ones(4), x, torch.ones(8, 4))


def _complex(x: Tensor) -> tuple[Tensor, ...]:
    turned = torch.polar(torch.ones(4), torch.arange(4.0)) * torch.view_as_complex(x.view(4, 4, 2))
    return turned, torch.view_as_real(turned), turned @ turned.conj().t(), torch.fft.rfft(x)


def _bits(x: Tensor) -> tuple[Tensor, ...]:
    """The sign bit taken out as an integer; the bytes of a number."""
    return (x.view(torch.int32) & 0x7FFFFFFF).view(torch.float32) * 2, x.view(torch.uint8).float().sum(-1)


def _fp8(x: Tensor) -> tuple[Tensor, ...]:
    narrow = x.to(torch.float8_e4m3fn)
    return narrow, narrow.float() * 2


@pytest.mark.parametrize("finalise", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", [_factories, _complex, _bits, _fp8])
def test_kinds_of_op(function: Callable[..., Any], finalise: str) -> None:
    (report,) = check(function, (_random(4, 8),), options={**ALL, "finalise": finalise})
    assert report.end_to_end is not None and report.end_to_end.passed


def test_complex_inputs() -> None:
    inputs = [_random(*shape).to(torch.complex64) for shape in ((4, 8), (8, 3))]
    result, _ = _verified(lambda x, w: x @ w, *inputs)
    assert result.passed and result.eager_rel_error_vs_fp64 < 1e-5, "the fp64 run computed something else"


def test_bits_mean_what_they_mean_in_the_dtype_of_the_model() -> None:
    x = _random(4, 8)
    captured, inputs = capture_with_inputs(_bits, [x])
    absolute, sums = DecisionInterpreter(captured.module, wide=True).run_on(inputs)
    assert torch.equal(absolute, x.abs().double() * 2)
    assert torch.equal(sums, x.view(torch.uint8).double().sum(-1))


def test_an_op_without_fp64_runs_in_its_own_dtype_and_the_report_says_so() -> None:
    library = torch.library.Library("k3_regression", "DEF")
    library.define("narrow(Tensor x) -> Tensor", tags=torch.Tag.pt2_compliant_tag)

    def narrow(x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("\"narrow\" not implemented for 'Double'")
        return x * 2

    library.impl("narrow", narrow, "CPU")
    library.impl("narrow", torch.empty_like, "Meta")
    (report,) = check(lambda x: torch.ops.k3_regression.narrow(x) + 1, (_random(4, 8),), options=ALL)
    assert report.end_to_end is not None and report.end_to_end.passed
    assert [note for note in report.notes if "narrow" in note and "takes no fp64" in note]


# ------------------------------------------------------------------------------------------------ random numbers


@pytest.mark.parametrize("finalise", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_model_that_draws_random_numbers_is_checked_on_the_same_draws(finalise: str) -> None:
    def function(x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, training=True) + torch.rand(8) + torch.randn_like(x) + torch.randint(0, 5, (8,))

    reports = check(function, (_random(4, 8),), (_random(4, 8),), options={**ALL, "finalise": finalise})
    assert reports[0].end_to_end is not None and reports[0].end_to_end.passed
    assert reports[0].end_to_end.eager_rel_error_vs_fp64 < 1e-6


def test_the_check_leaves_the_generator_where_one_run_leaves_it() -> None:
    x = _random(4, 8)
    compiled = torch.compile(lambda v: v + torch.rand(8), backend=Backend({"finalise": "eager", **ALL}))
    torch._dynamo.reset()
    torch.manual_seed(3)
    with torch.no_grad():
        compiled(x)
    after = torch.rand(3)
    torch.manual_seed(3)
    torch.rand(8)
    assert torch.equal(after, torch.rand(3))


# ------------------------------------------------------------------------------------------------ judging


def test_what_equals_eager_bit_by_bit_passes_though_eager_is_all_noise() -> None:
    def function(x: Tensor) -> Tensor:
        return (x + 1e8) - 1e8 - x

    check(function, (_random(4, 8),), options=ALL)


def test_what_differs_where_eager_is_all_noise_cannot_be_judged() -> None:
    captured, inputs = capture_with_inputs(lambda x: (x + 1e8) - 1e8 - x, [_random(4, 8)])
    run = EndToEndCheck(captured, lambda result: None).wrap(lambda values: (values[0] * 0.5,))
    with pytest.raises(VerificationError, match="output 0 cannot be judged"):
        run(list(inputs))


def test_errors_of_complex_and_of_fp8_numbers() -> None:
    exact = torch.complex(_random(4, 8), _random(8, 4).t()).to(torch.complex128)
    assert measure(exact.to(torch.complex64), exact).rms < 1e-6
    assert measure(exact.conj(), exact).rms > 0.1, "the sign of the imaginary part counts"
    off = exact.clone()
    off[0, 0] += 1j
    assert measure_both(exact, exact, off, exact)[1].worst > 0.5
    narrow = exact.real.to(torch.float8_e4m3fn)
    assert 1e-3 < measure(narrow, exact.real).rms < floor_of(torch.float8_e4m3fn)
    assert floor_of(torch.complex64) == FLOORS[torch.float32] and floor_of(torch.int32) == 0
    assert not acceptable(Error(1e-3, 1e-3), Error(0, 0), torch.complex64)
