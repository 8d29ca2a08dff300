"""Lift the depth mix of attention residuals to one op.

    v = torch.stack([*blocks, prefix], dim=-2).float()
    s = (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + eps) * n * p).sum(-1)       (lifted to k3::rms_norm before)
    h = (s.softmax(-1).unsqueeze(-1) * v).sum(-2).to(prefix.dtype)
    ->
    h = k3::attn_res([*blocks, prefix], n, p, eps, ...)

The stack disappears: the op reads each source where it lies. Scores may be spelled as a product and a sum, as a
matrix-vector product, or with n and p multiplied first; the weighted sum as a product and a sum or as a batched
matrix product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

import k3rewrite.kernels  # noqa: F401  registers the ops that the pattern names
from k3rewrite.graph.dtypes import widens
from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.passes.norm_patterns import is_narrow
from k3rewrite.patterns import (
    LAST_DIM,
    OPERATORS,
    Anything,
    Builder,
    Cast,
    CounterExample,
    Dims,
    Example,
    Match,
    Named,
    Number,
    Policy,
    Refusal,
    Rule,
    Var,
    Views,
    call,
)
from k3rewrite.patterns.bindings import cast_source
from k3rewrite.pipeline.pass_base import RulePass

_WIDE = Cast(Var("values"), "compute")
_NORMED = call(
    torch.ops.k3.rms_norm.default, Var("values"), Anything("score_norm"), Number("score_eps"), Anything("norm_compute"),
    Anything("norm_scale"), Anything("norm_out"), name="norm",
)  # fmt: skip
_PROJECTION = Cast(Var("score_proj"), "proj_dtype")
_COLUMN = Views(_PROJECTION)
_SCORES = (
    call(
        "sum", call("mul", _NORMED, Views(_PROJECTION, "proj_laid")), LAST_DIM, name="scores", keepdim=Anything("kept")
    )
    | call("mm", Views(_NORMED), _COLUMN, name="scores")
    | call("mv", Views(_NORMED), _COLUMN, name="scores")
    | call("sum", _NORMED, LAST_DIM, name="folded", keepdim=Anything())
)
_SOFTMAX = call("softmax", Views(_SCORES, "laid_out"), Anything("softmax_dim"), False, name="anchor")
_WEIGHTS = Views(_SOFTMAX, "weights")
_MIX = Named(call("sum", call("mul", _WEIGHTS, _WIDE, name="weighted"), Dims((-2,))), "mixed") | Views(
    call("bmm", _WEIGHTS, Views(_WIDE, "bmm_values"), name="bmm"), "mixed"
)


class LiftAttnRes(Rule):
    """See the module docstring. The anchor is the softmax over the sources."""

    name = "attn_res"
    policy = Policy.REASSOCIATES  # n and p may be multiplied first, sums over the width may be ordered otherwise
    anchors = OPERATORS["softmax"]
    pattern = Cast(_MIX, "out")
    reach = 6

    def policy_of(self, match: Match) -> Policy:
        return Policy.CHANGES_ROUNDING if is_narrow(match["compute"]) else self.policy

    def check(self, match: Match) -> Refusal | None:
        values, compute = match.value("values"), match["compute"]
        if values.dim() < 2:
            return Refusal("the sources have no depth dimension", match["values"])
        if {match["norm_compute"], match["norm_scale"], match["norm_out"]} != {compute}:
            return Refusal(f"the scores are rounded inside: norm dtypes {match['norm_scale']}, {match['norm_out']}; "
                           f"the mix runs in {compute}", match["norm"])  # fmt: skip
        if not widens(values.dtype, compute) or not widens(match["out"], compute):
            return Refusal(f"dtypes {values.dtype} -> {compute} -> {match['out']} of the mix", match.root)
        if "score_proj" in match.bindings and not widens(match.value("score_proj").dtype, match["proj_dtype"]):
            return Refusal(f"the projection is rounded to {match['proj_dtype']}", match["score_proj"])
        rank = values.dim()
        scores = match.value("anchor")
        if scores.dtype != compute:
            return Refusal(f"the scores are {scores.dtype}, the mix runs in {compute}", match["anchor"])
        if "proj_laid" in match.bindings and not _is_row(match.value("proj_laid"), values.shape[-1]):
            return Refusal("the projection is not laid along the width", match["proj_laid"])
        kept = scores.dim() == rank
        over = match["softmax_dim"] % scores.dim()
        if not same_sizes(scores.shape, (*values.shape[:-1], *([1] if kept else []))) or over != rank - 2:
            return Refusal(
                f"the softmax is over dimension {match['softmax_dim']} of {list(scores.shape)}, not over the sources",
                match["anchor"],
            )
        if not same_sizes(match.value("mixed").shape, (*values.shape[:-2], values.shape[-1])):
            return Refusal("the weighted sum is not over the sources", match["mixed"])
        if "weighted" in match.bindings and not same_sizes(match.value("weights").shape, (*values.shape[:-1], 1)):
            return Refusal("the weights are not laid along the sources", match["weights"])
        if "bmm" in match.bindings:
            weights, laid = match.value("weights"), match.value("bmm_values")
            if not same_size(weights.shape[-2], 1) or not same_sizes(laid.shape[-2:], values.shape[-2:]):
                return Refusal("the batched product is not weights times sources", match["bmm"])
        if _weights(match) is None:
            return Refusal("the score weights are not a norm weight and a projection of the width", match["norm"])
        return None

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        weights = _weights(match)
        assert weights is not None
        node = builder.call(
            torch.ops.k3.attn_res.default, sources(match["values"], builder), *weights, match["score_eps"],
            compute_dtype=match["compute"], out_dtype=match["out"],
        )  # fmt: skip
        return {"root": node}

    def examples(self) -> Sequence[Example]:
        def vendor(p: Tensor, b0: Tensor, b1: Tensor, n: Tensor, w: Tensor) -> Tensor:
            v = torch.stack([b0, b1, p], dim=1).float()
            s = _norm(v, n.float() * w.float()).sum(-1)
            return (s.softmax(-1).unsqueeze(-1) * v).sum(1).to(p.dtype)

        def projected(p: Tensor, b0: Tensor, b1: Tensor, n: Tensor, w: Tensor) -> Tensor:
            v = torch.cat([torch.stack([b0, b1], dim=1), p.unsqueeze(1)], dim=1).float()
            s = _norm(v, n) @ w.float()
            return (s.softmax(-1).unsqueeze(1) @ v).squeeze(1).to(p.dtype)

        return (Example("vendor spelling", vendor, _inputs), Example("matrix products", projected, _inputs))

    def counterexamples(self) -> Sequence[CounterExample]:
        def over_tokens(p: Tensor, b0: Tensor, b1: Tensor, n: Tensor, w: Tensor) -> Tensor:
            v = torch.stack([b0, b1, p], dim=1).float()
            s = _norm(v, n.float() * w.float()).sum(-1)
            return (s.softmax(0).unsqueeze(-1) * v).sum(1).to(p.dtype)

        def sources_exchanged_with_tokens(p: Tensor, b0: Tensor, b1: Tensor, n: Tensor, w: Tensor) -> Tensor:
            v = torch.stack([b0[:3], b1[:3], p[:3]], dim=1).float()
            s = (_norm(v, n) * w.float()).sum(-1)
            return (s.softmax(-1).t().unsqueeze(-1) * v).sum(1).to(p.dtype)

        def normed_sources(p: Tensor, b0: Tensor, b1: Tensor, n: Tensor, w: Tensor) -> Tensor:
            v = torch.stack([b0, b1, p], dim=1).float()
            normed = _norm(v, n)
            return ((normed * w.float()).sum(-1).softmax(-1).unsqueeze(-1) * normed).sum(1).to(p.dtype)

        return (
            CounterExample("softmax over tokens", over_tokens, _inputs, "not over the sources"),
            CounterExample("weights of another token", sources_exchanged_with_tokens, _inputs, "found t"),
            CounterExample("the normed sources are summed", normed_sources, _inputs, "'values' is"),
        )


def sources(values: Node, builder: Builder) -> list[Node]:
    """What was stacked: the operands of a stack or concatenation over the depth, else views of the stacked tensor.

    A cast that loses nothing is looked through: the op widens each source itself.
    """
    narrow = cast_source(values)
    if narrow is not None and widens(narrow.meta["val"].dtype, values.meta["val"].dtype):
        values = narrow
    rank = values.meta["val"].dim()
    if values.target in OPERATORS["stack"] and _dim(values) in (-2, rank - 2):
        return list(values.args[0])  # type: ignore[arg-type]
    if values.target in OPERATORS["cat"] and _dim(values) in (-2, rank - 2):
        parts: list[Node] = []
        for part in values.args[0]:  # type: ignore[union-attr]
            assert isinstance(part, Node)
            single = part.target in OPERATORS["unsqueeze"] and part.args[1] in (-2, rank - 2)
            parts.append(part.args[0] if single else part)  # type: ignore[arg-type]
        if parts[-1].meta["val"].dim() == rank - 1:
            return parts
    blocks = builder.call(torch.ops.aten.slice.Tensor, values, rank - 2, 0, -1)
    return [blocks, builder.call(torch.ops.aten.select.int, values, rank - 2, -1)]


def _dim(node: Node) -> Any:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)


def _weights(match: Match) -> tuple[Node, Node] | None:
    """Norm weight and projection, both of the width of the sources, without the casts around them."""
    norm = match["score_norm"]
    if not isinstance(norm, Node):
        return None
    if "folded" in match.bindings:
        if norm.target not in OPERATORS["mul"] or not all(isinstance(a, Node) for a in norm.args[:2]):
            return None
        if norm.meta["val"].dtype != match["compute"]:
            return None  # their product is rounded: it is no pair of weights any more
        pair = (norm.args[0], norm.args[1])
    else:
        pair = (norm, match["score_proj"])
    width = match.value("values").shape[-1]
    found = []
    for node in pair:
        assert isinstance(node, Node)
        source = cast_source(node)
        plain = source if source is not None and widens(source.meta["val"].dtype, node.meta["val"].dtype) else node
        if not _is_row(plain.meta["val"], width) or not widens(plain.meta["val"].dtype, match["compute"]):
            return None
        found.append(plain)
    return found[0], found[1]


def _is_row(value: Tensor, width: Any) -> bool:
    """[width], or with leading dimensions of size one."""
    shape = value.shape
    return len(shape) > 0 and same_size(shape[-1], width) and all(same_size(s, 1) for s in shape[:-1])


def _norm(v: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.k3.rms_norm(v, weight, 1e-5, torch.float32, torch.float32, torch.float32)


def _inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    rows = tuple(torch.randn(5, 64, generator=generator).bfloat16() for _ in range(3))
    return (*rows, *(torch.randn(64, generator=generator).bfloat16() for _ in range(2)))


@dataclass(frozen=True)
class LiftAttnResPass(RulePass):
    """Lift the softmax mix over stored blocks and prefix to k3::attn_res."""

    name: ClassVar[str] = "lift_attn_res"
    requires: ClassVar[frozenset[str]] = frozenset({"lift_rms_norm"})
    provides: ClassVar[frozenset[str]] = frozenset({"attn_res"})

    def rules(self) -> tuple[Rule, ...]:
        return (LiftAttnRes(),)
