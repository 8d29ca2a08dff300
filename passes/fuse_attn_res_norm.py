"""Fuse prefix update, depth mix and output norm of attention residuals.

    prefix' = prefix + delta                                             (rounded once; bit-equal in the fused op)
    h = k3::rms_norm(k3::attn_res([*blocks, prefix'], n, p, ...), w, ...)
    ->
    prefix', h = k3::add_attn_res_norm(prefix, delta, blocks, n, p, eps, w, eps', ...)

Without a delta (a layer that has just written a block) it is `k3::attn_res_norm`. Blocks kept in a list need no write;
for a bank see `fuse_block_write`.

    roundings: fewest   the mix stays in the compute dtype through the norm, one rounding at the end
    roundings: model    the mix is rounded before the norm and the norm before its weight, as the model does
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.fx import Node

import k3rewrite.kernels  # noqa: F401  registers the ops that the patterns name
from k3rewrite.graph.dtypes import widens
from k3rewrite.graph.shapes import same_sizes
from k3rewrite.patterns import (
    Anything,
    Builder,
    Cast,
    CounterExample,
    Example,
    ListOf,
    Match,
    Named,
    Number,
    Policy,
    Refusal,
    Rule,
    Var,
    call,
)
from k3rewrite.pipeline.pass_base import RulePass

Roundings = Literal["fewest", "model"]
_K3 = torch.ops.k3

_PREFIX = (
    Named(call("add", Var("prefix"), Var("delta"), name="sum"), "updated")
    | Named(Cast(call("add", Cast(Var("prefix"), "wide"), Cast(Var("delta"), "wide"), name="sum"), "stored"), "updated")
    | Var("prefix")
)
_MIX = call(
    _K3.attn_res.default, ListOf(each="blocks", last=_PREFIX), Var("score_norm"), Var("score_proj"),
    Number("score_eps"), name="anchor", compute_dtype=Anything("compute"), out_dtype=Anything("mix"),
)  # fmt: skip
_NORM = call(
    _K3.rms_norm.default, Cast(_MIX, "mix_used"), Var("weight"), Number("eps"), Anything("norm_compute"),
    Anything("scale"), Anything("out"),
)  # fmt: skip


class FuseAttnResNorm(Rule):
    """Mix and norm, with the prefix update where there is one."""

    name = "attn_res_norm"
    policy = Policy.CHANGES_ROUNDING
    anchors = frozenset({_K3.attn_res.default})
    pattern = _NORM
    exposable = frozenset({"updated"})
    reach = 2

    def __init__(self, roundings: Roundings = "fewest") -> None:
        self.roundings = roundings
        super().__init__()

    def policy_of(self, match: Match) -> Policy:
        rounded = {match["mix"], match["mix_used"], match["scale"]} != {match["compute"]}
        return Policy.CHANGES_ROUNDING if rounded and self.roundings == "fewest" else Policy.REASSOCIATES

    def check(self, match: Match) -> Refusal | None:
        if match["norm_compute"] != match["compute"]:
            return Refusal(f"mix in {match['compute']}, norm in {match['norm_compute']}", match.root)
        if not widens(match["mix"], match["mix_used"]):
            return Refusal(f"the mix is rounded twice, to {match['mix']} and {match['mix_used']}", match.root)
        weight = match.value("weight")
        if weight.dim() != 1:
            return Refusal("the norm's weight is not one vector", match["weight"])
        for name in ("weight", "score_norm", "score_proj"):
            if not widens(match.value(name).dtype, match["compute"]):
                return Refusal(f"a weight is {match.value(name).dtype}, wider than {match['compute']}", match[name])
        return self._check_update(match) if "delta" in match.bindings else None

    @staticmethod
    def _check_update(match: Match) -> Refusal | None:
        prefix, delta, updated = match.value("prefix"), match.value("delta"), match.value("updated")
        if not same_sizes(prefix.shape, delta.shape) or not same_sizes(prefix.shape, updated.shape):
            return Refusal("the prefix update broadcasts", match["sum"])
        if updated.dtype != prefix.dtype:
            return Refusal(f"the prefix changes its dtype from {prefix.dtype} to {updated.dtype}", match["sum"])
        wide = match.get("wide", prefix.dtype)
        if not all(widens(v.dtype, wide) and widens(v.dtype, match["compute"]) for v in (prefix, delta)):
            return Refusal(
                f"{prefix.dtype} and {delta.dtype} are added in {wide}, the mix runs in {match['compute']}",
                match["sum"],
            )
        return None

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        fewest = self.roundings == "fewest"
        scoring = (list(match["blocks"]), match["score_norm"], match["score_proj"], match["score_eps"])
        norming = (match["weight"], match["eps"])
        dtypes = {
            "compute_dtype": match["compute"],
            "mix_dtype": match["compute"] if fewest else match["mix"],
            "scale_dtype": match["compute"] if fewest else match["scale"],
            "out_dtype": match["out"],
        }
        if "delta" not in match.bindings:
            node = builder.call(_K3.attn_res_norm.default, match["prefix"], *scoring, *norming, **dtypes)
            return {"root": node}
        prefix, delta = _which_is_prefix(match["prefix"], match["delta"])
        node = builder.call(_K3.add_attn_res_norm.default, prefix, delta, *scoring, *norming, **dtypes)
        return {"updated": builder.item(node, 0), "root": builder.item(node, 1)}

    def examples(self) -> Sequence[Example]:
        def with_delta(p: Tensor, a: Tensor, b: Tensor, n: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            p = p + a
            return p, _norm(_mix([b, p], n, w), n)

        def without_delta(p: Tensor, a: Tensor, b: Tensor, n: Tensor, w: Tensor) -> Tensor:
            return _norm(_mix([b, p], n, w), n)

        return (Example("prefix update", with_delta, _inputs), Example("no prefix update", without_delta, _inputs))

    def counterexamples(self) -> Sequence[CounterExample]:
        def tapped(p: Tensor, a: Tensor, b: Tensor, n: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            mixed = _mix([b, p + a], n, w)
            return mixed, _norm(mixed, n)

        def not_normed(p: Tensor, a: Tensor, b: Tensor, n: Tensor, w: Tensor) -> Tensor:
            return _mix([b, p + a], n, w) * 2

        return (
            CounterExample("the mix is read before the norm", tapped, _inputs, "also used by"),
            CounterExample("no norm behind the mix", not_normed, _inputs, "rms_norm"),
        )


def _which_is_prefix(first: Node, second: Node) -> tuple[Node, Node]:
    """Addition commutes; the prefix is the operand that an earlier update made, if only one is such (and it is known
    that either may be, which the dtype decides)."""
    if first.meta["val"].dtype != second.meta["val"].dtype:
        return first, second

    def is_updated(node: Node) -> bool:
        source = node.args[0] if node.args else None
        return isinstance(source, Node) and source.target is _K3.add_attn_res_norm.default and bool(node.args[1] == 0)

    return (second, first) if is_updated(second) and not is_updated(first) else (first, second)


def _mix(rows: list[Tensor], n: Tensor, w: Tensor) -> Tensor:
    return _K3.attn_res(rows, n, w, 1e-5, compute_dtype=torch.float32, out_dtype=rows[-1].dtype)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return _K3.rms_norm(x, weight, 1e-5, torch.float32, x.dtype, x.dtype)


def _inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    rows = tuple(torch.randn(5, 64, generator=generator).bfloat16() for _ in range(3))
    return (*rows, *(torch.randn(64, generator=generator).bfloat16() for _ in range(2)))


@dataclass(frozen=True)
class FuseAttnResNormPass(RulePass):
    """Fuse prefix update, depth mix and output norm into one op."""

    name: ClassVar[str] = "fuse_attn_res_norm"
    requires: ClassVar[frozenset[str]] = frozenset({"lift_attn_res", "lift_rms_norm"})
    provides: ClassVar[frozenset[str]] = frozenset({"attn_res_norm", "add_attn_res_norm"})

    roundings: Roundings = "fewest"
    """fewest: one rounding, at the end; model: the roundings of the model"""

    def rules(self) -> tuple[Rule, ...]:
        return (FuseAttnResNorm(self.roundings),)
