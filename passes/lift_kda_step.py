"""Lift one token of the gated delta rule to one op: Kimi Delta Attention, and gated delta nets whose decay is a head's.

    S' = state * exp(g)[:, :, None]                      -> o, S = k3::kda_step(q, k, v, g, beta, state, None, ...)
    u  = beta[:, :, None] * (v - (S' * k[:, :, None]).sum(-1))
    S  = S' + u[:, :, :, None] * k[:, :, None]
    o  = (S * q[:, :, None]).sum(-1)

States may be values by keys, as above, or keys by values. `lift_state_slots` then takes in the gather of the states by
slot and the scatter of the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

import k3rewrite.kernels  # noqa: F401  registers the op that is built
from k3rewrite.errors import UnsupportedError
from k3rewrite.graph.layout import keeps_order
from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.patterns import (
    OPERATORS,
    Anything,
    Builder,
    CounterExample,
    Example,
    Match,
    Policy,
    Refusal,
    Rule,
    Var,
    Views,
    call,
)
from k3rewrite.pipeline.pass_base import RulePass

aten = torch.ops.aten
_STEP = torch.ops.k3.kda_step.default

_DECAYED = call("mul", Var("state"), Views(call(aten.exp.default, Views(Var("g"))), "decay"))
_PREDICTED = call("sum", call("mul", _DECAYED, Views(Var("k"), "predicting")), Anything("dims"))
_UPDATE = call("mul", Views(Var("beta"), "rate"), call("sub", Var("v"), _PREDICTED, name="anchor"))
_NEW = call("add", _DECAYED, call("mul", Views(_UPDATE, "update"), Views(Var("k"), "updating")), name="new")


class LiftKdaStep(Rule):
    """See the module docstring."""

    name = "kda_step"
    policy = Policy.EXACT
    anchors = OPERATORS["sub"]
    pattern = call("sum", call("mul", _NEW, Views(Var("q"), "reading")), Anything("dims"))
    reach = 8
    exposable = frozenset({"new"})

    def is_site(self, node: Node) -> bool:
        """What a sum of products over one dimension is taken from."""
        other = node.args[1] if len(node.args) > 1 else None
        if not isinstance(other, Node) or other.target not in OPERATORS["sum"] or other.meta["val"].dim() != 3:
            return False
        summed = other.args[0]
        return isinstance(summed, Node) and summed.target in OPERATORS["mul"] and len(list(other.args[1])) == 1  # type: ignore[arg-type]

    def check(self, match: Match) -> Refusal | None:
        state = match.value("state")
        for name in ("q", "k", "v", "g", "beta"):
            if (dtype := match.value(name).dtype) != state.dtype:
                return Refusal(f"{name} is {dtype}, and the state {state.dtype}", match[name])
        if state.dim() != 4 or match["dims"] not in ([-1], [3], [-2], [2]):
            return Refusal(f"sums over dimension {match['dims']} of a state of {state.dim()}", match["anchor"])
        rows, heads, keys, values = _sizes(match)
        along = (rows, heads, 1, keys) if _keys_last(match) else (rows, heads, keys, 1)
        across = (rows, heads, values, 1) if _keys_last(match) else (rows, heads, 1, values)
        for name, what in (("predicting", "k"), ("updating", "k"), ("reading", "q")):
            if not same_sizes(match.value(name).shape, along):
                return Refusal(f"{what} does not lie along the keys of the state", match[name])
        decay = match.value("decay").shape
        if not same_sizes(decay, along) and not same_sizes(decay, (rows, heads, 1, 1)):
            return Refusal("the decay is neither one of each key channel nor one of each head", match["decay"])
        if not same_sizes(match.value("update").shape, across):
            return Refusal("the update does not lie along the values of the state", match["update"])
        if not same_sizes(match.value("v").shape, (rows, heads, values)):
            return Refusal("v has not one row for each head", match["v"])
        if not same_sizes(match.value("rate").shape, (rows, heads, 1)):
            return Refusal("beta is not one number of each head", match["rate"])
        return None

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        _, heads, keys, _ = _sizes(match)
        decays = keys if not same_size(match.value("decay").numel(), match.value("rate").numel()) else 1
        step = builder.call(
            _STEP,
            as_rows(match["q"], (heads, keys), builder),
            as_rows(match["k"], (heads, keys), builder),
            match["v"],
            as_rows(match["g"], (heads, decays), builder),
            as_rows(match["beta"], (heads,), builder),
            match["state"],
            None,
            False,
            _keys_last(match),
        )
        return (
            {"root": builder.item(step, 0), "new": builder.item(step, 1)}
            if exposed
            else {"root": builder.item(step, 0)}
        )

    def examples(self) -> Sequence[Example]:
        def own(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return _step(q, k, v, g, beta, state)

        def per_head(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return _step(q, k, v, g[..., :1], beta, state)

        return (
            Example("values by keys", own, _inputs),
            Example("keys by values, of a sequence of one token", _transformers, _sequence),
            Example("a decay of each head", per_head, _inputs),
            Example("the state is not kept", lambda *a: _step(*a)[0], _inputs),
        )

    def counterexamples(self) -> Sequence[CounterExample]:
        def undecayed(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
            decayed, along = state * torch.exp(g).unsqueeze(2), k.unsqueeze(2)
            new = decayed + (beta.unsqueeze(2) * (v - (state * along).sum(-1))).unsqueeze(3) * along
            return (new * q.unsqueeze(2)).sum(-1)

        def read_first(
            q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
        ) -> tuple[Tensor, Tensor]:
            new = _step(q, k, v, g, beta, state)[1]
            return (state * q.unsqueeze(2)).sum(-1), new

        def base_two(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
            decayed, along = state * torch.exp2(g).unsqueeze(2), k.unsqueeze(2)
            new = decayed + (beta.unsqueeze(2) * (v - (decayed * along).sum(-1))).unsqueeze(3) * along
            return (new * q.unsqueeze(2)).sum(-1)

        def by_value(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
            decayed, along = state * torch.exp(g).unsqueeze(3), k.unsqueeze(2)
            new = decayed + (beta.unsqueeze(2) * (v - (decayed * along).sum(-1))).unsqueeze(3) * along
            return (new * q.unsqueeze(2)).sum(-1)

        return (
            CounterExample("a prediction of the state before its decay", undecayed, _inputs, "expected"),
            CounterExample("a readout of the state before its update", read_first, _inputs, "expected"),
            CounterExample("a decay to the base two", base_two, _inputs, "expected aten.exp"),
            CounterExample("a decay of each value", by_value, _square, "neither one of each key channel"),
        )


def _keys_last(match: Match) -> bool:
    return match["dims"] in ([-1], [3])


def _sizes(match: Match) -> tuple[Any, Any, Any, Any]:
    """Rows, heads, keys, values."""
    rows, heads, third, last = match.value("state").shape
    return (rows, heads, last, third) if _keys_last(match) else (rows, heads, third, last)


def as_rows(node: Node, sizes: tuple[Any, ...], builder: Builder) -> Node:
    """The value as rows of these sizes: what it is a view of, or a view of it."""
    seen = node
    while True:
        value = seen.meta["val"]
        if value.dim() == len(sizes) + 1 and same_sizes(value.shape[1:], sizes):
            return seen
        if not keeps_order(seen):
            break
        seen = seen.args[0]  # type: ignore[assignment]
    try:
        return builder.call(aten.view.default, node, [-1, *sizes])
    except RuntimeError as error:
        raise UnsupportedError(
            f"{node.name} cannot be seen as rows: {error}", place=str(_STEP), remedy="make it contiguous"
        ) from None


# ------------------------------------------------------------------ examples


def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    decayed, along = state * torch.exp(g).unsqueeze(2), k.unsqueeze(2)
    update = beta.unsqueeze(2) * (v - (decayed * along).sum(-1))
    new = decayed + update.unsqueeze(3) * along
    return (new * q.unsqueeze(2)).sum(-1), new


def _transformers(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers writes a sequence [B, T, H, K], of one token here."""
    q, k, v, decay, rate = q[:, 0], k[:, 0], v[:, 0], g[:, 0][..., None].exp(), beta[:, 0][..., None]
    state = state * decay
    delta = (v - (state * k[..., None]).sum(dim=-2)) * rate
    state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(dim=-2), state


def _inputs(values: int = 12) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows, heads, keys = 3, 2, 8
    q, k, v = normal(rows, heads, keys), normal(rows, heads, keys), normal(rows, heads, values)
    return (
        q,
        k * 0.3,
        v,
        -normal(rows, heads, keys).abs(),
        normal(rows, heads).sigmoid(),
        normal(rows, heads, values, keys),
    )


def _square() -> tuple[Tensor, ...]:
    return _inputs(values=8)


def _sequence() -> tuple[Tensor, ...]:
    *tokens, state = _inputs()
    return (*(value.unsqueeze(1) for value in tokens), state.transpose(2, 3).contiguous())


@dataclass(frozen=True)
class LiftKdaStepPass(RulePass):
    """Lift one token of the gated delta rule to k3::kda_step."""

    name: ClassVar[str] = "lift_kda_step"
    provides: ClassVar[frozenset[str]] = frozenset({"kda_step"})

    def rules(self) -> tuple[Rule, ...]:
        return (LiftKdaStep(),)
