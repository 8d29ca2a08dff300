"""The kernels of `k3::kda_chunk` as `select` and the emitter see them: Triton, and for gfx950 a prologue in HIP C++."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from k3rewrite.graph.shapes import same_size
from k3rewrite.kernels.costs import moving_us
from k3rewrite.kernels.dtypes import NAMES, text
from k3rewrite.kernels.headers import HEADERS
from k3rewrite.kernels.kda_chunk import hip_kernel
from k3rewrite.kernels.kda_chunk.launch import INPUTS, kda_chunk, shape_of
from k3rewrite.kernels.kda_chunk.op import OP
from k3rewrite.kernels.kda_chunk.plan import Plan, plan_for
from k3rewrite.kernels.kda_chunk.units import units_of
from k3rewrite.ops.kernel import Kernel, TritonUnit, Unit
from k3rewrite.targets import Target

SIZES = (32, 64, 128)
"""keys and values of a head"""
LAUNCH_US, PROLOGUE_US, CHUNK_US, GROUP_US = 1.0, 19.5, 1.5, 1.75
"""Of each launch; of a chunk of a head in the prologue, for one compute unit; of a chunk in the scan, which takes them
in order; of a group in what puts groups in order. Measured on an H200 with 128 keys and values (docs/results.md):
within 8 % of all four calls that were timed. Other targets take these for want of their own."""
_NARROW = ("q", "k", "v", "f", "b")
_WIDE = ("a_log", "dt_bias", "state")
_WHOLE = ("slots", "lengths", "offsets", "checkpoints")
_FOLDER = Path(__file__).parent


def accepts(arguments: Mapping[str, Any], target: Target) -> str | None:
    """None, or why the Triton kernel does not take the call."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not target.is_gpu:
        return f"target {target.name} runs the reference"
    return _dtype_objection(arguments) or _shape_objection(arguments)


def _dtype_objection(arguments: Mapping[str, Any]) -> str | None:
    for names, dtypes in (
        (_NARROW, (torch.bfloat16, torch.float16, torch.float32)),
        (_WIDE, (torch.float32,)),
        (_WHOLE, (torch.int32, torch.int64)),
        (("fresh",), (torch.bool,)),
    ):
        for name in names:
            tensor = arguments[name]
            if tensor is not None and tensor.dtype not in dtypes:
                return f"{name} is {text(tensor.dtype)}"
            if tensor is not None and not same_size(tensor.stride(-1), 1) and not same_size(tensor.shape[-1], 1):
                return f"{name} is not contiguous in its last dimension (stride {tensor.stride(-1)})"
    if (arguments["a_log"] is None) != (arguments["dt_bias"] is None):
        return "one of a_log and dt_bias is missing"
    return None if arguments["out_dtype"] in NAMES else f"out_dtype is {text(arguments['out_dtype'])}"


def _shape_objection(arguments: Mapping[str, Any]) -> str | None:
    state, checkpoints = arguments["state"], arguments["checkpoints"]
    heads, values, keys = state.shape[1:]
    if not all(isinstance(n, int) for n in (heads, values, keys)):
        return "heads or their sizes are symbolic"
    if keys not in SIZES or values not in SIZES:
        return f"heads of {values} values and {keys} keys; {', '.join(map(str, SIZES))} of each are taken"
    if not same_size(state.stride(2), keys):
        return "the state of a head does not lie in one piece"
    for name in INPUTS:
        tensor = arguments[name]
        width = 1 if name == "b" else tensor.shape[3]
        if not same_size(tensor.stride(2), width) or not isinstance(tensor.stride(1), int):
            return f"the heads of a token of {name} do not lie side by side, or tokens lie a symbol apart"
    if checkpoints is not None and not same_size(checkpoints.stride(0), checkpoints.shape[1]):
        return "checkpoints do not lie in one piece"
    return None


def plan_of(arguments: Mapping[str, Any], target: Target) -> Plan:
    """The plan of a call; a symbolic number of rows or tokens counts as one row of many."""
    state, shape = arguments["state"], shape_of(dict(arguments))
    rows, chunks = (n if isinstance(n, int) else 1 for n in (shape["rows"], shape["chunks"]))
    return plan_for(rows, state.shape[1], state.shape[3], state.shape[2], chunks, target.arch, target.compute_units)


def _units(arguments: Mapping[str, Any], target: Target) -> Sequence[TritonUnit]:
    return units_of(arguments, plan_of(arguments, target))


def _cost_us(arguments: Mapping[str, Any], target: Target) -> float:
    """Bytes at the target's bandwidth, or prologue and scan one after the other; and the launches. A number of rows or
    chunks that is a symbol counts as one."""
    plan, shape = plan_of(arguments, target), shape_of(dict(arguments))
    rows, chunks, numbers = (n if isinstance(n := shape[name], int) else 1 for name in ("rows", "chunks", "numbers"))
    heads, values = arguments["state"].shape[1:3]
    prologue = PROLOGUE_US * max(1.0, numbers * heads / target.compute_units)
    programs = rows * heads * (values // plan.tile) * plan.groups
    scan = CHUNK_US * chunks / plan.groups * max(1.0, programs / target.compute_units)
    ordered = scan + GROUP_US * plan.groups if plan.groups > 1 else 0.0  # transforms of groups, then their starts
    bandwidth = moving_us(OP, arguments, target)
    return max(bandwidth, prologue + scan + ordered) + (2 if plan.groups == 1 else 4) * LAUNCH_US


def _accepts_hip(arguments: Mapping[str, Any], target: Target) -> str | None:
    return accepts(arguments, target) or hip_kernel.objection(arguments, target)


def _units_with_hip(arguments: Mapping[str, Any], target: Target) -> Sequence[Unit]:
    return [hip_kernel.unit(arguments), *_units(arguments, target)[1:]]


def _cost_us_with_hip(arguments: Mapping[str, Any], target: Target) -> float:
    """Behind Triton's until it is measured: no GPU has executed it."""
    return 1.01 * _cost_us(arguments, target)


_SCAN = tuple(_FOLDER / f"{name}.py" for name in ("triton_scan", "triton_tokens", "triton_prologue", "launch", "plan"))

KERNELS = (
    Kernel(
        name="kda_chunk.triton",
        op="kda_chunk",
        language="triton",
        accepts=accepts,
        launch=kda_chunk,
        units=_units,
        cost_us=_cost_us,
        sources=(*_SCAN, _FOLDER / "form.py"),
    ),
    Kernel(  # compiled and emulated, not executed on hardware
        name="kda_chunk.hip",
        op="kda_chunk",
        language="hip",
        accepts=_accepts_hip,
        launch=hip_kernel.kda_chunk,
        units=_units_with_hip,
        cost_us=_cost_us_with_hip,
        sources=(
            hip_kernel.PATH,
            *sorted(hip_kernel.FOLDER.glob("*.h")),
            _FOLDER / "hip_kernel.py",
            *_SCAN,
            _FOLDER / "form.py",
            *HEADERS,
        ),
    ),
)
