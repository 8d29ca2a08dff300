"""What a launch asks of the device that its tensors are on: facts, and functions compiled for it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from k3rewrite.errors import EmitError
from k3rewrite.ops.kernel import HipUnit
from k3rewrite.targets import load_target

CLUSTER_ARCHS = ("sm_90", "sm_100")
"""have clusters of workgroups, and launches that overlap the kernel before them"""


@cache
def device_facts(device: torch.device) -> tuple[str, int]:
    """Architecture and compute units of a device. "cpu" stands for Triton's interpreter."""
    from k3rewrite.targets.detect import device_arch

    if device.type != "cuda":
        return "cpu", 1
    properties = torch.cuda.get_device_properties(device)
    return device_arch(properties, rocm=torch.version.hip is not None), properties.multi_processor_count


def loaded_function(unit: HipUnit) -> Any:
    """The function of a unit, compiled for the current device and loaded on it. Raises EmitError without a compiler."""
    from k3rewrite.emit.compiler import Missing, defines_text, find_compiler
    from k3rewrite.emit.launch import load_function
    from k3rewrite.emit.source import unit_source

    target = load_target("auto")
    compiler = find_compiler(unit, target)
    if isinstance(compiler, Missing):
        raise EmitError(compiler.reason, place=f"kernel {unit.symbol}", remedy="install the compiler, or bind Triton")
    made = compiler.compile(unit, target, defines_text(unit) + unit_source(unit))
    return load_function(made.object, unit.symbol)
