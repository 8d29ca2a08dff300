"""Lift a gated MLP to one op: dense and shared experts, SiLU or SiTU, separate or stacked gate and up weights.

    g, u = F.linear(x, w_gate), F.linear(x, w_up)
    a = 4 * torch.tanh(g / 4) * torch.sigmoid(g) * (25 * torch.tanh(u / 25))        (in fp32, one rounding)
    y = F.linear(a.to(x.dtype), w_down)
    ->
    y = k3::mlp(x, w_gate, w_up, w_down, "situ", 4.0, 25.0, float32)

The activation is a product in any association; its constants are captured and must agree with each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

import k3rewrite.kernels  # noqa: F401  registers the op that is built
from k3rewrite.graph.dtypes import widens
from k3rewrite.graph.layout import permutation
from k3rewrite.graph.shapes import same_size
from k3rewrite.passes.norm_patterns import is_narrow
from k3rewrite.patterns import (
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
    Product,
    Refusal,
    Rule,
    Var,
    Views,
    call,
)
from k3rewrite.pipeline.pass_base import RulePass


def _transposed(weight: str) -> Pattern:
    value = Var(weight)
    swapped = call("t", value) | call("transpose", value, Anything(), Anything()) | call("permute", value, Anything())
    return Named(swapped, f"{weight}_t")


_SEPARATE_GATE = Views(call("mm", Var("x"), _transposed("w_gate"), name="gate_mm"))
_SEPARATE_UP = Views(call("mm", Var("x"), _transposed("w_up"), name="up_mm"))
_BOTH = Cast(Views(call("mm", Var("x"), _transposed("w_both"), name="gate_mm")), "both_dtype")
_STACKED = call("split", _BOTH, Anything("sizes"), Anything("dim"), name="split")
_GATE = Cast(_SEPARATE_GATE | Item(_STACKED, 0), "compute")
_UP = Cast(_SEPARATE_UP | Item(_STACKED, 1), "compute")


def _scaled(value: Pattern, name: str) -> Pattern:
    """value / c, spelled as a division or as a product with 1 / c."""
    return call("div", value, Number(name)) | call("mul", value, Number(f"inverse_{name}"))


_TANH_GATE = call("tanh", _scaled(_GATE, "beta"))
_TANH_UP = call("tanh", _scaled(_UP, "linear_beta"))
_SITU = Product((_TANH_GATE, call("sigmoid", _GATE, name="anchor"), _TANH_UP), "scale")
_SITU_PLAIN_UP = Product((_TANH_GATE, call("sigmoid", _GATE, name="anchor"), _UP), "scale")
_SILU = call("mul", call("silu", _GATE, name="anchor"), _UP) | Product(
    (_GATE, call("sigmoid", _GATE, name="anchor"), _UP), "scale"
)


class LiftMlp(Rule):
    """See the module docstring. The anchor is the sigmoid or SiLU of the gate half."""

    name = "mlp"
    policy = Policy.REASSOCIATES  # the factors of the activation may be multiplied in another order
    anchors = OPERATORS["sigmoid"] | OPERATORS["silu"]
    pattern = call(
        "mm",
        Views(Cast(Named(_SITU | _SITU_PLAIN_UP | _SILU, "activated"), "narrow")),
        _transposed("w_down"),
        name="down_mm",
    )
    reach = 8

    def check(self, match: Match) -> Refusal | None:
        x = match.value("x")
        if match["narrow"] != x.dtype or not widens(x.dtype, match["compute"]):
            return Refusal(
                f"dtypes {x.dtype} -> {match['compute']} -> {match['narrow']}: the activation must run in the dtype of "
                "x or a wider one and end in the dtype of x", match["activated"],
            )  # fmt: skip
        if match.get("both_dtype", x.dtype) not in (x.dtype, match["compute"]):
            return Refusal(f"gate and up are rounded to {match['both_dtype']} before the activation", match["split"])
        for name in ("w_gate_t", "w_up_t", "w_both_t", "w_down_t"):
            if name in match.bindings and permutation(match[name]) != [1, 0]:
                return Refusal("a weight is used as it is stored, not transposed", match[name])
        inner = match.value("w_down").shape[1]
        if "w_both" in match.bindings:
            both = match.value("w_both")
            half = both.shape[0] // 2 if isinstance(both.shape[0], int) else None
            if half != inner:
                return Refusal(f"half of the stacked projection is {half} wide, and the down projection reads {inner}",
                               match["down_mm"])  # fmt: skip
            sizes = match["sizes"]
            if sizes != half and list(sizes if isinstance(sizes, (list, tuple)) else []) != [half, half]:
                return Refusal("the stacked projection is not split into halves", match["split"])
            split = match["split"]
            if match["dim"] not in (-1, split.args[0].meta["val"].dim() - 1):
                return Refusal("the stacked projection is split over another dimension", split)
        elif any(not same_size(match.value(name).shape[0], inner) for name in ("w_gate", "w_up")):
            return Refusal("gate, up and down projection do not have one inner width", match["down_mm"])
        if self._is_situ(match):
            return self._check_situ(match)
        if match.get("scale", 1.0) != 1.0:
            return Refusal(f"SiLU times a number ({match['scale']})", match["activated"])
        return None

    def _check_situ(self, match: Match) -> Refusal | None:
        beta, linear_beta = self._constant(match, "beta"), self._constant(match, "linear_beta")
        assert beta is not None
        captured = {"the scale of the gate half": beta, "the scale of the up half": linear_beta}
        for what, constant in captured.items():
            # the op takes 0.0 for a tanh that is not there
            if constant is not None and (constant == 0.0 or not math.isfinite(constant)):
                return Refusal(f"{what} is {constant:g}: that is no SiTU", match["activated"])
        expected = beta * (1.0 if linear_beta is None else linear_beta)
        # beta / (1 / beta) and the order of the constants round in the last place, and no further
        if not math.isclose(match["scale"], expected, rel_tol=8 * torch.finfo(torch.float64).eps):
            return Refusal(
                f"the product's constant is {match['scale']:g}, and SiTU needs beta * linear_beta = {expected:g}",
                match["activated"],
            )
        return None

    @staticmethod
    def _is_situ(match: Match) -> bool:
        return "beta" in match.bindings or "inverse_beta" in match.bindings

    @staticmethod
    def _constant(match: Match, name: str) -> float | None:
        """The constant as it was captured, by itself or as its inverse; None if it is in no form in the graph."""
        if name in match.bindings:
            return float(match[name])
        if f"inverse_{name}" not in match.bindings:
            return None
        inverse = float(match[f"inverse_{name}"])
        return 1.0 / inverse if inverse else math.inf

    def policy_of(self, match: Match) -> Policy:
        """In a narrow dtype the factors round in the order in which they are multiplied."""
        as_the_op = match["anchor"].target in OPERATORS["silu"] or not is_narrow(match["compute"])
        return self.policy if as_the_op else Policy.CHANGES_ROUNDING

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        if "w_both" in match.bindings:
            both = match["w_both"]
            half = match.value("w_both").shape[0] // 2
            w_gate = builder.call(torch.ops.aten.slice.Tensor, both, 0, 0, half)
            w_up = builder.call(torch.ops.aten.slice.Tensor, both, 0, half, 2 * half)
        else:
            w_gate, w_up = match["w_gate"], match["w_up"]
        situ = self._is_situ(match)
        beta, linear_beta = (self._constant(match, name) or 0.0 for name in ("beta", "linear_beta"))
        node = builder.call(
            torch.ops.k3.mlp.default, match["x"], w_gate, w_up, match["w_down"], "situ" if situ else "silu", beta,
            linear_beta, match["compute"],
        )  # fmt: skip
        return {"root": node}

    def examples(self) -> Sequence[Example]:
        def situ(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
            g, u = F.linear(x, w_gate).float(), F.linear(x, w_up).float()
            a = 4 * torch.tanh(g / 4) * torch.sigmoid(g) * (25 * torch.tanh(u / 25))
            return F.linear(a.to(x.dtype), w_down)

        def silu_stacked(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
            g, u = F.linear(x, torch.cat([w_gate, w_up])).chunk(2, dim=-1)
            return F.linear(F.silu(g) * u, w_down)

        def three_dimensional(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
            x = x.view(1, *x.shape)
            return F.linear(F.silu(F.linear(x, w_gate).float()).mul(F.linear(x, w_up).float()).to(x.dtype), w_down)

        return (
            Example("SiTU", situ, _inputs),
            Example("SiLU, stacked weights", silu_stacked, _inputs),
            Example("SiLU in fp32, three dimensions", three_dimensional, _inputs),
        )

    def counterexamples(self) -> Sequence[CounterExample]:
        def wrong_constant(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
            g, u = F.linear(x, w_gate), F.linear(x, w_up)
            return F.linear(5 * torch.tanh(g / 4) * torch.sigmoid(g) * (25 * torch.tanh(u / 25)), w_down)

        def not_transposed(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
            square = w_gate[:32] @ w_up[:32].T
            return F.linear(F.silu(x @ square.permute(0, 1)) * (x @ square.permute(0, 1)), square)

        def tokens_exchanged(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
            x = w_up[:, :32]
            return F.linear(F.silu(F.linear(x, w_gate).t()) * F.linear(x, w_up).t(), w_down)

        def two_inputs(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
            return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x + 1, w_up), w_down)

        return (
            CounterExample("a constant that is not beta * linear_beta", wrong_constant, _inputs, "beta * linear_beta"),
            CounterExample("weights that are not transposed", not_transposed, _inputs, "as it is stored"),
            CounterExample("a transposition in between", tokens_exchanged, _inputs, "found t"),
            CounterExample("gate and up of different inputs", two_inputs, _inputs, "'x' is"),
        )


def _inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 32), (48, 32), (48, 32), (32, 48))
    return tuple((torch.randn(s, generator=generator) * 0.2).bfloat16() for s in shapes)


@dataclass(frozen=True)
class LiftMlpPass(RulePass):
    """Lift gated MLPs (dense layers and shared experts) to k3::mlp."""

    name: ClassVar[str] = "lift_mlp"
    provides: ClassVar[frozenset[str]] = frozenset({"mlp"})

    def rules(self) -> tuple[Rule, ...]:
        return (LiftMlp(),)
