"""Lift the router: scores, selection bias, top-k, renormalisation, scale.

    s = torch.sigmoid(logits)
    ids = (s + bias).topk(16).indices
    w = s.gather(-1, ids)
    w = w / (w.sum(-1, keepdim=True) + 1e-20) * scale
    ->
    w, ids = k3::route(logits, bias, 16, "sigmoid", renormalise=True, eps=1e-20, scale=scale, ...)

Softmax before the top-k and softmax over the selected logits are the other scores. Selection limited to groups of
experts fills the scores of the other groups with -inf; it stays as it is. Where there is one group only,
`canonicalise` has taken the mask away.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

import k3rewrite.kernels  # noqa: F401  registers the op that is built
from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.dtypes import widens
from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.patterns import (
    LAST_DIM,
    OPERATORS,
    Anything,
    Builder,
    Cast,
    CounterExample,
    Example,
    Item,
    Match,
    Named,
    Number,
    Pattern,
    Policy,
    Refusal,
    Rule,
    Var,
    Views,
    call,
)
from k3rewrite.patterns.bindings import Attempt
from k3rewrite.pipeline.pass_base import RulePass

_LOGITS = Cast(Var("logits"), "compute")
_SIGMOID = call("sigmoid", _LOGITS, name="sigmoid")
_SOFTMAX = call("softmax", _LOGITS, Anything("softmax_dim"), False, name="softmax")
_SCORES = Named(_SIGMOID | _SOFTMAX, "scores")


def _topk(values: Pattern) -> Pattern:
    return call("topk", values, Number("top_k"), Anything("topk_dim"), name="anchor", open=True)


def _of_groups(values: Pattern) -> Pattern:
    """The scores, or those of some groups of experts with -inf for the others."""
    return values | call(torch.ops.aten.masked_fill.Scalar, values, Var("mask"), Number("filled"), name="masked")


_SELECTED = _topk(_of_groups(call("add", _SCORES, Var("bias")))) | _topk(_of_groups(_SCORES))
_IDS = Item(_SELECTED, 1, "ids")
_GATHERED = call("gather", _SCORES, Anything("gather_dim"), _IDS) | Item(_topk(_SCORES), 0)
_LATE_SOFTMAX = call(
    "softmax", Cast(Item(_topk(_LOGITS), 0), "late_dtype"), Anything("softmax_dim"), False, name="late"
)
_WEIGHTS = Cast(_GATHERED, "gathered") | _LATE_SOFTMAX
_TOTAL = Views(call("sum", _WEIGHTS, LAST_DIM, keepdim=Anything()))
_RENORMALISED = call("div", _WEIGHTS, Views(call("add", _TOTAL, Number("eps")) | _TOTAL, "total"), name="renormalised")
_NORMED = _RENORMALISED | _WEIGHTS


class LiftRoute(Rule):
    """See the module docstring. The anchor is the top-k whose ids and weights are used."""

    name = "route"
    policy = Policy.EXACT
    anchors = OPERATORS["topk"]
    pattern = Cast(call("mul", _NORMED, Number("scale")) | _NORMED, "out")
    exposable = frozenset({"ids", "anchor[1]"})
    reach = 7

    def is_site(self, node: Node) -> bool:
        return not _chooses_groups(node)

    def matches(self, anchor: Node) -> tuple[Iterator[Match], Attempt]:
        found, attempt = super().matches(anchor)
        matches = list(found)
        limited = [match["masked"] for match in matches if "masked" in match.bindings]
        if limited:
            attempt.node = limited[0]
            attempt.reason = "the selection is limited to groups of experts, or to those that a mask leaves"
        return iter([match for match in matches if "masked" not in match.bindings]), attempt

    def check(self, match: Match) -> Refusal | None:
        logits, topk = match.value("logits"), match["anchor"]
        if not widens(logits.dtype, match["compute"]) or not widens(match["out"], match["compute"]):
            return Refusal(f"dtypes {logits.dtype} -> {match['compute']} -> {match['out']} of scores", topk)
        last = (-1, logits.dim() - 1)
        for name in ("softmax_dim", "topk_dim", "gather_dim"):
            if name in match.bindings and match[name] not in last:
                return Refusal(f"{name.removesuffix('_dim')} over dimension {match[name]}, not over the experts", topk)
        if "gathered" in match.bindings and match["gathered"] != match["compute"]:
            return Refusal(f"the selected scores are cast to {match['gathered']} before they are used", topk)
        if match.get("late_dtype", match["compute"]) != match["compute"]:
            return Refusal(f"the top-k is in {match['compute']}, the softmax over it in {match['late_dtype']}", topk)
        if "renormalised" in match.bindings:
            weights = match.value("renormalised")
            if not same_sizes(match.value("total").shape, (*weights.shape[:-1], 1)):
                return Refusal("the sums of the weights are not laid along the tokens", match["total"])
        if not _argument(topk, "largest"):
            return Refusal("the smallest scores are selected", topk)
        if "bias" in match.bindings:
            bias = match.value("bias")
            if bias.dim() == 0 or not same_size(bias.shape[-1], logits.shape[-1]):
                return Refusal("the selection bias does not have one entry an expert", match["bias"])
            if any(not same_size(size, 1) for size in bias.shape[:-1]):
                return Refusal("the selection bias has another row for each token", match["bias"])
            if torch.promote_types(bias.dtype, match["compute"]) != match["compute"]:
                return Refusal("the selection bias is wider than the scores", match["bias"])
        return None

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        score = (
            "sigmoid" if "sigmoid" in match.bindings else "softmax" if "softmax" in match.bindings else "topk_softmax"
        )
        node = builder.call(
            torch.ops.k3.route.default, match["logits"], match.get("bias"), match["top_k"], score,
            "renormalised" in match.bindings, float(match.get("eps", 0.0)), float(match.get("scale", 1.0)),
            _argument(match["anchor"], "sorted"), match["compute"], match["out"],
        )  # fmt: skip
        results = {"root": builder.item(node, 0)}
        results.update({name: builder.item(node, 1) for name in sorted(exposed)})
        return results

    def examples(self) -> Sequence[Example]:
        def kimi(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            s = torch.sigmoid(logits)
            ids = (s + bias).topk(4, dim=-1).indices
            w = s.gather(-1, ids)
            return w / (w.sum(-1, keepdim=True) + 1e-20) * 2.5, ids

        def softmax_first(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            w, ids = logits.softmax(-1).topk(4, dim=-1)
            return w / w.sum(-1, keepdim=True), ids

        def softmax_last(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            w, ids = logits.topk(4, dim=-1)
            return w.softmax(-1), ids

        return (
            Example("sigmoid with a selection bias", kimi, _inputs),
            Example("softmax, top-k, renormalised", softmax_first, _inputs),
            Example("top-k, softmax over the selected", softmax_last, _inputs),
        )

    def counterexamples(self) -> Sequence[CounterExample]:
        def biased_weights(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            w, ids = (torch.sigmoid(logits) + bias).topk(4, dim=-1)
            return w / w.sum(-1, keepdim=True), ids

        def noisy(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            s = torch.sigmoid(logits)
            ids = (s + logits.sin()).topk(4, dim=-1).indices
            return s.gather(-1, ids), ids

        def softmax_in_another_dtype(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            w, ids = logits.topk(4, dim=-1)
            w = w.double().softmax(-1)
            return (w / w.sum(-1, keepdim=True)).float(), ids

        def sort_key_only(logits: Tensor, bias: Tensor) -> Tensor:
            return logits.topk(4, dim=-1).indices

        return (
            CounterExample("the bias is in the weights", biased_weights, _inputs, "found add"),
            CounterExample("noise of each token", noisy, _inputs, "another row for each token"),
            CounterExample(
                "softmax in another dtype than top-k", softmax_in_another_dtype, _inputs, "softmax over it in"
            ),
            CounterExample("ids only", sort_key_only, _inputs, "expected"),
            CounterExample(
                "groups of experts",
                lambda logits, bias: _grouped(logits, bias, groups=4),
                _inputs,
                "limited to groups",
                ("expected sigmoid",),
            ),
        )


def _argument(topk: Node, name: str) -> bool:
    return bool(bound_arguments(topk)[name])


def _chooses_groups(topk: Node) -> bool:
    """True for the top-k's of a selection of groups: the best scores of a group, which are summed for another top-k,
    and the best groups, whose numbers are only scattered into a mask."""
    items = {user.args[1]: user for user in topk.users if user.target is operator.getitem and user.users}
    if set(items) == {0}:
        sums = [user for user in items[0].users if user.target in OPERATORS["sum"] or user.target in _MAXIMA]
        chosen = [any(user.target in OPERATORS["topk"] for user in total.users) for total in sums]
        return len(sums) == len(items[0].users) and all(chosen)
    return set(items) == {1} and all(user.target is _aten.scatter.value for user in items[1].users)


_aten = torch.ops.aten
_MAXIMA = frozenset({_aten.amax.default})


def _inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 16, generator=generator), torch.randn(16, generator=generator)


def _grouped(logits: Tensor, bias: Tensor, *, groups: int) -> tuple[Tensor, Tensor]:
    """The selection of DeepSeek-V3: the better half of the groups, by the sum of their two best scores."""
    s = torch.sigmoid(logits)
    biased = s + bias
    totals = biased.view(-1, groups, s.shape[-1] // groups).topk(2, dim=-1)[0].sum(-1)
    chosen = totals.topk(max(1, groups // 2), dim=-1, sorted=False)[1]
    mask = torch.zeros_like(totals).scatter_(1, chosen, 1)
    mask = mask.unsqueeze(-1).expand(-1, groups, s.shape[-1] // groups).reshape(-1, s.shape[-1])
    ids = biased.masked_fill(~mask.bool(), float("-inf")).topk(4, dim=-1, sorted=False)[1]
    w = s.gather(1, ids)
    return w / (w.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


@dataclass(frozen=True)
class LiftRoutePass(RulePass):
    """Lift routers (scores, selection bias, top-k, renormalise, scale) to k3::route."""

    name: ClassVar[str] = "lift_route"
    provides: ClassVar[frozenset[str]] = frozenset({"route"})

    def rules(self) -> tuple[Rule, ...]:
        return (LiftRoute(),)
