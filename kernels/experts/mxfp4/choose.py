"""The CUDA kernels for MXFP4 weights on integer matrix units (NVIDIA, sm_90 and later): which calls get which.

    registers   a route reads its expert's weights alone, and holds them in registers     fewest tokens
    bulk        likewise, but fetched by bulk copies: more in flight                      several workgroups a slot
    shared      up to four routes of an expert share what is read and unpacked            tokens meet at experts

More tokens than that are handed to the Triton kernels, which read the same weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from k3rewrite.kernels.experts import accept, hip_call
from k3rewrite.kernels.experts.formats import GROUP
from k3rewrite.kernels.experts.mxfp4 import bulk, registers, shared
from k3rewrite.kernels.experts.mxfp4.sizes import DIGITS, MAX_WIDTH, SPAN, TILE
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.kernels.experts.schedule import expected_hits
from k3rewrite.ops.kernel import HipUnit
from k3rewrite.targets import Target

ARCHS = ("sm_90", "sm_100")
MAX_SHARED = 48 * 1024
"""bytes of shared memory that a kernel may declare"""
_SUMS = 2048
"""bytes of sums beside them, at most"""
FEW = hip_call.Few(share_from=2.0)
"""Not measured against what more tokens are handed over to. On an H200, 16 of 896 experts, it is faster than Humming
and Marlin up to 32 tokens."""
# Measured on an H200 with 16 of 896 experts of 3584 x 384, in sweeps of which one was kept, without bulk copies
# (bench/results/experts-mxfp4-sweep-h200.json).
BULK_FROM = 1024
"""workgroups of gate/up from which on bulk copies pay: 4 tokens have 768, 8 have 1,536"""
SHARE_FROM = 1.45
"""routes an expert that is hit, from which on they share what is read: 32 tokens have 1.31, 64 have 1.67"""
MANY_DOWN = 512
"""workgroups of down from which on few waves, each with one expert at a time, are better: 2 tokens have 448, 4 896"""
_MOST = 1 << 14
"""tokens beyond which none are few"""

Layout = registers.Layout | bulk.Layout | shared.Layout


def layout_for(arguments: Mapping[str, Any], facts: Facts, tokens: int, by_bulk: bool = True) -> Layout:
    """What `tokens` tokens get, 1 or more. Of `arguments` only the strides of weights are looked at; `by_bulk`: whether
    their addresses are for bulk copies."""
    routes = tokens * facts.top_k
    if routes >= SHARE_FROM * expected_hits(routes, facts.experts):
        return shared.Layout()
    if by_bulk and routes * facts.width // GROUP >= BULK_FROM and bulk.objection(arguments, facts) is None:
        return bulk.layout_for(facts)
    if tokens * facts.outer // TILE >= MANY_DOWN:
        return registers.Layout(down_waves=4, group=1)
    # wide experts take more registers each
    return registers.Layout(group=2 if facts.width <= 4 * SPAN else 1)


def layouts_of(arguments: Mapping[str, Any], facts: Facts) -> list[Layout]:
    """What any number of tokens gets that is few."""
    few = itertools.takewhile(lambda tokens: FEW.takes(facts, tokens), range(1, _MOST))
    return list(dict.fromkeys(layout_for(arguments, facts, tokens) for tokens in few))


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
        ("the result", facts.outer, TILE),
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
    for name in ("x", "w_gate", "w_up", "w_down", "s_gate", "s_up", "s_down"):
        if any(step >= 2**31 for step in arguments[name].stride()):
            return f"rows of {name} lie further apart than 32 bits can say (strides {tuple(arguments[name].stride())})"
    return FEW.objection(arguments, target)


def units(arguments: Mapping[str, Any], target: Target) -> Sequence[HipUnit]:
    """Those of the number of tokens; of all numbers that are few where it is symbolic."""
    facts, tokens = Facts.of(arguments, nvidia=True), arguments["x"].shape[0]
    one = isinstance(tokens, int)
    layouts = [layout_for(arguments, facts, max(1, tokens))] if one else layouts_of(arguments, facts)
    every = [unit for layout in layouts for unit in layout.units(facts)]
    return [unit for index, unit in enumerate(every) if unit not in every[:index]]


def experts(*arguments: Any, **options: Any) -> Tensor:
    """As `launch.experts`, which gets what these kernels do not take: more tokens, addresses at odd places."""
    named = hip_call.named_arguments(*arguments, **options)
    facts = Facts.of(named, nvidia=True)
    aligned = dict.fromkeys(("x", "w_gate", "w_up", "w_down"), 16) | {"s_gate": 8, "s_up": 8, "s_down": 4}
    handed = hip_call.handed_over(named, facts, FEW, aligned)
    if handed is not None:
        return handed
    by_bulk = not any(named[name].data_ptr() % 16 for name in ("s_gate", "s_up", "s_down"))
    return layout_for(named, facts, named["x"].shape[0], by_bulk).run(named, facts)
