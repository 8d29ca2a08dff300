"""The CUDA kernels for MXFP4 weights (`hip/mxfp4_decode.hip`): few tokens, on 8-bit matrix units.

NVIDIA, sm_90 and later. More tokens than the routes' path takes are handed to the Triton kernels, which read the same
weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.devices import loaded_function
from k3rewrite.kernels.experts import accept, hip_call
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.ops.kernel import HipUnit
from k3rewrite.targets import Target

PATH = Path(__file__).parent / "hip" / "mxfp4_decode.hip"
GATE_UP, DOWN = "mxfp4_gate_up", "mxfp4_down"
ARCHS = ("sm_90", "sm_100")
TILE, SPAN = 16, 64
"""rows of a workgroup, columns of a step"""


@dataclass(frozen=True)
class Layout:
    """Waves of a workgroup of each kernel, and steps of gate/up whose loads are in flight together."""

    gate_up_waves: int = 4
    down_waves: int = 4
    unroll: int = 4


CHOSEN = Layout()
"""not measured yet"""


def accepts(arguments: Mapping[str, Any], target: Target) -> str | None:
    if target.arch not in ARCHS:
        return f"{target.arch} is none of {', '.join(ARCHS)}"
    if reason := accept.accepts(arguments, target):
        return reason
    if arguments["format"] != "mxfp4":
        return f"reads mxfp4 weights, not {arguments['format']}"
    if arguments["out_dtype"] != torch.bfloat16 or arguments["weights"].dtype != torch.float32:
        return "routing weights are float32, the result is bfloat16"
    facts = Facts.of(arguments, nvidia=True)
    for name, size, step in (
        ("x", facts.inner, SPAN),
        ("an expert", facts.width, SPAN),
        ("the result", facts.outer, TILE),
    ):
        if size % step:
            return f"the width of {name} is {size}; a multiple of {step} is needed"
    for name, step in (("x", 8), ("w_gate", 8), ("w_down", 8), ("s_gate", 2), ("s_down", 2)):
        if any(not isinstance(s, int) or s % step for s in arguments[name].stride()[:-1]):
            return (
                f"rows of {name} are not {step} apart, or a multiple of it (strides {tuple(arguments[name].stride())})"
            )
    return hip_call.too_many(arguments, target)


def units(arguments: Mapping[str, Any], target: Target) -> Sequence[HipUnit]:
    return both_units(Facts.of(arguments, nvidia=True), arguments["ids"].dtype, CHOSEN)


def both_units(facts: Facts, ids: torch.dtype, layout: Layout) -> list[HipUnit]:
    """The two launches of a layout."""
    macros = hip_call.defines("MXFP4", facts, ids, UNROLL=layout.unroll)
    waves = {GATE_UP: layout.gate_up_waves, DOWN: layout.down_waves}
    return [HipUnit(PATH, symbol, {**macros, "MXFP4_WAVES": str(count)}) for symbol, count in waves.items()]


def experts(*arguments: Any, **options: Any) -> Tensor:
    """As `launch.experts`, which gets what these kernels do not take: more tokens, addresses at odd places."""
    named = hip_call.named_arguments(*arguments, **options)
    facts = Facts.of(named, nvidia=True)
    aligned = {"x": 16, "w_gate": 8, "w_up": 8, "w_down": 8, "s_gate": 2, "s_up": 2, "s_down": 2}
    handed = hip_call.handed_over(named, facts, aligned)
    return handed if handed is not None else mxfp4_decode(named, facts, CHOSEN)


def mxfp4_decode(named: Mapping[str, Any], facts: Facts, layout: Layout) -> Tensor:
    """The two launches. `layout` is a choice for benchmarks and tests."""
    x, ids, weights, first = named["x"], named["ids"].contiguous(), named["weights"].contiguous(), named["first"]
    gate, up, down = named["w_gate"], named["w_up"], named["w_down"]
    s_gate, s_up, s_down = named["s_gate"], named["s_up"], named["s_down"]
    out = x.new_empty((x.shape[0], facts.outer))
    hidden = x.new_empty((ids.numel(), facts.width))
    with torch.cuda.device(x.device):
        functions = _functions(facts, ids.dtype, layout, x.device)
        functions[GATE_UP](
            grid=(ids.numel(), facts.width // TILE),
            threads=32 * layout.gate_up_waves,
            arguments=[
                x, x.stride(0), ids, first, facts.experts, gate, up, gate.stride(0), gate.stride(1), s_gate, s_up,
                s_gate.stride(0), s_gate.stride(1), float(named["beta"]), float(named["linear_beta"]), hidden,
            ],
        )  # fmt: skip
        functions[DOWN](
            grid=(x.shape[0], facts.outer // TILE),
            threads=32 * layout.down_waves,
            dependent=True,
            arguments=[
                hidden, ids, weights, first, facts.experts, down, down.stride(0), down.stride(1), s_down,
                s_down.stride(0), s_down.stride(1), out,
            ],
        )  # fmt: skip
    return out


@cache
def _functions(facts: Facts, ids: torch.dtype, layout: Layout, device: torch.device) -> Mapping[str, Any]:
    """The kernels for these sizes, compiled and loaded on `device`, the current one."""
    return {unit.symbol: loaded_function(unit) for unit in both_units(facts, ids, layout)}
