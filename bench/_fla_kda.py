"""flash-linear-attention's chain of a KDA token: convolution update, recurrence with norms and gates inside, norm.

It comes from the wheels `fla-core` and `flash-linear-attention`, which are not part of this repository:

    pip install --no-deps --target .peers/fla fla-core==0.6.0 flash-linear-attention==0.6.0
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Chain = Callable[[int], Tensor]


def load(folder: Path) -> dict[str, Any]:
    """The three functions. A wheel in the folder is read as it is."""
    for path in (folder / "fla", *sorted(folder.glob("f*la*.whl"))):
        if path.exists():
            sys.path.insert(0, str(path))
    from fla.modules.causal_conv1d.ops import causal_conv1d_update
    from fla.modules.norm.fused_norm_gate import FusedRMSNormGated
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    return {"conv": causal_conv1d_update, "step": fused_recurrent_kda_fwd, "norm": FusedRMSNormGated}


def make_chain(fla: dict[str, Any], calls: list[dict[str, Any]]) -> Chain:
    """The chain on the inputs of each call, all of which share weights and pools. Its lines are its own."""
    first = calls[0]
    heads, size = first["state"].shape[1], first["state"].shape[3]
    rows = first["qkv"].shape[0]
    norm = fla["norm"](size, eps=first["norm_eps"], activation="sigmoid", device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.copy_(first["norm_weight"])
    weight = first["conv_weight"].to(torch.bfloat16)
    ends = torch.arange(rows + 1, device="cuda")
    # [rows, channels, 4]: FLA keeps the whole window
    lines = [
        torch.nn.functional.pad(call["conv_state"][call["slots"].long(), -3:].transpose(1, 2), (1, 0)).contiguous()
        for call in calls
    ]
    # Its recurrence takes every input for contiguous: what the others read as views it gets as copies, made beforehand.
    given = [
        {
            "f": call["f"].reshape(1, rows, heads, size).contiguous(),
            "b": call["b"].reshape(1, rows, heads).contiguous(),
            "gate": call["gate"].reshape(1, rows, heads, size).contiguous(),
            "slots": call["slots"].int(),
        }
        for call in calls
    ]
    out = torch.empty(1, rows, heads, size, device="cuda", dtype=torch.bfloat16)

    def chain(i: int) -> Tensor:
        call, own = calls[i], given[i]
        moved = fla["conv"](call["qkv"], lines[i], weight=weight, activation="silu")
        x = moved[0] if isinstance(moved, tuple) else moved
        # q, k and v lie side by side in a row; one copy for all three, where there is more than one row
        q, k, v = x.view(rows, 3, heads, size).transpose(0, 1).contiguous().unsqueeze(1).unbind(0)
        read = fla["step"](
            q, k, v, own["f"], own["b"], call["a_log"], call["dt_bias"], call["state"], inplace_final_state=True,
            state_v_first=True, cu_seqlens=ends, ssm_state_indices=own["slots"], use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=call["bound"], out=out,
        )[0]  # fmt: skip
        result: Tensor = norm(read, own["gate"])
        return result[0]

    return chain
