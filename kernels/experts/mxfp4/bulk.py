"""The CUDA kernels for MXFP4 weights that fetch by bulk copies (`hip/mxfp4_bulk.hip`), for more tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.experts import hip_call
from k3rewrite.kernels.experts.formats import GROUP
from k3rewrite.kernels.experts.mxfp4.launching import Room, launches
from k3rewrite.kernels.experts.mxfp4.registers import PREPARING, prepare_grid, prepare_unit
from k3rewrite.kernels.experts.mxfp4.sizes import DIGITS, FOLDER, TILE
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.ops.kernel import HipUnit

PATH = FOLDER / "mxfp4_bulk.hip"
_THIRD, _HALF = (228 * 1024 // n - 1024 - 2560 for n in (3, 2))
"""bytes of dynamic shared memory with which so many workgroups fit into a multiprocessor, beside what the hardware
keeps of each and what the sources declare"""


@dataclass(frozen=True)
class Layout:
    """Waves of a workgroup of each kernel; stages in flight, of gate/up for a workgroup, of down for each wave."""

    gate_up_waves: int = 8
    gate_up_ring: int = 2
    down_waves: int = 4
    down_ring: int = 2
    tiles: int = 2
    """tiles of 16 rows of a stage of down"""
    gate_up_occupancy: int = 6
    down_occupancy: int = 4
    """waves of a quarter of a multiprocessor for which registers are kept few enough"""

    def units(self, facts: Facts) -> list[HipUnit]:
        return all_units(facts, self)

    def run(self, named: Mapping[str, Any], facts: Facts) -> Tensor:
        return mxfp4_bulk(named, facts, self)


def layout_for(facts: Facts) -> Layout:
    """Measured with x of 3584 and experts of 384; wider ones have fewer rows in flight, so that as many fit."""
    chosen = Layout()
    if _gate_up_bytes(facts, chosen) > _THIRD:
        chosen = replace(chosen, gate_up_ring=1)
    if facts.outer % (TILE * chosen.tiles) or _down_bytes(facts, chosen) > _THIRD:
        chosen = replace(chosen, tiles=1)
    return chosen


def objection(arguments: Mapping[str, Any], facts: Facts) -> str | None:
    """To a call that the other MXFP4 kernels take: what keeps its rows from being fetched many at a time."""
    layout = layout_for(facts)
    for name, columns in (("w_gate", facts.inner // 2), ("w_down", facts.width // 2), ("s_gate", facts.inner // GROUP),
                          ("s_down", facts.width // GROUP)):  # fmt: skip
        experts, rows = arguments[name].stride()[:2]
        if rows != columns or experts % 16:
            return f"rows of {name} do not lie one after the other"
    if max(_gate_up_bytes(facts, layout), _down_bytes(facts, layout)) > _HALF:
        return "no two workgroups' rows in flight fit the shared memory"
    return None


def all_units(facts: Facts, layout: Layout) -> list[HipUnit]:
    """The three launches: prepare, gate/up, down."""

    def unit(symbol: str, waves: int, ring: int, occupancy: int, lds: int) -> HipUnit:
        own = {"WAVES": waves, "RING": ring, "TILES": layout.tiles, "OCCUPANCY": occupancy}
        return HipUnit(PATH, symbol, hip_call.defines("MXFP4", facts, **own), dynamic_lds=lds)

    gate_up, down = _gate_up_bytes(facts, layout), _down_bytes(facts, layout)
    return [
        prepare_unit(facts),
        unit("mxfp4_bulk_gate_up", layout.gate_up_waves, layout.gate_up_ring, layout.gate_up_occupancy, gate_up),
        unit("mxfp4_bulk_down", layout.down_waves, layout.down_ring, layout.down_occupancy, down),
    ]


def _gate_up_bytes(facts: Facts, layout: Layout) -> int:
    return layout.gate_up_ring * _stage_bytes(facts.inner) + facts.inner // GROUP * DIGITS


def _down_bytes(facts: Facts, layout: Layout) -> int:
    routes = -(-facts.top_k // layout.down_waves) * layout.down_waves
    stages = layout.down_waves * layout.down_ring * layout.tiles
    return stages * _stage_bytes(facts.width) + routes * facts.width // GROUP * DIGITS


def _stage_bytes(columns: int) -> int:
    """16 rows and their scales."""
    return TILE * (columns // 2 + columns // GROUP)


def mxfp4_bulk(named: Mapping[str, Any], facts: Facts, layout: Layout) -> Tensor:
    """The three launches; arguments that `choose.accepts` takes and `objection` does not refuse."""
    x, first, room = named["x"], named["first"], Room.of(named, facts)
    gate, down, s_gate, s_down = (named[name] for name in ("w_gate", "w_down", "s_gate", "s_down"))
    tokens = x.shape[0]
    with torch.cuda.device(x.device):
        prepare, gate_up, down_of = launches(facts, layout, x.device)
        prepare(grid=prepare_grid(facts, tokens), threads=32 * PREPARING, arguments=[x, x.stride(0), room.prepared])
        gate_up(
            grid=room.gate_up_grid,
            threads=32 * layout.gate_up_waves,
            arguments=[
                room.prepared, room.ids, first, facts.experts, gate, named["w_up"], gate.stride(0), s_gate,
                named["s_up"], s_gate.stride(0), float(named["beta"]), float(named["linear_beta"]), 1 << 16,
                room.hidden,
            ],
        )  # fmt: skip
        down_of(
            grid=(tokens, facts.outer // (TILE * layout.tiles)),
            threads=32 * layout.down_waves,
            arguments=[
                room.hidden, room.ids, room.weights, first, facts.experts, down, down.stride(0), s_down,
                s_down.stride(0), 1 << 16, room.out,
            ],
        )  # fmt: skip
    return room.out
