"""Running the Triton kernels of `k3::kda_chunk` on tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.devices import device_facts
from k3rewrite.kernels.kda_chunk.form import CHUNK
from k3rewrite.kernels.kda_chunk.op import check
from k3rewrite.kernels.kda_chunk.plan import Plan, plan_for

INPUTS = ("q", "k", "v", "f", "b")
COMMON = {"num_stages": 1, "enable_fp_fusion": True}
BATCHES = tuple(f"{name}_batch" for name in INPUTS)


def token_strides(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Compiled in: addresses of the sixteen rows of a block are then one register and sixteen constants."""
    return {f"{name}_token": arguments[name].stride(1) for name in INPUTS}


def shape_of(arguments: dict[str, Any]) -> dict[str, int]:
    """rows, tokens of a row's line, chunks of the longest row, numbers of chunks of all rows."""
    q, offsets = arguments["q"], arguments["offsets"]
    tokens = q.shape[1]
    if offsets is None:
        chunks = -(-tokens // CHUNK)
        return {"rows": q.shape[0], "tokens": tokens, "chunks": chunks, "numbers": q.shape[0] * chunks}
    rows = offsets.shape[0] - 1
    return {"rows": rows, "tokens": tokens, "chunks": -(-tokens // CHUNK), "numbers": tokens // CHUNK + rows}


def constants(arguments: dict[str, Any]) -> dict[str, Any]:
    """What all kernels of a call are compiled for."""
    return {
        "HEADS": arguments["q"].shape[2],
        "K": arguments["q"].shape[3],
        "V": arguments["v"].shape[3],
        "PACKED": arguments["offsets"] is not None,
        "LENGTHS": arguments["lengths"] is not None,
        "SLOTS": arguments["slots"] is not None,
        "NULL": arguments["null_slot"] and arguments["slots"] is not None,
    }


def row_block(rows: int) -> int:
    """A power of two, at least as many as there are rows."""
    return 1 << max(4, (rows - 1).bit_length())


def prologue_options(plan: Plan) -> dict[str, Any]:
    """Options of the compiler for the prologue."""
    return {"maxnreg": plan.prologue_registers} if plan.prologue_registers else {}


class Between:
    """What the launches hand on, [chunks, heads, ...]; A and T lie in the place of the values, if they fit."""

    def __init__(
        self, numbers: int, heads: int, keys: int, values: int, device: torch.device, narrow: torch.dtype | None = None
    ) -> None:
        if narrow is None:  # Triton's interpreter has no bf16 products
            narrow = torch.bfloat16 if device.type == "cuda" else torch.float32

        def room(*shape: int, of: torch.dtype = narrow) -> Tensor:
            return torch.empty(numbers, heads, *shape, dtype=of, device=device)

        self.values, self.keys = room(values, CHUNK), room(CHUNK, keys)
        self.queries, self.ends, self.scores = room(CHUNK, keys), room(CHUNK, keys), room(CHUNK, CHUNK)
        self.decay = room(keys, of=torch.float32)
        fits = values == 2 * CHUNK and narrow == torch.bfloat16
        self.inverse = self.values.view(torch.float32) if fits else room(CHUNK, CHUNK, of=torch.float32)

    @property
    def results(self) -> list[Tensor]:
        return [self.values, self.keys, self.queries, self.scores, self.ends, self.decay]


Prologue = Callable[[dict[str, Any], Between, Plan], None]
"""Fills what lies between the launches, from a call's arguments."""


def kda_chunk(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor | None, dt_bias: Tensor | None, state: Tensor,
    slots: Tensor | None, fresh: Tensor | None, lengths: Tensor | None, offsets: Tensor | None,
    checkpoints: Tensor | None, null_slot: bool, bound: float, q_scale: float, l2_eps: float | None,
    out_dtype: torch.dtype, *, in_place: bool = False, plan: Plan | None = None, prologue: Prologue | None = None,
) -> tuple[Tensor, Tensor] | Tensor:  # fmt: skip
    """What the op takes. `in_place`: the state is written where it is, and only the output is returned. A `prologue`
    takes the place of Triton's."""
    check(q, lengths, offsets, checkpoints, bound)
    if not in_place:
        state = torch.empty_like(state).copy_(state)
    out = v.new_empty(v.shape, dtype=out_dtype)
    arguments = {
        "q": q, "k": k, "v": v, "f": f, "b": b, "a_log": a_log, "dt_bias": dt_bias, "state": state, "slots": slots,
        "fresh": fresh, "lengths": lengths, "offsets": offsets, "checkpoints": checkpoints, "null_slot": null_slot,
        "bound": bound, "q_scale": q_scale, "l2_eps": l2_eps,
    }  # fmt: skip
    if out.numel():
        with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
            _launch(arguments, out, plan, prologue or launch_prologue)
    return out if in_place else (out, state)


def launch_prologue(arguments: dict[str, Any], between: Between, plan: Plan) -> None:
    """Triton's."""
    from k3rewrite.kernels.kda_chunk import triton_prologue

    shape, fixed = shape_of(arguments), constants(arguments)
    triton_prologue.kda_chunk_prologue[(fixed["HEADS"] * shape["numbers"],)](
        *(arguments[name] for name in (*INPUTS, "a_log", "dt_bias", "slots", "lengths", "offsets")), *between.results,
        between.inverse, *(arguments[name].stride(0) for name in INPUTS), shape["rows"], shape["tokens"],
        shape["chunks"], *numbers_of(arguments), **fixed, **flags_of(arguments), **token_strides(arguments),
        ROWS=row_block(shape["rows"]), SLAB=min(plan.slab, fixed["K"]), PTX=plan.ptx, num_warps=plan.prologue_warps,
        **COMMON, **prologue_options(plan),
    )  # fmt: skip


def flags_of(arguments: dict[str, Any]) -> dict[str, bool]:
    return {"RAW": arguments["a_log"] is not None, "NORMED": arguments["l2_eps"] is None}


def numbers_of(arguments: dict[str, Any]) -> list[float]:
    return [float(arguments["bound"]), float(arguments["q_scale"]), float(arguments["l2_eps"] or 0.0)]


def _launch(arguments: dict[str, Any], out: Tensor, plan: Plan | None, prologue: Prologue) -> None:
    from k3rewrite.kernels.kda_chunk import triton_scan

    shape, fixed, state = shape_of(arguments), constants(arguments), arguments["state"]
    heads, keys, values, rows = fixed["HEADS"], fixed["K"], fixed["V"], shape["rows"]
    if plan is None:
        plan = plan_for(rows, heads, keys, values, shape["chunks"], *device_facts(out.device))
    if values % plan.tile or (plan.groups > 1 and keys % plan.tile):
        raise ValueError(
            f"kda_chunk: tiles of {plan.tile} do not divide {keys} keys and {values} values; take {min(keys, values)}"
        )
    between = Between(shape["numbers"], heads, keys, values, out.device)
    inputs = [arguments[name] for name in (*INPUTS, "a_log", "dt_bias")]
    strides = [arguments[name].stride(0) for name in INPUTS]
    steps = token_strides(arguments)
    extents = [rows, shape["tokens"], shape["chunks"]]
    slots, lengths, offsets = (arguments[name] for name in ("slots", "lengths", "offsets"))
    pool = [state.stride(0), state.stride(1)]
    if shape["tokens"] > 1:
        prologue(arguments, between, plan)
    starts = None
    fresh = {"FRESH": arguments["fresh"] is not None}
    if plan.groups > 1:
        starts = state.new_empty(rows, plan.groups, heads, values, keys)
        summaries = state.new_empty(rows, plan.groups - 1, heads, keys + values, keys)
        triton_scan.kda_chunk_groups[((keys + values) // plan.tile * heads * rows * (plan.groups - 1),)](
            state, slots, arguments["fresh"], lengths, offsets, summaries, starts, between.values, between.keys,
            between.ends, between.decay, *pool, *extents, **fixed, **fresh, TILE=plan.tile, GROUPS=plan.groups,
            STAGES=plan.group_stages, num_warps=plan.scan_warps, **COMMON,
        )  # fmt: skip
        triton_scan.kda_chunk_order[(values // plan.order_tile * heads * rows,)](
            lengths, slots, offsets, summaries, starts, *extents, **fixed, TILE=plan.order_tile, GROUPS=plan.groups,
            PRECISION=plan.order_precision, num_warps=4, **COMMON,
        )  # fmt: skip
    checkpoints = arguments["checkpoints"]
    triton_scan.kda_chunk_scan[(values // plan.tile * heads * rows * plan.groups,)](
        *inputs, state, slots, arguments["fresh"], lengths, offsets, checkpoints, starts, *between.results, out,
        *strides, *pool, *extents, 0 if checkpoints is None else checkpoints.shape[1], *numbers_of(arguments), **fixed,
        **flags_of(arguments), **fresh, **steps, TILE=plan.tile, SAVES=checkpoints is not None, GROUPS=plan.groups,
        STAGES=plan.scan_stages, num_warps=plan.scan_warps, **COMMON,
    )  # fmt: skip
