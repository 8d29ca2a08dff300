"""`target: auto`: which target describes the device of this machine.

A device is recognised by its architecture (gfx950, sm_90), because that decides which kernels run. Other models of the
same architecture (MI300X beside MI325X, H100 beside H200) get the same target: their kernels are the same, and only
estimates of time, which rest on the named model's bandwidth, are off.
"""

from __future__ import annotations

from typing import Protocol

import torch

from k3rewrite.errors import ConfigError
from k3rewrite.targets.load import known_targets, load_target
from k3rewrite.targets.target import Target


def detect_target() -> Target:
    """The target of the current CUDA or ROCm device; `cpu` where there is none.

    `ConfigError` if no shipped target has the device's architecture. Asks torch only: Triton's own driver object raises
    on a machine without a GPU.
    """
    arch = machine_arch()
    if arch is None:
        return load_target("cpu")
    for name in known_targets():
        if (target := load_target(name)).arch == arch:
            return target
    known = ", ".join(f"{name} ({load_target(name).arch})" for name in known_targets())
    raise ConfigError(
        f"no target describes this device: {torch.cuda.get_device_name()} ({arch}); known: {known}",
        place="target: auto",
        remedy="name the nearest target, `cpu` for the references, or the path of a target's YAML file of your own",
    )


def machine_arch() -> str | None:
    """Architecture of this machine's current GPU, described by a target or not; None without one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return device_arch(properties, rocm=torch.version.hip is not None)


class DeviceProperties(Protocol):
    """What is read of `torch.cuda.get_device_properties`; only ROCm's torch has the last."""

    major: int
    minor: int
    gcnArchName: str


def device_arch(properties: DeviceProperties, *, rocm: bool) -> str:
    """`gfx942` from ROCm's "gfx942:sramecc+:xnack-"; `sm_90` from compute capability 9.0."""
    if rocm:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"
