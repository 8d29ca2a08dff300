"""The HIP C++ kernel of `k3::kda_verify` (`hip/kda_verify.hip`): bf16 inputs, fp32 states, a window in one launch.

AMD       one workgroup a head of a sequence
NVIDIA    few heads (sm_90 and later): a cluster of workgroups shares a head, each with a part of its values
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.devices import CLUSTER_ARCHS, device_facts, loaded_function
from k3rewrite.kernels.kda import at_odd_addresses, hip_objection
from k3rewrite.kernels.kda_verify import launch
from k3rewrite.ops.kernel import HipUnit
from k3rewrite.ops.runs import hand_over
from k3rewrite.targets import Target

PATH = Path(__file__).parent / "hip" / "kda_verify.hip"
SYMBOL = "kda_verify"
_IDS = ("start", "table", "history", "lengths")
_ROWS_WITHOUT_A_NUMBER = 8
"""sequences of a symbolic batch for which the layout to compile is chosen"""


@dataclass(frozen=True)
class Layout:
    """Workgroups that share a head, waves of each, and whether the launch overlaps the kernel before it."""

    split: int
    waves: int
    dependent: bool = False
    ahead: bool = False
    """a dependent launch brings what it will read into the L2 before the kernel before it has ended"""


def layout_for(head_sequences: int, arch: str, compute_units: int) -> Layout:
    """As many workgroups a head as leave no compute unit with two. What it gives for 12 heads of 1 to 32 sequences is
    the fastest of a sweep on an H200 with windows of 2 and 4 tokens, or within 2 % (kda_verify-sweep-h200.json, of the
    kernel before it asked for states where a look at the slots said); AMD's and sm_100's layouts were not measured."""
    if arch not in CLUSTER_ARCHS:
        return Layout(1, 8 if head_sequences >= compute_units else 16)
    for split, waves in ((8, 4), (4, 4), (2, 8)):
        if head_sequences * split <= compute_units:
            return Layout(split, waves, dependent=True, ahead=True)
    return Layout(1, 8, dependent=True, ahead=head_sequences <= compute_units)


def objection(arguments: Mapping[str, Any], target: Target) -> str | None:
    """None, or why a call that the Triton kernels take is not this one's."""
    if reason := hip_objection(arguments, target):
        return reason
    if len({arguments[name].dtype for name in _IDS if arguments[name] is not None}) > 1:
        return "slots, columns and lengths are of several dtypes"
    return None


def units(arguments: Mapping[str, Any], target: Target) -> Sequence[HipUnit]:
    rows = arguments["table"].shape[0]
    count = rows if isinstance(rows, int) else _ROWS_WITHOUT_A_NUMBER
    layout = layout_for(count * arguments["state"].shape[1], target.arch, target.compute_units)
    return [unit(arguments, layout)]


def unit(arguments: Mapping[str, Any], layout: Layout) -> HipUnit:
    """What to compile for a call."""
    values = {
        "HEADS": arguments["state"].shape[1],
        "SIZE": arguments["state"].shape[3],
        "TOKENS": arguments["table"].shape[1],
        "SPLIT": layout.split,
        "WAVES": layout.waves,
        "IDS": arguments["table"].dtype.itemsize * 8,
        "RAGGED": int(arguments["lengths"] is not None),
        "NULL": int(arguments["null_slot"]),
        "SILU": int(arguments["activation"] == "silu"),
        "INNER_BF16": int(arguments["inner_dtype"] == torch.bfloat16),
        "DEPENDENT": int(layout.dependent),
        "AHEAD": int(layout.ahead),
    }
    return HipUnit(PATH, SYMBOL, {f"KDA_{name}": str(value) for name, value in values.items()})


def kda_verify(
    qkv: Tensor, f: Tensor, b: Tensor, gate: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor,
    norm_weight: Tensor, conv_state: Tensor, state: Tensor, start: Tensor, table: Tensor, history: Tensor,
    lengths: Tensor | None, null_slot: bool, bound: float, q_scale: float, l2_eps: float, norm_eps: float,
    activation: str, inner_dtype: torch.dtype, out_dtype: torch.dtype, *, in_place: bool = False,
    layout: Layout | None = None,
) -> tuple[Tensor, Tensor, Tensor] | Tensor:  # fmt: skip
    """As `launch.kda_verify`, by the HIP kernel; by that one where states or taps do not begin at 16 bytes, which is
    looked at before anything is written. A `layout` takes the place of the target's own."""
    if at_odd_addresses(state, conv_weight):
        hand_over("triton")
        return launch.kda_verify(
            qkv, f, b, gate, conv_weight, a_log, dt_bias, norm_weight, conv_state, state, start, table, history,
            lengths, null_slot, bound, q_scale, l2_eps, norm_eps, activation, inner_dtype, out_dtype, in_place=in_place,
        )  # fmt: skip
    if not in_place:
        conv_state, state = (torch.empty_like(pool).copy_(pool) for pool in (conv_state, state))
    heads, size = state.shape[1], state.shape[3]
    out = qkv.new_empty((*table.shape, heads, size), dtype=out_dtype)
    if table.numel():
        arch, compute_units = device_facts(qkv.device)
        chosen = layout or layout_for(table.shape[0] * heads, arch, compute_units)
        wanted = unit(
            {"state": state, "table": table, "lengths": lengths, "null_slot": null_slot, "activation": activation,
             "inner_dtype": inner_dtype},
            chosen,
        )  # fmt: skip
        with torch.cuda.device(qkv.device):
            _function(tuple(wanted.defines.items()), qkv.device)(
                grid=(table.shape[0] * heads * chosen.split,),
                threads=chosen.waves * (32 if torch.version.hip is None else 64),
                dependent=chosen.dependent,
                arguments=[
                    qkv, *qkv.stride()[:2], f, *f.stride()[:2], b, *b.stride()[:2], gate, *gate.stride()[:3],
                    conv_weight, a_log, dt_bias, norm_weight, conv_state, *conv_state.stride()[:2], state,
                    *state.stride()[:2], start, table, table.stride(0), history, history.stride(0),
                    table if lengths is None else lengths, min(len(state), len(conv_state)), conv_state.shape[1],
                    out, float(bound), float(q_scale), float(l2_eps), float(norm_eps),
                ],
            )  # fmt: skip
    return out if in_place else (out, conv_state, state)


@cache
def _function(defines: tuple[tuple[str, str], ...], device: torch.device) -> Any:
    """The kernel for these sizes, compiled and loaded on `device`, the current one."""
    return loaded_function(HipUnit(PATH, SYMBOL, dict(defines)))
