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
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from k3rewrite.errors import UnsupportedError
from k3rewrite.graph.shapes import same_size
from k3rewrite.passes import kda_layer as layer
from k3rewrite.passes.kda_layer import Roundings
from k3rewrite.passes.kda_patterns import CONV_DTYPES, aten, k3, layer_pattern
from k3rewrite.passes.windows import computed, drawn_numbers, drawn_table
from k3rewrite.patterns import (
    Anything,
    Builder,
    CounterExample,
    Example,
    Match,
    Policy,
    Refusal,
    Rule,
    Var,
    call,
)
from k3rewrite.pipeline.pass_base import RulePass

_CONV = call(
    k3.conv_verify.default, Var("qkv"), Var("conv_weight"), Var("conv_state"), Var("line"), Var("history"),
    Anything("conv_lengths"), Anything("conv_null"), Anything("silu"), *map(Anything, CONV_DTYPES), name="conv",
)  # fmt: skip


def _window(*heads: Any) -> Any:
    return call(
        k3.kda_window.default, *heads, Var("state"), Var("start"), Var("table"), Anything("lengths"),
        Anything("null_slot"), name="anchor",
    )  # fmt: skip


class FuseKdaVerify(Rule):
    """See the module docstring."""

    name = "kda_verify"
    policy = Policy.CHANGES_ROUNDING
    anchors = frozenset({k3.kda_window.default})
    pattern = layer_pattern(_CONV, _window)
    reach = 8
    exposable = frozenset({"conv[1]", "anchor[1]"})

    def __init__(self, roundings: Roundings = "fewest") -> None:
        self.roundings = roundings
        super().__init__()

    def policy_of(self, match: Match) -> Policy:
        return layer.policy_of(match, self.roundings, True)

    def check(self, match: Match) -> Refusal | None:
        table, state = match.value("table").shape, match.value("state")
        if not isinstance(table[1], int):
            return Refusal("the window's length is symbolic", match["table"])
        if (match["conv_null"], match["conv_lengths"]) != (match["null_slot"], match["lengths"]):
            return Refusal("null slots or lengths are others for the line than for the states", match["conv"])
        if match["line"].target is not aten.select.int or match["line"].args != (match["table"], 1, 0):
            return Refusal("the line is not in the first slot of the table", match["line"])
        if "bound" not in match.bindings:
            return Refusal("the decay of a window has no bound", match["decay"])
        if not same_size(match.value("g").shape[-1], state.shape[3]):
            return Refusal("the decay of a window is not one for each channel", match["decay"])
        return layer.objection(match, self.roundings, table[0] * table[1])

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
        state, tokens = match.value("state"), match.value("table").shape[1]
        heads, size = state.shape[1], state.shape[3]

        def windows(name: str, *sizes: int) -> Node:
            try:
                return builder.call(aten.view.default, match[name], [-1, tokens, *sizes])
            except RuntimeError as error:
                raise UnsupportedError(
                    f"{name} cannot be seen as windows: {error}", place="k3::kda_verify", remedy="make it contiguous"
                ) from None

        node = builder.call(
            k3.kda_verify.default, match["qkv"], windows("f", heads * size), windows("b", heads),
            windows("gate", heads, size), match["conv_weight"], layer.rates(match["a_log"], heads, builder),
            layer.flat(match["dt_bias"], builder), match["norm_weight"], match["conv_state"], match["state"],
            match["start"], match["table"], match["history"], match["lengths"], match["null_slot"],
            float(match["bound"]), layer.q_scale(match), match["q_eps"], match["norm_eps"], match["activation"],
            layer.inner_dtype(match, self.roundings), match["out_dtype"],
        )  # fmt: skip
        shape = match.root.meta["val"].shape
        new = {"root": builder.call(aten.view.default, builder.item(node, 0), [-1, *shape[1:]])}
        results = {"conv[1]": 1, "anchor[1]": 2}
        return new | {name: builder.item(node, results[name]) for name in sorted(exposed)}

    def examples(self) -> Sequence[Example]:
        return (
            Example("Kimi K3", _layer, _inputs),
            Example("q, k and v by split", partial(_layer, split=True), _inputs),
            Example("windows of several lengths", _layer, _ragged),
        )

    def counterexamples(self) -> Sequence[CounterExample]:
        def variant(**changes: Any) -> Any:
            return partial(_layer, **changes)

        return (
            CounterExample("a decay without bound", variant(decay=layer.softplus), _inputs, "no bound"),
            CounterExample("v before k before q", variant(order=(2, 1, 0)), _inputs, "expected"),
            CounterExample("another epsilon for q", variant(q_eps=1e-5), _inputs, "normalised differently"),
            CounterExample("a line of its own slots", variant(column=1), _inputs, "not in the first slot"),
            CounterExample("null slots for the line alone", variant(null=False), _inputs, "others for the line"),
        )


# ------------------------------------------------------------------ examples


def _layer(
    qkv: Tensor, f: Tensor, b: Tensor, gate: Tensor, weight: Tensor, a_log: Tensor, dt_bias: Tensor, norm: Tensor,
    line: Tensor, state: Tensor, start: Tensor, table: Tensor, history: Tensor, lengths: Tensor | None = None,
    column: int = 0, null: bool = True, **how: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    wide, narrow, shape = torch.float32, qkv.dtype, tuple(table.shape)
    x = qkv.unflatten(0, shape)
    y, line = k3.conv_verify(x, weight, line, table[:, column], history, lengths, null, True, wide, wide, narrow)
    tokens = layer.heads_of(y, f, b, a_log, dt_bias, shape, state.shape[1], **how)
    o, state = k3.kda_window(*tokens, state, start, table, lengths, True)
    return layer.gated(o.flatten(0, 1), gate, norm, narrow), line, state


def _inputs() -> tuple[Tensor, ...]:
    return (
        *layer.inputs(6, 2, 8, 8, 5), torch.tensor([5, 0, 1]), torch.tensor([[3, 5], [0, 0], [7, 1]]),
        torch.tensor([[1, 2, 3], [0, 1, 2], [1, 2, 3]]),
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
