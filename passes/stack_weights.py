"""Let a concatenation of weights be one weight: it is made once, and not in every step.

    w = cat([w_q, w_k, w_v])    ->    w = k3::pack_rows([w_q, w_k, w_v], [0, n, 2 n], 3 n)

A model that keeps the taps of three convolutions apart and runs one writes this. The stack is made before the first
step, and the weights move into it (`finalise/prologue.py`), as those of `merge_projections` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Node

import k3rewrite.kernels  # noqa: F401  registers the op that is built
from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.weights import Weight, cannot_move, lie_together, weight_of
from k3rewrite.patterns import Anything, Builder, CounterExample, Example, Match, Policy, Refusal, Rule
from k3rewrite.patterns.bindings import Attempt
from k3rewrite.pipeline.pass_base import RulePass

aten = torch.ops.aten
_PACK = torch.ops.k3.pack_rows.default
_ALIGNED_BYTES = 16
"""where a weight may begin: kernels load so much at once"""


class StackWeights(Rule):
    """See the module docstring."""

    name = "stack_weights"
    policy = Policy.EXACT
    anchors = frozenset({aten.cat.default})
    pattern = Anything()

    def is_site(self, node: Node) -> bool:
        """A concatenation of nothing but parameters and buffers that are only read."""
        return all(isinstance(value, Node) and weight_of(value) is not None for value in _tensors(node))

    def matches(self, anchor: Node) -> tuple[Iterator[Match], Attempt]:
        weights = _tensors(anchor)
        return iter([Match(anchor, {"anchor": anchor, "weights": weights}, frozenset({anchor}))]), Attempt(anchor)

    def check(self, match: Match) -> Refusal | None:
        weights, anchor = match["weights"], match["anchor"]
        values = [weight.meta["val"] for weight in weights]
        if bound_arguments(anchor)["dim"] % values[0].dim() != 0:
            return Refusal("the weights are put together along their columns", anchor)
        if len(weights) < 2 or len(set(weights)) < len(weights):
            return Refusal("one weight is there alone, or twice", anchor)
        if any(value.dtype != values[0].dtype or value.dim() != values[0].dim() for value in values):
            return Refusal("the weights are of several dtypes or ranks", anchor)
        if any(start % _ALIGNED_BYTES for start in _starts_in_bytes(values)):
            return Refusal(f"a weight would not begin at a multiple of {_ALIGNED_BYTES} bytes", anchor)
        for weight in weights:
            for user in weight.users:
                if user is not anchor and (
                    user.target is _PACK or (user.target in self.anchors and self.is_site(user))
                ):
                    return Refusal(f"its weight {weight.name} is in the stack {user.name} too", anchor)
        if not _there(weights) and (reasons := cannot_move([_weight(weight) for weight in weights])):
            reason = f"a weight cannot move into a stack: {next(iter(reasons.values()))}"
            return Refusal(reason, anchor, built=True, declined=True)
        return None

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        rows = [weight.meta["val"].shape[0] for weight in match["weights"]]
        starts = list(accumulate(rows[:-1], initial=0))
        return {"root": builder.call(_PACK, list(match["weights"]), starts, sum(rows))}

    def describe(self, match: Match, new: Mapping[str, Node]) -> str:
        value = new["root"].meta["val"]
        verb = "lie in" if _there(match["weights"]) else "move into"
        return f"{len(match['weights'])} weights {verb} a stack of {value.numel() * value.element_size()} bytes"

    def examples(self) -> Sequence[Example]:
        return (Example("the taps of three convolutions", _Taps(lambda *w: torch.cat(w)), _inputs),)

    def counterexamples(self) -> Sequence[CounterExample]:
        def elsewhere(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.cat([q, k, v]) + torch.cat([v, k, q])

        def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.cat([q, k, k])

        def in_columns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.cat([q, k, v], 2).view(24, 1, 4)

        narrow = _Taps(lambda *w: torch.cat(w), columns=1, rows=(3, 3, 18))
        return (
            CounterExample("a weight of two stacks", _Taps(elsewhere), _inputs, "is in the stack"),
            CounterExample("a weight twice", _Taps(twice), _inputs, "or twice"),
            CounterExample("columns", _Taps(in_columns), _inputs, "along their columns"),
            CounterExample("rows of 4 bytes", narrow, _inputs, "multiple of 16 bytes"),
        )


def _tensors(cat: Node) -> list[Any]:
    return list(bound_arguments(cat)["tensors"])


def _starts_in_bytes(values: Sequence[Tensor]) -> list[int]:
    """Where each begins in the stack."""
    return list(accumulate((value.numel() * value.element_size() for value in values[:-1]), initial=0))


def _weight(node: Node) -> Weight:
    weight = weight_of(node)
    assert weight is not None, "no site without one"
    return weight


def _there(weights: Sequence[Node]) -> bool:
    """True if the weights lie as the stack has them."""
    values = [weight.meta["val"] for weight in weights]
    size = sum(value.numel() * value.element_size() for value in values)
    return lie_together([_weight(weight) for weight in weights], _starts_in_bytes(values), size)


# ------------------------------------------------------------------ examples


class _Taps(nn.Module):
    """`put` makes one of three weights; each row of it is summed with its rows of the input."""

    def __init__(self, put: Callable[..., Tensor], columns: int = 4, rows: tuple[int, ...] = (8, 8, 8)) -> None:
        super().__init__()
        self.put = put
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(n, 1, columns, generator=generator) for n in rows]
        self.weights = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in drawn)

    def forward(self, x: Tensor) -> Tensor:
        return (self.put(*self.weights).squeeze(1) * x.unsqueeze(-1)).sum(-1)


def _inputs() -> tuple[Tensor]:
    return (torch.randn(5, 24, generator=torch.Generator().manual_seed(1)),)


@dataclass(frozen=True)
class StackWeightsPass(RulePass):
    """Make concatenations of weights once, before the first step."""

    name: ClassVar[str] = "stack_weights"
    requires: ClassVar[frozenset[str]] = frozenset({"canonicalise"})
    provides: ClassVar[frozenset[str]] = frozenset({"pack_rows"})

    def rules(self) -> tuple[Rule, ...]:
        return (StackWeights(),)
