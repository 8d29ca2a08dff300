"""Fuse one token of a KDA layer, from its projections to the input of its output projection, into one op.

    y, conv  = k3::short_conv(qkv, w, conv, slots, ...)           -> y, conv, S = k3::kda_decode(qkv, f, b, gate, ...)
    q, k, v  = y.view(-1, 3, H, K).unbind(1)
    g        = sigmoid(exp(A_log[:H])[:, None] * (f.float() + dt_bias).view(-1, H, K)) * bound
    o, S     = k3::kda_step(k3::l2_norm(q) * scale, k3::l2_norm(k), v.float(), g, sigmoid(b.float()), S, slots, ...)
    y        = k3::gated_rms_norm(o.bfloat16(), weight, gate, ...)

`roundings: model` rounds the convolution's and the recurrence's results as the model does; `fewest` keeps them in the
dtype of the state.
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

import k3rewrite.kernels  # noqa: F401  registers the ops that the pattern names
from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.passes.lift_state_slots import drawn_slots
from k3rewrite.patterns import (
    Anything,
    Builder,
    Cast,
    CounterExample,
    Example,
    Item,
    Match,
    Number,
    Policy,
    Refusal,
    Rule,
    Var,
    Views,
    call,
)
from k3rewrite.pipeline.pass_base import RulePass

aten, k3 = torch.ops.aten, torch.ops.k3
Roundings = Literal["fewest", "model"]
_CONV_DTYPES, _NORM_DTYPES = ("conv_compute", "conv_sum"), tuple(f"norm{i}" for i in range(5))

_CONV = call(
    k3.short_conv.default, Var("qkv"), Var("conv_weight"), Var("conv_state"), Anything("slots"), Anything("null_slot"),
    Number("columns"), Anything("channels_last"), Anything("silu"), Anything("conv_compute"), Anything("conv_sum"),
    Anything("conv_out"), name="conv",
)  # fmt: skip
_PARTS = call(aten.unbind.int, Views(Item(_CONV, 0), "parts"), Anything("dim"))


def _unit(index: int, name: str) -> Any:
    return call(
        k3.l2_norm.default, Item(_PARTS, index), Number(f"{name}_eps"), Anything(f"{name}_inside"),
        Anything(f"{name}_compute"), Anything(f"{name}_out"),
    )  # fmt: skip


_RATE = call(aten.exp.default, call("slice", Var("a_log"), 0, 0, Anything("heads")) | Var("a_log"))
_DECAY = call(
    "mul",
    call(
        "sigmoid",
        call("mul", Views(_RATE, "rate"), Views(call("add", Cast(Var("f"), "f_dtype"), Var("dt_bias")), "decay")),
    ),
    Number("bound"),
)
_STEP = call(
    k3.kda_step.default, call("mul", _unit(0, "q"), Number("q_scale")), _unit(1, "k"), Cast(Item(_PARTS, 2), "v_dtype"),
    _DECAY, call("sigmoid", Cast(Var("b"), "b_dtype")), Var("state"), Anything("slots"), Anything("null_slot"),
    Anything("keys_last"), name="anchor",
)  # fmt: skip


class FuseKdaDecode(Rule):
    """See the module docstring."""

    name = "kda_decode"
    policy = Policy.CHANGES_ROUNDING
    anchors = frozenset({k3.kda_step.default})
    pattern = call(
        k3.gated_rms_norm.default, Cast(Item(_STEP, 0), "step_out"), Var("norm_weight"), Var("gate"),
        Number("norm_eps"), Anything("activation"), *map(Anything, _NORM_DTYPES), Anything("out_dtype"),
        name="normed",
    )  # fmt: skip
    reach = 4
    exposable = frozenset({"conv[1]", "anchor[1]"})

    def __init__(self, roundings: Roundings = "fewest") -> None:
        self.roundings = roundings
        super().__init__()

    def policy_of(self, match: Match) -> Policy:
        return self.policy if self._inner(match) != match["conv_out"] else Policy.EXACT

    def _inner(self, match: Match) -> torch.dtype:
        dtype: torch.dtype = match["conv_out"] if self.roundings == "model" else match.value("state").dtype
        return dtype

    def check(self, match: Match) -> Refusal | None:
        state, wide = match.value("state"), match.value("state").dtype
        rows, heads, size = match.value("gate").shape[0], state.shape[1], state.shape[3]
        names = (*_CONV_DTYPES, "q_compute", "q_out", "k_compute", "k_out", "v_dtype", "f_dtype", "b_dtype")
        for name in (*names, *_NORM_DTYPES):
            if match[name] != wide:
                return Refusal(f"{name} is {match[name]}, and the state {wide}", match["anchor"])
        if match["step_out"] != match["conv_out"]:
            return Refusal(f"roundings {match['conv_out']} and {match['step_out']}: not the same in both places")
        if not (match["keys_last"] and match["channels_last"] and match["silu"] and match["q_inside"]):
            return Refusal("states of keys by values, lines of channels, no SiLU, or an epsilon outside of the sum")
        if match["q_eps"] != match["k_eps"] or match["q_inside"] is not match["k_inside"]:
            return Refusal("q and k are normalised differently", match["anchor"])
        if not same_sizes(match.value("parts").shape[1:], (3, heads, size)) or match["dim"] % 4 != 1:
            return Refusal("what is convolved is not q, k and v of each head, one after the other", match["parts"])
        if not same_size(state.shape[2], size) or not same_sizes(match.value("gate").shape, (rows, heads, size)):
            return Refusal("values and gates are not as wide as keys", match["gate"])
        if not same_sizes(match.value("rate").shape, (heads, 1)):
            return Refusal("the rates of the decay are not one for each head", match["rate"])
        if not same_sizes(match.value("decay").shape, (rows, heads, size)) or match.value("f").dim() != 2:
            return Refusal("the decay is not one for each channel of each head", match["decay"])
        if match.value("dt_bias").dim() != 1 or not same_size(match.value("dt_bias").shape[0], heads * size):
            return Refusal("the bias of the decay is not one for each channel", match["dt_bias"])
        return None

    def region_values(self, match: Match, seed: int) -> Mapping[Node, Tensor]:
        if not isinstance(match["slots"], Node):
            return {}
        return {match["slots"]: drawn_slots(match.value("slots"), match.value("state"), match["null_slot"], seed)}

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        heads = match.value("state").shape[1]
        a_log = match["a_log"]
        if not same_sizes(a_log.meta["val"].shape, (heads,)):
            a_log = builder.call(aten.slice.Tensor, a_log, 0, 0, heads)
        node = builder.call(
            k3.kda_decode.default, match["qkv"], match["f"], match["b"], match["gate"], match["conv_weight"], a_log,
            match["dt_bias"], match["norm_weight"], match["conv_state"], match["state"], match["slots"],
            match["null_slot"], match["columns"], float(match["bound"]), float(match["q_scale"]), match["q_eps"],
            match["norm_eps"], match["activation"], self._inner(match), match["out_dtype"],
        )  # fmt: skip
        results = {"root": 0, "conv[1]": 1, "anchor[1]": 2}
        return {name: builder.item(node, results[name]) for name in ("root", *sorted(exposed))}

    def examples(self) -> Sequence[Example]:
        return (Example("Kimi K3", _layer, _inputs),)

    def counterexamples(self) -> Sequence[CounterExample]:
        def softplus(rate: Tensor, moved: Tensor) -> Tensor:
            return -rate * F.softplus(moved)

        def per_head(qkv: Tensor, f: Tensor, *rest: Any) -> tuple[Tensor, ...]:
            changed = (qkv, f[:, :2].contiguous(), *rest[:4], rest[4][:2].contiguous(), *rest[5:])
            return partial(_layer, channels=1)(*changed)

        return (
            CounterExample("a decay of each head", per_head, _inputs, "not one for each channel of each head"),
            CounterExample("a decay without bound", partial(_layer, decay=softplus), _inputs, "expected"),
            CounterExample("v before k before q", partial(_layer, order=(2, 1, 0)), _inputs, "expected"),
            CounterExample("another epsilon for q", partial(_layer, q_eps=1e-5), _inputs, "normalised differently"),
        )


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
