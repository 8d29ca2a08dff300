"""The CUDA kernels for MXFP4 weights where several tokens meet at an expert (`hip/mxfp4_shared.hip`).

prepare   digits of the tokens; which routes meet            gate/up, down   once for up to `together` routes
combine   the routes of a token added up in their order
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.experts import hip_call
from k3rewrite.kernels.experts.formats import GROUP
from k3rewrite.kernels.experts.mxfp4.launching import Room, launches
from k3rewrite.kernels.experts.mxfp4.sizes import DIGITS, FOLDER, SPAN
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.ops.kernel import HipUnit

PATH = FOLDER / "mxfp4_shared.hip"
GATE_UP_STAGE, DOWN_STAGE = 2176, 1088
"""bytes of a stage of a ring: of gate/up, of down for each step"""
_PREPARING, _COMBINING = 4, 4
"""waves of a workgroup of the first and the last kernel"""


@dataclass(frozen=True)
class Layout:
    """Waves of a workgroup, a multiple of 4 for gate/up; stages of a wave's ring; routes that share what is read."""

    together: int = 4
    """2, 4 or 8"""
    gate_up_waves: int = 8
    occupancy: int = 6
    """waves of a quarter of a multiprocessor for which gate/up's registers are kept few enough"""
    gate_up_ring: int = 2
    down_waves: int = 8
    down_ring: int = 2
    shares: int = 2
    """workgroups among which an expert's outputs are divided"""

    def units(self, facts: Facts) -> list[HipUnit]:
        return all_units(facts, self)

    def run(self, named: Mapping[str, Any], facts: Facts) -> Tensor:
        return mxfp4_shared(named, facts, self)


def all_units(facts: Facts, layout: Layout) -> list[HipUnit]:
    """The four launches: prepare, gate/up, down, combine."""

    def unit(symbol: str, waves: int, ring: int = 1, lds: int = 0) -> HipUnit:
        macros = hip_call.defines(
            "MXFP4", facts, WAVES=waves, RING=ring, TOGETHER=layout.together, OCCUPANCY=layout.occupancy
        )
        return HipUnit(PATH, f"mxfp4_shared_{symbol}", macros, dynamic_lds=lds)

    digits = layout.together * DIGITS // GROUP
    rings = layout.gate_up_waves * layout.gate_up_ring, layout.down_waves * layout.down_ring
    return [
        unit("prepare", _PREPARING),
        unit("gate_up", layout.gate_up_waves, layout.gate_up_ring, rings[0] * GATE_UP_STAGE + digits * facts.inner),
        unit(
            "down",
            layout.down_waves,
            layout.down_ring,
            rings[1] * DOWN_STAGE * (facts.width // SPAN) + digits * facts.width,
        ),
        unit("combine", _COMBINING),
    ]


def mxfp4_shared(named: Mapping[str, Any], facts: Facts, layout: Layout) -> Tensor:
    """The four launches; arguments as `choose.accepts` takes them, with at least one token."""
    x, first, room = named["x"], named["first"], Room.of(named, facts)
    gate, up, down = named["w_gate"], named["w_up"], named["w_down"]
    s_gate, s_up, s_down = named["s_gate"], named["s_up"], named["s_down"]
    tokens, routes = room.ids.shape[0], room.ids.numel()
    links = room.ids.new_empty((routes, layout.together), dtype=torch.int32)
    routed = x.new_empty((routes, facts.outer), dtype=torch.float32)
    window = (room.ids, first, facts.experts)
    with torch.cuda.device(x.device):
        prepare, gate_up, down_shared, combine = launches(facts, layout, x.device)
        prepare(
            grid=(tokens, -(-facts.inner // (8 * 32 * _PREPARING)) + -(-facts.top_k // _PREPARING)),
            threads=32 * _PREPARING,
            arguments=[x, x.stride(0), *window, routes, room.prepared, links],
        )
        gate_up(
            grid=room.gate_up_grid,
            threads=32 * layout.gate_up_waves,
            arguments=[
                room.prepared, links, *window, gate, up, gate.stride(0), gate.stride(1), s_gate, s_up, s_gate.stride(0),
                s_gate.stride(1), float(named["beta"]), float(named["linear_beta"]), 1 << 16, room.hidden,
            ],
        )  # fmt: skip
        down_shared(
            grid=(routes, layout.shares),
            threads=32 * layout.down_waves,
            arguments=[
                room.hidden, links, *window, down, down.stride(0), down.stride(1), s_down, s_down.stride(0),
                s_down.stride(1), 1 << 16, layout.shares, routed,
            ],
        )  # fmt: skip
        combine(
            grid=(tokens, -(-facts.outer // (4 * 32 * _COMBINING))),
            threads=32 * _COMBINING,
            arguments=[routed, room.ids, room.weights, first, facts.experts, room.out],
        )
    return room.out
