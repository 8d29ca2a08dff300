"""The CUDA kernels for MXFP4 weights that hold them in registers (`hip/mxfp4_registers.hip`): fewest tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.experts import hip_call
from k3rewrite.kernels.experts.mxfp4.launching import Room, launches
from k3rewrite.kernels.experts.mxfp4.sizes import FOLDER, TILE
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.ops.kernel import HipUnit

PATH = FOLDER / "mxfp4_registers.hip"
PREPARE = "mxfp4_prepare"
PREPARING = 4
"""waves of a workgroup of `mxfp4_prepare`"""


@dataclass(frozen=True)
class Layout:
    """Waves of a workgroup of each kernel, a multiple of 4 for gate/up."""

    gate_up_waves: int = 8
    occupancy: int = 4
    """waves of a quarter of a multiprocessor for which gate/up's registers are kept few enough"""
    down_waves: int = 8
    tiles: int = 1
    """tiles of 16 rows of a wave of down"""
    group: int = 2
    """experts of which a wave of down has loads in flight together"""

    def units(self, facts: Facts) -> list[HipUnit]:
        return all_units(facts, self)

    def run(self, named: Mapping[str, Any], facts: Facts) -> Tensor:
        return mxfp4_registers(named, facts, self)


def all_units(facts: Facts, layout: Layout) -> list[HipUnit]:
    """The three launches of a layout: prepare, gate/up, down."""
    own = {"GROUP": layout.group, "TILES": layout.tiles, "OCCUPANCY": layout.occupancy}
    waves = {"mxfp4_gate_up": layout.gate_up_waves, "mxfp4_down": layout.down_waves}
    units = [HipUnit(PATH, name, hip_call.defines("MXFP4", facts, WAVES=n, **own)) for name, n in waves.items()]
    return [prepare_unit(facts), *units]


def prepare_unit(facts: Facts) -> HipUnit:
    """The first launch: the same for every layout, which its source has no use for."""
    macros = hip_call.defines("MXFP4", facts, WAVES=PREPARING, GROUP=1, TILES=1, OCCUPANCY=4)
    return HipUnit(PATH, PREPARE, macros)


def prepare_grid(facts: Facts, tokens: int) -> tuple[int, int]:
    """Workgroups of `mxfp4_prepare`: each takes vectors of eight columns, one a thread."""
    return tokens, -(-facts.inner // (8 * 32 * PREPARING))


def mxfp4_registers(named: Mapping[str, Any], facts: Facts, layout: Layout) -> Tensor:
    """The three launches; arguments as `choose.accepts` takes them, with at least one token."""
    x, first, room = named["x"], named["first"], Room.of(named, facts)
    gate, up, down = named["w_gate"], named["w_up"], named["w_down"]
    s_gate, s_up, s_down = named["s_gate"], named["s_up"], named["s_down"]
    tokens = x.shape[0]
    with torch.cuda.device(x.device):
        prepare, gate_up, down_of = launches(facts, layout, x.device)
        prepare(grid=prepare_grid(facts, tokens), threads=32 * PREPARING, arguments=[x, x.stride(0), room.prepared])
        gate_up(
            grid=room.gate_up_grid,
            threads=32 * layout.gate_up_waves,
            arguments=[
                room.prepared, room.ids, first, facts.experts, gate, up, gate.stride(0), gate.stride(1), s_gate, s_up,
                s_gate.stride(0), s_gate.stride(1), float(named["beta"]), float(named["linear_beta"]), 1 << 16,
                room.hidden,
            ],
        )  # fmt: skip
        down_of(
            grid=(tokens, facts.outer // (TILE * layout.tiles)),
            threads=32 * layout.down_waves,
            arguments=[
                room.hidden, room.ids, room.weights, first, facts.experts, down, down.stride(0), down.stride(1), s_down,
                s_down.stride(0), s_down.stride(1), 1 << 16, room.out,
            ],
        )  # fmt: skip
    return room.out
