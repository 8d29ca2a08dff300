"""The Triton kernels of k3::kda_chunk without a GPU: interpreted against fp64, compiled for every target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreting import results_of
from kda_chunk_cases import BY_TOKEN, make_call

from k3rewrite.emit import Provenance, emit_unit
from k3rewrite.kernels.kda_chunk.kernel import KERNELS, plan_of
from k3rewrite.kernels.kda_chunk.launch import kda_chunk
from k3rewrite.kernels.kda_chunk.plan import Plan, groups_for, plan_for
from k3rewrite.kernels.kda_chunk.units import units_of
from k3rewrite.targets import load_target

pytest.importorskip("triton")
from k3rewrite.kernels.kda_chunk import triton_prologue, triton_scan

KERNEL = KERNELS[0]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = results_of("kda_chunk_interpreted.py", timeout=600)
    assert len(results) == 24
    return results


def test_near_fp64(interpreted: dict[str, dict[str, Any]]) -> None:
    for name, found in interpreted.items():
        if name not in ("prefixes", "far"):
            assert found["out"] <= (5e-3 if name == "bf16 out" else 1e-6) and found["state"] <= 1e-6, name


def test_nothing_else_is_touched(interpreted: dict[str, dict[str, Any]]) -> None:
    for name, found in interpreted.items():
        if name not in ("prefixes", "far"):
            assert (found["dead"], found["untouched"]) == (0, 0) and found["inputs_kept"], name
            assert found.get("in_place_same", True), name
    assert {name for name, found in interpreted.items() if "in_place_same" in found} == {
        "tokens one by one", "checkpoints",
    }  # fmt: skip


def test_later_gates_and_keys_leave_earlier_outputs_bit_equal(interpreted: dict[str, dict[str, Any]]) -> None:
    assert interpreted["prefixes"] == {f"{t}": True for t in (20, 47, 64, 80)}


def test_offsets_into_the_pool_have_64_bits(interpreted: dict[str, dict[str, Any]]) -> None:
    """Row 100 of the fault kinds: a slot or a head that begins behind 2^31 elements."""
    assert interpreted["far"] == {"slots": True, "heads": True}


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1 << 23), (70_000, 2)])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_grids_of_millions_of_tokens(
    rows: int, tokens: int, groups: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 36 of the fault kinds: only the first number of a grid may be more than 65,535."""
    grids: list[tuple[int, ...]] = []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *arguments, **options: None

    monkeypatch.setattr(triton_prologue, "kda_chunk_prologue", Launched())
    for name in ("groups", "order", "scan"):
        monkeypatch.setattr(triton_scan, f"kda_chunk_{name}", Launched())
    call = make_call([2], 12, 128, packed=packed)
    call = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    for name in BY_TOKEN:
        shape = (1, rows * tokens) if packed else (rows, tokens)
        call[name] = torch.empty(*shape, *call[name].shape[2:], dtype=torch.bfloat16, device="meta")
    name = "offsets" if packed else "lengths"
    call[name] = torch.empty(rows + packed, dtype=torch.int32, device="meta")
    call["state"] = torch.empty(rows, 12, 128, 128, device="meta")
    kda_chunk(**call, plan=Plan(groups=groups))
    assert len(grids) == (2 if groups == 1 else 4)
    chunks = rows * tokens // 64 + rows if packed else rows * -(-tokens // 64)
    assert grids[0] == (12 * chunks,) and grids[-1] == (2 * 12 * rows * groups,)
    assert all(len(grid) == 1 and grid[0] < 1 << 31 for grid in grids)


REGISTERS = {"nvidia": 255, "amd": 512}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["mi355x", "mi325x", "h200", "b200"])
def test_compiled_for_every_target(target: str, tmp_path: Path) -> None:
    """One call with groups, so that all four functions are compiled: registers, spills and LDS."""
    goal = load_target(target)
    call = make_call([1024], 12, 128, slots=[1])
    call = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    assert KERNEL.accepts(call, goal) is None
    plan = replace(plan_of(call, goal), groups=4)
    for unit in units_of(call, plan):
        made = emit_unit(unit, goal, tmp_path, unit.symbol, Provenance("kda_chunk", KERNEL.name))
        if made.object is None:
            pytest.skip(made.skipped)
        found = made.resources
        assert found is not None, unit.symbol
        bounded = "maxnreg" in unit.options  # two programs of the prologue an SM, and spills in the L1
        assert found.spills <= (200 if bounded else 0), (unit.symbol, found)
        assert not bounded or (found.occupancy is not None and found.occupancy.workgroups_per_cu == 2), found
        assert found.registers <= REGISTERS[goal.vendor] and found.lds_bytes <= goal.lds_bytes_per_workgroup, (
            unit.symbol
        )


def test_groups_only_where_compute_units_would_be_idle() -> None:
    assert groups_for(24, 64, 132) == 5  # 12 heads in two tiles, 4K tokens: 120 of 132
    assert groups_for(24, 256, 132) == 5
    assert groups_for(24, 17, 132) == 4 and groups_for(24, 15, 132) == 1  # at least 4 chunks each, or none
    assert groups_for(34, 256, 132) == 1 and groups_for(33, 256, 132) == 4  # none if fewer than 4
    assert groups_for(96, 1024, 132) == 1  # four sequences
    assert groups_for(1, 1024, 256) == 32 and groups_for(1, 100, 256) == 25  # at most 32
    assert groups_for(0, 0, 132) == 1
    assert [plan_for(1, 12, 128, 128, 64, arch, units).groups for arch, units in (("sm_90", 132), ("gfx950", 256))] == [
        5,
        10,
    ]
    assert plan_for(1, 12, 128, 128, 64, "sm_90", 132).ptx and not plan_for(1, 12, 128, 128, 64, "gfx950", 256).ptx
    assert isinstance(plan_for(0, 12, 32, 32, 0, "cpu", 1), Plan)
    for keys, values, tile in ((32, 32, 32), (32, 128, 32), (128, 32, 32), (64, 128, 64), (128, 128, 64)):
        assert plan_for(1, 12, keys, values, 64, "sm_90", 132).tile == tile


@pytest.mark.parametrize(
    ("rows", "tokens", "measured"), [(1, 4096, 175.1), (1, 16384, 614.5), (4, 4096, 558.1), (4, 16384, 2145.0)]
)
def test_the_cost_is_near_what_was_measured(rows: int, tokens: int, measured: float) -> None:
    """On an H200 (docs/results.md)."""
    call = make_call([64] * rows, 12, 128, slots=[*range(1, rows + 1)])
    for name in ("q", "k", "v", "f", "b"):
        call[name] = torch.empty(rows, tokens, *call[name].shape[2:], dtype=torch.bfloat16, device="meta")
    assert KERNEL.cost_us(call, load_target("h200")) == pytest.approx(measured, rel=0.08)


def test_what_it_does_not_take() -> None:
    h200, call = load_target("h200"), make_call([70, 3], 2, 32, slots=[1, 2])
    assert KERNEL.accepts(call, h200) is None and KERNEL.cost_us(call, h200) > 0
    assert KERNEL.accepts(call, load_target("cpu")) == "target cpu runs the reference"
    for change, reason in (
        ({"state": call["state"].double()}, "state is float64"),
        ({"a_log": None}, "one of a_log and dt_bias is missing"),
        ({"state": torch.zeros(4, 2, 24, 32)}, "heads of 24 values and 32 keys"),
        ({"state": call["state"].transpose(2, 3)}, "not contiguous"),
        ({"state": torch.zeros(4, 2, 32, 64)[..., :32]}, "does not lie in one piece"),
        ({"slots": call["slots"].to(torch.int16)}, "slots is int16"),
        (
            {"q": call["q"].transpose(1, 2).contiguous().transpose(1, 2)},
            "heads of a token of q do not lie side by side",
        ),
        ({"out_dtype": torch.float64}, "out_dtype is float64"),
        ({"checkpoints": torch.zeros(2, 4, dtype=torch.int32)[:, :1]}, "checkpoints do not lie in one piece"),
    ):
        assert reason in str(KERNEL.accepts(call | change, h200)), change
