"""The kernels of the AttnRes ops as `select` and the emitter see them."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.attn_res_norm import hip_kernel
from k3rewrite.kernels.attn_res_norm.accept import (
    call_parts,
    objection,
    row_count,
    source_count,
    target_objection,
)
from k3rewrite.kernels.attn_res_norm.schedule import (
    MAX_SOURCES,
    Schedule,
    padded,
    schedule_for,
    schedules_of,
    wide_enough,
)
from k3rewrite.kernels.costs import moving_us
from k3rewrite.kernels.dtypes import NAMES, pointer
from k3rewrite.kernels.headers import HEADERS
from k3rewrite.ops.kernel import Kernel, TritonUnit, Unit
from k3rewrite.ops.vocabulary import Op
from k3rewrite.targets import Target

_FOLDER = Path(__file__).parent
_TRITON_SOURCES = (
    *(_FOLDER / name for name in ("triton.py", "schedule.py", "launch.py")),
    _FOLDER.parent / "triton_math.py",
)

TRITON_FLOOR_US, HIP_FLOOR_US = 5.3, 2.8
"""What a launch costs however little it moves: measured on an H200 with one row, inside a CUDA graph. On AMD, where
neither has run, they say that the HIP kernel is preferred."""


def kernels_of(op: Op, run: Callable[..., Any]) -> tuple[Kernel, Kernel]:
    """The Triton and the HIP kernel of one of the four ops; `run` is its function in launch.py."""

    def cost_us(floor: float) -> Callable[[Mapping[str, Any], Target], float]:
        return lambda arguments, target: floor + moving_us(op, arguments, target)

    triton = Kernel(
        name=f"{op.name}.triton",
        op=op.name,
        language="triton",
        accepts=_accepts,
        launch=run,
        units=_units,
        cost_us=cost_us(TRITON_FLOOR_US),
        sources=_TRITON_SOURCES,
    )
    hip = Kernel(
        name=f"{op.name}.hip",
        op=op.name,
        language="hip",
        accepts=hip_kernel.accepts,
        launch=functools.partial(run, mix=hip_kernel.mix_rows_by_call),
        units=_hip_units,
        cost_us=cost_us(HIP_FLOOR_US),
        sources=(hip_kernel.PATH, *HEADERS, _FOLDER / "hip_kernel.py", *_TRITON_SOURCES),
    )
    return triton, hip


def _accepts(arguments: Mapping[str, Any], target: Target) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return target_objection(target) or objection(arguments)


def _units(arguments: Mapping[str, Any], target: Target) -> Sequence[TritonUnit]:
    """One unit for each schedule that the call can get: one for a known number of rows, else all of the table."""
    prefix, blocks = call_parts(arguments)
    count = source_count(prefix, blocks)
    assert count is not None, "accepts has refused a symbolic number of sources"
    call, rows = (count, prefix.shape[-1], prefix.dtype), row_count(prefix)
    if rows is None:
        schedules: Sequence[Schedule] = schedules_of(target.arch, *call)
    else:
        schedules = [schedule_for(target.arch, rows, *call)]
    return [_unit(arguments, target, schedule, count - 1) for schedule in schedules]


def _hip_units(arguments: Mapping[str, Any], target: Target) -> Sequence[Unit]:
    """The HIP unit, and on NVIDIA for a symbolic number of rows the Triton units that take over with many rows."""
    many = target.vendor == "nvidia" and row_count(call_parts(arguments)[0]) is None
    return [*hip_kernel.units(arguments, target), *(_units(arguments, target) if many else [])]


def _unit(arguments: Mapping[str, Any], target: Target, schedule: Schedule, blocks: int) -> TritonUnit:
    from k3rewrite.kernels.attn_res_norm import triton as kernels

    prefix, _ = call_parts(arguments)
    columns, delta = prefix.shape[-1], arguments.get("delta")
    stored = delta is not None or "bank" in arguments
    normed = "norm_weight" in arguments
    nvidia = target.vendor == "nvidia"
    pointers: dict[str, Tensor | torch.dtype | None] = {
        "prefix": prefix,
        "delta": delta,
        "new_prefix_ptr": prefix.dtype if stored else None,
        "score_norm": arguments["score_norm"],
        "score_proj": arguments["score_proj"],
        "norm_weight": arguments.get("norm_weight"),
        "out": arguments["out_dtype"],
    }
    strides: dict[str, bool] = {
        "prefix_stride": True,
        "delta_stride": delta is not None,
        "new_prefix_stride": stored,
        "out_stride": True,
    }
    for i in range(MAX_SOURCES - 1):
        pointers[f"b{i}"] = prefix.dtype if i < blocks else None
        strides[f"r{i}"] = i < blocks
    constants: dict[str, Any] = {
        "BLOCKS": blocks,
        "D": columns,
        "BLOCK": padded(columns),
        "DELTA": delta is not None,
        "STORE": stored,
        "NORM": normed,
        "MIX": NAMES[arguments.get("mix_dtype", torch.float32)],
        "SCALE": NAMES[arguments.get("scale_dtype", torch.float32)],
        "PDL": schedule.dependent_launch and nvidia,
        "PTX": nvidia and wide_enough(columns, schedule),
    }
    if not schedule.resident:
        constants["STAGES"] = schedule.stages
    signature = {"rows": "i32", "score_eps": "fp32", "norm_eps": "fp32"}
    aligned = set()
    for name, value in pointers.items():
        if value is None:
            constants[name] = None
            continue
        signature[name] = pointer(value if isinstance(value, torch.dtype) else value.dtype)
        aligned.add(name)
    for name, present in strides.items():
        if not present:
            constants[name] = None
            continue
        signature[name] = "i32"
        if columns % 16 == 0:
            aligned.add(name)
    signature |= dict.fromkeys(constants, "constexpr")
    options: dict[str, Any] = {"maxnreg": schedule.max_registers} if schedule.max_registers and nvidia else {}
    return TritonUnit(
        function=kernels.attn_res_resident if schedule.resident else kernels.attn_res_streamed,
        signature=signature,
        constants=constants,
        aligned=frozenset(aligned),
        num_warps=schedule.num_warps,
        num_stages=1,
        options=options | ({"launch_pdl": True} if constants["PDL"] else {}),
    )
