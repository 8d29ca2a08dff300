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
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.passes import kda_layer as layer
from k3rewrite.passes.kda_layer import Roundings
from k3rewrite.passes.kda_patterns import CONV_DTYPES, aten, k3, layer_pattern
from k3rewrite.passes.lift_kda_step import as_rows
from k3rewrite.passes.lift_state_slots import drawn_slots
from k3rewrite.patterns import (
    Anything,
    Builder,
    CounterExample,
    Example,
    Match,
    Number,
    Policy,
    Refusal,
    Rule,
    Var,
    call,
)
from k3rewrite.pipeline.pass_base import RulePass

_CONV = call(
    k3.short_conv.default, Var("qkv"), Var("conv_weight"), Var("conv_state"), Anything("slots"), Anything("null_slot"),
    Number("columns"), Anything("channels_last"), Anything("silu"), *map(Anything, CONV_DTYPES), name="conv",
)  # fmt: skip


def _step(*heads: Any) -> Any:
    return call(
        k3.kda_step.default, *heads, Var("state"), Anything("slots"), Anything("null_slot"), Anything("keys_last"),
        name="anchor",
    )  # fmt: skip


class FuseKdaDecode(Rule):
    """See the module docstring."""

    name = "kda_decode"
    policy = Policy.CHANGES_ROUNDING
    anchors = frozenset({k3.kda_step.default})
    pattern = layer_pattern(_CONV, _step)
    reach = 8
    exposable = frozenset({"conv[1]", "anchor[1]"})

    def __init__(self, roundings: Roundings = "fewest") -> None:
        self.roundings = roundings
        super().__init__()

    def policy_of(self, match: Match) -> Policy:
        return layer.policy_of(match, self.roundings, match["keys_last"])

    def check(self, match: Match) -> Refusal | None:
        return layer.objection(match, self.roundings, match.value("qkv").shape[0], match["keys_last"])

    def region_values(self, match: Match, seed: int) -> Mapping[Node, Tensor]:
        if not isinstance(match["slots"], Node):
            return {}
        return {match["slots"]: drawn_slots(match.value("slots"), match.value("state"), match["null_slot"], seed)}

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        heads, size = match.value("state").shape[1], match.value("state").shape[3]
        channels = heads * match.value("g").shape[2]
        lines, states = match["conv_state"], match["state"]
        if not match["channels_last"]:
            lines = builder.call(aten.transpose.int, lines, 1, 2)
        if not match["keys_last"]:
            states = builder.call(aten.transpose.int, states, 2, 3)
        bound = match.get("bound")
        node = builder.call(
            k3.kda_decode.default, match["qkv"], _close(as_rows(match["f"], (channels,), builder), builder),
            _close(as_rows(match["b"], (heads,), builder), builder), as_rows(match["gate"], (heads, size), builder),
            match["conv_weight"], layer.rates(match["a_log"], heads, builder), layer.flat(match["dt_bias"], builder),
            match["norm_weight"], lines, states, _close(match["slots"], builder), match["null_slot"], match["columns"],
            None if bound is None else float(bound), layer.q_scale(match), match["q_eps"], match["norm_eps"],
            match["activation"], layer.inner_dtype(match, self.roundings), match["out_dtype"],
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
            return partial(_layer, decay=layer.softplus, channels=1)(*changed)

        return (
            Example("Kimi K3", _layer, _inputs),
            Example("q, k and v by split", partial(_layer, split=True), _inputs),
            Example("a decay without bound", partial(_layer, decay=_unbounded), _inputs),
            Example("a decay without bound, by torch", partial(_layer, decay=layer.softplus), _inputs),
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


def _layer(
    qkv: Tensor, f: Tensor, b: Tensor, gate: Tensor, weight: Tensor, a_log: Tensor, dt_bias: Tensor, norm: Tensor,
    line: Tensor, state: Tensor, slots: Tensor, **how: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    wide, narrow, heads = torch.float32, qkv.dtype, state.shape[1]
    y, line = k3.short_conv(qkv, weight, line, slots, True, 3, True, True, wide, wide, narrow)
    tokens = layer.heads_of(y, f, b, a_log, dt_bias, (-1,), heads, **how)
    o, state = k3.kda_step(*tokens, state, slots, True, True)
    return layer.gated(o, gate, norm, narrow), line, state


def _unbounded(rate: Tensor, moved: Tensor) -> Tensor:
    return -(rate * torch.where(moved > 20.0, moved, torch.log1p(torch.exp(moved))))


def _inputs() -> tuple[Tensor, ...]:
    return (*layer.inputs(4, 2, 8, 6, 3), torch.tensor([3, 0, 5, 1]))


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
