"""What to compile ahead of time for a call of `k3::kda_chunk`: the functions of its plan, with their signatures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from k3rewrite.kernels.dtypes import pointer
from k3rewrite.kernels.kda_chunk.launch import BATCHES, constants, prologue_options, row_block, shape_of, token_strides
from k3rewrite.kernels.kda_chunk.plan import Plan
from k3rewrite.ops.kernel import TritonUnit

_BETWEEN = dict.fromkeys(("values", "keys", "queries", "scores", "ends"), "*bf16") | dict.fromkeys(
    ("decay", "inverse", "starts", "summaries"), "*fp32"
)
_SIZES = ("rows", "tokens", "chunks", "saves", "state_slot", "state_head", *BATCHES)
_NUMBERS = ("bound", "q_scale", "l2_eps")


def units_of(arguments: Mapping[str, Any], plan: Plan) -> list[TritonUnit]:
    """The prologue and the scan; with groups also what makes their transforms and what orders them."""
    from k3rewrite.kernels.kda_chunk import triton_prologue, triton_scan

    fixed = constants(dict(arguments))
    flags = {"RAW": arguments["a_log"] is not None, "NORMED": arguments["l2_eps"] is None}
    fresh = {"FRESH": arguments["fresh"] is not None}
    saves = {"SAVES": arguments["checkpoints"] is not None}
    groups, steps = {"GROUPS": plan.groups}, token_strides(arguments)
    rows = shape_of(dict(arguments))["rows"]
    block = row_block(rows if isinstance(rows, int) else 1)
    tile = {"ROWS": block, "SLAB": min(plan.slab, fixed["K"]), "PTX": plan.ptx}
    made: list[tuple[Any, dict[str, Any], int, dict[str, Any]]] = [
        (
            triton_prologue.kda_chunk_prologue,
            fixed | flags | steps | tile,
            plan.prologue_warps,
            prologue_options(plan),
        )
    ]
    if plan.groups > 1:
        tile = {"TILE": plan.tile, "STAGES": plan.group_stages}
        made.append((triton_scan.kda_chunk_groups, fixed | fresh | groups | tile, plan.scan_warps, {}))
        order = {"TILE": plan.order_tile, "PRECISION": plan.order_precision}
        made.append((triton_scan.kda_chunk_order, fixed | groups | order, 4, {}))
    tile = {"TILE": plan.tile, "STAGES": plan.scan_stages}
    made.append(
        (triton_scan.kda_chunk_scan, fixed | flags | fresh | steps | saves | groups | tile, plan.scan_warps, {})
    )
    return [_unit(arguments, *each) for each in made]


def _unit(
    arguments: Mapping[str, Any], function: Any, fixed: Mapping[str, Any], warps: int, options: Mapping[str, Any]
) -> TritonUnit:
    signature: dict[str, str] = {}
    constant = dict(fixed)
    for name in function.arg_names:
        if name in fixed:
            signature[name] = "constexpr"
        elif name in _BETWEEN and (name != "starts" or fixed.get("GROUPS", 1) > 1):
            signature[name] = _BETWEEN[name]
        elif name == "out":
            signature[name] = pointer(arguments["out_dtype"])
        elif name in _SIZES:
            signature[name] = "i32"
        elif name in _NUMBERS:
            signature[name] = "fp32"
        elif isinstance(value := arguments.get(name), Tensor):
            signature[name] = pointer(value.dtype)
        else:
            signature[name], constant[name] = "constexpr", None
    odd = {"rows", "tokens", "chunks", "saves", *_NUMBERS, "b", "b_batch"}
    odd |= {name for name in BATCHES if name in signature and arguments[name[0]].stride(0) % 16}
    aligned = {name for name, kind in signature.items() if kind != "constexpr"} - odd
    return TritonUnit(
        function, signature, constant, aligned=frozenset(aligned), num_warps=warps, num_stages=1, options=options
    )
