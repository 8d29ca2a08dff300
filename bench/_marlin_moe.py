"""Marlin as a peer: routed experts with MXFP4 weights and bf16 activations, from vLLM's compiled `_moe_C` extension.

The extension is that of `_vllm_moe`. Its `moe_wna16_marlin_gemm` has kernels for E2M1 weights with an E8M0 scale per 32
columns; the operation that brings weights into Marlin's order is in another extension, and is written here in torch.

A call is, as in vLLM: routes to blocks, gate|up, SiLU product, down times routing weights, sum over a token's routes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import _vllm_moe as vllm
import torch
from _humming_moe import Align, Call, align_routes, single_blocks
from torch import Tensor

from k3rewrite.models.kimi_k3.mxfp4 import pack_nibbles, unpack_nibbles

E2M1 = 562949953487106
"""vLLM's number of the element type: 2 bits of exponent, 1 of mantissa, a sign, only finite values"""
CHUNK = 32
"""experts that are brought into order at a time"""


class Tiles(NamedTuple):
    """Depth and columns of a block, blocks a multiprocessor; -1 leaves it to Marlin."""

    depth: int = -1
    columns: int = -1
    blocks: int = -1


TILES = (Tiles(128, 128, 1), Tiles(64, 128, 1), Tiles(64, 128, 2), Tiles(128, 64, 1), Tiles(128, 64, 2))
"""those whose blocks are resident together for sure: they wait for each other"""


@dataclass(frozen=True)
class Gemm:
    """One projection of all experts, in Marlin's order."""

    weight: Tensor
    scale: Tensor
    rows: int
    columns: int


@dataclass(frozen=True)
class Experts:
    gate_up: Gemm
    down: Gemm


@dataclass(frozen=True)
class Schedule:
    """Tiles of the two GEMMs; whether routes of one expert share blocks, or have one each; rows of a block."""

    gate_up: Tiles
    down: Tiles
    sort: bool
    rows: int


def load(root: Path) -> Any:
    """The extension's operations. `OSError` if it is not in `root`, `AttributeError` if it has no Marlin."""
    if not hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm"):
        vllm.load(root)
    if not hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm"):
        raise AttributeError("the extension has no moe_wna16_marlin_gemm")
    return torch.ops._moe_C


def repack(packed: Tensor, scale: Tensor) -> Gemm:
    """MXFP4 as the checkpoint stores it, `[experts, rows, columns / 2]` and `[experts, rows, columns / 32]` uint8."""
    rows, half = packed.shape[1:]
    if rows % 64 or half % 32:
        raise ValueError(f"Marlin takes multiples of 64 rows and columns, not {rows} and {half * 2}")
    weight = torch.cat([_weights(part) for part in packed.split(CHUNK)])
    return Gemm(weight, _scales(scale).view(torch.float8_e8m0fnu), rows, half * 2)


def _weights(packed: Tensor) -> Tensor:
    """`[experts, columns / 16, rows * 2]` int32.

    A tile is 64 rows by 16 columns. Lane 4 * row + pair of warp w holds eight elements in a word: rows `row` and
    `row + 8` of the warp's 16, columns 2 * pair, 2 * pair + 1, and both again 8 columns on.
    """
    experts, rows, half = packed.shape
    # row = (tile, warp, second half of the warp's rows, row), column = (tile, second half, pair, odd)
    codes = unpack_nibbles(packed).view(experts, rows // 64, 4, 2, 8, half // 8, 2, 4, 2)
    ordered = codes.permute(0, 5, 1, 4, 7, 2, 8, 3, 6).reshape(experts, half // 8, -1)
    return pack_nibbles(ordered).view(torch.int32)


def _scales(scale: Tensor) -> Tensor:
    """`[experts, columns / 32, rows]`: eight rows of a tile of 64, eight apart, lie together; the middle two of four
    change places."""
    experts, rows, groups = scale.shape
    tiles = scale.transpose(1, 2).reshape(experts, groups, rows // 64, 2, 2, 2, 8)
    return tiles.permute(0, 1, 2, 6, 3, 5, 4).reshape(experts, groups, rows).contiguous()


def stock(tokens: int, top_k: int, experts: int) -> Schedule:
    """vLLM's choice of rows, Marlin's own of tiles. Routes are sorted unless they are few, as in vLLM's fused_moe."""
    rows = next((rows for rows in (8, 16, 32, 48, 64) if tokens * top_k / experts / rows < 0.9), 64)
    return Schedule(Tiles(), Tiles(), tokens * top_k * 4 > experts, rows)


def tune(stock: Schedule, time_of: Callable[[Schedule], float]) -> tuple[Schedule, float]:
    """The fastest schedule and its time: gate|up first, then down, then sorting.

    time_of: microseconds of a schedule; it may raise for one that cannot run or is wrong.
    """

    def timed(schedule: Schedule) -> float:
        try:
            return time_of(schedule)
        except (RuntimeError, ValueError, TypeError):
            return math.inf

    best, best_us = stock, timed(stock)
    tries: list[Callable[[Schedule], Schedule]] = [
        *(lambda s, t=tiles: replace(s, gate_up=t) for tiles in TILES),
        *(lambda s, t=tiles: replace(s, down=t) for tiles in TILES),
        lambda s: replace(s, sort=not s.sort),
    ]
    for change in tries:
        schedule = change(best)
        if (us := timed(schedule)) < best_us:
            best, best_us = schedule, us
    return best, best_us


def make_call(
    peer: Any, experts: Experts, x: Tensor, ids: Tensor, shares: Tensor, schedule: Schedule, align: Align | None = None
) -> Call:  # fmt: skip
    """x `[routings, tokens, columns]` bf16, ids and shares `[routings, tokens, routes a token]`.

    align: vLLM's `moe_align_block_size`; torch operations if there is none.
    """
    _, tokens, top_k = ids.shape
    routes, count = tokens * top_k, experts.down.weight.shape[0]
    ids, shares = ids.int().contiguous(), shares.float().contiguous()
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    locks = torch.zeros(processors * 4, dtype=torch.int32, device=x.device)
    alone = single_blocks(routes, schedule.rows, x.device)
    align = align or align_routes

    def project(
        gemm: Gemm, tiles: Tiles, rows_in: Tensor, per_row: int, blocks: tuple[Tensor, ...], weights: Tensor
    ) -> Tensor:
        out = rows_in.new_empty(routes, gemm.rows)
        # after b_type: rows, columns, depth; no act-order; sums between blocks in fp32, not by atomics
        return peer.moe_wna16_marlin_gemm(
            rows_in, out, gemm.weight, None, gemm.scale, None, None, None, None, None, locks, *blocks, weights,
            schedule.rows, per_row, gemm is experts.down, E2M1, rows_in.shape[0], gemm.rows, gemm.columns,
            True, False, True, False, tiles.depth, tiles.columns, tiles.blocks,
        )  # fmt: skip

    def call(i: int) -> Tensor:
        blocks = (alone[0], ids[i].view(-1), alone[1])
        if schedule.sort:
            blocks = align(ids[i], schedule.rows, count)
        both = project(experts.gate_up, schedule.gate_up, x[i], top_k, blocks, shares[i])
        hidden = x.new_empty(routes, experts.down.columns)
        vllm._activate(None, hidden, both)
        out = project(experts.down, schedule.down, hidden, 1, blocks, shares[i])
        result = torch.empty_like(x[i])
        peer.moe_sum(out.view(tokens, top_k, -1), result)
        return result

    return call
