"""Running the Triton kernels of `k3::kda_verify` on tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.devices import CLUSTER_ARCHS, device_facts
from k3rewrite.kernels.dtypes import NAMES
from k3rewrite.kernels.kda_verify.tiles import Tile, tile_for

TILE_POINTERS = (
    "qkv", "f", "b", "conv_weight", "a_log", "dt_bias", "conv_state", "state", "start", "table", "history", "lengths",
)  # fmt: skip
CLOSE_POINTERS = ("qkv", "gate", "norm_weight", "conv_state", "table", "history", "lengths")
_STRIDES = {
    "qkv_row": ("qkv", 0), "qkv_token": ("qkv", 1), "f_row": ("f", 0), "f_token": ("f", 1), "b_row": ("b", 0),
    "b_token": ("b", 1), "gate_row": ("gate", 0), "gate_token": ("gate", 1), "gate_head": ("gate", 2),
    "conv_slot": ("conv_state", 0), "conv_column": ("conv_state", 1), "state_slot": ("state", 0),
    "state_head": ("state", 1), "table_row": ("table", 0), "history_row": ("history", 0),
    "weight_channel": ("conv_weight", 0), "weight_tap": ("conv_weight", 1),
}  # fmt: skip
"""the kernels' strides: of which tensor, and which"""
_GATE = ("gate_row", "gate_token", "gate_head")
TILE_STRIDES = {name: of for name, of in _STRIDES.items() if name not in _GATE}
CLOSE_STRIDES = {name: of for name, of in _STRIDES.items() if name[:2] not in ("f_", "b_", "st", "we")}
CLOSE_WARPS = 4
"""not measured"""


def constants(arguments: Mapping[str, Any], tile: Tile | None, arch: str) -> dict[str, Any]:
    """What a call's kernels are compiled for: the tiles', or without a tile those of the closing one."""
    state, lengths = arguments["state"], arguments["lengths"]
    tokens = arguments["table"].shape[1]
    common = {"HEADS": state.shape[1], "SIZE": state.shape[3], "TOKENS": tokens,
              "RAGGED": lengths is not None, "NULL": arguments["null_slot"],
              "PDL": arch in CLUSTER_ARCHS}  # fmt: skip
    inner = NAMES[arguments["inner_dtype"]]
    if tile is None:
        return common | {"SILU": arguments["activation"] == "silu", "INNER": inner}
    return common | {"WIDTH": tile.width, "READY": lengths is None and tokens <= tile.ready, "INNER": inner}


def recur(arguments: Mapping[str, Any], read: Tensor, tile: Tile) -> None:
    """The first launch: states are stored, `read` [B, N, H, V] in the state's dtype is written."""
    from k3rewrite.kernels.kda_verify import triton as kernels

    state, arch = arguments["state"], device_facts(read.device)[0]
    grid = (arguments["table"].shape[0] * state.shape[1] * (state.shape[2] // tile.width),)
    kernels.kda_verify_tile[grid](
        *(arguments[name] for name in TILE_POINTERS), read,
        *(arguments[name].stride(dim) for name, dim in TILE_STRIDES.values()),
        arguments["bound"], arguments["q_scale"], arguments["l2_eps"],
        **constants(arguments, tile, arch), **_options(arch), num_warps=tile.waves,
    )  # fmt: skip


def close(arguments: Mapping[str, Any], read: Tensor, out: Tensor) -> None:
    """The second launch: the output norm, and the line."""
    from k3rewrite.kernels.kda_verify import triton as kernels

    arch = device_facts(read.device)[0]
    kernels.kda_verify_close[(arguments["table"].shape[0], arguments["state"].shape[1])](
        *(arguments[name] for name in CLOSE_POINTERS), read, out,
        *(arguments[name].stride(dim) for name, dim in CLOSE_STRIDES.values()), arguments["norm_eps"],
        **constants(arguments, None, arch), **_options(arch), num_warps=CLOSE_WARPS,
    )  # fmt: skip


def _options(arch: str) -> dict[str, Any]:
    dependent = {"launch_pdl": arch in CLUSTER_ARCHS} if arch.startswith("sm_") else {}
    return {"num_stages": 1, "enable_fp_fusion": True, **dependent}


def kda_verify(
    qkv: Tensor, f: Tensor, b: Tensor, gate: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor,
    norm_weight: Tensor, conv_state: Tensor, state: Tensor, start: Tensor, table: Tensor, history: Tensor,
    lengths: Tensor | None, null_slot: bool, bound: float, q_scale: float, l2_eps: float, norm_eps: float,
    activation: str, inner_dtype: torch.dtype, out_dtype: torch.dtype, *, in_place: bool = False,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor] | Tensor:  # fmt: skip
    """What the op takes. `in_place`: both states are written where they are, and only the output is returned. A `tile`
    takes the place of the target's own."""
    if not in_place:
        conv_state, state = (torch.empty_like(pool).copy_(pool) for pool in (conv_state, state))
    arguments: dict[str, Any] = {
        "qkv": qkv, "f": f, "b": b, "gate": gate, "conv_weight": conv_weight, "a_log": a_log, "dt_bias": dt_bias,
        "norm_weight": norm_weight, "conv_state": conv_state, "state": state, "start": start, "table": table,
        "history": history, "lengths": lengths, "null_slot": null_slot, "bound": bound, "q_scale": q_scale,
        "l2_eps": l2_eps, "norm_eps": norm_eps, "activation": activation, "inner_dtype": inner_dtype,
    }  # fmt: skip
    rows, heads, size = table.shape[0], state.shape[1], state.shape[3]
    out = qkv.new_empty((*table.shape, heads, size), dtype=out_dtype)
    if table.numel():
        read = torch.empty_like(out, dtype=state.dtype)
        with torch.cuda.device(qkv.device) if qkv.is_cuda else contextlib.nullcontext():
            recur(arguments, read, tile or _tile(rows * heads, size, qkv.device))
            close(arguments, read, out)
    return out if in_place else (out, conv_state, state)


def _tile(head_sequences: int, size: int, device: torch.device) -> Tile:
    arch, compute_units = device_facts(device)
    return tile_for(head_sequences, size, arch, compute_units, 32 if torch.version.hip is None else 64)
