"""Running the experts' Triton kernels on tensors."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.devices import device_facts
from k3rewrite.kernels.experts.plan import PARAMETER, Facts, plan
from k3rewrite.kernels.experts.schedule import Schedule


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, s_gate: Tensor | None,
    s_up: Tensor | None, s_down: Tensor | None, format: str, activation: str, beta: float, linear_beta: float,
    first: int, product_dtype: torch.dtype, compute_dtype: torch.dtype, hidden_dtype: torch.dtype,
    route_dtype: torch.dtype, combine_dtype: torch.dtype, out_dtype: torch.dtype, *, schedule: Schedule | None = None,
) -> Tensor:  # fmt: skip
    """What the op takes. A `schedule` takes the place of the table's choice: for benchmarks and tests."""
    out = x.new_empty((x.shape[0], w_down.shape[1]), dtype=out_dtype)
    if out.numel() == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    arguments: dict[str, Any] = {
        "x": x, "ids": ids.contiguous(), "weights": weights.contiguous(), "w_gate": w_gate, "w_up": w_up,
        "w_down": w_down, "format": format, "activation": activation, "beta": beta, "linear_beta": linear_beta,
        "first": first, "product_dtype": product_dtype, "compute_dtype": compute_dtype, "route_dtype": route_dtype,
        "combine_dtype": combine_dtype, "out_dtype": out_dtype, "out": out,
    }  # fmt: skip
    tokens, routes = x.shape[0], ids.numel()
    arch, _ = device_facts(x.device)
    facts = Facts.of(arguments, nvidia=arch.startswith("sm_"))
    chosen = schedule or facts.schedule(arch, tokens)
    arguments |= (
        _scratch(facts, chosen, x, routes) | _layout(w_gate, s_gate, "w_", "s_") | _layout(w_down, s_down, "d_", "sd_")
    )
    # A kernel for dense weights has the parameters for scales too, and does not read them.
    arguments |= {"s_gate": _bytes(s_gate, w_gate), "s_up": _bytes(s_up, w_up), "s_down": _bytes(s_down, w_down)}
    arguments |= {"x_stride": x.stride(0), "count": facts.experts, "routes": routes}
    if format == "mxfp8":
        arguments |= {name: arguments[name].view(torch.uint8) for name in ("w_gate", "w_up", "w_down")}
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        for step in plan(facts, chosen, tokens):
            bound = {PARAMETER.get(name, name): arguments[name] for name in step.arguments}
            options = {"launch_pdl": step.dependent} if facts.nvidia else {}
            step.function[step.grid](
                **bound, **step.constants, num_warps=step.num_warps, num_stages=1, enable_fp_fusion=True, **options
            )
    return out


def _scratch(facts: Facts, schedule: Schedule, x: Tensor, routes: int) -> dict[str, Tensor]:
    """Intermediate rows, and what the paths beside `routes` need."""
    scratch = {"hidden": x.new_empty((routes, facts.width))}
    if schedule.path != "routes":
        stored = torch.bfloat16 if facts.route == torch.bfloat16 else torch.float32
        scratch["routed"] = x.new_empty((routes, facts.outer), dtype=stored)
    if schedule.path == "sorted":
        scratch["counts"] = x.new_empty(facts.experts, dtype=torch.int32)
        scratch["order"] = x.new_empty(routes, dtype=torch.int32)
    return scratch


def _layout(weight: Tensor, scale: Tensor | None, prefix: str, scale_prefix: str) -> dict[str, int]:
    strides = {f"{prefix}expert": weight.stride(0), f"{prefix}row": weight.stride(1)}
    if scale is None:
        return strides | {f"{scale_prefix}expert": 0, f"{scale_prefix}row": 0}
    return strides | {f"{scale_prefix}expert": scale.stride(0), f"{scale_prefix}row": scale.stride(1)}


def _bytes(scale: Tensor | None, weight: Tensor) -> Tensor:
    return weight if scale is None else scale
