"""The HIP C++ kernel of `k3::kda_decode` (`hip/kda_decode.hip`): bf16 inputs, fp32 states, compiled for each shape.

AMD       one workgroup a head of a row, whose state is in its registers
NVIDIA    sm_90 and later. Few heads: a cluster of workgroups shares a head, each with a part of its values; more: one
          workgroup a head, whose state waits in shared memory, or, where there are very many, in registers
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
from k3rewrite.kernels.devices import CLUSTER_ARCHS, device_facts, loaded_function
from k3rewrite.kernels.kda import at_odd_addresses, hip_objection
from k3rewrite.kernels.kda_decode import launch
from k3rewrite.ops.kernel import HipUnit
from k3rewrite.ops.runs import hand_over
from k3rewrite.targets import Target

PATH = Path(__file__).parent / "hip" / "kda_decode.hip"
SYMBOL = "kda_decode"
TAPS = 4
BULK_BYTES = 64 * 2**20
"""of all states of a call, up to which they wait in shared memory; about the L2 of an H200"""
_ROWS_WITHOUT_A_NUMBER = 64
"""rows of a symbolic batch for which the layout to compile is chosen"""


@dataclass(frozen=True)
class Layout:
    """Workgroups that share a head, waves of each, whether the launch overlaps the kernel before it, and more."""

    split: int
    waves: int
    dependent: bool = False
    keys: int = 16
    """of a row of the state that a lane has: 8 or 16"""
    bulk: bool = False
    """states wait in shared memory, which bulk copies fill and empty (sm_90 and later), instead of in registers"""
    once: bool = False
    """bulk copies tell the L2 that a state is not needed again soon"""
    ahead: bool = False
    """a dependent launch brings what it will read into the L2 before the kernel before it has ended"""


def layout_for(size: int, heads: int, arch: str, compute_units: int) -> Layout:
    """`heads`: of all rows. Measured on an H200 with heads of 128; elsewhere a workgroup takes a head.

    Few heads are shared by clusters, as long as no compute unit gets two workgroups. Up to two heads to a compute
    unit, what the launch will read is brought nearer before the kernel before it ends; with more, those who wait
    would be in the way. From the second head to a compute unit on, states are under way in shared memory, three to
    a compute unit; of 1,536 heads (96 MiB) registers are 4 % faster, of 768 as fast. In between nothing was measured.
    """
    if arch not in CLUSTER_ARCHS:
        return Layout(1, 8 if heads >= compute_units else 16)
    if heads <= compute_units:
        split = 4 if heads * 4 <= compute_units else 2 if heads * 2 <= compute_units else 1
        return Layout(split, 4, dependent=True, ahead=True)
    if heads * size * size * 4 > BULK_BYTES:
        return Layout(1, 4, dependent=True)
    return Layout(1, 8, dependent=True, keys=8, bulk=True, once=True, ahead=heads <= compute_units * 2)


def objection(arguments: Mapping[str, Any], target: Target) -> str | None:
    """None, or why a call that the Triton kernel takes is not this one's."""
    if reason := hip_objection(arguments, target):
        return reason
    state, taps = arguments["state"], arguments["conv_weight"].shape[1]
    if taps != TAPS:
        return f"{taps} taps; {TAPS} are taken"
    if not same_size(arguments["conv_state"].stride(2), 1):
        return "a line of channels by columns"
    if same_size(arguments["f"].shape[1], state.shape[1]):
        return "a decay of each head, not of each channel"
    return None


def units(arguments: Mapping[str, Any], target: Target) -> Sequence[HipUnit]:
    state, rows = arguments["state"], arguments["qkv"].shape[0]
    count = rows if isinstance(rows, int) else _ROWS_WITHOUT_A_NUMBER
    return [unit(arguments, layout_for(state.shape[3], count * state.shape[1], target.arch, target.compute_units))]


def unit(arguments: Mapping[str, Any], layout: Layout) -> HipUnit:
    """What to compile for a call."""
    state, slots = arguments["state"], arguments["slots"]
    values = {
        "HEADS": state.shape[1],
        "SIZE": state.shape[3],
        "TAPS": arguments["conv_weight"].shape[1],
        "COLUMNS": arguments["columns"],
        "SPLIT": layout.split,
        "WAVES": layout.waves,
        "SLOTS": 0 if slots is None else slots.dtype.itemsize * 8,
        "NULL": int(arguments["null_slot"] and slots is not None),
        "SILU": int(arguments["activation"] == "silu"),
        "INNER_BF16": int(arguments["inner_dtype"] == torch.bfloat16),
        "BOUNDED": int(arguments["bound"] is not None),
        "DEPENDENT": int(layout.dependent),
        "KEYS": layout.keys,
        "BULK": int(layout.bulk),
        "ONCE": int(layout.once),
        "AHEAD": int(layout.ahead),
    }
    defines = {f"KDA_{name}": str(value) for name, value in values.items()}
    return HipUnit(PATH, SYMBOL, defines, dynamic_lds=_state_bytes(state.shape[3], layout))


def _state_bytes(size: int, layout: Layout) -> int:
    """Of a workgroup's part of a head's state, in shared memory."""
    return size // layout.split * size * 4 if layout.bulk else 0


def kda_decode(
    qkv: Tensor, f: Tensor, b: Tensor, gate: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor,
    norm_weight: Tensor, conv_state: Tensor, state: Tensor, slots: Tensor | None, null_slot: bool, columns: int,
    bound: float | None, q_scale: float, l2_eps: float, norm_eps: float, activation: str, inner_dtype: torch.dtype,
    out_dtype: torch.dtype, *, in_place: bool = False, layout: Layout | None = None,
) -> tuple[Tensor, Tensor, Tensor] | Tensor:  # fmt: skip
    """As `launch.kda_decode`, by the HIP kernel; by that one where states or taps do not begin at 16 bytes, which is
    looked at before anything is written. A `layout` takes the place of the target's own."""
    if at_odd_addresses(state, conv_weight):
        hand_over("triton")
        return launch.kda_decode(
            qkv, f, b, gate, conv_weight, a_log, dt_bias, norm_weight, conv_state, state, slots, null_slot, columns,
            bound, q_scale, l2_eps, norm_eps, activation, inner_dtype, out_dtype, in_place=in_place,
        )  # fmt: skip
    if not in_place:
        conv_state, state = (torch.empty_like(pool).copy_(pool) for pool in (conv_state, state))
    rows, heads, size = qkv.shape[0], state.shape[1], state.shape[3]
    out = qkv.new_empty((rows, heads, size), dtype=out_dtype)
    if rows:
        arch, compute_units = device_facts(qkv.device)
        chosen = layout or layout_for(size, rows * heads, arch, compute_units)
        wanted = unit(
            {"state": state, "slots": slots, "conv_weight": conv_weight, "columns": columns, "null_slot": null_slot,
             "activation": activation, "inner_dtype": inner_dtype, "bound": bound},
            chosen,
        )  # fmt: skip
        with torch.cuda.device(qkv.device):
            loaded = _function(tuple(wanted.defines.items()), qkv.device)
            loaded(
                grid=(rows * heads * chosen.split,),
                threads=chosen.waves * (32 if torch.version.hip is None else 64),
                dependent=chosen.dependent,
                dynamic_lds=wanted.dynamic_lds,
                arguments=[
                    qkv, qkv.stride(0), f, f.stride(0), b, b.stride(0), gate, gate.stride(0), gate.stride(1),
                    conv_weight, a_log, dt_bias, norm_weight, conv_state, conv_state.stride(0), conv_state.stride(1),
                    state, state.stride(0), state.stride(1), qkv if slots is None else slots,
                    min(len(state), len(conv_state)), out, float(bound or 0.0), float(q_scale), float(l2_eps),
                    float(norm_eps),
                ],
            )  # fmt: skip
    return out if in_place else (out, conv_state, state)


@cache
def _function(defines: tuple[tuple[str, str], ...], device: torch.device) -> Any:
    """The kernel for these sizes, compiled and loaded on `device`, the current one."""
    return loaded_function(HipUnit(PATH, SYMBOL, dict(defines)))
