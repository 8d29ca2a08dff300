"""Give routed experts the form that warp decode computes: the fewest roundings, on kernels of the target.

    y = k3::experts(x, ids, w, ..., product bf16, compute fp32, hidden bf16, route bf16, combine fp32, out bf16)
    ->
    y = k3::experts(x, ids, w, ..., product fp32, compute fp32, hidden bf16, route fp32, combine fp32, out bf16)

    roundings: fewest   gate, up and each expert's result stay fp32; the activation and y are rounded
    roundings: model    as the model rounds

A call that no kernel of the target takes in this form stays as it is. Which of the kernel's paths runs (outputs owned
by routes, reads shared by an expert's routes, or routes sorted by expert) is decided at run time by the number of
tokens: `kernels/experts/schedule.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import k3rewrite.kernels  # noqa: F401  registers the op that the pattern names
from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.dtypes import widens
from k3rewrite.patterns import Builder, CounterExample, Example, Match, Policy, Refusal, Rule, call
from k3rewrite.patterns.rewrite import apply_rule
from k3rewrite.pipeline.pass_base import PassContext, RulePass
from k3rewrite.report.schema import PassReport

Roundings = Literal["fewest", "model"]
_EXPERTS = torch.ops.k3.experts.default
_WIDENED = ("product_dtype", "compute_dtype", "route_dtype", "combine_dtype")


class WarpDecodeMoe(Rule):
    """See the module docstring. Without a `context` no kernel is asked for."""

    name = "warp_decode_moe"
    policy = Policy.CHANGES_ROUNDING
    anchors = frozenset({_EXPERTS})
    pattern = call(_EXPERTS, name="anchor", open=True)
    reach = 0

    def __init__(self, roundings: Roundings = "fewest", context: PassContext | None = None) -> None:
        self.roundings, self._context = roundings, context
        super().__init__()

    def policy_of(self, match: Match) -> Policy:
        return Policy.EXACT if self._arguments(match) == bound_arguments(match["anchor"]) else self.policy

    def check(self, match: Match) -> Refusal | None:
        arguments = self._arguments(match)
        for name in _WIDENED:
            if not widens(arguments[name], torch.float32):
                return Refusal(f"{name} is {arguments[name]}, wider than what the kernels compute in", match.root)
        offers = self._context.offers("experts", arguments) if self._context is not None else None
        if offers is None or offers.taking:
            return None
        return Refusal(f"no kernel takes the call ({'; '.join(offers.objections)})", match.root)

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        return {"root": builder.call(_EXPERTS, **self._arguments(match))}

    def _arguments(self, match: Match) -> dict[str, Any]:
        arguments = dict(bound_arguments(match["anchor"]))
        if self.roundings == "fewest":
            arguments |= {n: torch.promote_types(arguments[n], torch.float32) for n in _WIDENED}
        return arguments

    def examples(self) -> Sequence[Example]:
        return (Example("SiLU, rounded everywhere", _rounded_everywhere, _inputs),)

    def counterexamples(self) -> Sequence[CounterExample]:
        def in_fp64(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
            return _rounded_everywhere(x.double(), ids, weights, w13.double(), w2.double())

        return (CounterExample("computed in fp64", in_fp64, _inputs, "float64"),)


def _rounded_everywhere(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    return _EXPERTS(
        x, ids, weights, w13[:, :16], w13[:, 16:], w2, None, None, None, "dense", "silu", 0.0, 0.0, 0, *(x.dtype,) * 6
    )


def _inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    ids = torch.randint(0, 4, (5, 2), generator=generator)
    return normal(5, 32), ids, torch.rand(5, 2, generator=generator), normal(4, 32, 32), normal(4, 32, 16)


@dataclass(frozen=True)
class WarpDecodeMoePass(RulePass):
    """Fewest roundings for routed experts that a kernel of the target computes."""

    name: ClassVar[str] = "warp_decode_moe"
    requires: ClassVar[frozenset[str]] = frozenset({"lift_moe"})
    provides: ClassVar[frozenset[str]] = frozenset({"experts"})

    roundings: Roundings = "fewest"
    """fewest: the activation and the result are rounded; model: the roundings of the model"""

    def rules(self) -> tuple[Rule, ...]:
        return (WarpDecodeMoe(self.roundings),)

    def run(self, module: GraphModule, context: PassContext, report: PassReport) -> None:
        rule = WarpDecodeMoe(self.roundings, context)
        apply_rule(rule, module, report, allow_changes_rounding=self.allow_changes_rounding, verify=context.verify_site)
