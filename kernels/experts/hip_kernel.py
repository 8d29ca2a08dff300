"""The HIP C++ kernels (`hip/warp_decode.hip`): bf16, few tokens, compiled for each shape.

The published form of warp decode is one layout of them (`PUBLISHED`): 8 waves a workgroup, a wave an output, a
butterfly over the lanes, no shared memory and no barrier. Other layouts give a wave more loads in flight and let the
two kernels overlap: down reads its first weights while gate/up still runs. More tokens than the routes' path takes, and
what cannot be read 16 bytes at a time, is handed to the Triton kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3rewrite.graph.shapes import same_size
from k3rewrite.kernels.devices import loaded_function
from k3rewrite.kernels.experts import accept, hip_call
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.kernels.experts.schedule import step_of
from k3rewrite.ops.kernel import HipUnit
from k3rewrite.targets import Target, load_target

PATH = Path(__file__).parent / "hip" / "warp_decode.hip"
GATE_UP, DOWN = "warp_decode_gate_up", "warp_decode_down"
VECTOR = 8
"""bf16 elements of a 16-byte access"""


@dataclass(frozen=True)
class Layout:
    """Waves of a workgroup and outputs of a wave, of each kernel, and what is in flight together."""

    gate_up_waves: int = 8
    gate_up_rows: int = 1
    unroll: int = 1
    """vectors of x and of each row of weights that a lane of gate/up has in flight together"""
    down_waves: int = 8
    down_rows: int = 1
    group: int = 1
    """rounds of experts of which a wave of down has loads in flight together"""
    side_by_side: bool = False
    """a wave of down reads several experts in one round where a row does not fill its lanes evenly"""
    gate_up_dependent: bool = False
    down_dependent: bool = False
    """NVIDIA: the kernel is launched before the one before it ends"""

    def lanes(self, width: int, wave_size: int) -> int:
        """Lanes that read one expert's row together."""
        even = step_of(width // VECTOR)
        return min(wave_size, even) if self.side_by_side and even >= _FEWEST_LANES else wave_size


PUBLISHED = Layout()
CHOSEN = Layout(unroll=2, down_waves=4, group=2, side_by_side=True, gate_up_dependent=True, down_dependent=True)
FEW_OUTPUTS = replace(CHOSEN, group=8)
"""for results so few that the waves of down are all there at once, with the loads of eight rounds in flight: 90 % of
the fastest read at one token of 128 experts of 768 x 2048 on an H200, `CHOSEN` 84 %; at 3584 outputs it loses"""
_RESIDENT = 16 * 132
"""waves of `FEW_OUTPUTS` that an H200 holds"""
_IN_FLIGHT, _MOST_STEPS = 24, 32
"""vectors of weights that a lane of down has in flight, and of one row at most: they lie in registers"""
_FEWEST_LANES = 8
"""128 contiguous bytes: a row read by fewer lanes costs more transactions than idle lanes do"""


FEW = hip_call.Few(share_from=1.43, near_bytes=44e6)
"""One H200: as fast as shared reads at 12 to 13 tokens of 8 of 128 experts of 768 x 2048, and at 24 tokens of 16 of 896
experts of 384 x 3584, where 44 MB lie between two reads of its 60 MB L2."""
FEW_ON_AMD = hip_call.Few(share_from=1.12)
"""not measured"""


def few(facts: Facts) -> hip_call.Few:
    """How many tokens are few on the vendor's GPUs."""
    return FEW if facts.nvidia else FEW_ON_AMD


def layout_for(facts: Facts, tokens: int) -> Layout:
    """The layout for a number of tokens."""
    layout = FEW_OUTPUTS if facts.nvidia and tokens * facts.outer <= _RESIDENT else CHOSEN
    return replace(layout, group=max(1, min(layout.group, _IN_FLIGHT // _steps(layout, facts))))


def _steps(layout: Layout, facts: Facts) -> int:
    """Vectors of an expert's row that a lane of down reads."""
    lanes = layout.lanes(facts.width, 32 if facts.nvidia else 64)
    return -(-facts.width // (VECTOR * lanes))


def accepts(arguments: Mapping[str, Any], target: Target) -> str | None:
    if reason := accept.accepts(arguments, target):
        return reason
    if arguments["format"] != "dense":
        return f"reads dense weights, not {arguments['format']}"
    if reason := hip_call.dtype_objection(arguments):
        return reason
    for name in ("x", "w_gate", "w_down"):
        tensor = arguments[name]
        steps = [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if not same_size(n, 1)][:-1]
        if any(not isinstance(step, int) or step % VECTOR for step in (*steps, tensor.storage_offset())):
            return f"rows of {name} do not begin at multiples of 16 bytes (strides {tuple(tensor.stride())})"
    facts = Facts.of(arguments, target.vendor == "nvidia")
    if _steps(CHOSEN, facts) > _MOST_STEPS:
        return f"an expert is {facts.width} wide; a row of down is held in registers, which are too few"
    return few(facts).objection(arguments, target)


def units(arguments: Mapping[str, Any], target: Target) -> Sequence[HipUnit]:
    facts = Facts.of(arguments, target.vendor == "nvidia")
    tokens = arguments["x"].shape[0]
    layouts = [layout_for(facts, tokens)] if isinstance(tokens, int) else [layout_for(facts, n) for n in (1, 1 << 20)]
    made = [unit for layout in layouts for unit in both_units(facts, layout, target.wave_size)]
    return [unit for index, unit in enumerate(made) if unit not in made[:index]]


def both_units(facts: Facts, layout: Layout, wave_size: int) -> list[HipUnit]:
    """The two launches of a layout."""
    lanes = layout.lanes(facts.width, wave_size)
    own = {"LANES": lanes, "GROUP": layout.group, "UNROLL": layout.unroll}
    own["DEPENDENT"] = int((layout.gate_up_dependent or layout.down_dependent) and facts.nvidia)
    macros = hip_call.defines("WARP_DECODE", facts, **own)
    sizes = {GATE_UP: (layout.gate_up_waves, layout.gate_up_rows), DOWN: (layout.down_waves, layout.down_rows)}
    return [
        HipUnit(
            PATH,
            symbol,
            {**macros, "WARP_DECODE_THREADS": str(waves * wave_size), "WARP_DECODE_ROWS": str(rows)},
        )
        for symbol, (waves, rows) in sizes.items()
    ]


def experts(*arguments: Any, **options: Any) -> Tensor:
    """As `launch.experts`, which gets what these kernels do not take: more tokens, addresses at odd places."""
    named = hip_call.named_arguments(*arguments, **options)
    facts = Facts.of(named, nvidia=torch.version.hip is None)
    aligned = dict.fromkeys(("x", "w_gate", "w_up", "w_down"), 2 * VECTOR)
    handed = hip_call.handed_over(named, facts, few(facts), aligned)
    return handed if handed is not None else warp_decode(named, facts, layout_for(facts, named["x"].shape[0]))


def warp_decode(named: Mapping[str, Any], facts: Facts, layout: Layout) -> Tensor:
    """The two launches. `layout` is a choice for benchmarks and tests."""
    x, ids, weights = named["x"], named["ids"].contiguous(), named["weights"].contiguous()
    w_gate, w_up, w_down, first = named["w_gate"], named["w_up"], named["w_down"], named["first"]
    tokens, routes = x.shape[0], ids.numel()
    out = x.new_empty((tokens, facts.outer))
    hidden = x.new_empty((routes, facts.width))
    blocks = -(-facts.width // (layout.gate_up_waves * layout.gate_up_rows))
    with torch.cuda.device(x.device):
        functions = _functions(facts, layout, x.device)
        wave_size = load_target("auto").wave_size
        functions[GATE_UP](
            grid=(routes, blocks),
            threads=layout.gate_up_waves * wave_size,
            dependent=layout.gate_up_dependent and facts.nvidia,
            arguments=[
                x, x.stride(0), ids, first, facts.experts, w_gate, w_up, w_gate.stride(0), w_gate.stride(1),
                float(named["beta"]), float(named["linear_beta"]), hidden,
            ],
        )  # fmt: skip
        functions[DOWN](
            grid=(tokens, -(-facts.outer // (layout.down_waves * layout.down_rows))),
            threads=layout.down_waves * wave_size,
            dependent=layout.down_dependent and facts.nvidia,
            arguments=[
                hidden, ids, weights, first, facts.experts, w_down, w_down.stride(0), w_down.stride(1), out,
            ],
        )  # fmt: skip
    return out


@cache
def _functions(facts: Facts, layout: Layout, device: torch.device) -> Mapping[str, Any]:
    """The kernels for these sizes, compiled and loaded on `device`, the current one."""
    units = both_units(facts, layout, load_target("auto").wave_size)
    return {unit.symbol: loaded_function(unit) for unit in units}
