"""Fuse one token of a KDA layer, from its projections to the input of its output projection, into one op.

    y, conv  = k3::short_conv(qkv, w, conv, slots, ...)           -> y, conv, S = k3::kda_decode(qkv, f, b, gate, ...)
    q, k, v  = y.view(-1, 3, H, K).unbind(1)
    g        = sigmoid(exp(A_log[:H])[:, None] * (f.float() + dt_bias).view(-1, H, K)) * bound
    o, S     = k3::kda_step(k3::l2_norm(q) * scale, k3::l2_norm(k), v.float(), g, sigmoid(b.float()), S, slots, ...)
    y        = k3::gated_rms_norm(o.bfloat16(), weight, gate, ...)

What else each part may look like is in `kda_patterns.py`. States of keys by values and lines of channels by columns are
given to the op as transposed views: the kernel writes the cache where it is.

`roundings: model` rounds the convolution's and the recurrence's results as the model does, and refuses a model that
rounds at other places; `fewest` keeps everything in between in the dtype of the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from k3rewrite.graph.dtypes import widens
from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.passes.kda_patterns import KDA_TOKEN, NORM_DTYPES, aten, k3
from k3rewrite.passes.lift_kda_step import as_rows
from k3rewrite.passes.lift_state_slots import drawn_slots
from k3rewrite.patterns import Builder, CounterExample, Example, Match, Policy, Refusal, Rule
from k3rewrite.pipeline.pass_base import RulePass

Roundings = Literal["fewest", "model"]
_WIDE = (
    "conv_compute", "q_compute", "q_out", "k_compute", "k_out", "a_log_dtype", "norm0",
)  # fmt: skip
"""computed in the dtype of the state"""
_ROUNDED = ("conv_sum", "b_dtype", "norm_weight_dtype", *NORM_DTYPES[1:])
"""may be narrower in the model, and is not in the op"""


class FuseKdaDecode(Rule):
    """See the module docstring."""

    name = "kda_decode"
    policy = Policy.CHANGES_ROUNDING
    anchors = frozenset({k3.kda_step.default})
    pattern = KDA_TOKEN
    reach = 8
    exposable = frozenset({"conv[1]", "anchor[1]"})

    def __init__(self, roundings: Roundings = "fewest") -> None:
        self.roundings = roundings
        super().__init__()

    def policy_of(self, match: Match) -> Policy:
        wide = match.value("state").dtype
        if self._inner(match) != match["conv_out"] or any(match[name] != wide for name in _ROUNDED):
            return self.policy
        same_order = match["keys_last"] and not {"log", "q_divisor"} & match.bindings.keys()
        return Policy.EXACT if same_order else Policy.REASSOCIATES

    def _inner(self, match: Match) -> torch.dtype:
        dtype: torch.dtype = match["conv_out"] if self.roundings == "model" else match.value("state").dtype
        return dtype

    def check(self, match: Match) -> Refusal | None:
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
            values, keys = state.shape[2:] if match["keys_last"] else reversed(state.shape[2:])
            return Refusal(f"{values} values and {keys} keys a head, and as many of both are taken", match["state"])
        if not same_sizes(match.value("norm_weight").shape, (size,)):
            return Refusal("the weight of the norm is not one for each value", match["norm_weight"])
        return (
            self._roundings_objection(match)
            or _parts_objection(match, heads, size)
            or _decay_objection(match, heads, size)
            or _gate_objection(match, heads, size)
        )

    def _roundings_objection(self, match: Match) -> Refusal | None:
        if match["step_out"] != match["conv_out"]:
            return Refusal(f"roundings {match['conv_out']} and {match['step_out']}: not the same in both places")
        if self.roundings == "model":
            for name in _ROUNDED:
                if match[name] != (wide := match.value("state").dtype):
                    return Refusal(f"{name} is {match[name]}, which the op computes in {wide}", match["anchor"])
        return None

    def region_values(self, match: Match, seed: int) -> Mapping[Node, Tensor]:
        if not isinstance(match["slots"], Node):
            return {}
        return {match["slots"]: drawn_slots(match.value("slots"), match.value("state"), match["null_slot"], seed)}

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        heads, size = match.value("state").shape[1], match.value("state").shape[3]
        channels = heads * match.value("g").shape[2]
        a_log, lines, states = _flat(match["a_log"], builder), match["conv_state"], match["state"]
        if not same_sizes(a_log.meta["val"].shape, (heads,)):
            a_log = builder.call(aten.slice.Tensor, a_log, 0, 0, heads)
        if not match["channels_last"]:
            lines = builder.call(aten.transpose.int, lines, 1, 2)
        if not match["keys_last"]:
            states = builder.call(aten.transpose.int, states, 2, 3)
        bound = match.get("bound")
        q_scale = 1.0 / match["q_divisor"] if "q_divisor" in match.bindings else float(match["q_scale"])
        node = builder.call(
            k3.kda_decode.default, match["qkv"], _close(as_rows(match["f"], (channels,), builder), builder),
            _close(as_rows(match["b"], (heads,), builder), builder), as_rows(match["gate"], (heads, size), builder),
            match["conv_weight"], a_log, _flat(match["dt_bias"], builder), match["norm_weight"], lines, states,
            _close(match["slots"], builder), match["null_slot"], match["columns"],
            None if bound is None else float(bound), q_scale, match["q_eps"], match["norm_eps"], match["activation"],
            self._inner(match), match["out_dtype"],
        )  # fmt: skip
        y, shape = builder.item(node, 0), match.root.meta["val"].shape
        new = {
            "root": y
            if same_sizes(shape, y.meta["val"].shape)
            else builder.call(aten.view.default, y, [-1, *shape[1:]])
        }
        if "conv[1]" in exposed:
            moved = builder.item(node, 1)
            new["conv[1]"] = moved if match["channels_last"] else builder.call(aten.transpose.int, moved, 1, 2)
        if "anchor[1]" in exposed:
            moved = builder.item(node, 2)
            new["anchor[1]"] = moved if match["keys_last"] else builder.call(aten.transpose.int, moved, 2, 3)
        return new

    def examples(self) -> Sequence[Example]:
        def per_head(qkv: Tensor, f: Tensor, *rest: Any) -> tuple[Tensor, ...]:
            changed = (qkv, f[:, :2].contiguous(), *rest[:4], rest[4][:2].contiguous(), *rest[5:])
            return partial(_layer, decay=_softplus, channels=1)(*changed)

        return (
            Example("Kimi K3", _layer, _inputs),
            Example("a decay without bound", partial(_layer, decay=_unbounded), _inputs),
            Example("a decay without bound, by torch", partial(_layer, decay=_softplus), _inputs),
            Example("a decay of each head", per_head, _inputs),
        )

    def counterexamples(self) -> Sequence[CounterExample]:
        def reverted(rate: Tensor, moved: Tensor) -> Tensor:
            return -rate * torch.where(moved > 10.0, moved, torch.log(1.0 + torch.exp(moved)))

        def per_channel(rate: Tensor, moved: Tensor) -> Tensor:
            return torch.sigmoid(rate * moved.exp2()) * -5.0

        return (
            CounterExample("another function of the gate", partial(_layer, decay=per_channel), _inputs, "expected"),
            CounterExample("another threshold", partial(_layer, decay=reverted), _inputs, "expected"),
            CounterExample("v before k before q", partial(_layer, order=(2, 1, 0)), _inputs, "expected"),
            CounterExample("another epsilon for q", partial(_layer, q_eps=1e-5), _inputs, "normalised differently"),
        )


def _dtype(match: Match, name: str) -> torch.dtype:
    """As what it is read, behind its cast."""
    made = match.get(f"{name}_made")
    dtype: torch.dtype = match[f"{name}_dtype"] if made is None else made.meta["val"].dtype
    return dtype


def _close(node: Any, builder: Builder) -> Any:
    """A few numbers of each row, next to each other: kernels load them so. All layers read one copy of the slots."""
    if not isinstance(node, Node) or same_size(node.meta["val"].stride(-1), 1):
        return node
    for copied in node.users:
        if (
            copied.target is aten.clone.default
            and copied < builder.before
            and same_size(copied.meta["val"].stride(-1), 1)
        ):
            return copied
    return builder.call(aten.clone.default, node, memory_format=torch.contiguous_format)


def _flat(node: Node, builder: Builder) -> Node:
    """A weight as one row."""
    return node if node.meta["val"].dim() == 1 else builder.call(aten.view.default, node, [-1])


def _parts_objection(match: Match, heads: Any, size: Any) -> Refusal | None:
    """q, k and v of each head follow each other in what is convolved."""
    shape, along = match.value("parts").shape, match["dim"] % len(match.value("parts").shape)
    if (sizes := match.get("sizes")) is None:
        fits = len(shape) >= 3 and same_sizes(shape[-3:], (3, heads, size)) and along == len(shape) - 3
    else:
        fits = along == len(shape) - 1 and same_sizes(sizes, [heads * size] * 3)
        fits = fits and all(same_size(match.value(f"part{i}").shape[-1], size) for i in (0, 1))
    return (
        None
        if fits
        else Refusal("what is convolved is not q, k and v of each head, one after the other", match["parts"])
    )


def _decay_objection(match: Match, heads: Any, size: Any) -> Refusal | None:
    decays, rate, moved = match.value("g").shape[2], match.value("rate").shape, match.value("decay").shape
    each = (heads,) if len(moved) < 3 or not same_sizes(moved[-2:], (heads, decays)) else (heads, decays)
    rates = each if len(each) == 1 else (heads, 1)
    if not same_sizes(rate[-len(rates) :], rates) or any(not same_size(n, 1) for n in rate[: -len(rates)]):
        return Refusal("the rates of the decay are not one for each head", match["rate"])
    rows, wide = match.value("qkv").shape[0], match.value("decay").dtype
    if wide != match.value("state").dtype or not all(widens(match[f"{name}_dtype"], wide) for name in ("f", "dt_bias")):
        return Refusal(f"f and its bias are added up as {wide}", match["decay"])
    if not same_sizes(moved[-len(each) :], each) or not same_size(match.value("f").numel(), rows * heads * decays):
        return Refusal("the decay is not one for each channel of each head, or one for each head", match["decay"])
    if not same_size(match.value("dt_bias").numel(), heads * decays):
        return Refusal("the bias of the decay is not one for each decay", match["dt_bias"])
    if not same_size(decays, size) and not same_size(decays, 1):
        return Refusal("the decay is neither of each channel nor of each head", match["decay"])
    return None


def _gate_objection(match: Match, heads: Any, size: Any) -> Refusal | None:
    gate = match.value("gate")
    rows = match.value("qkv").shape[0]
    if not same_size(gate.shape[-1], size) or not same_size(gate.numel(), rows * heads * size):
        return Refusal("the gate is not one for each value of each head", match["gate"])
    return None


def _layer(
    qkv: Tensor, f: Tensor, b: Tensor, gate: Tensor, weight: Tensor, a_log: Tensor, dt_bias: Tensor, norm: Tensor,
    line: Tensor, state: Tensor, slots: Tensor, decay: Any = None, order: tuple[int, ...] = (0, 1, 2),
    q_eps: float = 1e-6, channels: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    wide, narrow, heads, size = torch.float32, qkv.dtype, state.shape[1], state.shape[3]
    y, line = k3.short_conv(qkv, weight, line, slots, True, 3, True, True, wide, wide, narrow)
    parts = y.view(-1, 3, heads, size).unbind(-3)
    q, k, v = (parts[i] for i in order)
    moved = (f.to(wide) + dt_bias).view(-1, heads, channels or size)
    rate = torch.exp(a_log[:heads]).unsqueeze(1)
    g = torch.sigmoid(rate * moved) * -5.0 if decay is None else decay(rate, moved)
    unit_q, unit_k = k3.l2_norm(q, q_eps, True, wide, wide) * 0.5, k3.l2_norm(k, 1e-6, True, wide, wide)
    o, state = k3.kda_step(unit_q, unit_k, v.to(wide), g, torch.sigmoid(b.to(wide)), state, slots, True, True)
    y = k3.gated_rms_norm(o.to(narrow), norm, gate, 1e-5, "sigmoid", wide, wide, wide, wide, wide, narrow)
    return y, line, state


def _softplus(rate: Tensor, moved: Tensor) -> Tensor:
    return -rate * F.softplus(moved)


def _unbounded(rate: Tensor, moved: Tensor) -> Tensor:
    return -(rate * torch.where(moved > 20.0, moved, torch.log1p(torch.exp(moved))))


def _inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows, heads, size = 4, 2, 8
    width = heads * size
    return (
        normal(rows, 3 * width).bfloat16(), normal(rows, width).bfloat16(), normal(rows, heads).bfloat16(),
        normal(rows, heads, size).bfloat16(), normal(3 * width, 4), normal(size) * 0.3, normal(width), normal(size),
        normal(6, 3, 3 * width).bfloat16(), normal(6, heads, size, size), torch.tensor([3, 0, 5, 1]),
    )  # fmt: skip


@dataclass(frozen=True)
class FuseKdaDecodePass(RulePass):
    """Fuse convolution, gates, recurrence and output norm of a KDA decode step into k3::kda_decode."""

    name: ClassVar[str] = "fuse_kda_decode"
    requires: ClassVar[frozenset[str]] = frozenset({"lift_state_slots", "lift_l2_norm", "lift_gated_rms_norm"})
    provides: ClassVar[frozenset[str]] = frozenset({"kda_decode"})

    roundings: Roundings = "fewest"
    """fewest: what the convolution and the recurrence give stays in the dtype of the state; model: as the model does"""

    def rules(self) -> tuple[Rule, ...]:
        return (FuseKdaDecode(self.roundings),)
