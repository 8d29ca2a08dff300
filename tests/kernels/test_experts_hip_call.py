"""Which calls the HIP kernels of the experts take when they are made, and which they hand to Triton's."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from experts_cases import FEWEST, make_case
from test_experts_triton import K3_TP8, QWEN3, call
from torch import Tensor

from k3rewrite.emit import Provenance, emit_unit
from k3rewrite.kernels.experts import (
    KERNELS,
    hip_call,
    hip_kernel,
    hip_mxfp4,
    hip_mxfp4_bulk,
    hip_mxfp4_registers,
    hip_mxfp4_shared,
    launch,
)
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.ops.runs import noting, watching
from k3rewrite.targets import load_target

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
    monkeypatch.setattr(hip_mxfp4, "run", recorded("mxfp4"))
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
    if format == "mxfp4":
        run(**few | {"s_gate": shifted(few["s_gate"])})
        assert ran.pop() == "triton"
    one = arguments(format, 1)
    run(**one | {"x": torch.empty(1, one["x"].shape[1] + 1).bfloat16()[:, :-1]})
    assert ran.pop() == name, "the stride of one row is never gone along"
    with watching() as runs:
        noting(run, "experts", "hip")(*many.values())
        noting(run, "experts", "hip")(*few.values())
    assert {seen.by for seen in runs} == {"triton", "hip"}


def test_one_layout_for_few_results_and_one_for_more() -> None:
    facts = Facts.of(arguments("dense", 1), nvidia=True)
    few, more = hip_kernel.layout_for(facts, 1), hip_kernel.layout_for(facts, 4096)
    assert (few, more) == (hip_kernel.FEW_OUTPUTS, hip_kernel.CHOSEN)
    assert hip_kernel.layout_for(Facts.of(arguments("dense", 1), nvidia=False), 1) == hip_kernel.CHOSEN
    both = {unit.symbol for unit in hip_kernel.both_units(facts, few, 32)}
    assert both == {hip_kernel.GATE_UP, hip_kernel.DOWN}


@pytest.mark.parametrize(
    ("width", "wave", "side_by_side", "lanes"),
    [(384, 32, True, 16), (768, 32, True, 32), (384, 64, True, 16), (384, 32, False, 32), (72, 32, True, 32)],
)
def test_lanes_that_read_a_row_together(width: int, wave: int, side_by_side: bool, lanes: int) -> None:
    assert hip_kernel.Layout(side_by_side=side_by_side).lanes(width, wave) == lanes


LAUNCHED = [
    (hip_kernel, "dense", hip_kernel.PUBLISHED),
    (hip_kernel, "dense", hip_kernel.CHOSEN),
    (hip_mxfp4_registers, "mxfp4", hip_mxfp4_registers.Layout()),
    (hip_mxfp4_bulk, "mxfp4", hip_mxfp4_bulk.Layout()),
    (hip_mxfp4_shared, "mxfp4", hip_mxfp4_shared.Layout()),
]
DECODE = {
    hip_kernel: (hip_kernel.warp_decode, 2),
    hip_mxfp4_registers: (hip_mxfp4_registers.mxfp4_decode, 3),
    hip_mxfp4_bulk: (hip_mxfp4_bulk.mxfp4_bulk, 3),
    hip_mxfp4_shared: (hip_mxfp4_shared.mxfp4_shared, 4),
}
"""how a module is called, and how often it launches"""


@pytest.mark.parametrize(("module", "format", "layout"), LAUNCHED)
def test_what_is_handed_to_a_kernel_is_what_it_declares(
    module: Any, format: str, layout: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Addresses are 64 bits, all other arguments 32: the launcher passes them as they are."""
    target = load_target("h200")
    launched: dict[str, list[Any]] = {}
    emitted: dict[str, Any] = {}

    def loaded(unit: Any) -> Any:
        made = emit_unit(unit, target, tmp_path, "experts", Provenance("experts", "hip"))
        if made.object is None:
            pytest.skip(made.skipped)
        emitted[unit.symbol] = made

        def launch(*, arguments: list[Any], grid: tuple[int, ...], threads: int, **options: Any) -> None:
            launched[unit.symbol] = arguments
            assert min(grid) > 0 and threads == made.resources.threads
            assert options.get("dynamic_lds", 0) == unit.dynamic_lds

        return launch

    monkeypatch.setattr(module, "loaded_function", loaded)
    monkeypatch.setattr(hip_kernel, "load_target", lambda name: target)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    named = arguments(format, 3)
    decode, launches = DECODE[module]
    assert decode(named, Facts.of(named, nvidia=True), layout).shape == (3, SIZES["outer"])
    assert len(launched) == launches
    for symbol, given in launched.items():
        declared = re.findall(rf"\.param \.([a-z]+\d+)[^,)]* {symbol}_param_\d+", emitted[symbol].assembly.read_text())
        bits = ["64" if isinstance(value, Tensor) else "32" for value in given]
        assert [kind[-2:] for kind in declared] == bits, symbol
        assert [kind for kind, value in zip(declared, given, strict=True) if isinstance(value, float)] in (
            [],
            ["f32", "f32"],
        )


def test_how_many_tokens_are_few() -> None:
    """Measured on an H200: where routes of their own and shared reads take the same time."""

    def most(few: hip_call.Few, shape: tuple[int, int, int, int, int], format: str) -> int:
        facts = Facts.of(call(1, shape, format), nvidia=True)
        return max(n for n in range(1, 200) if few.takes(facts, n))

    assert most(hip_kernel.FEW, QWEN3, "dense") == 12
    assert most(hip_kernel.FEW, K3_TP8, "dense") == 23
    assert most(hip_mxfp4.FEW, K3_TP8, "mxfp4") == 89
