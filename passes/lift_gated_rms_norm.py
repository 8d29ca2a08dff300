"""Lift a lifted RMSNorm times an activated gate to one op.

    y = k3::rms_norm(o, w, ...) * torch.sigmoid(z.float())        -> k3::gated_rms_norm(o, w, z, ..., "sigmoid", ...)
    y = k3::rms_norm(o, w, ...) * F.silu(z.float())               -> the same with "silu"

Every lifted RMSNorm is a candidate; most have no gate behind them, and that is the reason of their miss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

import k3rewrite.kernels  # noqa: F401  registers the ops that the pattern names
from k3rewrite.graph.dtypes import widens
from k3rewrite.graph.shapes import same_sizes
from k3rewrite.passes.norm_patterns import is_narrow
from k3rewrite.patterns import (
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
    call,
)
from k3rewrite.pipeline.pass_base import RulePass


def _rms_norm(x: Tensor, w: Tensor, scale: torch.dtype, out: torch.dtype) -> Tensor:
    return torch.ops.k3.rms_norm(x, w, 1e-5, torch.float32, scale, out)


_NORM = call(
    torch.ops.k3.rms_norm.default, Var("x"), Anything("weight"), Number("eps"), Anything("compute"), Anything("scale"),
    Anything("norm"), name="anchor",
)  # fmt: skip
_GATE = Cast(Var("gate"), "gate_dtype")
_SIGMOID = call("sigmoid", _GATE, name="activation")
_SILU = call("silu", _GATE, name="activation") | call("mul", _GATE, call("sigmoid", _GATE), name="activation")


class LiftGatedRmsNorm(Rule):
    """See the module docstring."""

    name = "gated_rms_norm"
    policy = Policy.EXACT
    reach = 3

    anchors = frozenset({torch.ops.k3.rms_norm.default})
    pattern = Cast(
        call("mul", Cast(_NORM, "norm_used"), Cast(_SIGMOID | _SILU, "gated"), name="product"),
        "out",
    )

    def check(self, match: Match) -> Refusal | None:
        product = match.value("product").dtype
        if not same_sizes(match.value("x").shape, match.value("gate").shape):
            return Refusal("the gate does not have the shape of the normed tensor", match["gate"])
        if not widens(match["norm"], match["norm_used"]):
            return Refusal(f"the norm is rounded again to {match['norm_used']} before the product", match["product"])
        if torch.promote_types(match["norm"], match["gated"]) != product:
            return Refusal(f"the cast to {product} before the product is not what promotion gives", match["product"])
        if not widens(match["out"], product):
            return Refusal(f"a cast to {match['out']} after the product widens a rounded value", match.root)
        return None

    def policy_of(self, match: Match) -> Policy:
        """SiLU spelled as a product is another function in the last place, and in a narrow dtype a rounding more."""
        if match["activation"].target not in OPERATORS["mul"]:
            return self.policy
        return Policy.CHANGES_ROUNDING if is_narrow(match["gate_dtype"]) else Policy.REASSOCIATES

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        activation = "sigmoid" if match["activation"].target is torch.ops.aten.sigmoid.default else "silu"
        node = builder.call(
            torch.ops.k3.gated_rms_norm.default, match["x"], match["weight"], match["gate"], match["eps"], activation,
            match["compute"], match["scale"], match["norm"], match["gate_dtype"], match["gated"], match["out"],
        )  # fmt: skip
        return {"root": node}

    def examples(self) -> Sequence[Example]:
        def sigmoid_gate(o: Tensor, w: Tensor, z: Tensor) -> Tensor:
            return (_rms_norm(o, w, torch.float32, torch.float32) * torch.sigmoid(z.float())).to(o.dtype)

        def silu_gate(o: Tensor, w: Tensor, z: Tensor) -> Tensor:
            return (_rms_norm(o, w, torch.bfloat16, torch.bfloat16) * F.silu(z.float())).to(o.dtype)

        return (Example("sigmoid gate", sigmoid_gate, _inputs), Example("silu gate", silu_gate, _inputs))

    def counterexamples(self) -> Sequence[CounterExample]:
        def tanh_gate(o: Tensor, w: Tensor, z: Tensor) -> Tensor:
            return _rms_norm(o, w, torch.float32, torch.float32) * torch.tanh(z.float())

        def per_head_gate(o: Tensor, w: Tensor, z: Tensor) -> Tensor:
            return _rms_norm(o, w, torch.float32, torch.float32) * torch.sigmoid(z[..., :1].float())

        return (
            CounterExample("another activation", tanh_gate, _inputs, "sigmoid"),
            CounterExample("one gate a head", per_head_gate, _inputs, "shape"),
        )


def _inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(5, 3, 32, generator=generator).bfloat16(),
        torch.randn(32, generator=generator),
        torch.randn(5, 3, 32, generator=generator).bfloat16(),
    )


@dataclass(frozen=True)
class LiftGatedRmsNormPass(RulePass):
    """Lift RMSNorm times sigmoid or SiLU of a gate to k3::gated_rms_norm."""

    name: ClassVar[str] = "lift_gated_rms_norm"
    requires: ClassVar[frozenset[str]] = frozenset({"lift_rms_norm"})
    provides: ClassVar[frozenset[str]] = frozenset({"gated_rms_norm"})

    def rules(self) -> tuple[Rule, ...]:
        return (LiftGatedRmsNorm(),)
