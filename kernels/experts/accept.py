"""Why the Triton kernels do not take a call of `k3::experts`: one reason, in words, or None. Adds no guard."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from k3rewrite.graph.shapes import same_size
from k3rewrite.kernels.experts.formats import GROUP
from k3rewrite.kernels.experts.schedule import MAX_EXPERTS, MAX_TOP_K, step_of
from k3rewrite.targets import Target

LEAST_STEP = {"dense": 16, "mxfp8": GROUP, "mxfp4": GROUP}
"""columns that every matrix must come in multiples of"""
NARROW = (torch.float32, torch.bfloat16)


def accepts(arguments: Mapping[str, Any], target: Target) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not target.is_gpu:
        return f"the target '{target.name}' has no kernels; it runs the references"
    return _roundings(arguments) or _tensors(arguments) or _sizes(arguments)


def _roundings(arguments: Mapping[str, Any]) -> str | None:
    if (hidden := arguments["hidden_dtype"]) != torch.bfloat16:
        return f"the activation is stored in bfloat16, not {_short(hidden)}"
    for name in ("product_dtype", "compute_dtype", "route_dtype", "combine_dtype", "out_dtype"):
        if arguments[name] not in NARROW:
            return f"{name} is {_short(arguments[name])}; bfloat16 and float32 are offered"
    if arguments["activation"] == "situ" and arguments["compute_dtype"] != torch.float32:
        return f"SiTU is computed in float32, not {_short(arguments['compute_dtype'])}"
    return None


def _tensors(arguments: Mapping[str, Any]) -> str | None:
    x, ids, weights = arguments["x"], arguments["ids"], arguments["weights"]
    if x.dtype != torch.bfloat16:
        return f"x is {_short(x.dtype)}; bfloat16 is read"
    if ids.dtype not in (torch.int32, torch.int64):
        return f"ids are {_short(ids.dtype)}; int32 and int64 are read"
    if weights.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"weights are {_short(weights.dtype)}; float32, bfloat16 and float16 are read"
    stored = {"dense": (torch.bfloat16,), "mxfp4": (torch.uint8,), "mxfp8": (torch.uint8, torch.float8_e4m3fn)}
    for name in ("w_gate", "w_up", "w_down", "s_gate", "s_up", "s_down"):
        tensor: Tensor | None = arguments[name]
        if tensor is None:
            continue
        wanted = (torch.uint8,) if name.startswith("s_") else stored[arguments["format"]]
        if tensor.dtype not in wanted:
            return f"{name} is {_short(tensor.dtype)}, not {_short(wanted[0])}"
        if not same_size(tensor.stride(2), 1):
            return f"the rows of {name} are not contiguous (strides {tuple(tensor.stride())})"
    for one, other in (("w_gate", "w_up"), ("s_gate", "s_up")):
        if arguments[one] is not None and arguments[one].stride() != arguments[other].stride():
            return f"{one} and {other} are laid out differently"
    return None


def _sizes(arguments: Mapping[str, Any]) -> str | None:
    count, width, _ = arguments["w_gate"].shape
    sizes = {
        "the number of experts": count,
        "the width of an expert": width,
        "the width of x": arguments["x"].shape[1],
        "the width of the result": arguments["w_down"].shape[1],
        "the number of experts a token": arguments["ids"].shape[1],
    }
    for name, size in sizes.items():
        if not isinstance(size, int):
            return f"{name} is symbolic"
    top_k = sizes["the number of experts a token"]
    if not 0 < top_k <= MAX_TOP_K:
        return f"{top_k} experts a token; 1 to {MAX_TOP_K} are taken"
    if not 0 < count <= MAX_EXPERTS:
        return f"{count} experts; 1 to {MAX_EXPERTS} are taken"
    least = LEAST_STEP[arguments["format"]]
    for name, columns in (("x", sizes["the width of x"]), ("an expert", width)):
        if step_of(columns) < least:
            return f"the width of {name} is {columns}; a multiple of {least} is needed"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
