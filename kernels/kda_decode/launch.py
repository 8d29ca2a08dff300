"""Running the Triton kernel of `k3::kda_decode` on tensors."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from k3rewrite.graph.shapes import same_size
from k3rewrite.kernels.dtypes import NAMES

POINTERS = ("qkv", "f", "b", "gate", "conv_weight", "a_log", "dt_bias", "norm_weight", "conv_state", "state", "slots")
STRIDES = {
    "qkv_row": ("qkv", 0), "f_row": ("f", 0), "b_row": ("b", 0), "gate_row": ("gate", 0), "gate_head": ("gate", 1),
    "conv_slot": ("conv_state", 0), "conv_column": ("conv_state", 1), "conv_channel": ("conv_state", 2),
    "state_slot": ("state", 0), "state_head": ("state", 1),
}  # fmt: skip
"""the kernel's strides: of which tensor, and which"""
NUM_WARPS = 4
"""measured on an H200 with 12 to 6144 heads of 128: 8 take up to a third longer, 16 up to two fifths"""


def constants(arguments: dict[str, Any]) -> dict[str, Any]:
    """What a call's kernel is compiled for."""
    state = arguments["state"]
    return {
        "HEADS": state.shape[1],
        "SIZE": state.shape[3],
        "TAPS": arguments["conv_weight"].shape[1],
        "COLUMNS": arguments["columns"],
        "SLOTS": arguments["slots"] is not None,
        "NULL": arguments["null_slot"],
        "SILU": arguments["activation"] == "silu",
        "INNER": NAMES[arguments["inner_dtype"]],
        "BOUNDED": arguments["bound"] is not None,
        "DECAYS": state.shape[3] if arguments["f"].shape[1] != state.shape[1] else 1,
        "KEYS_LAST": same_size(state.stride(3), 1),
    }


def kda_decode(
    qkv: Tensor, f: Tensor, b: Tensor, gate: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor,
    norm_weight: Tensor, conv_state: Tensor, state: Tensor, slots: Tensor | None, null_slot: bool, columns: int,
    bound: float | None, q_scale: float, l2_eps: float, norm_eps: float, activation: str, inner_dtype: torch.dtype,
    out_dtype: torch.dtype, *, in_place: bool = False, num_warps: int = NUM_WARPS,
) -> tuple[Tensor, Tensor, Tensor] | Tensor:  # fmt: skip
    """What the op takes. `in_place`: both states are written where they are, and only the output is returned."""
    from k3rewrite.kernels.kda_decode import triton as kernels

    if not in_place:
        conv_state, state = (torch.empty_like(pool).copy_(pool) for pool in (conv_state, state))
    arguments: dict[str, Any] = {
        "qkv": qkv, "f": f, "b": b, "gate": gate, "conv_weight": conv_weight, "a_log": a_log, "dt_bias": dt_bias,
        "norm_weight": norm_weight, "conv_state": conv_state, "state": state, "slots": slots, "null_slot": null_slot,
        "columns": columns, "activation": activation, "inner_dtype": inner_dtype,
        "bound": bound,
    }  # fmt: skip
    out = qkv.new_empty((qkv.shape[0], state.shape[1], state.shape[3]), dtype=out_dtype)
    if qkv.shape[0]:
        with torch.cuda.device(qkv.device) if qkv.is_cuda else contextlib.nullcontext():
            kernels.kda_decode_head[(qkv.shape[0], state.shape[1])](
                *(arguments[name] for name in POINTERS), out,
                *(arguments[name].stride(dim) for name, dim in STRIDES.values()), bound or 0.0, q_scale,
                l2_eps, norm_eps, **constants(arguments), num_warps=num_warps, num_stages=1, enable_fp_fusion=True,
            )  # fmt: skip
    return out if in_place else (out, conv_state, state)
