"""The HIP C++ kernels (`hip/warp_decode.hip`): bf16, few tokens, compiled for each shape.

The published form of warp decode is one layout of them (`PUBLISHED`): 8 waves a workgroup, a wave an output, a
butterfly over the lanes, no shared memory and no barrier. Other layouts give a wave more loads in flight. More tokens
than the routes' path takes, and what cannot be read 16 bytes at a time, is handed to the Triton kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3rewrite.graph.shapes import same_size
from k3rewrite.kernels.devices import loaded_function
from k3rewrite.kernels.experts import accept, hip_call
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.ops.kernel import HipUnit
from k3rewrite.targets import Target, load_target

PATH = Path(__file__).parent / "hip" / "warp_decode.hip"
GATE_UP, DOWN = "warp_decode_gate_up", "warp_decode_down"
VECTOR = 8
"""bf16 elements of a 16-byte access"""


@dataclass(frozen=True)
class Layout:
    """Waves of a workgroup, outputs of a wave, experts and vectors whose loads are in flight together."""

    waves: int = 8
    rows: int = 1
    group: int = 1
    unroll: int = 1


PUBLISHED = Layout()
CHOSEN = Layout(rows=1, group=4, unroll=2)
"""not measured yet"""


def accepts(arguments: Mapping[str, Any], target: Target) -> str | None:
    if reason := accept.accepts(arguments, target):
        return reason
    if arguments["format"] != "dense":
        return f"reads dense weights, not {arguments['format']}"
    if arguments["out_dtype"] != torch.bfloat16:
        return "writes bfloat16"
    if arguments["weights"].dtype != torch.float32:
        return "the routing weights are not float32"
    for name in ("x", "w_gate", "w_down"):
        tensor = arguments[name]
        steps = [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if not same_size(n, 1)][:-1]
        if any(not isinstance(step, int) or step % VECTOR for step in (*steps, tensor.storage_offset())):
            return f"rows of {name} do not begin at multiples of 16 bytes (strides {tuple(tensor.stride())})"
    return hip_call.too_many(arguments, target)


def units(arguments: Mapping[str, Any], target: Target) -> Sequence[HipUnit]:
    facts = Facts.of(arguments, target.vendor == "nvidia")
    return both_units(facts, arguments["ids"].dtype, CHOSEN, target.wave_size)


def both_units(facts: Facts, ids: torch.dtype, layout: Layout, wave_size: int) -> list[HipUnit]:
    """The two launches of a layout."""
    own = {"THREADS": layout.waves * wave_size, "ROWS": layout.rows, "GROUP": layout.group, "UNROLL": layout.unroll}
    macros = hip_call.defines("WARP_DECODE", facts, ids, **own)
    return [HipUnit(PATH, symbol, macros) for symbol in (GATE_UP, DOWN)]


def experts(*arguments: Any, **options: Any) -> Tensor:
    """As `launch.experts`, which gets what these kernels do not take: more tokens, addresses at odd places."""
    named = hip_call.named_arguments(*arguments, **options)
    facts = Facts.of(named, nvidia=torch.version.hip is None)
    aligned = dict.fromkeys(("x", "w_gate", "w_up", "w_down"), 2 * VECTOR)
    handed = hip_call.handed_over(named, facts, aligned)
    return handed if handed is not None else warp_decode(named, facts, CHOSEN)


def warp_decode(named: Mapping[str, Any], facts: Facts, layout: Layout) -> Tensor:
    """The two launches. `layout` is a choice for benchmarks and tests."""
    x, ids, weights = named["x"], named["ids"].contiguous(), named["weights"].contiguous()
    w_gate, w_up, w_down, first = named["w_gate"], named["w_up"], named["w_down"], named["first"]
    tokens, routes = x.shape[0], ids.numel()
    out = x.new_empty((tokens, facts.outer))
    hidden = x.new_empty((routes, facts.width))
    owned = layout.waves * layout.rows
    with torch.cuda.device(x.device):
        functions = _functions(facts, ids.dtype, layout, x.device)
        threads = layout.waves * load_target("auto").wave_size
        functions[GATE_UP](
            grid=(routes, -(-facts.width // owned)),
            threads=threads,
            arguments=[
                x, x.stride(0), ids, first, facts.experts, w_gate, w_up, w_gate.stride(0), w_gate.stride(1),
                float(named["beta"]), float(named["linear_beta"]), hidden,
            ],
        )  # fmt: skip
        functions[DOWN](
            grid=(tokens, -(-facts.outer // owned)),
            threads=threads,
            dependent=facts.nvidia,
            arguments=[
                hidden, ids, weights, first, facts.experts, w_down, w_down.stride(0), w_down.stride(1), out,
            ],
        )  # fmt: skip
    return out


@cache
def _functions(facts: Facts, ids: torch.dtype, layout: Layout, device: torch.device) -> Mapping[str, Any]:
    """The kernels for these sizes, compiled and loaded on `device`, the current one."""
    units = both_units(facts, ids, layout, load_target("auto").wave_size)
    return {unit.symbol: loaded_function(unit) for unit in units}
