"""The meaning of `k3::experts` against the op written apart from it: formats, windows, duplicates, roundings."""

from __future__ import annotations

import math

import pytest
import torch
from experts_cases import ALL_BF16, FEWEST, FP64, MODEL, Case, make_case, relative_error

from k3rewrite.kernels.experts.formats import e2m1_values, e8m0_values
from k3rewrite.models.kimi_k3.mxfp4 import pair_table, scale_table

IN_FP64 = dict.fromkeys(FEWEST, FP64)


def run(case: Case, dtypes: dict[str, torch.dtype], wide: bool = False) -> torch.Tensor:
    arguments = case.arguments(dtypes)
    if wide:
        arguments |= {
            n: v.double() for n, v in arguments.items() if isinstance(v, torch.Tensor) and v.is_floating_point()
        }
    return torch.ops.k3.experts.default(**arguments)


@pytest.mark.parametrize("format", ["dense", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("activation", ["silu", "situ"])
def test_fp64_is_exact(format: str, activation: str) -> None:
    case = make_case(5, 3, 8, 64, 32, 48, format=format, activation=activation, first=4, global_experts=16)
    assert relative_error(run(case, IN_FP64, wide=True), case.exact()) < 1e-13


@pytest.mark.parametrize(("dtypes", "bound"), [(FEWEST, 3e-3), (MODEL, 8e-3), (ALL_BF16, 1.2e-2)])
def test_roundings(dtypes: dict[str, torch.dtype], bound: float) -> None:
    case = make_case(16, 4, 16, 256, 128, 256, activation="silu")
    fewest = relative_error(run(case, FEWEST), case.exact())
    error = relative_error(run(case, dtypes), case.exact())
    assert fewest <= error < bound


def test_what_is_outside_of_the_window_has_no_part() -> None:
    case = make_case(3, 2, 4, 32, 32, 32, first=4, ids=[[4, 5], [-1, 7], [3, 8]])
    case.weights[1, 0] = case.weights[2, 0] = math.nan
    case.weights[2, 1] = math.inf
    result = run(case, FEWEST)
    assert bool((result[2] == 0).all()) and result.isfinite().all()
    assert relative_error(result[:2], case.exact()[:2]) < 3e-3


def test_an_expert_that_stands_twice_counts_twice() -> None:
    once, twice = (make_case(1, n, 4, 32, 32, 32, ids=[[2] * n]) for n in (1, 2))
    twice.x, twice.weights = once.x, once.weights.expand(1, 2)
    assert torch.allclose(run(twice, IN_FP64, wide=True), 2 * run(once, IN_FP64, wide=True))


@pytest.mark.parametrize("dtypes", [FEWEST, MODEL])
def test_no_token(dtypes: dict[str, torch.dtype]) -> None:
    assert run(make_case(0, 3, 8, 64, 32, 48), dtypes).shape == (0, 48)


def test_every_code_of_the_mx_formats() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(e2m1_values(codes, torch.float32).view(256, 2), pair_table(torch.float32))
    assert torch.equal(e8m0_values(codes, torch.float32).nan_to_num(-1), scale_table(torch.float32).nan_to_num(-1))


def test_weights_that_are_one_row_shown_often() -> None:
    case = make_case(3, 2, 4, 32, 16, 32, activation="silu")
    arguments = case.arguments(ALL_BF16)
    shown = {name: arguments[name][:, :1].expand_as(arguments[name]) for name in ("w_gate", "w_up", "w_down")}
    result, copied = (
        torch.ops.k3.experts.default(**arguments | weights)
        for weights in (shown, {name: tensor.contiguous() for name, tensor in shown.items()})
    )
    torch.testing.assert_close(result, copied, rtol=2e-2, atol=2e-2)


def test_no_expert_and_no_slot_give_zeros() -> None:
    arguments = make_case(3, 2, 4, 32, 16, 48).arguments(FEWEST)
    for changes in (
        {name: arguments[name][:0] for name in ("w_gate", "w_up", "w_down")},
        {name: arguments[name][:, :0] for name in ("ids", "weights")},
    ):
        assert torch.equal(torch.ops.k3.experts.default(**arguments | changes), torch.zeros(3, 48).bfloat16())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_arguments_that_mean_nothing_are_refused_by_the_real_and_the_fake_op(device: str) -> None:
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in make_case(3, 2, 4, 32, 16, 48).arguments(FEWEST).items()
    }
    for changes, message in (
        ({"activation": "gelu"}, "activation 'gelu'; known: silu, situ"),
        ({"format": "int4"}, "format 'int4'"),
        ({"format": "mxfp4"}, "missing scales"),
        ({"s_down": arguments["w_down"]}, "format 'dense' with scales"),
        ({"ids": arguments["weights"]}, "ids are torch.float32"),
        ({"weights": arguments["weights"].t()}, r"weights and ids have the shapes \[2, 3\] and \[3, 2\]"),
        ({"w_up": arguments["w_up"][:, :1]}, "w_up and w_gate"),
        ({"w_down": arguments["w_down"][:2]}, "experts of w_down and w_gate"),
    ):
        with pytest.raises(ValueError, match=message):
            torch.ops.k3.experts.default(**arguments | changes)
