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

from k3rewrite.graph.dtypes import widens
from k3rewrite.graph.shapes import same_sizes
from k3rewrite.passes.norm_patterns import (
    ROOTS,
    at_least,
    inverse_root,
    is_narrow,
    is_plain_scaling,
    is_root,
    over_last,
    root,
    squares,
)
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
_X_USED = Cast(Var("x"), "used")
_SUM = Views(over_last("sum", squares(_X)))
_STATISTIC = Views(call("add", _SUM, Number("eps")))
_LENGTH = at_least(Views(call("vector_norm", _X, Anything("ord"), LAST_DIM, keepdim=Anything(), name="anchor")))


class LiftL2Norm(Rule):
    """The spelling with eps inside the root (and the sum)."""

    name = "l2_norm"
    policy = Policy.REASSOCIATES  # x / sqrt(s) becomes x * rsqrt(s): one unit in the last place of the compute dtype
    anchors = ROOTS
    pattern = Cast(
        call("mul", _X_USED, Views(inverse_root(_STATISTIC), "laid_out"), name="normed")
        | call("div", _X_USED, Views(root(_STATISTIC), "laid_out"), name="normed"),
        "out",
    )
    reach = 6

    def is_site(self, node: Node) -> bool:
        return is_root(node)

    def check(self, match: Match) -> Refusal | None:
        return check_vectors(match)

    def policy_of(self, match: Match) -> Policy:
        """In a narrow dtype each step of another spelling is a rounding that the op does not make."""
        as_the_op = is_plain_scaling(match) or not is_narrow(match["compute"])
        return self.policy if as_the_op else Policy.CHANGES_ROUNDING

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
        call("div", _X_USED, Views(_LENGTH, "laid_out"), name="normed")
        | call("div", _X_USED, call("expand", Views(_LENGTH, "laid_out"), Anything(), open=True), name="normed"),
        "out",
    )
    reach = 5

    def check(self, match: Match) -> Refusal | None:
        if match["ord"] not in (2, 2.0):
            return Refusal(f"the norm is of order {match['ord']}, not 2", match["anchor"])
        return check_vectors(match)

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        arguments = (match["x"], float(match["eps"]), False, match["compute"], match["out"])
        return {"root": builder.call(torch.ops.k3.l2_norm.default, *arguments)}

    def examples(self) -> Sequence[Example]:
        return (Example("F.normalize", lambda x: F.normalize(x, dim=-1, eps=1e-6), _fp32),)

    def counterexamples(self) -> Sequence[CounterExample]:
        return (
            CounterExample("order 1", lambda x: F.normalize(x, p=1.0, dim=-1), _fp32, "order 1"),
            CounterExample("another dim", lambda x: F.normalize(x, dim=0), _fp32, "a reduction over dim -1"),
            CounterExample("another vector's length", lambda x: x / _lengths(x).mT, _square, "laid along"),
        )


def check_vectors(match: Match) -> Refusal | None:
    """Each vector by its own length; the statistic not narrower than x, the result not wider than the statistic."""
    x, compute = match.value("x"), match["compute"]
    if not widens(x.dtype, compute) or not widens(x.dtype, match["used"]):
        return Refusal(f"x is narrowed from {x.dtype} to {match['used']}, {compute} in the statistic", match["x"])
    if not same_sizes(match.value("laid_out").shape, (*x.shape[:-1], 1)):
        return Refusal("the length is not laid along the vectors that it is the length of", match["laid_out"])
    if (product := match.value("normed").dtype) != compute:
        return Refusal(f"the scaled x is {product}, and the statistic {compute}", match["normed"])
    if not widens(match["out"], compute):
        return Refusal(f"a cast to {match['out']} after the norm widens a rounded value", match.root)
    return None


def _lengths(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-6)


def _square() -> tuple[Tensor]:
    return (_fp32()[0][0, :, :3].contiguous(),)


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
