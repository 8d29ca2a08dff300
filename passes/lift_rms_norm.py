"""Lift every spelling of RMSNorm to one op.

    v = x.float()
    y = w * (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    ->
    y = k3::rms_norm(x, w, eps, float32, bfloat16, bfloat16)

The places of the casts and of the weight multiply are carried in the op's dtypes, never normalised away. A graph that
also reads the mean square or its inverse root gets `k3::rms_norm_stat`, which returns them.
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
from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.passes.norm_patterns import (
    ROOTS,
    inverse_root,
    is_narrow,
    is_plain_scaling,
    is_root,
    over_last,
    root,
    squares,
)
from k3rewrite.patterns import (
    OPERATORS,
    Builder,
    Cast,
    CounterExample,
    Example,
    Match,
    Named,
    Number,
    Policy,
    Product,
    Refusal,
    Rule,
    Var,
    Views,
    call,
)
from k3rewrite.pipeline.pass_base import RulePass

_X = Cast(Var("x"), "compute")
_X_USED = Cast(Var("x"), "used")
_SUM = over_last("sum", squares(_X))
_MEAN = (
    over_last("mean", squares(_X), name="mean")
    | call("div", _SUM, Number("count"), name="mean")
    | call("mul", _SUM, Number("inverse_count"), name="mean")
)
_STATISTIC = Views(call("add", Views(_MEAN), Number("eps")))
_RSTD = Views(Named(inverse_root(_STATISTIC), "rstd"), "laid_out")
_NORMED = call("mul", _X_USED, _RSTD, name="normed") | call(
    "div", _X_USED, Views(root(_STATISTIC), "laid_out"), name="normed"
)
_SCALED = Cast(_NORMED, "scale")
_WEIGHT = Named(Cast(Var("weight"), "weight_dtype"), "weight_used")
_WEIGHTED = call("mul", _SCALED, _WEIGHT, name="weighted")
_WEIGHTED_X = Named(Product((_X_USED, _WEIGHT), "factor"), "weighted_x")
_WEIGHT_INSIDE = Named(
    Product((_X_USED, _RSTD, _WEIGHT), "factor") | call("div", _WEIGHTED_X, Views(root(_STATISTIC), "laid_out")),
    "weighted",
)


class LiftRmsNorm(Rule):
    """See the module docstring."""

    name = "rms_norm"
    policy = Policy.REASSOCIATES  # 1/sqrt becomes rsqrt, sum/d becomes mean: one unit in the last place of fp32
    anchors = ROOTS
    pattern = Cast(_WEIGHTED, "out") | Cast(_WEIGHT_INSIDE, "out") | Cast(_SCALED, "out")
    exposable = frozenset({"mean", "rstd"})
    reach = 7

    def is_site(self, node: Node) -> bool:
        return is_root(node)

    def check(self, match: Match) -> Refusal | None:
        x, compute, scale = match.value("x"), match["compute"], match.get("scale", match["compute"])
        if not x.dim():
            return Refusal("x is a single number", match["x"])
        size = x.shape[-1]
        if not widens(x.dtype, compute) or not widens(x.dtype, match["used"]):
            return Refusal(f"x is narrowed from {x.dtype} to {match['used']}, {compute} in the statistic", match["x"])
        if not same_sizes(match.value("laid_out").shape, (*x.shape[:-1], 1)):
            return Refusal("the root is not laid along the vectors that it is the root of", match["laid_out"])
        for name in ("weighted_x", "weighted") if "factor" in match.bindings else ("normed",):
            if name in match.bindings and (product := match.value(name).dtype) != compute:
                return Refusal(f"the statistic is {compute}, and x is scaled in {product}", match[name])
        if not widens(scale, compute) or not widens(match["out"], self._product(match).dtype):
            return Refusal(f"a cast to {match['out']} after the norm widens a rounded value", match.root)
        if "count" in match.bindings and not same_size(size, match["count"]):
            return Refusal(f"the sum of squares is divided by {match['count']}, not by the width {size}", match["mean"])
        if "inverse_count" in match.bindings and not (
            isinstance(size, int) and abs(match["inverse_count"] * size - 1) < 1e-12
        ):
            return Refusal(f"the sum of squares is not divided by the width {size}", match["mean"])
        if match.get("factor", 1.0) != 1.0:
            return Refusal(f"the norm is multiplied by the number {match['factor']:g}", match.root)
        if (mean := _centred(match["x"])) is not None:
            return Refusal("the mean is subtracted from x before the norm: this is a LayerNorm", mean)
        return self._check_weight(match) if "weight" in match.bindings else None

    def _check_weight(self, match: Match) -> Refusal | None:
        weight, x = match.value("weight_used"), match.value("x")
        if not weight.dim() or not same_size(weight.shape[-1], x.shape[-1]):
            return Refusal("the factor after the norm does not have the width of x", match["weight"])
        one_row = all(same_size(s, 1) for s in weight.shape[:-1])
        if weight.dim() >= x.dim() > 1 and (not one_row or same_sizes(weight.shape, x.shape)):
            return Refusal("the factor after the norm has the shape of x: it is no weight", match["weight"])
        return None

    @staticmethod
    def _product(match: Match) -> Tensor:
        node = match.get("weighted") or match["normed"]
        return node.meta["val"]

    def policy_of(self, match: Match) -> Policy:
        """In a narrow dtype each step of another spelling is a rounding that the op does not make."""
        as_the_op = (
            "factor" not in match.bindings and is_plain_scaling(match) and match["mean"].target in OPERATORS["mean"]
        )
        return self.policy if as_the_op or not is_narrow(match["compute"]) else Policy.CHANGES_ROUNDING

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        scale = match.get("scale", match["compute"])
        arguments = (match["x"], self._weight(match, scale), float(match["eps"]), match["compute"], scale, match["out"])
        if not exposed:
            return {"root": builder.call(torch.ops.k3.rms_norm.default, *arguments)}
        node = builder.call(torch.ops.k3.rms_norm_stat.default, *arguments)
        results = {"root": builder.item(node, 0)}
        for index, name in ((1, "mean"), (2, "rstd")):
            if name in exposed:
                results[name] = builder.item(node, index)
        return results

    def _weight(self, match: Match, scale: torch.dtype) -> Node | None:
        """The weight without its cast, unless the cast rounds it or decides the dtype of the product."""
        if "weight" not in match.bindings:
            return None
        stored, used = match.value("weight").dtype, match["weight_dtype"]
        plain = widens(stored, used) and torch.promote_types(scale, stored) == self._product(match).dtype
        return match["weight"] if plain else match["weight_used"]

    def examples(self) -> Sequence[Example]:
        def downcast_first(x: Tensor, w: Tensor) -> Tensor:
            v = x.float()
            return w * (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

        def statistic_returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            return x * rstd * w, rstd

        def no_weight(x: Tensor, w: Tensor) -> Tensor:
            return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)

        def weight_first(x: Tensor, w: Tensor) -> Tensor:
            return x * w * torch.rsqrt(x.square().mean(-1) + 1e-6).unsqueeze(-1)

        return (
            Example("weight after the downcast", downcast_first, _bf16),
            Example("F.rms_norm", lambda x, w: F.rms_norm(x, (64,), w, 1e-5), _bf16),
            Example("statistic returned", statistic_returned, _fp32),
            Example("divided by the root, no weight", no_weight, _fp32),
            Example("weight multiplied first, no keepdim", weight_first, _fp32),
        )

    def counterexamples(self) -> Sequence[CounterExample]:
        def other_dim(x: Tensor, w: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6) * w

        def layer_norm(x: Tensor, w: Tensor) -> Tensor:
            c = x - x.mean(-1, keepdim=True)
            return c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + 1e-6) * w

        def written_between(x: Tensor, w: Tensor) -> Tensor:
            rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            x = x.clone()
            x.add_(1)
            return x * rstd * w

        def along_the_rows(x: Tensor, w: Tensor) -> Tensor:
            x = x[:, : x.shape[0]]
            return x * torch.rsqrt(x.pow(2).mean(-1) + 1e-6)

        return (
            CounterExample("another dim", other_dim, _fp32, "a reduction over dim -1"),
            CounterExample("mean subtracted", layer_norm, _fp32, "LayerNorm"),
            CounterExample("the root is broadcast along the rows", along_the_rows, _fp32, "laid along"),
            CounterExample("write between statistic and use", written_between, _fp32, "'x' is"),
        )


def _centred(x: Node) -> Node | None:
    """The node that subtracts its own mean over the last dimension to give x, if there is one."""
    if x.target not in OPERATORS["sub"] or not isinstance(x.args[1], Node):
        return None
    mean = x.args[1]
    return x if mean.target in OPERATORS["mean"] and mean.args[0] is x.args[0] else None


def _bf16() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 64, generator=generator).bfloat16(), torch.randn(64, generator=generator).bfloat16()


def _fp32() -> tuple[Tensor, Tensor]:
    x, w = _bf16()
    return x.float(), w.float()


@dataclass(frozen=True)
class LiftRmsNormPass(RulePass):
    """Lift RMSNorm, however it is spelled, to k3::rms_norm."""

    name: ClassVar[str] = "lift_rms_norm"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset({"rms_norm", "rms_norm_stat"})

    def rules(self) -> tuple[Rule, ...]:
        return (LiftRmsNorm(),)
