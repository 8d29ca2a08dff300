"""What to compile ahead of time for a call of `k3::kda_chunk`: the Triton functions of its plan, with their signatures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.kda_chunk.launch import INPUTS, STRIDES, constants, row_block, shape_of
from k3rewrite.kernels.kda_chunk.plan import Plan
from k3rewrite.ops.kernel import TritonUnit

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_OTHERS = {torch.int32: "i32", torch.int64: "i64", torch.bool: "i1"}
_BETWEEN = {name: "*bf16" for name in ("values", "keys", "queries", "scores", "ends")} | {
    name: "*fp32" for name in ("decay", "lower", "inverse", "starts", "summaries")
}
_SIZES = ("rows", "tokens", "chunks", "saves", "state_slot", "state_head", *STRIDES)
_NUMBERS = ("bound", "q_scale", "l2_eps")


def units_of(arguments: Mapping[str, Any], plan: Plan) -> list[TritonUnit]:
    """The prologue and the scan; with groups also what makes their transforms and what orders them."""
    from k3rewrite.kernels.kda_chunk import triton_prologue, triton_scan

    fixed = constants(dict(arguments))
    flags = {"RAW": arguments["a_log"] is not None, "NORMED": arguments["l2_eps"] is None}
    fresh = {"FRESH": arguments["fresh"] is not None}
    saves = {"SAVES": arguments["checkpoints"] is not None}
    groups = {"GROUPS": plan.groups}
    rows = shape_of(dict(arguments))["rows"]
    made = [
        (
            triton_prologue.kda_chunk_prologue,
            fixed | flags | {"ROWS": row_block(rows if isinstance(rows, int) else 1)},
            plan.prologue_warps,
        )
    ]
    if plan.groups > 1:
        tile = {"TILE": plan.tile, "STAGES": plan.group_stages}
        made.append((triton_scan.kda_chunk_groups, fixed | fresh | groups | tile, plan.scan_warps))
        made.append((triton_scan.kda_chunk_order, fixed | groups | {"TILE": plan.order_tile}, 4))
    tile = {"TILE": plan.tile, "STAGES": plan.scan_stages}
    made.append((triton_scan.kda_chunk_scan, fixed | flags | fresh | saves | groups | tile, plan.scan_warps))
    return [_unit(arguments, *each) for each in made]


def _unit(arguments: Mapping[str, Any], function: Any, fixed: Mapping[str, Any], warps: int) -> TritonUnit:
    signature: dict[str, str] = {}
    constant = dict(fixed)
    for name in function.arg_names:
        if name in fixed:
            signature[name] = "constexpr"
        elif name in _BETWEEN and (name != "starts" or fixed.get("GROUPS", 1) > 1):
            signature[name] = _BETWEEN[name]
        elif name == "out":
            signature[name] = "*" + NAMES[arguments["out_dtype"]]
        elif name in _SIZES:
            signature[name] = "i32"
        elif name in _NUMBERS:
            signature[name] = "fp32"
        elif isinstance(value := arguments.get(name), Tensor):
            signature[name] = "*" + (NAMES.get(value.dtype) or _OTHERS[value.dtype])
        else:
            signature[name], constant[name] = "constexpr", None
    views = {*INPUTS, *STRIDES}  # of one projection, at any offset
    odd = {"rows", "tokens", "chunks", "saves", "bound", "q_scale", "l2_eps", "b_token", "b_batch"}
    wide = {name for name in STRIDES if arguments[STRIDES[name][0]].stride(STRIDES[name][1]) % 16 == 0}
    aligned = {name for name, kind in signature.items() if kind != "constexpr"} - odd - (views - set(INPUTS) - wide)
    return TritonUnit(function, signature, constant, aligned=frozenset(aligned), num_warps=warps, num_stages=1)
