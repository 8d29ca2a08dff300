"""The layouts that a sweep of the experts' kernels tries."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

from _experts_inputs import Inputs
from _experts_variants import FEW, Call, hip, mxfp4, scheduled

from k3rewrite.kernels.experts import hip_kernel
from k3rewrite.kernels.experts.mxfp4 import bulk, registers, shared
from k3rewrite.kernels.experts.schedule import Schedule, Tiles

ROUTE_TILES = [
    Schedule("routes", Tiles(rows, columns, warps, stages), Tiles(d_rows, 128, d_warps, 2, group=group))
    for (rows, columns, warps, stages), (d_rows, d_warps, group) in itertools.product(
        [(2, 512, 2, 3), (4, 512, 4, 3), (8, 256, 4, 4)], [(8, 4, 4), (4, 4, 8), (8, 2, 2), (2, 2, 16)]
    )
]
_GATE_UP, _DOWN = Tiles(64, 128, 4, 3), Tiles(64, 128, 4, 3, blocks=4)
EXPERT_TILES = [
    *(
        Schedule("experts", Tiles(*tiles), _DOWN)
        for tiles in [(64, 128, 4, 3), (32, 128, 4, 4), (64, 64, 4, 5), (64, 128, 8, 3), (32, 64, 4, 6)]
    ),
    *(
        Schedule("experts", _GATE_UP, Tiles(rows, columns, warps, stages, blocks=blocks))
        for rows, columns, warps, stages, blocks in [
            (64, 128, 4, 3, 1), (64, 128, 4, 3, 7), (128, 128, 4, 2, 1), (128, 128, 4, 2, 4), (128, 128, 8, 3, 2),
            (128, 64, 4, 3, 4), (64, 128, 4, 2, 4), (64, 64, 4, 4, 4),
        ]
    ),
]  # fmt: skip
"""one of the two tiles changed at a time"""
HIP_LAYOUTS = [
    hip_kernel.Layout(
        unroll=2, group=group, down_waves=waves, down_rows=rows, side_by_side=True, gate_up_dependent=both,
        down_dependent=down,
    )
    for (group, rows), waves, (both, down) in itertools.product(
        [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2)], (2, 4, 8), [(False, False), (False, True), (True, True)]
    )
]  # fmt: skip
_REGISTERS, _BULK = registers.Layout(), bulk.Layout()
MXFP4_LAYOUTS = [
    *(
        replace(_REGISTERS, gate_up_waves=waves, occupancy=occupancy)
        for waves, occupancy in [(8, 4), (8, 6), (4, 4), (16, 4)]
    ),
    *(
        replace(_REGISTERS, down_waves=waves, group=group, tiles=tiles)
        for waves, group, tiles in [(8, 1, 1), (4, 1, 1), (4, 2, 1), (4, 1, 2), (2, 2, 1), (16, 1, 1)]
    ),
    *(
        replace(_BULK, gate_up_waves=waves, gate_up_ring=ring)
        for waves, ring in [(8, 2), (7, 2), (4, 2), (8, 1), (7, 3)]
    ),
    *(
        replace(_BULK, down_waves=waves, down_ring=ring, tiles=tiles)
        for waves, ring, tiles in [(4, 1, 2), (8, 1, 2), (4, 2, 1), (8, 2, 1), (4, 4, 1), (2, 2, 4)]
    ),
]
"""one of the two kernels changed at a time"""
_SHARED = shared.Layout()
MXFP4_SHARED_LAYOUTS = [
    *(replace(_SHARED, together=n, occupancy=o) for n, o in [(2, 6), (2, 8), (4, 6), (4, 4), (8, 4)]),
    *(
        replace(_SHARED, gate_up_waves=waves, gate_up_ring=ring)
        for waves, ring in [(4, 2), (4, 4), (8, 1), (8, 3), (8, 4), (16, 1), (16, 2)]
    ),
    *(
        replace(_SHARED, down_waves=waves, down_ring=ring, shares=shares)
        for waves, ring, shares in [
            (8, 2, 2), (8, 2, 7), (8, 2, 14), (4, 2, 4), (4, 4, 4), (8, 3, 4), (4, 4, 8), (16, 2, 2), (4, 3, 14),
        ]
    ),
]  # fmt: skip
"""for tokens that meet at experts; likewise"""


def candidates(data: Inputs) -> Iterator[tuple[str, Call]]:
    """Name and call of every layout that may be for this number of tokens."""
    tokens = data.x.shape[1]
    if data.weights.s13 is not None:
        for packed in [*MXFP4_LAYOUTS, *(MXFP4_SHARED_LAYOUTS if tokens >= FEW else [])]:
            yield str(packed), functools.partial(mxfp4, data, packed)
        return
    for schedule in [*(ROUTE_TILES if tokens <= 8 else []), *(EXPERT_TILES if tokens >= 8 else [])]:
        yield str(schedule), functools.partial(scheduled, data, schedule)
    for layout in HIP_LAYOUTS if tokens <= 24 else []:
        yield str(layout), functools.partial(hip, data, layout)
