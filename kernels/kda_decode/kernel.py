"""The kernels of `k3::kda_decode` as `select` and the emitter see them: Triton, and HIP C++."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.kernels.costs import moving_us
from k3rewrite.kernels.dtypes import NAMES, pointer, text
from k3rewrite.kernels.headers import HEADERS
from k3rewrite.kernels.kda_decode import hip_kernel
from k3rewrite.kernels.kda_decode.launch import NUM_WARPS, POINTERS, STRIDES, constants, kda_decode
from k3rewrite.kernels.kda_decode.op import OP
from k3rewrite.ops.kernel import Kernel, TritonUnit
from k3rewrite.targets import Target

SIZES = (16, 32, 64, 128)
"""channels of a head: its state, the square of them, is held in registers"""
FLOOR_US, HIP_FLOOR_US = 5.0, 1.6
"""what a launch costs however little it moves; on an H200 12 heads of 128 take 5.4 us by Triton, 2.0 by HIP, which is
faster with more heads as well"""
_VIEWED = ("conv_state", "state")
"""may lie as a transposed view"""
_FOLDER = Path(__file__).parent


def accepts(arguments: Mapping[str, Any], target: Target) -> str | None:
    """None, or why the Triton kernel does not take the call."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return _objection(arguments, target)


def _accepts_hip(arguments: Mapping[str, Any], target: Target) -> str | None:
    return _objection(arguments, target) or hip_kernel.objection(arguments, target)


def _objection(arguments: Mapping[str, Any], target: Target) -> str | None:
    if not target.is_gpu:
        return f"target {target.name} runs the reference"
    for name in POINTERS:
        tensor = arguments[name]
        if tensor is None or name == "slots":
            continue
        if tensor.dtype not in ((torch.float32,) if name == "state" else NAMES):
            return f"{name} is {text(tensor.dtype)}"
        if name not in _VIEWED and not same_size(tensor.stride(-1), 1) and not same_size(tensor.shape[-1], 1):
            return f"{name} is not contiguous in its last dimension (stride {tensor.stride(-1)})"
    for name in ("inner_dtype", "out_dtype"):
        if arguments[name] not in NAMES:
            return f"{name} is {text(arguments[name])}"
    return _shape_objection(arguments)


def _shape_objection(arguments: Mapping[str, Any]) -> str | None:
    state, weight, slots = arguments["state"], arguments["conv_weight"], arguments["slots"]
    heads, values, size = state.shape[1:]
    if not all(isinstance(n, int) for n in (heads, values, size, *weight.shape)):
        return "heads or their sizes are symbolic"
    if size not in SIZES or values != size:
        return f"heads of {values} values and {size} keys; as many of both are taken, of {', '.join(map(str, SIZES))}"
    within = [state.stride(2), state.stride(3)]
    if not (same_sizes(within, (size, 1)) or same_sizes(within, (1, size))):
        return "the state of a head does not lie in one piece"
    if not same_sizes(weight.stride(), (weight.shape[1], 1)):
        return "the taps do not lie in one piece"
    if slots is not None and (slots.dtype not in (torch.int32, torch.int64) or not same_size(slots.stride(0), 1)):
        return "slots are not contiguous int32 or int64"
    return None


def _units(arguments: Mapping[str, Any], target: Target) -> Sequence[TritonUnit]:
    from k3rewrite.kernels.kda_decode import triton as kernels

    signature: dict[str, str] = {}
    fixed = constants(dict(arguments))
    for name in POINTERS:
        if arguments[name] is None:
            fixed[name] = None
        else:
            signature[name] = pointer(arguments[name].dtype)
    signature["out"] = pointer(arguments["out_dtype"])
    views = {"qkv", "f", "b", "gate"}  # of one projection, at any offset
    steps = {"conv_slot", "conv_column", "state_slot", "state_head"}
    if same_size(arguments["conv_state"].stride(2), 1):
        fixed["conv_channel"] = 1  # as Triton takes a stride of one
    else:
        steps -= {"conv_column"}
    aligned = (frozenset(signature) - views) | steps
    signature |= dict.fromkeys((name for name in STRIDES if name not in fixed), "i32") | dict.fromkeys(
        ("bound", "q_scale", "l2_eps", "norm_eps"), "fp32"
    )
    signature |= dict.fromkeys(fixed, "constexpr")
    return [TritonUnit(kernels.kda_decode_head, signature, fixed, aligned=aligned, num_warps=NUM_WARPS, num_stages=1)]


def _cost_us(arguments: Mapping[str, Any], target: Target) -> float:
    return FLOOR_US + moving_us(OP, arguments, target)


def _cost_us_of_hip(arguments: Mapping[str, Any], target: Target) -> float:
    """On AMD behind Triton's: neither was run there."""
    return (HIP_FLOOR_US if target.vendor == "nvidia" else FLOOR_US + 0.1) + moving_us(OP, arguments, target)


KERNELS = (
    Kernel(
        name="kda_decode.triton",
        op="kda_decode",
        language="triton",
        accepts=accepts,
        launch=kda_decode,
        units=_units,
        cost_us=_cost_us,
        sources=(*(_FOLDER / name for name in ("triton.py", "launch.py")), _FOLDER.parent / "triton_math.py"),
    ),
    Kernel(
        name="kda_decode.hip",
        op="kda_decode",
        language="hip",
        accepts=_accepts_hip,
        launch=hip_kernel.kda_decode,
        units=hip_kernel.units,
        cost_us=_cost_us_of_hip,
        sources=(hip_kernel.PATH, _FOLDER / "hip_kernel.py", _FOLDER.parent / "kda.py", *HEADERS),
    ),
)
