"""Fuse a verify window of a KDA layer, from its projections to the input of its output projection, into one op.

    y, line  = k3::conv_verify(qkv, w, line, table[:, 0], history, ...)  -> y, line, S = k3::kda_verify(qkv, f, b, gate,
    q, k, v  = y.view(B, N, 3, H, K).unbind(2)                              ..., line, S, start, table, history, ...)
    g        = sigmoid(exp(A_log[:H])[:, None] * (f.float() + dt_bias).view(B, N, H, K)) * bound
    o, S     = k3::kda_window(k3::l2_norm(q) * scale, k3::l2_norm(k), v.float(), g, sigmoid(b.float()), S, start,
                              table, ...)
    y        = k3::gated_rms_norm(o.view(B * N, H, V).bfloat16(), weight, gate, ...)

`roundings` are those of `fuse_kda_decode`.
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
from k3rewrite.errors import UnsupportedError
from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.passes.windows import computed, drawn_numbers, drawn_table
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
_NORM_DTYPES = tuple(f"norm{i}" for i in range(5))

_CONV = call(
    k3.conv_verify.default, Var("qkv"), Var("conv_weight"), Var("conv_state"), Var("line"), Var("history"),
    Anything("conv_lengths"), Anything("conv_null"), Anything("silu"), Anything("conv_compute"), Anything("conv_sum"),
    Anything("conv_out"), name="conv",
)  # fmt: skip
_PARTS = call(aten.unbind.int, Views(Item(_CONV, 0), "parts"), Anything("dim"))


def _unit(index: int, name: str) -> Any:
    return call(
        k3.l2_norm.default, Item(_PARTS, index), Number(f"{name}_eps"), Anything(f"{name}_inside"),
        Anything(f"{name}_compute"), Anything(f"{name}_out"),
    )  # fmt: skip


_RATE = call(aten.exp.default, call("slice", Var("a_log"), 0, 0, Anything("heads")) | Var("a_log"))
_MOVED = Views(call("add", Cast(Views(Var("f")), "f_dtype"), Var("dt_bias")), "decay")
_DECAY = call("mul", call("sigmoid", call("mul", Views(_RATE, "rate"), _MOVED)), Number("bound"))
_WINDOW = call(
    k3.kda_window.default, call("mul", _unit(0, "q"), Number("q_scale")), _unit(1, "k"),
    Cast(Item(_PARTS, 2), "v_dtype"), _DECAY, Views(call("sigmoid", Cast(Views(Var("b")), "b_dtype")), "beta"),
    Var("state"), Var("start"), Var("table"), Anything("lengths"), Anything("null_slot"), name="anchor",
)  # fmt: skip


class FuseKdaVerify(Rule):
    """See the module docstring."""

    name = "kda_verify"
    policy = Policy.CHANGES_ROUNDING
    anchors = frozenset({k3.kda_window.default})
    pattern = call(
        k3.gated_rms_norm.default, Cast(Views(Item(_WINDOW, 0), "read"), "step_out"), Var("norm_weight"), Var("gate"),
        Number("norm_eps"), Anything("activation"), *map(Anything, _NORM_DTYPES), Anything("out_dtype"),
        name="normed",
    )  # fmt: skip
    reach = 5
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
        for name in ("conv_compute", "conv_sum", "q_compute", "q_out", "k_compute", "k_out", "v_dtype", "f_dtype",
                     "b_dtype", *_NORM_DTYPES):  # fmt: skip
            if match[name] != wide:
                return Refusal(f"{name} is {match[name]}, and the state {wide}", match["anchor"])
        if match["step_out"] != match["conv_out"]:
            return Refusal(f"roundings {match['conv_out']} and {match['step_out']}: not the same in both places")
        if match["q_eps"] != match["k_eps"] or not match["q_inside"] or not match["k_inside"] or not match["silu"]:
            return Refusal("q and k are normalised differently, an epsilon is outside of the sum, or there is no SiLU")
        if (match["conv_null"], match["conv_lengths"]) != (match["null_slot"], match["lengths"]):
            return Refusal("null slots or lengths are others for the line than for the states", match["conv"])
        if match["line"].target is not aten.select.int or match["line"].args != (match["table"], 1, 0):
            return Refusal("the line is not in the first slot of the table", match["line"])
        return _shape_refusal(match, state.shape[1], state.shape[3])

    def region_values(self, match: Match, seed: int) -> Mapping[Node, Tensor]:
        state, table, history = match.value("state"), match["table"], match["history"]
        drawn = drawn_table(table.meta["val"], state, match["null_slot"], seed)
        offset = drawn_numbers(match.value("start"), table.meta["val"].shape[1], seed)
        past = offset.unsqueeze(1) + torch.arange(match.value("history").shape[1], device=offset.device)
        leaves = {
            table: drawn,
            match["start"]: drawn.gather(1, offset.to(torch.int64).unsqueeze(1)).squeeze(1).to(offset.dtype),
            history: past.to(match.value("history").dtype),
        }
        return computed(leaves, (match["line"],))

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        state = match.value("state")
        heads, size, tokens, a_log = state.shape[1], state.shape[3], match.value("table").shape[1], match["a_log"]
        if not same_sizes(a_log.meta["val"].shape, (heads,)):
            a_log = builder.call(aten.slice.Tensor, a_log, 0, 0, heads)

        def windows(name: str, *sizes: int) -> Node:
            try:
                return builder.call(aten.view.default, match[name], [-1, tokens, *sizes])
            except RuntimeError as error:
                raise UnsupportedError(
                    f"{name} cannot be seen as windows: {error}", place="k3::kda_verify", remedy="make it contiguous"
                ) from None

        node = builder.call(
            k3.kda_verify.default, match["qkv"], windows("f", heads * size), windows("b", heads),
            windows("gate", heads, size), match["conv_weight"], a_log, match["dt_bias"], match["norm_weight"],
            match["conv_state"], match["state"], match["start"], match["table"], match["history"], match["lengths"],
            match["null_slot"], float(match["bound"]), float(match["q_scale"]), match["q_eps"], match["norm_eps"],
            match["activation"], self._inner(match), match["out_dtype"],
        )  # fmt: skip
        new = {"root": builder.call(aten.view.default, builder.item(node, 0), [-1, heads, size])}
        results = {"conv[1]": 1, "anchor[1]": 2}
        return new | {name: builder.item(node, results[name]) for name in sorted(exposed)}

    def examples(self) -> Sequence[Example]:
        return (
            Example("Kimi K3", _layer, _inputs),
            Example("windows of several lengths", _layer, _ragged),
        )

    def counterexamples(self) -> Sequence[CounterExample]:
        def variant(**changes: Any) -> Any:
            return partial(_layer, **changes)

        def softplus(rate: Tensor, moved: Tensor) -> Tensor:
            return -rate * F.softplus(moved)

        return (
            CounterExample("a decay without bound", variant(decay=softplus), _inputs, "expected"),
            CounterExample("v before k before q", variant(order=(2, 1, 0)), _inputs, "expected"),
            CounterExample("another epsilon for q", variant(q_eps=1e-5), _inputs, "normalised differently"),
            CounterExample("a line of its own slots", variant(column=1), _inputs, "not in the first slot"),
            CounterExample("null slots for the line alone", variant(null=False), _inputs, "others for the line"),
        )


def _shape_refusal(match: Match, heads: Any, size: Any) -> Refusal | None:
    table, gate = match.value("table").shape, match.value("gate")
    if not isinstance(table[1], int):
        return Refusal("the window's length is symbolic", match["table"])
    if not same_sizes(match.value("parts").shape, (*table, 3, heads, size)) or match["dim"] % 5 != 2:
        return Refusal("what is convolved is not q, k and v of each head, one after the other", match["parts"])
    if not same_size(match.value("state").shape[2], size) or not same_sizes(gate.shape[1:], (heads, size)):
        return Refusal("values and gates are not as wide as keys", match["gate"])
    if gate.dim() != 3 or not same_sizes(match.value("read").shape, gate.shape):
        return Refusal("what is read out is not one row a token", match["read"])
    if not same_sizes(match.value("rate").shape, (heads, 1)):
        return Refusal("the rates of the decay are not one for each head", match["rate"])
    if not same_sizes(match.value("decay").shape, (*table, heads, size)):
        return Refusal("the decay is not one for each channel of each head", match["decay"])
    if not same_sizes(match.value("beta").shape, (*table, heads)):
        return Refusal("beta is not one number of each head", match["beta"])
    if not same_size(match.value("f").shape[-1], heads * size):
        return Refusal("what decays is not a row of all channels for each token", match["f"])
    if match.value("dt_bias").dim() != 1 or not same_size(match.value("dt_bias").shape[0], heads * size):
        return Refusal("the bias of the decay is not one for each channel", match["dt_bias"])
    return None


# ------------------------------------------------------------------ examples


def _layer(
    qkv: Tensor, f: Tensor, b: Tensor, gate: Tensor, weight: Tensor, a_log: Tensor, dt_bias: Tensor, norm: Tensor,
    line: Tensor, state: Tensor, start: Tensor, table: Tensor, history: Tensor, lengths: Tensor | None = None,
    decay: Any = None, order: tuple[int, ...] = (0, 1, 2), q_eps: float = 1e-6, column: int = 0, null: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    wide, narrow, heads, size = torch.float32, qkv.dtype, state.shape[1], state.shape[3]
    shape = table.shape
    x = qkv.unflatten(0, shape)
    y, line = k3.conv_verify(x, weight, line, table[:, column], history, lengths, null, True, wide, wide, narrow)
    parts = y.view(*shape, 3, heads, size).unbind(-3)
    q, k, v = (parts[i] for i in order)
    moved = (f.to(wide) + dt_bias).view(*shape, heads, size)
    rate = torch.exp(a_log[:heads]).unsqueeze(1)
    g = torch.sigmoid(rate * moved) * -5.0 if decay is None else decay(rate, moved)
    unit_q, unit_k = k3.l2_norm(q, q_eps, True, wide, wide) * 0.5, k3.l2_norm(k, 1e-6, True, wide, wide)
    beta = torch.sigmoid(b.to(wide)).unflatten(0, shape)
    o, state = k3.kda_window(unit_q, unit_k, v.to(wide), g, beta, state, start, table, lengths, True)
    o = o.flatten(0, 1).to(narrow)
    y = k3.gated_rms_norm(o, norm, gate, 1e-5, "sigmoid", wide, wide, wide, wide, wide, narrow)
    return y, line, state


def _inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows, heads, size = 6, 2, 8
    width = heads * size
    return (
        normal(rows, 3 * width).bfloat16(), normal(rows, width).bfloat16(), normal(rows, heads).bfloat16(),
        normal(rows, heads, size).bfloat16(), normal(3 * width, 4), normal(size) * 0.3, normal(width), normal(size),
        normal(8, 5, 3 * width).bfloat16(), normal(8, heads, size, size), torch.tensor([5, 0, 1]),
        torch.tensor([[3, 5], [0, 0], [7, 1]]), torch.tensor([[1, 2, 3], [0, 1, 2], [1, 2, 3]]),
    )  # fmt: skip


def _ragged() -> tuple[Tensor, ...]:
    return (*_inputs(), torch.tensor([2, 1, 1]))


@dataclass(frozen=True)
class FuseKdaVerifyPass(RulePass):
    """Fuse convolution, gates, recurrence and output norm of a KDA verify window into k3::kda_verify."""

    name: ClassVar[str] = "fuse_kda_verify"
    requires: ClassVar[frozenset[str]] = frozenset(
        {"lift_conv_verify", "lift_kda_window", "lift_l2_norm", "lift_gated_rms_norm"}
    )
    provides: ClassVar[frozenset[str]] = frozenset({"kda_verify"})

    roundings: Roundings = "fewest"
    """fewest: what the convolution and the recurrence give stays in the dtype of the state; model: as the model does"""

    def rules(self) -> tuple[Rule, ...]:
        return (FuseKdaVerify(self.roundings),)
