"""What `fuse_kda_decode` and `fuse_kda_verify` check in a match of `layer_pattern`, and make of its weights."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from k3rewrite.graph.dtypes import widens
from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.passes.kda_patterns import NORM_DTYPES, aten, k3
from k3rewrite.patterns import Builder, Match, Policy, Refusal

Roundings = Literal["fewest", "model"]
_WIDE = ("conv_compute", "q_compute", "q_out", "k_compute", "k_out", "a_log_dtype", "norm0")
"""computed in the dtype of the state"""
_ROUNDED = ("conv_sum", "b_dtype", "norm_weight_dtype", *NORM_DTYPES[1:])
"""may be narrower in the model, and is not in the op"""


def inner_dtype(match: Match, roundings: Roundings) -> torch.dtype:
    """What convolution and recurrence give is rounded to."""
    dtype: torch.dtype = match["conv_out"] if roundings == "model" else match.value("state").dtype
    return dtype


def policy_of(match: Match, roundings: Roundings, keys_last: bool) -> Policy:
    wide = match.value("state").dtype
    if inner_dtype(match, roundings) != match["conv_out"] or any(match[name] != wide for name in _ROUNDED):
        return Policy.CHANGES_ROUNDING
    same_order = keys_last and not {"log", "q_divisor"} & match.bindings.keys()
    return Policy.EXACT if same_order else Policy.REASSOCIATES


def objection(match: Match, roundings: Roundings, rows: Any, keys_last: bool = True) -> Refusal | None:
    """None, or what keeps the match from being a layer of `rows` tokens whose states are as many values by keys."""
    state, wide = match.value("state"), match.value("state").dtype
    heads, size = state.shape[1], state.shape[3]
    for name in _WIDE:
        if match[name] != wide:
            return Refusal(f"{name} is {match[name]}, and the state {wide}", match["anchor"])
    if not (match["silu"] and match["q_inside"]):
        return Refusal("no SiLU behind the convolution, or an epsilon outside of the sum", match["anchor"])
    if match["q_eps"] != match["k_eps"] or match["q_inside"] is not match["k_inside"]:
        return Refusal("q and k are normalised differently", match["anchor"])
    for name in "qkv":
        if not widens(match["conv_out"], read := _dtype(match, name)) or not widens(read, wide):
            return Refusal(f"{name} is read as {read}", match["anchor"])
    if match.value("qkv").device != state.device:
        return Refusal("the state is on another device than what is convolved", match["state"])
    if not same_size(state.shape[2], size):
        values, keys = state.shape[2:] if keys_last else reversed(state.shape[2:])
        return Refusal(f"{values} values and {keys} keys a head, and as many of both are taken", match["state"])
    if not same_sizes(match.value("norm_weight").shape, (size,)):
        return Refusal("the weight of the norm is not one for each value", match["norm_weight"])
    return (
        _roundings_objection(match, roundings)
        or _parts_objection(match, heads, size)
        or _decay_objection(match, heads, size, rows)
        or _gate_objection(match, heads, size, rows)
    )


def _roundings_objection(match: Match, roundings: Roundings) -> Refusal | None:
    if match["step_out"] != match["conv_out"]:
        return Refusal(f"roundings {match['conv_out']} and {match['step_out']}: not the same in both places")
    if roundings == "model":
        for name in _ROUNDED:
            if match[name] != (wide := match.value("state").dtype):
                return Refusal(f"{name} is {match[name]}, which the op computes in {wide}", match["anchor"])
    return None


def _dtype(match: Match, name: str) -> torch.dtype:
    """As what it is read, behind its cast."""
    made = match.get(f"{name}_made")
    dtype: torch.dtype = match[f"{name}_dtype"] if made is None else made.meta["val"].dtype
    return dtype


def _parts_objection(match: Match, heads: Any, size: Any) -> Refusal | None:
    """q, k and v of each head follow each other in what is convolved."""
    shape, along = match.value("parts").shape, match["dim"] % len(match.value("parts").shape)
    if (sizes := match.get("sizes")) is None:
        fits = len(shape) >= 3 and same_sizes(shape[-3:], (3, heads, size)) and along == len(shape) - 3
    else:
        each = sizes if isinstance(sizes, list | tuple) else [sizes] * 3
        fits = along == len(shape) - 1 and same_sizes([shape[-1], *each], [3 * heads * size, *[heads * size] * 3])
        fits = fits and all(same_size(match.value(f"part{i}").shape[-1], size) for i in (0, 1))
    return (
        None
        if fits
        else Refusal("what is convolved is not q, k and v of each head, one after the other", match["parts"])
    )


def _decay_objection(match: Match, heads: Any, size: Any, rows: Any) -> Refusal | None:
    decays, rate, moved = match.value("g").shape[-1], match.value("rate").shape, match.value("decay").shape
    each = (heads,) if len(moved) < 3 or not same_sizes(moved[-2:], (heads, decays)) else (heads, decays)
    rates = each if len(each) == 1 else (heads, 1)
    if not same_sizes(rate[-len(rates) :], rates) or any(not same_size(n, 1) for n in rate[: -len(rates)]):
        return Refusal("the rates of the decay are not one for each head", match["rate"])
    wide = match.value("decay").dtype
    if wide != match.value("state").dtype or not all(widens(match[f"{name}_dtype"], wide) for name in ("f", "dt_bias")):
        return Refusal(f"f and its bias are added up as {wide}", match["decay"])
    if not same_sizes(moved[-len(each) :], each) or not same_size(match.value("f").numel(), rows * heads * decays):
        return Refusal("the decay is not one for each channel of each head, or one for each head", match["decay"])
    if not same_size(match.value("dt_bias").numel(), heads * decays):
        return Refusal("the bias of the decay is not one for each decay", match["dt_bias"])
    if not same_size(decays, size) and not same_size(decays, 1):
        return Refusal("the decay is neither of each channel nor of each head", match["decay"])
    return None


def _gate_objection(match: Match, heads: Any, size: Any, rows: Any) -> Refusal | None:
    if not same_size(match.value("b").numel(), rows * heads):
        return Refusal("beta is not one for each head", match["b"])
    gate, gated = match.value("gate"), match.root.meta["val"]
    if not same_size(gate.shape[-1], size) or any(not same_size(t.numel(), rows * heads * size) for t in (gate, gated)):
        return Refusal("the gate is not one for each value of each head", match["gate"])
    return None


def rates(a_log: Node, heads: Any, builder: Builder) -> Node:
    """A_log as one number for each head: a checkpoint may hold more."""
    row = flat(a_log, builder)
    if same_sizes(row.meta["val"].shape, (heads,)):
        return row
    return builder.call(aten.slice.Tensor, row, 0, 0, heads)


def q_scale(match: Match) -> float:
    return 1.0 / match["q_divisor"] if "q_divisor" in match.bindings else float(match["q_scale"])


def flat(node: Node, builder: Builder) -> Node:
    """A weight as one row."""
    return node if node.meta["val"].dim() == 1 else builder.call(aten.view.default, node, [-1])


# ------------------------------------------------------------------ examples


def gated(o: Tensor, gate: Tensor, norm: Tensor, narrow: torch.dtype) -> Tensor:
    """The output norm of an example."""
    wide = torch.float32
    y: Tensor = k3.gated_rms_norm(o.to(narrow), norm, gate, 1e-5, "sigmoid", wide, wide, wide, wide, wide, narrow)
    return y


def heads_of(
    y: Tensor, f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, shape: tuple[int, ...], heads: int, *,
    decay: Any = None, order: tuple[int, ...] = (0, 1, 2), q_eps: float = 1e-6, channels: int = 0, split: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """q, k, v, g and beta of an example, each `[*shape, heads, ..]`, of what is convolved and projected."""
    wide, size = torch.float32, y.shape[-1] // (3 * heads)
    parts = [part.view(*shape, heads, size) for part in y.split(heads * size, -1)]
    if not split:
        parts = list(y.view(*shape, 3, heads, size).unbind(-3))
    q, k, v = (parts[i] for i in order)
    moved = (f.to(wide) + dt_bias).view(*shape, heads, channels or size)
    rate = torch.exp(a_log[:heads]).unsqueeze(1)
    g = torch.sigmoid(rate * moved) * -5.0 if decay is None else decay(rate, moved)
    unit_q, unit_k = k3.l2_norm(q, q_eps, True, wide, wide) * 0.5, k3.l2_norm(k, 1e-6, True, wide, wide)
    beta = torch.sigmoid(b.to(wide))
    return unit_q, unit_k, v.to(wide), g, beta if len(shape) == 1 else beta.unflatten(0, shape)


def softplus(rate: Tensor, moved: Tensor) -> Tensor:
    """A decay without bound, for `heads_of`."""
    return -rate * F.softplus(moved)


def inputs(rows: int, heads: int, size: int, slots: int, columns: int) -> tuple[Tensor, ...]:
    """qkv, f, b, gate, taps, A_log, bias, weight of the norm, lines and states of an example."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    width = heads * size
    return (
        normal(rows, 3 * width).bfloat16(), normal(rows, width).bfloat16(), normal(rows, heads).bfloat16(),
        normal(rows, heads, size).bfloat16(), normal(3 * width, 4), normal(size) * 0.3, normal(width), normal(size),
        normal(slots, columns, 3 * width).bfloat16(), normal(slots, heads, size, size),
    )  # fmt: skip
