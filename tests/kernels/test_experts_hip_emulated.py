"""The experts' HIP kernels on the CPU against fp64: every layout, ragged sizes, windows, poisoned outputs."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from experts_cases import ALL_BF16, FEWEST, MODEL, Case, make_case, relative_error
from hip_emulation import COMPILER, emulated

from k3rewrite.kernels.experts import hip_kernel
from k3rewrite.kernels.experts.mxfp4 import bulk, choose, launching, registers, shared
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.targets import load_target

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

BOUND = {"fewest": 3e-3, "model": 8e-3, "bf16": 1.2e-2}
MODES = {"fewest": FEWEST, "model": MODEL, "bf16": ALL_BF16}
DECODE = {hip_kernel: hip_kernel.warp_decode, choose: lambda named, facts, layout: layout.run(named, facts)}
DENSE = {"experts": 5, "inner": 320, "width": 72, "outer": 37}
PACKED = {"experts": 5, "inner": 512, "width": 128, "outer": 96}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, compiled: Path) -> Any:
    """`on_cpu(target)` lets the launches run in the emulator, with new memory full of NaN."""

    def use(target: str) -> None:
        goal = load_target(target)
        for module in (hip_kernel, launching):
            monkeypatch.setattr(module, "loaded_function", lambda unit: emulated(unit, compiled, goal.wave_size))
        forget()
        monkeypatch.setattr(hip_kernel, "load_target", lambda name: goal)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned)

    def forget() -> None:
        hip_kernel._functions.cache_clear()
        launching.launches.cache_clear()

    yield use
    forget()


def _poisoned(self: torch.Tensor, size: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    made = torch.empty(size, dtype=dtype or self.dtype)
    return made.fill_(math.nan if made.is_floating_point() else 255)


def window(last: int = 4, **settings: Any) -> Case:
    case = make_case(2, 3, **settings, ids=[[1, 1, -1], [7, last, 99]], activation="silu")
    case.weights = case.weights.bfloat16()
    return case


def meeting() -> Case:
    """Expert 4: 13 routes and those of t % 5 == 4."""
    return make_case(13, 3, **PACKED, ids=[[t % 5, 4, 1 if t < 5 else 3] for t in range(13)], format="mxfp4")


def meeting_window() -> Case:
    case = window(last=1, **PACKED, format="mxfp4")
    case.ids = case.ids.int()
    return case


CASES: dict[str, Callable[[], Case]] = {
    "dense": lambda: make_case(3, 3, **DENSE),
    "dense window": lambda: window(**DENSE, pad=8),
    "mxfp4": lambda: make_case(2, 3, **PACKED, format="mxfp4"),
    "mxfp4 window": lambda: window(**PACKED, format="mxfp4"),
    "meeting": meeting,
    "meeting window": meeting_window,
}


@functools.cache
def known(name: str) -> tuple[Case, torch.Tensor]:
    """A case of several layouts, and its result."""
    case = CASES[name]()
    return case, case.exact()


def check(module: Any, what: Case | str, layout: Any, mode: str, target: str) -> None:
    case, exact = known(what) if isinstance(what, str) else (what, what.exact())
    named = case.arguments(MODES[mode])
    result = DECODE[module](named, Facts.of(named, nvidia=load_target(target).vendor == "nvidia"), layout)
    assert relative_error(result, exact) <= BOUND[mode]


WARP_DECODE = {
    "published": hip_kernel.PUBLISHED,
    "chosen": hip_kernel.CHOSEN,
    "few outputs": hip_kernel.FEW_OUTPUTS,
    "two rows": hip_kernel.Layout(4, 2, 4, 2, 2, 2, side_by_side=True),
}


@pytest.mark.parametrize("target", ["h200", "mi355x"])
@pytest.mark.parametrize("layout", list(WARP_DECODE))
def test_warp_decode(target: str, layout: str, on_cpu: Any) -> None:
    on_cpu(target)
    check(hip_kernel, "dense", WARP_DECODE[layout], "fewest", target)
    check(hip_kernel, "dense window", WARP_DECODE[layout], "bf16", target)


def test_warp_decode_of_a_window_with_the_models_roundings(on_cpu: Any) -> None:
    on_cpu("h200")
    case = make_case(2, 5, experts=6, inner=256, width=128, outer=48, first=2, global_experts=9)
    check(hip_kernel, case, hip_kernel.CHOSEN, "model", "h200")


MXFP4 = {
    "registers": registers.Layout(),
    "registers, two tiles": registers.Layout(4, down_waves=2, tiles=2, group=1),
    "registers, three tiles": registers.Layout(12, down_waves=4, tiles=3, group=3),
    "bulk": bulk.Layout(),
    "bulk, short rings": bulk.Layout(3, gate_up_ring=1, down_waves=2, down_ring=1, tiles=1),
    "bulk, long rings": bulk.Layout(4, gate_up_ring=4, down_waves=2, down_ring=2, tiles=3),
}


@pytest.mark.parametrize("layout", list(MXFP4))
def test_mxfp4(layout: str, on_cpu: Any) -> None:
    on_cpu("h200")
    check(choose, "mxfp4", MXFP4[layout], "fewest", "h200")
    check(choose, "mxfp4 window", MXFP4[layout], "bf16", "h200")


@pytest.mark.parametrize("layout", ["registers", "bulk"])
def test_mxfp4_of_a_window_with_the_models_roundings(layout: str, on_cpu: Any) -> None:
    on_cpu("h200")
    case = make_case(1, 5, experts=6, inner=768, width=256, outer=96, first=2, global_experts=9, format="mxfp4")
    check(choose, case, MXFP4[layout], "model", "h200")


@pytest.mark.parametrize("layout", ["registers", "bulk"])
def test_mxfp4_rows_with_zeros_and_with_what_is_no_number(layout: str, on_cpu: Any) -> None:
    on_cpu("h200")
    case = make_case(4, 2, **PACKED, format="mxfp4")
    clean, facts = case.arguments(FEWEST), Facts.of(case.arguments(FEWEST), nvidia=True)
    first = MXFP4[layout].run(clean, facts)
    case.x[1] = 0
    case.x[2, 3], case.x[3, 7] = math.nan, math.inf
    second = MXFP4[layout].run(case.arguments(FEWEST), facts)
    assert bool((second[1] == 0).all()) and not bool(second[2:].isfinite().any())
    assert torch.equal(second[0], first[0])


def test_activations_of_very_different_sizes(on_cpu: Any) -> None:
    """Each group of 32 has a unit of its own: what is small in one does not vanish beside what is large in another."""
    on_cpu("h200")
    case = make_case(2, 2, **PACKED, format="mxfp4")
    case.x *= torch.logspace(-6, 6, PACKED["inner"]).bfloat16()
    case.x[:, -64:] = 0
    check(choose, case, MXFP4["bulk"], "fewest", "h200")


SHARED = {
    "two": shared.Layout(2, gate_up_waves=4, gate_up_ring=1, down_waves=2, down_ring=1, shares=1),
    "four": shared.Layout(),
    "eight": shared.Layout(8, gate_up_waves=12, gate_up_ring=3, down_waves=3, down_ring=4, shares=5),
}


@pytest.mark.parametrize("layout", list(SHARED))
def test_mxfp4_of_tokens_that_meet(layout: str, on_cpu: Any) -> None:
    """More routes of an expert than work together, fewer, one, none; also as int32, and across 32 of them."""
    on_cpu("h200")
    check(choose, "meeting", SHARED[layout], "fewest", "h200")
    check(choose, "meeting window", SHARED[layout], "bf16", "h200")


def test_mxfp4_of_tokens_that_meet_in_a_window_with_the_models_roundings(on_cpu: Any) -> None:
    on_cpu("h200")
    case = make_case(6, 5, experts=6, inner=768, width=256, outer=96, first=2, global_experts=9, format="mxfp4")
    check(choose, case, SHARED["four"], "model", "h200")


def test_a_token_gets_the_same_result_among_others(on_cpu: Any) -> None:
    """The routes that share a read do not touch each other: bit for bit, with numbers that are none beside them."""
    on_cpu("h200")
    case = make_case(6, 2, **PACKED, ids=[[0, 1]] * 4 + [[2, 0], [1, 0]], format="mxfp4")
    case.x[1], case.x[2, 7] = 0, math.nan
    named = case.arguments(FEWEST)
    facts = Facts.of(named, nvidia=True)
    together = SHARED["four"].run(named, facts)
    for t in range(6):
        alone = named | {name: named[name][t : t + 1] for name in ("x", "ids", "weights")}
        result = SHARED["four"].run(alone, facts)
        assert torch.equal(result.nan_to_num(7.0), together[t : t + 1].nan_to_num(7.0))
    assert bool((together[1] == 0).all()) and bool(together[2].isnan().all())
