"""The kernel of `k3::mla_attend` as `select` and the emitter see it: Triton."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from k3rewrite.graph.shapes import same_size
from k3rewrite.kernels.costs import moving_us
from k3rewrite.kernels.dtypes import NAMES, pointer, text
from k3rewrite.kernels.mla_attend.launch import (
    MERGE_WARPS,
    MERGE_WIDTH,
    PART_POINTERS,
    PART_SIZES,
    PART_STRIDES,
    constants,
    mla_attend,
)
from k3rewrite.kernels.mla_attend.op import OP
from k3rewrite.kernels.mla_attend.splits import MOST_PARTS, parts_for
from k3rewrite.kernels.mla_attend.tiles import Tile, tile_for
from k3rewrite.ops.kernel import Kernel, TritonUnit
from k3rewrite.targets import Target

FP8 = torch.float8_e4m3fn
FLOOR_US = 8.0
"""what two launches cost however little they move; a guess until it is measured"""
_INTEGERS = ("table", "lengths")
_FOLDER = Path(__file__).parent


def accepts(arguments: Mapping[str, Any], target: Target) -> str | None:
    """None, or why the Triton kernel does not take the call."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not target.is_gpu:
        return f"target {target.name} runs the reference"
    query, cache, scale = arguments["query"], arguments["cache"], arguments["cache_scale"]
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"query is {text(query.dtype)}"
    if cache.dtype not in (query.dtype, FP8):
        return f"query is {text(query.dtype)}, and the cache {text(cache.dtype)}"
    if cache.dtype == FP8 and query.dtype == torch.float32:
        return "a cache of fp8 and queries in float32"
    if (cache.dtype == FP8) != (scale is not None):
        return "a cache of fp8 has a scale, another has none"
    if scale is not None and (scale.dtype != torch.float32 or not same_size(scale.numel(), 1)):
        return f"the cache's scale is not one float32 ({text(scale.dtype)}, {tuple(scale.shape)})"
    if arguments["out_dtype"] not in NAMES:
        return f"out_dtype is {text(arguments['out_dtype'])}"
    for name in _INTEGERS:
        if arguments[name].dtype not in (torch.int32, torch.int64):
            return f"{name} is {text(arguments[name].dtype)}"
    for name in ("query", "cache", "table"):
        if not same_size(arguments[name].stride(-1), 1) and not same_size(arguments[name].shape[-1], 1):
            return f"{name} is not contiguous in its last dimension (stride {arguments[name].stride(-1)})"
    return _shape_objection(arguments)


def _shape_objection(arguments: Mapping[str, Any]) -> str | None:
    query, values = arguments["query"], arguments["value_size"]
    if not all(isinstance(size, int) for size in query.shape[1:]):
        return "tokens, heads or their size are symbolic"
    queries = query.shape[1] * query.shape[2]
    if arguments["cache"].dtype == FP8 and queries > (few := tile_for(1, "sm_90").queries):
        return f"{queries} queries a row and a cache of fp8, whose registers spill; up to {few} are taken"
    rest = query.shape[3] - values
    for size in (values, rest):
        if size < 16 or size & (size - 1):
            return f"values of {values} and {rest} more numbers of a key; powers of two from 16 on are taken"
    if not same_size(arguments["lengths"].stride(0), 1) and not same_size(arguments["lengths"].shape[0], 1):
        return "lengths do not lie together"
    return None


def _tile(arguments: Mapping[str, Any], arch: str) -> Tile:
    query = arguments["query"]
    return tile_for(query.shape[1] * query.shape[2], arch, fp8=arguments["cache"].dtype == FP8)


def _units(arguments: Mapping[str, Any], target: Target) -> Sequence[TritonUnit]:
    """The kernel for one part, or for several and their merge; all three where the number is not known before."""
    from k3rewrite.kernels.mla_attend import triton as kernels

    query, cache, table = arguments["query"], arguments["cache"], arguments["table"]
    queries, values = query.shape[1] * query.shape[2], arguments["value_size"]
    batch, context = query.shape[0], cache.shape[1] * table.shape[1]
    known = isinstance(batch, int) and isinstance(context, int)
    blocks = -(-queries // _tile(arguments, target.arch).queries)
    parts = parts_for(batch * blocks, context, target.compute_units) if known else None
    made = [
        _part_unit(kernels.mla_attend_part, arguments, whole, target.arch)
        for whole in (False, True)
        if parts is None or (parts == 1) is whole
    ]
    if parts != 1:
        many = 1 << ((parts or MOST_PARTS) - 1).bit_length()
        fixed = {"VALUES": values, "WIDTH": min(MERGE_WIDTH, values), "PARTS": many}
        pointers = {"partial": "*fp32", "partial_lse": "*fp32", "out": pointer(arguments["out_dtype"]), "lse": "*fp32"}
        signature = pointers | {"parts": "i32"} | dict.fromkeys(fixed, "constexpr")
        made.append(
            TritonUnit(kernels.mla_attend_merge, signature, fixed, aligned=frozenset(pointers), num_warps=MERGE_WARPS,
                       num_stages=1)
        )  # fmt: skip
    return made


def _part_unit(function: Any, arguments: Mapping[str, Any], whole: bool, arch: str) -> TritonUnit:
    fixed = constants(arguments, whole, arch)
    signature: dict[str, str] = {}
    for name in PART_POINTERS:
        tensor = arguments[name]
        if tensor is None:
            fixed[name] = None
        else:
            signature[name] = "*fp8e4nv" if tensor.dtype == FP8 else pointer(tensor.dtype)
    out = arguments["out_dtype"] if whole else torch.float32
    signature |= {"out": pointer(out), "lse": "*fp32", "scale": "fp32"}
    signature |= dict.fromkeys((*PART_STRIDES, *PART_SIZES), "i32")
    signature |= dict.fromkeys(fixed, "constexpr")
    aligned = frozenset({"query", "cache", "out", "lse", "query_token", "query_head", "cache_page", "cache_position"})
    tile = _tile(arguments, arch)
    return TritonUnit(function, signature, fixed, aligned=aligned, num_warps=tile.warps, num_stages=tile.stages)


def _cost_us(arguments: Mapping[str, Any], target: Target) -> float:
    return FLOOR_US + moving_us(OP, arguments, target)


def _paths(arguments: Mapping[str, Any], target: Target) -> str:
    tile = _tile(arguments, target.arch)
    return f"tiles of {tile.queries} queries by {tile.keys} keys; parts of a history by rows and compute units, merged"


KERNELS = (
    Kernel(
        name="mla_attend.triton",
        op="mla_attend",
        language="triton",
        accepts=accepts,
        launch=mla_attend,
        units=_units,
        cost_us=_cost_us,
        sources=tuple(_FOLDER / name for name in ("triton.py", "launch.py", "splits.py", "tiles.py")),
        paths=_paths,
    ),
)
