"""The kernels of `k3::experts`, for `select` and the emitter: Triton, whose launch chooses the path, and HIP C++."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.costs import moving_us
from k3rewrite.kernels.dtypes import pointer
from k3rewrite.kernels.experts import hip_kernel, launch
from k3rewrite.kernels.experts.accept import accepts
from k3rewrite.kernels.experts.mxfp4 import choose
from k3rewrite.kernels.experts.op import OP
from k3rewrite.kernels.experts.paths import described
from k3rewrite.kernels.experts.plan import DOWN_WEIGHTS, PARAMETER, WEIGHTS, Facts, Step, plan
from k3rewrite.kernels.experts.schedule import LADDER, Schedule, schedules_of
from k3rewrite.kernels.headers import HEADERS
from k3rewrite.ops.kernel import Kernel, TritonUnit
from k3rewrite.targets import Target

_FOLDER = Path(__file__).parent
_SOURCES = (
    *sorted(_FOLDER.glob("triton_*.py")),
    *(_FOLDER / name for name in ("plan.py", "schedule.py", "launch.py")),
    _FOLDER.parent / "triton_math.py",
)
_HIP_SOURCES = (
    *(_FOLDER / name for name in ("hip_call.py", "hip_kernel.py", "hip/activation.h")),
    *HEADERS,
)
_MXFP4_SOURCES = (
    *sorted((_FOLDER / "hip").glob("mxfp4*")),
    *sorted((_FOLDER / "mxfp4").glob("*.py")),
    *_HIP_SOURCES,
)
_FLOOR_US = 6.0
"""two launches, the second overlapping the first; not measured yet"""


def _cost_us(arguments: Mapping[str, Any], target: Target) -> float:
    return _FLOOR_US + moving_us(OP, arguments, target)


def _cost_us_of_few(arguments: Mapping[str, Any], target: Target) -> float:
    """On one H200, from 1 to 8 tokens: 89 to 96 % of the fastest read for dense weights, 57 to 74 % for MXFP4, more
    than Triton's kernels reach there."""
    return 0.95 * _cost_us(arguments, target)


def _paths(arguments: Mapping[str, Any], target: Target) -> str:
    return described(Facts.of(arguments, target.vendor == "nvidia"), target.arch)


def _warp_decode_paths(arguments: Mapping[str, Any], target: Target) -> str:
    facts = Facts.of(arguments, target.vendor == "nvidia")
    return described(facts, target.arch, "warp decode", hip_kernel.few(facts).takes)


def _mxfp4_paths(arguments: Mapping[str, Any], target: Target) -> str:
    return described(Facts.of(arguments, True), target.arch, "integer matrix units", choose.FEW.takes)


def units(arguments: Mapping[str, Any], target: Target) -> Sequence[TritonUnit]:
    """Every launch of the path that the call gets; of all paths where the number of tokens is symbolic."""
    facts = Facts.of(arguments, nvidia=target.vendor == "nvidia")
    tokens = arguments["x"].shape[0]
    if isinstance(tokens, int):
        chosen = facts.schedule(target.arch, tokens)
        calls: list[tuple[Schedule, int]] = [(chosen, tokens)]
    else:
        sizes = {"routes": [1], "experts": [max(1, n // facts.top_k) for n in LADDER], "sorted": [4096]}
        every = schedules_of(target.arch, facts.inner, facts.width, packed=facts.format != "dense")
        calls = [(schedule, size) for schedule in every for size in sizes[schedule.path]]
    made = [as_unit(step, facts, arguments) for schedule, size in calls for step in plan(facts, schedule, size)]
    return [unit for index, unit in enumerate(made) if unit not in made[:index]]


def as_unit(step: Step, facts: Facts, arguments: Mapping[str, Any]) -> TritonUnit:
    """A launch as what the emitter compiles."""
    signature: dict[str, str] = {}
    aligned = set()
    for name in step.arguments:
        parameter, kind = PARAMETER.get(name, name), _type_of(name, facts, arguments)
        signature[parameter] = kind
        if kind.startswith("*") or name.endswith(("_row", "_expert", "_stride")):
            aligned.add(parameter)
    return TritonUnit(
        function=step.function,
        signature=signature | dict.fromkeys(step.constants, "constexpr"),
        constants=step.constants,
        aligned=frozenset(aligned & _divisible(step, facts, arguments)),
        num_warps=step.num_warps,
        num_stages=1,
        options={"launch_pdl": True} if step.dependent else {},
    )


def _type_of(name: str, facts: Facts, arguments: Mapping[str, Any]) -> str:
    scratch = {
        "hidden": torch.bfloat16,
        "routed": torch.bfloat16 if facts.route == torch.bfloat16 else torch.float32,
        "counts": torch.int32,
        "order": torch.int32,
        "out": facts.out,
    }
    if name in scratch:
        return pointer(scratch[name])
    value = arguments.get(name)
    if name.startswith("s_") and name in ("s_gate", "s_up", "s_down") and value is None:
        value = arguments["w_" + name[2:]]
    if isinstance(value, Tensor):
        return pointer(value.dtype)
    if name in ("beta", "linear_beta"):
        return "fp32"
    return "i32"


def _divisible(step: Step, facts: Facts, arguments: Mapping[str, Any]) -> frozenset[str]:
    """Parameters that may be taken for multiples of 16: addresses, and strides that are."""
    strides = {"x_stride": arguments["x"].stride(0)}
    for names, weight, scale in ((WEIGHTS, "w_gate", "s_gate"), (DOWN_WEIGHTS, "w_down", "s_down")):
        stored, scales = arguments[weight], arguments[scale]
        values = (*stored.stride()[:2], *(scales.stride()[:2] if scales is not None else (0, 0)))
        strides |= dict(zip(names, values, strict=True))
    multiples = {n for n, s in strides.items() if isinstance(s, int) and s % 16 == 0}
    return frozenset(PARAMETER.get(name, name) for name in step.arguments if name in multiples or name not in strides)


KERNELS = (
    Kernel(
        name="experts.triton",
        op="experts",
        language="triton",
        accepts=accepts,
        launch=launch.experts,
        units=units,
        cost_us=_cost_us,
        sources=_SOURCES,
        paths=_paths,
    ),
    Kernel(
        name="experts.hip",
        op="experts",
        language="hip",
        accepts=hip_kernel.accepts,
        launch=hip_kernel.experts,
        units=hip_kernel.units,
        cost_us=_cost_us_of_few,
        sources=(hip_kernel.PATH, *_HIP_SOURCES, *_SOURCES),
        paths=_warp_decode_paths,
    ),
    Kernel(
        name="experts.mxfp4",
        op="experts",
        language="hip",
        accepts=choose.accepts,
        launch=choose.experts,
        units=choose.units,
        cost_us=_cost_us_of_few,
        sources=(*_MXFP4_SOURCES, *_SOURCES),
        paths=_mxfp4_paths,
    ),
)
