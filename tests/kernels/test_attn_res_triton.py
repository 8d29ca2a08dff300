"""The Triton kernels without a GPU: in the interpreter against fp64, and compiled ahead of time within budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interpreting import results_of

from k3rewrite.emit import Provenance, emit_unit
from k3rewrite.kernels.attn_res.kernel import KERNELS as MIX_KERNELS
from k3rewrite.kernels.attn_res_norm import KERNELS
from k3rewrite.kernels.attn_res_norm.schedule import Schedule, padded, schedule_for, schedules_of
from k3rewrite.ops.kernel import Kernel
from k3rewrite.targets import load_target

pytest.importorskip("triton")
GPU_TARGETS = ("mi355x", "mi325x", "h200", "b200")
BY_NAME: dict[str, Kernel] = {kernel.name: kernel for kernel in (*KERNELS, *MIX_KERNELS)}
NARROW = {"torch.bfloat16": 1e-2, "torch.float16": 8e-4, "torch.float32": 1e-6}
"""bounds of the interpreter's error: one rounding of the prefix and one of the result, which it cuts off in bf16"""


@pytest.fixture(scope="module")
def interpreted() -> list[dict[str, Any]]:
    results = results_of("attn_res_interpreted.py")
    assert len(results) == 27
    return results


def test_interpreted_results_are_near_fp64(interpreted: list[dict[str, Any]]) -> None:
    for result in interpreted:
        assert max(result["errors"]) <= NARROW[result["dtype"]], result["name"]


def test_interpreted_prefix_is_rounded_once(interpreted: list[dict[str, Any]]) -> None:
    for result in interpreted:
        assert result["prefix_equal"] or (result["dtype"] == "torch.bfloat16" and result["prefix_close"] <= 2**-5)


def test_interpreted_calls_write_only_what_they_should(interpreted: list[dict[str, Any]]) -> None:
    for result in interpreted:
        assert result["inputs_kept"] and result["others_kept"] and result["in_place_same"], result["name"]


def call(rows: int, blocks: int, dtype: torch.dtype = torch.bfloat16, columns: int = 7168) -> dict[str, Any]:
    """Arguments of add_attn_res_norm for K3's widths, without memory."""
    with torch.device("meta"):
        return {
            "prefix": torch.empty(rows, columns, dtype=dtype),
            "delta": torch.empty(rows, columns, dtype=dtype),
            "blocks": [torch.empty(rows, 8, columns, dtype=dtype)[:, :blocks]],
            "score_norm": torch.empty(columns, dtype=dtype),
            "score_proj": torch.empty(1, columns, dtype=dtype),
            "score_eps": 1e-5,
            "norm_weight": torch.empty(columns, dtype=dtype),
            "norm_eps": 1e-5,
            "compute_dtype": torch.float32,
            "mix_dtype": torch.float32,
            "scale_dtype": torch.float32,
            "out_dtype": dtype,
        }


def emitted(kernel: str, arguments: dict[str, Any], target: str, folder: Path) -> list[Any]:
    chosen, goal = BY_NAME[kernel], load_target(target)
    assert chosen.accepts(arguments, goal) is None
    provenance = Provenance(chosen.op, chosen.name)
    return [emit_unit(unit, goal, folder, chosen.op, provenance) for unit in chosen.units(arguments, goal)]


@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize(("rows", "blocks"), [(64, 8), (64, 0), (4096, 8)])
def test_compiles_without_spills_within_the_lds(target: str, rows: int, blocks: int, tmp_path: Path) -> None:
    (kernel,) = emitted("add_attn_res_norm.triton", call(rows, blocks), target, tmp_path)
    resources = kernel.resources
    assert (resources.spills, resources.scratch_bytes) == (0, 0)
    assert resources.lds_bytes <= load_target(target).lds_bytes_per_workgroup // 2
    assert resources.occupancy.workgroups_per_cu >= (1 if rows == 64 else 2)
    assert kernel.symbol == ("attn_res_resident" if rows == 64 and blocks * 8 < 8 * 9 else "attn_res_streamed") or (
        target == "b200"
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", GPU_TARGETS)
@pytest.mark.parametrize(("dtype", "odd"), [(torch.bfloat16, None), (torch.float16, 0), (torch.float32, 1)])
def test_every_number_of_blocks_compiles_without_spills(
    target: str, dtype: torch.dtype, odd: int | None, tmp_path: Path
) -> None:
    """Of fp16 and fp32 half of the numbers on each target, all of them on the two targets of a vendor, and the most."""
    taken = [n for n in range(9) if odd is None or n == 8 or n % 2 == (odd + GPU_TARGETS.index(target)) % 2]
    for rows in (64, 4096):
        for blocks in taken:
            for kernel in emitted("add_attn_res_norm.triton", call(rows, blocks, dtype), target, tmp_path):
                assert (kernel.resources.spills, kernel.resources.scratch_bytes) == (0, 0), (rows, blocks)


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_sixteen_byte_loads(target: str, tmp_path: Path) -> None:
    """Every load of sources and weights is 16 bytes wide a lane: the assembly has no narrower ones."""
    (kernel,) = emitted("add_attn_res_norm.triton", call(64, 7), target, tmp_path)
    text = kernel.assembly.read_text()
    if target.startswith("mi"):
        wide, narrow = text.count("global_load_dwordx4"), text.count("global_load_dword ") + text.count("_load_ushort")
        wide += text.count("buffer_load_dwordx4")
    else:
        loads = [line for line in text.splitlines() if "ld.global" in line]
        wide, narrow = sum(".v4." in line for line in loads), sum(".v4." not in line for line in loads)
    assert wide >= 9 * 2 and narrow == 0


def test_a_symbolic_batch_compiles_every_schedule() -> None:
    assert len(schedules_of("sm_90", 9, 7168, torch.bfloat16)) == 2
    assert {schedule.resident for schedule in schedules_of("sm_90", 9, 7168, torch.bfloat16)} == {True, False}
    assert schedules_of("sm_90", 9, 7168, torch.float32) == (schedule_for("sm_90", 1, 9, 7168, torch.float32),)


def test_schedules_by_rows_width_and_dtype() -> None:
    few, many = (schedule_for("sm_90", rows, 9, 7168, torch.bfloat16) for rows in (132, 133))
    assert few.resident and not many.resident
    assert not schedule_for("sm_90", 1, 10, 7168, torch.bfloat16).resident  # 10 sources do not fit in registers
    assert not schedule_for("sm_90", 1, 9, 7168, torch.float16).resident
    assert schedule_for("sm_90", 1, 9, 64, torch.bfloat16).num_warps == 1  # 64 elements: one warp is plenty
    assert not schedule_for("sm_75", 1, 9, 7168, torch.bfloat16).dependent_launch
    assert [padded(n) for n in (1, 2, 3, 7168, 8192)] == [1, 2, 4, 8192, 8192]
    assert isinstance(few, Schedule)
