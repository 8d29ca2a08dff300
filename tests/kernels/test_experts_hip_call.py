"""Which calls the HIP kernels of the experts take when they are made, and which they hand to Triton's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from experts_cases import FEWEST, make_case
from test_experts_triton import K3_TP8, QWEN3, call
from torch import Tensor

from k3rewrite.kernels.experts import KERNELS, hip_call, hip_kernel, hip_mxfp4, launch
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.ops.runs import noting, watching

SIZES = {"experts": 8, "inner": 256, "width": 128, "outer": 64}
TOP_K = 2


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the implementations that are called; none of them computes."""
    calls: list[str] = []

    def recorded(name: str) -> Any:
        def run(*arguments: Any, **options: Any) -> Tensor:
            calls.append(name)
            return torch.zeros(1)

        return run

    monkeypatch.setattr(launch, "experts", recorded("triton"))
    monkeypatch.setattr(hip_kernel, "warp_decode", recorded("hip"))
    monkeypatch.setattr(hip_mxfp4, "mxfp4_decode", recorded("mxfp4"))
    return calls


def arguments(format: str, tokens: int) -> dict[str, Any]:
    return make_case(tokens, TOP_K, **SIZES, format=format).arguments(FEWEST)


def shifted(tensor: Tensor) -> Tensor:
    """The same numbers at an address that is no multiple of 16 bytes."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return room[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize(("format", "kernel", "name"), [("dense", 1, "hip"), ("mxfp4", 2, "mxfp4")])
def test_few_many_none_and_odd_addresses(format: str, kernel: int, name: str, ran: list[str]) -> None:
    run = KERNELS[kernel].launch
    few, many = arguments(format, 2), arguments(format, 40)
    for made, expected in (
        (few, name),
        (many, "triton"),
        (arguments(format, 0), "triton"),
        (few | {"x": shifted(few["x"])}, "triton"),
        (few | {"w_down": shifted(few["w_down"])}, "triton"),
        (few | {"x": few["x"].t().contiguous().t()}, "triton"),
    ):
        run(**made)
        assert ran.pop() == expected
    with watching() as runs:
        noting(run, "experts", "hip")(*many.values())
        noting(run, "experts", "hip")(*few.values())
    assert {seen.by for seen in runs} == {"triton", "hip"}


def test_one_layout_for_few_results_and_one_for_more() -> None:
    facts = Facts.of(arguments("dense", 1), nvidia=True)
    few, more = hip_kernel.layout_for(facts, 1), hip_kernel.layout_for(facts, 4096)
    assert (few, more) == (hip_kernel.FEW_OUTPUTS, hip_kernel.CHOSEN)
    assert hip_kernel.layout_for(Facts.of(arguments("dense", 1), nvidia=False), 1) == hip_kernel.CHOSEN
    both = {unit.symbol for unit in hip_kernel.both_units(facts, torch.int64, few, 32)}
    assert both == {hip_kernel.GATE_UP, hip_kernel.DOWN}


@pytest.mark.parametrize(
    ("width", "wave", "side_by_side", "lanes"),
    [(384, 32, True, 16), (768, 32, True, 32), (384, 64, True, 16), (384, 32, False, 32), (72, 32, True, 32)],
)
def test_lanes_that_read_a_row_together(width: int, wave: int, side_by_side: bool, lanes: int) -> None:
    assert hip_kernel.Layout(side_by_side=side_by_side).lanes(width, wave) == lanes


def test_what_is_fetched_ahead() -> None:
    assert hip_call.ahead(0, 768, 16, 48) == (48, 0)
    first, rows = hip_call.ahead(8 << 20, 768, 16, 48)
    assert 0 <= first < 48 and 16 * (48 - first) * rows * 768 <= 8 << 20 and rows > 0
    assert hip_call.ahead(1000, 768, 16, 48) == (48, 0), "less than a row for each workgroup"
    assert hip_call.ahead(8 << 20, 768, 0, 48)[1] > 0, "no routes: nothing is launched, and nothing is divided by zero"


def test_how_many_tokens_are_few() -> None:
    """Measured on an H200: where routes of their own and shared reads take the same time."""

    def most(few: hip_call.Few, shape: tuple[int, int, int, int, int], format: str) -> int:
        facts = Facts.of(call(1, shape, format), nvidia=True)
        return max(n for n in range(1, 200) if few.takes(facts, n))

    assert most(hip_kernel.FEW, QWEN3, "dense") == 12
    assert most(hip_kernel.FEW, K3_TP8, "dense") == 23
    assert most(hip_mxfp4.FEW, K3_TP8, "mxfp4") == 89
