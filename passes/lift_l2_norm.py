"""Lift vectors scaled to unit length to one op.

    y = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)      -> k3::l2_norm(x, eps, eps_inside=True, ...)
    y = x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)       -> the same
    y = F.normalize(x, dim=-1, eps=eps)                           -> k3::l2_norm(x, eps, eps_inside=False, ...)

The sum is what tells it from an RMSNorm; a sum divided by the width is a mean and belongs to `lift_rms_norm`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from k3rewrite.passes.norm_patterns import ROOTS, inverse_root, is_inverse_root, root, squares, widens
from k3rewrite.patterns import (
    LAST_DIM,
    OPERATORS,
    Anything,
    Builder,
    Cast,
    CounterExample,
    Example,
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

_X = Cast(Var("x"), "compute")
_SUM = call("sum", squares(_X), LAST_DIM, keepdim=True)
_STATISTIC = call("add", _SUM, Number("eps"))


class LiftL2Norm(Rule):
    """The spelling with eps inside the root (and the sum)."""

    name = "l2_norm"
    policy = Policy.REASSOCIATES  # x / sqrt(s) becomes x * rsqrt(s): one unit in the last place of the compute dtype
    anchors = ROOTS
    pattern = Cast(call("mul", _X, inverse_root(_STATISTIC)) | call("div", _X, root(_STATISTIC)), "out")
    reach = 4

    def is_site(self, node: Node) -> bool:
        return is_inverse_root(node)

    def check(self, match: Match) -> Refusal | None:
        return check_dtypes(match)

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        arguments = (match["x"], float(match["eps"]), True, match["compute"], match["out"])
        return {"root": builder.call(torch.ops.k3.l2_norm.default, *arguments)}

    def examples(self) -> Sequence[Example]:
        def multiplied(x: Tensor) -> Tensor:
            v = x.float()
            return (v * torch.rsqrt((v * v).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)

        def divided(x: Tensor) -> Tensor:
            return x / torch.sqrt(x.pow(2).sum(dim=-1, keepdim=True) + 1e-6)

        return (Example("rsqrt and multiply", multiplied, _bf16), Example("sqrt and divide", divided, _fp32))

    def counterexamples(self) -> Sequence[CounterExample]:
        def rms(x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

        def two_vectors(x: Tensor) -> Tensor:
            return x * torch.rsqrt((x * (x + 1)).sum(-1, keepdim=True) + 1e-6)

        return (
            CounterExample("a mean", rms, _fp32, "expected sum"),
            CounterExample("a dot product of two vectors", two_vectors, _fp32, "'x' is"),
        )


class LiftNormalize(Rule):
    """The spelling of torch.nn.functional.normalize: the norm, not its square, is kept from zero."""

    name = "normalize"
    policy = Policy.EXACT
    anchors = OPERATORS["vector_norm"]
    pattern = Cast(
        call(
            "div",
            _X,
            Views(
                call(
                    "clamp_min",
                    call("vector_norm", _X, Anything("ord"), LAST_DIM, keepdim=True, name="anchor"),
                    Number("eps"),
                )
            ),
        ),
        "out",
    )
    reach = 4

    def check(self, match: Match) -> Refusal | None:
        if match["ord"] not in (2, 2.0):
            return Refusal(f"the norm is of order {match['ord']}, not 2", match["anchor"])
        return check_dtypes(match)

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        arguments = (match["x"], float(match["eps"]), False, match["compute"], match["out"])
        return {"root": builder.call(torch.ops.k3.l2_norm.default, *arguments)}

    def examples(self) -> Sequence[Example]:
        return (Example("F.normalize", lambda x: F.normalize(x, dim=-1, eps=1e-6), _fp32),)

    def counterexamples(self) -> Sequence[CounterExample]:
        return (
            CounterExample("order 1", lambda x: F.normalize(x, p=1.0, dim=-1), _fp32, "order 1"),
            CounterExample("another dim", lambda x: F.normalize(x, dim=0), _fp32, "a reduction over dim -1"),
        )


def check_dtypes(match: Match) -> Refusal | None:
    """The statistic must not be narrower than x, and the result not wider than the statistic."""
    if not widens(match.value("x").dtype, match["compute"]):
        return Refusal(f"x is narrowed to {match['compute']} before the statistic", match["x"])
    if not widens(match["out"], match["compute"]):
        return Refusal(f"a cast to {match['out']} after the norm widens a rounded value", match.root)
    return None


def _fp32() -> tuple[Tensor]:
    return (torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(0)),)


def _bf16() -> tuple[Tensor]:
    return (_fp32()[0].bfloat16(),)


@dataclass(frozen=True)
class LiftL2NormPass(RulePass):
    """Lift scaling to unit length to k3::l2_norm."""

    name: ClassVar[str] = "lift_l2_norm"
    provides: ClassVar[frozenset[str]] = frozenset({"l2_norm"})

    def rules(self) -> tuple[Rule, ...]:
        return (LiftL2Norm(), LiftNormalize())
