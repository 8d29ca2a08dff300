"""The CUDA kernels for MXFP4 weights (`hip/mxfp4_decode.hip`): few tokens, on integer matrix units.

NVIDIA, sm_90 and later. More tokens than the routes' path takes are handed to the Triton kernels, which read the same
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.devices import loaded_function
from k3rewrite.kernels.experts import accept, hip_call
from k3rewrite.kernels.experts.formats import GROUP
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.ops.kernel import HipUnit
from k3rewrite.targets import Target

_FOLDER = Path(__file__).parent / "hip"
PATH, RING_PATH = _FOLDER / "mxfp4_decode.hip", _FOLDER / "mxfp4_ring.hip"
PREPARE = "mxfp4_prepare"
ARCHS = ("sm_90", "sm_100")
TILE, SPAN = 16, 128
"""rows of a product, columns of a step"""
MAX_WIDTH = 1024
"""of an expert: a wave of down has a row's steps in registers, and up to here none of them spills"""
MAX_SHARED = 48 * 1024
"""bytes of shared memory that a kernel may declare"""
DIGITS = 80
"""bytes of a group of activations as digits"""
_WHOLE_WAVES = 8
"""groups that a wave prepares together"""
GATE_UP_STAGE, DOWN_STAGE = 2176, 1088
"""bytes of a stage of a ring: of gate/up, of down for each step"""
_SUMS = 2048
"""bytes of sums beside them, at most"""
_PREPARING = 4
"""waves of a workgroup of `mxfp4_prepare`"""


@dataclass(frozen=True)
class Layout:
    """Waves of a workgroup of each kernel, a multiple of 4 for gate/up."""

    gate_up_waves: int = 8
    occupancy: int = 6
    """waves of a quarter of a multiprocessor for which gate/up's registers are kept few enough"""
    down_waves: int = 8
    tiles: int = 1
    """tiles of 16 rows of a wave of down"""
    group: int = 2
    """experts of which a wave of down has loads in flight together"""
    gate_up_ring: int = 0
    """stages of shared memory that a wave of gate/up has in flight, instead of registers; 0: registers"""
    down_ring: int = 0


CHOSEN = Layout()
FEW = hip_call.Few(share_from=2.0)
"""Not measured against what more tokens are handed over to. On an H200, 16 of 896 experts, it is faster than Humming
and Marlin up to 16 tokens, and slower from 32 on, where it unpacks a weight again for each route."""


def accepts(arguments: Mapping[str, Any], target: Target) -> str | None:
    if target.arch not in ARCHS:
        return f"{target.arch} is none of {', '.join(ARCHS)}"
    if reason := accept.accepts(arguments, target):
        return reason
    if arguments["format"] != "mxfp4":
        return f"reads mxfp4 weights, not {arguments['format']}"
    if reason := hip_call.dtype_objection(arguments):
        return reason
    facts = Facts.of(arguments, nvidia=True)
    for name, size, step in (
        ("x", facts.inner, 2 * SPAN),
        ("an expert", facts.width, SPAN),
        ("the result", facts.outer, TILE * CHOSEN.tiles),
    ):
        if size % step:
            return f"the width of {name} is {size}; a multiple of {step} is needed"
    if facts.width > MAX_WIDTH:
        return f"an expert is {facts.width} wide; up to {MAX_WIDTH} are held in registers"
    for what, columns in (("x", facts.inner), ("the experts of a token", facts.top_k * facts.width)):
        if columns // GROUP * DIGITS > MAX_SHARED - _SUMS:
            return f"the digits of {what}, {columns} columns, do not fit into {MAX_SHARED} bytes of shared memory"
    for name, step in (("x", 8), ("w_gate", 16), ("w_down", 16), ("s_gate", 8), ("s_down", 4)):
        if any(not isinstance(s, int) or s % step for s in arguments[name].stride()[:-1]):
            return (
                f"rows of {name} are not {step} apart, or a multiple of it (strides {tuple(arguments[name].stride())})"
            )
    return FEW.objection(arguments, target)


def units(arguments: Mapping[str, Any], target: Target) -> Sequence[HipUnit]:
    facts = Facts.of(arguments, nvidia=True)
    return all_units(facts, layout_for(facts))


def layout_for(facts: Facts) -> Layout:
    """`CHOSEN`, with fewer experts in flight where each one takes more registers."""
    return CHOSEN if facts.width <= 4 * SPAN else replace(CHOSEN, group=1)


def all_units(facts: Facts, layout: Layout) -> list[HipUnit]:
    """The three launches of a layout: prepare, gate/up, down."""

    def unit(symbol: str, waves: int, ring: int, stage: int, **own: int) -> HipUnit:
        if ring:
            own, symbol = {"RING": ring}, symbol.replace("mxfp4_", "mxfp4_ring_")
        macros = hip_call.defines("MXFP4", facts, WAVES=waves, **own)
        return HipUnit(RING_PATH if ring else PATH, symbol, macros, dynamic_lds=waves * ring * stage)

    own = {"GROUP": layout.group, "TILES": layout.tiles, "OCCUPANCY": layout.occupancy}
    return [
        unit(PREPARE, _PREPARING, 0, 0, **own),
        unit("mxfp4_gate_up", layout.gate_up_waves, layout.gate_up_ring, GATE_UP_STAGE, **own),
        unit("mxfp4_down", layout.down_waves, layout.down_ring, DOWN_STAGE * (facts.width // SPAN), **own),
    ]


def experts(*arguments: Any, **options: Any) -> Tensor:
    """As `launch.experts`, which gets what these kernels do not take: more tokens, addresses at odd places."""
    named = hip_call.named_arguments(*arguments, **options)
    facts = Facts.of(named, nvidia=True)
    aligned = dict.fromkeys(("x", "w_gate", "w_up", "w_down"), 16) | {"s_gate": 8, "s_up": 8, "s_down": 4}
    handed = hip_call.handed_over(named, facts, FEW, aligned)
    return handed if handed is not None else mxfp4_decode(named, facts, layout_for(facts))


def mxfp4_decode(named: Mapping[str, Any], facts: Facts, layout: Layout) -> Tensor:
    """The three launches. `layout` is a choice for benchmarks and tests."""
    x, ids, weights, first = named["x"], named["ids"].contiguous(), named["weights"].contiguous(), named["first"]
    gate, up, down = named["w_gate"], named["w_up"], named["w_down"]
    s_gate, s_up, s_down = named["s_gate"], named["s_up"], named["s_down"]
    tokens, routes, blocks = x.shape[0], ids.numel(), facts.width // GROUP
    out = x.new_empty((tokens, facts.outer))
    prepared = x.new_empty((tokens, prepared_groups(facts), DIGITS), dtype=torch.uint8)
    hidden = x.new_empty((routes, blocks, DIGITS), dtype=torch.uint8)
    with torch.cuda.device(x.device):
        launches = _launches(facts, layout, x.device)
        launches[0](
            grid=(tokens, -(-facts.inner // (8 * 32 * _PREPARING))),
            threads=32 * _PREPARING,
            arguments=[x, x.stride(0), prepared],
        )
        launches[1](
            grid=(routes, blocks),
            threads=32 * layout.gate_up_waves,
            arguments=[
                prepared, ids, first, facts.experts, gate, up, gate.stride(0), gate.stride(1), s_gate, s_up,
                s_gate.stride(0), s_gate.stride(1), float(named["beta"]), float(named["linear_beta"]), 1 << 16, hidden,
            ],
        )  # fmt: skip
        launches[2](
            grid=(tokens, facts.outer // (TILE * (1 if layout.down_ring else layout.tiles))),
            threads=32 * layout.down_waves,
            arguments=[
                hidden, ids, weights, first, facts.experts, down, down.stride(0), down.stride(1), s_down,
                s_down.stride(0), s_down.stride(1), 1 << 16, out,
            ],
        )  # fmt: skip
    return out


def prepared_groups(facts: Facts) -> int:
    """Groups of digits for which a prepared token has room: whole waves prepare them."""
    return -(-facts.inner // (_WHOLE_WAVES * GROUP)) * _WHOLE_WAVES


@cache
def _launches(facts: Facts, layout: Layout, device: torch.device) -> tuple[Callable[..., None], ...]:
    """The kernels for these sizes, compiled and loaded on `device`, the current one. Each is launched before the one
    before it ends, and waits for it inside."""
    units = all_units(facts, layout)
    return tuple(partial(loaded_function(u), dynamic_lds=u.dynamic_lds, dependent=True) for u in units)
