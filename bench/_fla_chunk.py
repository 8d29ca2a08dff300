"""flash-linear-attention's `chunk_kda`: norms, gates and states inside, as a prompt of Kimi K3 uses it.

Where it comes from: see `_fla_kda.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def load(folder: Path) -> Callable[..., Any]:
    """The function. A wheel in the folder is read as it is."""
    for path in (folder / "fla", *sorted(folder.glob("f*la*.whl"))):
        if path.exists():
            sys.path.insert(0, str(path))
    from fla.ops.kda import chunk_kda

    function: Callable[..., Any] = chunk_kda
    return function


def make_call(chunk_kda: Callable[..., Any], call: dict[str, Any]) -> Callable[[], tuple[Tensor, Tensor]]:
    """Its call on the inputs of ours. States are gathered before: that is not part of what is timed."""
    inputs = {name: call[name].contiguous() for name in ("q", "k", "v")}
    first = call["state"][call["slots"].long()].contiguous()

    def run() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            out, last = chunk_kda(
                **inputs, g=call["f"], beta=call["b"], A_log=call["a_log"], dt_bias=call["dt_bias"],
                initial_state=first, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=call["bound"], state_v_first=True,
                disable_recompute=False,
            )  # fmt: skip
        return out, last

    return run
