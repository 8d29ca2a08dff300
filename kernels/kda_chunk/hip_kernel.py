"""The prologue of `k3::kda_chunk` in HIP C++ for gfx950 (`hip/kda_chunk_prologue.hip`); Triton's scan comes after it.

Written for CDNA 4: bf16 products of 16x16x32, fp32 products of 16x16x4, waves of 64, 160 KiB of LDS a compute unit. It
was compiled and run on an emulator of those, and on no GPU. Other targets have Triton's prologue.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.devices import loaded_function
from k3rewrite.kernels.dtypes import text
from k3rewrite.kernels.kda_chunk import launch
from k3rewrite.kernels.kda_chunk.launch import INPUTS, Between, numbers_of, shape_of
from k3rewrite.kernels.kda_chunk.plan import Plan
from k3rewrite.ops.kernel import HipUnit
from k3rewrite.ops.runs import hand_over
from k3rewrite.targets import Target, lds_use

FOLDER = Path(__file__).parent / "hip"
PATH = FOLDER / "kda_chunk_prologue.hip"
SYMBOL, ARCH = "kda_chunk_prologue", "gfx950"
SIZE, THREADS = 128, 256
LDS_BYTES = 35_584
"""of a workgroup"""
WORKGROUPS = 2
"""of a compute unit: what the registers allow"""
_ROWS = ("q", "k", "v", "f")
"""read by 16 bytes"""


def objection(arguments: Mapping[str, Any], target: Target) -> str | None:
    """None, or why a call that Triton's kernels take is not this one's."""
    if target.arch != ARCH:
        return f"the matrix instructions and the 160 KiB of LDS are {ARCH}'s; {target.arch} has Triton's prologue"
    if lds_use(target, LDS_BYTES).workgroups_per_cu < WORKGROUPS:
        return f"{WORKGROUPS} workgroups of {LDS_BYTES:,} bytes of LDS do not fit a compute unit of {target.name}"
    for name in INPUTS:
        if (dtype := arguments[name].dtype) != torch.bfloat16:
            return f"{name} is {text(dtype)}; bfloat16 is read"
    values, keys = arguments["state"].shape[2:]
    if (values, keys) != (SIZE, SIZE):
        return f"heads of {values} values and {keys} keys; {SIZE} of each are taken"
    for name in _ROWS:
        steps = (*arguments[name].stride()[:2], arguments[name].storage_offset())  # symbols: looked at in the call
        if any(isinstance(step, int) and step % 8 for step in steps):
            return f"tokens of {name} do not begin at multiples of 16 bytes"
    return None


def unit(arguments: Mapping[str, Any]) -> HipUnit:
    """What to compile for a call."""

    def bits(name: str) -> int:
        return 0 if arguments[name] is None else arguments[name].dtype.itemsize * 8

    values = {
        "HEADS": arguments["q"].shape[2],
        "RAW": int(arguments["a_log"] is not None),
        "NORMED": int(arguments["l2_eps"] is None),
        "SLOTS": bits("slots"),
        "LENGTHS": bits("lengths"),
        "OFFSETS": bits("offsets"),
        "NULL": int(arguments["null_slot"] and arguments["slots"] is not None),
    }
    return HipUnit(PATH, SYMBOL, {f"KDA_{name}": str(value) for name, value in values.items()})


def prologue(arguments: dict[str, Any], between: Between, plan: Plan) -> None:
    """As `launch.launch_prologue`; by that one for addresses that are no multiple of 16 and strides beyond 32 bits."""
    shape, packed = shape_of(arguments), arguments["offsets"] is not None
    strides = [0 if packed else arguments[name].stride(0) for name in INPUTS]  # one line has no second batch
    strides += [arguments[name].stride(1) for name in INPUTS]
    odd = [arguments[name].data_ptr() % 16 for name in (*_ROWS, "dt_bias") if arguments[name] is not None]
    odd += [step % 8 for name in _ROWS for step in arguments[name].stride()[packed:2]]
    if any(odd) or max(strides) >= 1 << 31:
        hand_over("triton")
        launch.launch_prologue(arguments, between, plan)
        return
    wanted, q = unit(arguments), arguments["q"]

    def given(name: str) -> Tensor:
        """Anything, where nothing is read."""
        return q if arguments[name] is None else arguments[name]

    _function(tuple(wanted.defines.items()), q.device)(
        grid=(q.shape[2] * shape["numbers"],),
        threads=THREADS,
        arguments=[
            *(given(name) for name in (*INPUTS, "a_log", "dt_bias", "slots", "lengths", "offsets")), *between.results,
            *strides, shape["rows"], shape["tokens"], shape["chunks"], *numbers_of(arguments),
        ],
    )  # fmt: skip


def kda_chunk(*arguments: Any, in_place: bool = False, plan: Plan | None = None) -> tuple[Tensor, Tensor] | Tensor:
    """As `launch.kda_chunk`, with this prologue."""
    return launch.kda_chunk(*arguments, in_place=in_place, plan=plan, prologue=prologue)


@cache
def _function(defines: tuple[tuple[str, str], ...], device: torch.device) -> Any:
    """The kernel for these sizes, compiled and loaded on `device`, the current one."""
    return loaded_function(HipUnit(PATH, SYMBOL, dict(defines)))
