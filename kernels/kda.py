"""What the HIP kernels of KDA steps, `kda_decode` and `kda_verify`, take.

bf16 inputs and lines, fp32 weights and states, rows of states and taps that begin at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from k3rewrite.graph.shapes import same_size
from k3rewrite.kernels.devices import CLUSTER_ARCHS
from k3rewrite.kernels.dtypes import text
from k3rewrite.targets import Target

SIZES = (64, 128)
"""keys, and values, of a head"""
_NARROW = ("qkv", "f", "b", "gate", "conv_state")
_WIDE = ("conv_weight", "a_log", "dt_bias", "norm_weight")


def hip_objection(arguments: Mapping[str, Any], target: Target) -> str | None:
    """None, or why neither kernel takes a call that Triton's do: dtypes, sizes and places of what both read."""
    if target.vendor == "nvidia" and target.arch not in CLUSTER_ARCHS:
        return f"{target.arch} has no clusters of workgroups"
    for names, dtype in ((_NARROW, torch.bfloat16), (_WIDE, torch.float32)):
        for name in names:
            if arguments[name].dtype != dtype:
                return f"{name} is {text(arguments[name].dtype)}; {text(dtype)} is read"
    if arguments["out_dtype"] != torch.bfloat16 or arguments["inner_dtype"] not in (torch.float32, torch.bfloat16):
        return "writes bfloat16, and rounds on the way to bfloat16 or not at all"
    state, weight = arguments["state"], arguments["conv_weight"]
    if state.shape[3] not in SIZES:
        return f"heads of {state.shape[3]}; {' or '.join(map(str, SIZES))} are taken"
    if not same_size(state.stride(3), 1):
        return "a state of keys by values"
    if not same_size(weight.stride(1), 1) or not same_size(weight.stride(0), weight.shape[1]):
        return "the taps of a channel do not lie together"
    for tensor, name in ((state, "the state"), (weight, "the taps")):
        steps = (*tensor.stride()[:-1], tensor.storage_offset())
        if any(not isinstance(step, int) or step % 4 for step in steps):
            return f"rows of {name} do not begin at multiples of 16 bytes"
    if not same_size(arguments["norm_weight"].stride(0), 1):
        return "the weight of the norm is not contiguous"
    return None


def at_odd_addresses(state: Tensor, conv_weight: Tensor) -> bool:
    """Whether they do not begin at 16 bytes, as addresses of tensors tell: looked at before anything is written."""
    return state.data_ptr() % 16 != 0 or conv_weight.data_ptr() % 16 != 0
