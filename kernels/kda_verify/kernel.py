"""The kernels of `k3::kda_verify` as `select` and the emitter see them: Triton, and HIP C++."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from k3rewrite.graph.shapes import same_size
from k3rewrite.kernels.costs import moving_us
from k3rewrite.kernels.dtypes import NAMES, pointer, text
from k3rewrite.kernels.headers import HEADERS
from k3rewrite.kernels.kda_verify import hip_kernel
from k3rewrite.kernels.kda_verify.launch import (
    CLOSE_POINTERS,
    CLOSE_STRIDES,
    CLOSE_WARPS,
    TILE_POINTERS,
    TILE_STRIDES,
    constants,
    kda_verify,
)
from k3rewrite.kernels.kda_verify.op import OP
from k3rewrite.kernels.kda_verify.tiles import Tile, tile_for, tiles_of
from k3rewrite.ops.kernel import Kernel, TritonUnit
from k3rewrite.targets import Target

SIZES = (16, 32, 64, 128)
"""channels of a head"""
TAPS, MAX_TOKENS = 4, 8
FLOOR_US, HIP_FLOOR_US = 6.5, 2.6
"""what two launches of Triton, and one of HIP, cost however little they move; on an H200 a window of 4 tokens of 12
heads takes 8.3 us and 3.6, and HIP is faster up to 8 tokens of 32 sequences"""
_WIDE = ("conv_weight", "a_log", "dt_bias", "norm_weight", "state")
_INTEGERS = ("start", "table", "history", "lengths")
_FOLDER = Path(__file__).parent


def accepts(arguments: Mapping[str, Any], target: Target) -> str | None:
    """None, or why the Triton kernels do not take the call."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return _objection(arguments, target)


def _accepts_hip(arguments: Mapping[str, Any], target: Target) -> str | None:
    return _objection(arguments, target) or hip_kernel.objection(arguments, target)


def _objection(arguments: Mapping[str, Any], target: Target) -> str | None:
    if not target.is_gpu:
        return f"target {target.name} runs the reference"
    for name in dict.fromkeys((*TILE_POINTERS, *CLOSE_POINTERS)):
        tensor = arguments[name]
        if tensor is None:
            continue
        if name in _INTEGERS:
            fitting: tuple[torch.dtype, ...] = (torch.int32, torch.int64)
        else:
            fitting = (torch.float32,) if name in _WIDE else (torch.float32, torch.bfloat16, torch.float16)
        if tensor.dtype not in fitting:
            return f"{name} is {text(tensor.dtype)}"
        if name == "conv_weight":  # a row for each channel, or for each tap
            continue
        if not same_size(tensor.stride(-1), 1) and not same_size(tensor.shape[-1], 1):
            return f"{name} is not contiguous in its last dimension (stride {tensor.stride(-1)})"
    for name in ("inner_dtype", "out_dtype"):
        if arguments[name] not in NAMES:
            return f"{name} is {text(arguments[name])}"
    if (raw := arguments["qkv"].dtype) != (line := arguments["conv_state"].dtype):
        return f"qkv is {text(raw)}, and the line {text(line)}"
    return _shape_objection(arguments)


def _shape_objection(arguments: Mapping[str, Any]) -> str | None:
    state, weight, table = arguments["state"], arguments["conv_weight"], arguments["table"]
    heads, values, size = state.shape[1:]
    columns = arguments["conv_state"].shape[1]
    if not all(isinstance(n, int) for n in (heads, values, size, *weight.shape, table.shape[1], columns)):
        return "heads, their sizes, the window or the columns of a line are symbolic"
    if size not in SIZES or values != size:
        return f"heads of {values} values and {size} keys; as many of both are taken, of {', '.join(map(str, SIZES))}"
    if not 1 <= table.shape[1] <= MAX_TOKENS or weight.shape[1] != TAPS:
        return f"windows of {table.shape[1]} tokens and {weight.shape[1]} taps; up to {MAX_TOKENS} and {TAPS} are taken"
    if columns < table.shape[1] + TAPS - 2:
        return f"lines of {columns} columns, and {table.shape[1]} tokens leave {table.shape[1] + TAPS - 2}"
    if not same_size(state.stride(2), size):
        return "the state of a head does not lie in one piece"
    return None


def _units(arguments: Mapping[str, Any], target: Target) -> Sequence[TritonUnit]:
    """A tile for each number of sequences that is not known, and the closing kernel."""
    from k3rewrite.kernels.kda_verify import triton as kernels

    rows, size = arguments["table"].shape[0], arguments["state"].shape[3]
    if isinstance(rows, int):
        heads = rows * arguments["state"].shape[1]
        tiles: tuple[Tile, ...] = (tile_for(heads, size, target.arch, target.compute_units, target.wave_size),)
    else:
        tiles = tiles_of(size, target.arch)
    scalars, read = dict.fromkeys(("bound", "q_scale", "l2_eps"), "fp32"), {"read": torch.float32}
    made = [
        _unit(kernels.kda_verify_tile, arguments, constants(arguments, tile, target.arch), TILE_POINTERS, read,
              TILE_STRIDES, scalars, tile.waves)
        for tile in tiles
    ]  # fmt: skip
    close = _unit(
        kernels.kda_verify_close, arguments, constants(arguments, None, target.arch), CLOSE_POINTERS,
        read | {"out": arguments["out_dtype"]}, CLOSE_STRIDES, {"norm_eps": "fp32"}, CLOSE_WARPS,
    )  # fmt: skip
    return [*made, close]


def _unit(
    function: Any, arguments: Mapping[str, Any], fixed: dict[str, Any], pointers: Sequence[str],
    written: Mapping[str, torch.dtype], strides: Mapping[str, Any], scalars: Mapping[str, str], waves: int,
) -> TritonUnit:  # fmt: skip
    signature: dict[str, str] = {}
    for name in pointers:
        if arguments[name] is None:
            fixed[name] = None
        else:
            signature[name] = pointer(arguments[name].dtype)
    signature |= {name: pointer(dtype) for name, dtype in written.items()}
    views = {"qkv", "f", "b", "gate", "start", "table", "history", "lengths"}  # at any offset of something else
    aligned = (frozenset(signature) - views) | (
        strides.keys() & {"conv_slot", "conv_column", "state_slot", "state_head", "weight_tap"}
    )
    weight = [name for name, (of, dim) in strides.items() if of == "conv_weight" and arguments[of].stride(dim) == 1]
    fixed |= dict.fromkeys(weight, 1)  # as a launch specialises a stride of one
    signature |= (
        dict.fromkeys([name for name in strides if name not in fixed], "i32")
        | dict(scalars)
        | dict.fromkeys(fixed, "constexpr")
    )
    return TritonUnit(function, signature, fixed, aligned=aligned, num_warps=waves, num_stages=1)


def _cost_us(arguments: Mapping[str, Any], target: Target) -> float:
    return FLOOR_US + moving_us(OP, arguments, target)


def _cost_us_of_hip(arguments: Mapping[str, Any], target: Target) -> float:
    """On AMD behind Triton's: neither was run there."""
    return (HIP_FLOOR_US if target.vendor == "nvidia" else FLOOR_US + 0.1) + moving_us(OP, arguments, target)


def _paths(arguments: Mapping[str, Any], target: Target) -> str:
    tiles = tiles_of(arguments["state"].shape[3], target.arch)
    widths = ", ".join(f"{tile.width} ({tile.waves} waves)" for tile in tiles)
    return f"tiles of {widths} values by heads x sequences and compute units, then norm and line in a second launch"


KERNELS = (
    Kernel(
        name="kda_verify.triton",
        op="kda_verify",
        language="triton",
        accepts=accepts,
        launch=kda_verify,
        units=_units,
        cost_us=_cost_us,
        sources=(
            *(_FOLDER / name for name in ("triton.py", "launch.py", "tiles.py")),
            _FOLDER.parent / "triton_math.py",
        ),
        paths=_paths,
    ),
    Kernel(
        name="kda_verify.hip",
        op="kda_verify",
        language="hip",
        accepts=_accepts_hip,
        launch=hip_kernel.kda_verify,
        units=hip_kernel.units,
        cost_us=_cost_us_of_hip,
        sources=(hip_kernel.PATH, _FOLDER / "hip_kernel.py", _FOLDER.parent / "kda.py", *HEADERS),
    ),
)
