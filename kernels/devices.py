"""What a launch asks of the device that its tensors are on."""

from __future__ import annotations

from functools import cache

import torch


@cache
def device_facts(device: torch.device) -> tuple[str, int]:
    """Architecture and compute units of a device. "cpu" stands for Triton's interpreter."""
    from k3rewrite.targets.detect import device_arch

    if device.type != "cuda":
        return "cpu", 1
    properties = torch.cuda.get_device_properties(device)
    return device_arch(properties, rocm=torch.version.hip is not None), properties.multi_processor_count
