"""A call as a list of launches, for running it and for compiling it ahead of time.

    plan(facts, schedule)  ->  Step(gate_up_routes, arguments=("x", "ids", ...), constants={...}, grid=(16, 96)), ...

A step names its arguments; `launch.py` binds the names to tensors and numbers, `kernel.py` to types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from k3rewrite.kernels.dtypes import NAMES
from k3rewrite.kernels.experts.schedule import LADDER, Schedule, Tiles, power_of_two, schedule_for

CHUNK = 1024
"""ids that a program of the sorted path looks at together"""
_GATE_UP, _DOWN = ("w_gate", "w_up", "s_gate", "s_up"), ("w_down", "s_down")
WEIGHTS = ("w_expert", "w_row", "s_expert", "s_row")
DOWN_WEIGHTS = ("d_expert", "d_row", "sd_expert", "sd_row")
"""names of what the down kernels call w_expert, w_row, s_expert and s_row: their matrix has strides of its own"""
PARAMETER = dict(zip(DOWN_WEIGHTS, WEIGHTS, strict=True))
"""argument name -> the name of the kernel's parameter, where they differ"""


@dataclass(frozen=True)
class Facts:
    """What a call's kernels depend on, beside the number of tokens."""

    top_k: int
    experts: int
    inner: int
    width: int
    outer: int
    format: str
    activation: str
    linear: bool
    product: torch.dtype
    compute: torch.dtype
    route: torch.dtype
    combine: torch.dtype
    out: torch.dtype
    ids: torch.dtype
    shares: torch.dtype
    nvidia: bool

    @staticmethod
    def of(arguments: Mapping[str, Any], nvidia: bool) -> Facts:
        """The facts of a call, given by the op's parameter names."""
        experts, width, _ = arguments["w_gate"].shape
        return Facts(
            top_k=arguments["ids"].shape[1],
            experts=experts,
            inner=arguments["x"].shape[1],
            width=width,
            outer=arguments["w_down"].shape[1],
            format=arguments["format"],
            activation=arguments["activation"],
            linear=bool(arguments["linear_beta"]),
            product=arguments["product_dtype"],
            compute=arguments["compute_dtype"],
            route=arguments["route_dtype"],
            combine=arguments["combine_dtype"],
            out=arguments["out_dtype"],
            ids=arguments["ids"].dtype,
            shares=arguments["weights"].dtype,
            nvidia=nvidia,
        )

    def schedule(self, arch: str, tokens: int) -> Schedule:
        """The path and tiles that the table of `arch` gives this call."""
        packed = self.format != "dense"
        return schedule_for(arch, tokens, self.top_k, self.experts, self.inner, self.width, packed=packed)


@dataclass(frozen=True)
class Step:
    """One launch. `arguments` are the names of the parameters that are no constants."""

    function: Any
    arguments: tuple[str, ...]
    constants: Mapping[str, Any]
    num_warps: int
    grid: tuple[int, int]
    dependent: bool = False
    """NVIDIA: the launch overlaps the end of the one before, and waits for it inside"""


def plan(facts: Facts, schedule: Schedule, tokens: int) -> list[Step]:
    """The launches of one call with `tokens` tokens, in order."""
    return {"routes": _routes, "experts": _experts, "sorted": _sorted}[schedule.path](facts, schedule, tokens)


def _routes(facts: Facts, schedule: Schedule, tokens: int) -> list[Step]:
    from k3rewrite.kernels.experts import triton_decode as kernels

    up, down = schedule.gate_up, schedule.down
    return [
        Step(
            kernels.gate_up_routes,
            ("x", "ids", *_GATE_UP, "hidden", "x_stride", *WEIGHTS, "first", "count", "beta", "linear_beta"),
            {**_gating(facts), "TOP_K": facts.top_k, **_tiles(up), "PDL": facts.nvidia},
            up.num_warps,
            (tokens * facts.top_k, _blocks(facts.width, up.rows)),
        ),
        Step(
            kernels.down_tokens,
            ("hidden", "ids", "weights", *_DOWN, "out", *DOWN_WEIGHTS, "first", "count"),
            {**_downing(facts), "TOP_K": facts.top_k, "COMBINE": NAMES[facts.combine], "ROUTE": NAMES[facts.route],
             "GROUP": down.group, **_tiles(down), "PDL": facts.nvidia},
            down.num_warps,
            (tokens, _blocks(facts.outer, down.rows)),
            dependent=facts.nvidia,
        ),
    ]  # fmt: skip


def _experts(facts: Facts, schedule: Schedule, tokens: int) -> list[Step]:
    from k3rewrite.kernels.experts import triton_shared as kernels

    up, down = schedule.gate_up, schedule.down
    looked_at = {"ROUTES": next(n for n in LADDER if n >= tokens * facts.top_k)}
    return [
        Step(
            kernels.gate_up_experts,
            ("x", "ids", *_GATE_UP, "hidden", "x_stride", *WEIGHTS, "first", "routes", "beta", "linear_beta"),
            {**_gating(facts), "TOP_K": facts.top_k, **looked_at, "TOKENS": up.tokens, **_tiles(up),
             "PDL": facts.nvidia},
            up.num_warps,
            (facts.experts, _blocks(facts.width, up.rows)),
        ),
        Step(
            kernels.down_experts,
            ("hidden", "ids", *_DOWN, "routed", *DOWN_WEIGHTS, "first", "routes"),
            {**_downing(facts), **looked_at, "TOKENS": down.tokens, **_tiles(down), "BLOCKS": down.blocks,
             "PDL": facts.nvidia},
            down.num_warps,
            (facts.experts, _blocks(facts.outer, down.rows * down.blocks)),
            dependent=facts.nvidia,
        ),
        _combine(facts, tokens, dependent=facts.nvidia),
    ]  # fmt: skip


def _sorted(facts: Facts, schedule: Schedule, tokens: int) -> list[Step]:
    from k3rewrite.kernels.experts import triton_sorted as kernels

    up, down = schedule.gate_up, schedule.down
    routes, every = tokens * facts.top_k, {"EXPERTS": power_of_two(facts.experts)}

    def blocks(tiles: Tiles) -> int:
        return min(routes, _blocks(routes, tiles.tokens) + facts.experts)

    return [
        Step(kernels.count_routes, ("ids", "counts", "first", "routes"), {"CHUNK": CHUNK}, 4, (facts.experts, 1)),
        Step(
            kernels.place_routes,
            ("ids", "counts", "order", "first", "routes"),
            {**every, "CHUNK": CHUNK},
            4,
            (facts.experts, 1),
        ),
        Step(
            kernels.gate_up_sorted,
            ("x", "order", "counts", *_GATE_UP, "hidden", "x_stride", *WEIGHTS, "count", "beta", "linear_beta"),
            {**_gating(facts), "TOP_K": facts.top_k, **every, "TOKENS": up.tokens, **_tiles(up)},
            up.num_warps,
            (blocks(up), _blocks(facts.width, up.rows)),
        ),
        Step(
            kernels.down_sorted,
            ("hidden", "order", "counts", *_DOWN, "routed", *DOWN_WEIGHTS, "count"),
            {**_downing(facts), **every, "TOKENS": down.tokens, **_tiles(down)},
            down.num_warps,
            (blocks(down), _blocks(facts.outer, down.rows)),
        ),
        _combine(facts, tokens, dependent=False),
    ]


def _combine(facts: Facts, tokens: int, *, dependent: bool) -> Step:
    from k3rewrite.kernels.experts import triton_shared as kernels

    rows = min(1024, power_of_two(facts.outer))
    constants = {"OUTER": facts.outer, "TOP_K": facts.top_k, "COMBINE": NAMES[facts.combine], "ROWS": rows}
    return Step(
        kernels.combine_routes,
        ("routed", "ids", "weights", "out", "first", "count"),
        {**constants, "PDL": dependent},
        4,
        (tokens, _blocks(facts.outer, rows)),
        dependent=dependent,
    )


def _gating(facts: Facts) -> dict[str, Any]:
    return {
        "WIDTH": facts.width,
        "INNER": facts.inner,
        "FORMAT": facts.format,
        "ACTIVATION": facts.activation,
        "LINEAR": facts.linear,
        "PRODUCT": NAMES[facts.product],
        "COMPUTE": NAMES[facts.compute],
    }


def _downing(facts: Facts) -> dict[str, Any]:
    return {"WIDTH": facts.width, "OUTER": facts.outer, "FORMAT": facts.format}


def _tiles(tiles: Tiles) -> dict[str, int]:
    return {"ROWS": tiles.rows, "COLUMNS": tiles.columns, "STAGES": tiles.stages}


def _blocks(size: int, each: int) -> int:
    return -(-size // each)
