"""Projections of one value: which linear layers read it, which of them may become one, and why the others may not.

    mm(x, t(w))   addmm(b, x, t(w))   k3::mlp(x, w_gate, w_up, ...)       projections of x: one, one and two

The projections of a value and of its casts are a family. Of a family, those that read the very same tensor, all with a
bias or all without, are a group; each of the others is alone, with a reason. What is said of a group is in
`merge_projections.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.effects import is_view
from k3rewrite.graph.layout import permutation
from k3rewrite.graph.shapes import same_size
from k3rewrite.graph.weights import weight_of
from k3rewrite.patterns.bindings import cast_source

aten = torch.ops.aten
MLP = torch.ops.k3.mlp.default
_INPUT: dict[Any, str] = {aten.mm.default: "self", aten.addmm.default: "mat1", MLP: "x"}
ANCHORS = frozenset(_INPUT)


@dataclass(frozen=True)
class Projection:
    """A node that multiplies its input by one weight, or by two; `objection` is why it must stay as it is."""

    node: Node
    weights: tuple[Node, ...]
    bias: Node | None = None
    objection: str | None = None

    @property
    def x(self) -> Node:
        """What it reads now: a group that was merged before may have replaced it."""
        node: Node = bound_arguments(self.node)[_INPUT[self.node.target]]
        return node

    @property
    def stored(self) -> tuple[Node, ...]:
        """Weights and bias."""
        return self.weights if self.bias is None else (*self.weights, self.bias)

    @property
    def views(self) -> tuple[Node, ...]:
        """The transposition between weight and product."""
        return () if self.node.target is MLP else (bound_arguments(self.node)["mat2"],)


def projection_of(node: Node, taken_whole: Callable[[Node], bool]) -> Projection | None:
    """The projection that a node is, or None. `taken_whole` says of an MLP that a kernel takes it as it is."""
    if node.target is MLP:
        return _of_mlp(node, taken_whole)
    if node.target not in _INPUT:
        return None
    arguments = bound_arguments(node)
    weight, objection = _weight(arguments["mat2"])
    if weight is None:
        return None
    bias = arguments["self"] if node.target is aten.addmm.default else None
    if objection is None and bias is not None:
        objection = _bias_objection(arguments, weight)
    return Projection(node, (weight,), bias, objection or _shared([weight, *([] if bias is None else [bias])]))


def _of_mlp(node: Node, taken_whole: Callable[[Node], bool]) -> Projection:
    arguments = bound_arguments(node)
    weights = (arguments["w_gate"], arguments["w_up"])
    objection = None
    if node.args[0].meta["val"].dim() != 2:  # type: ignore[union-attr]
        objection = "its input is not rows of one dimension"
    elif any(weight_of(weight) is None for weight in weights):
        objection = NO_WEIGHT
    elif taken_whole(node):
        objection = "a kernel takes the MLP as a whole"
    return Projection(node, weights, None, objection or _shared(weights))


NO_WEIGHT = "its weight is no parameter or buffer that is only read, or it is empty"


def _weight(operand: Node) -> tuple[Node | None, str | None]:
    """(the input of the graph that a right operand is made from, why it is not the transposed weight itself)."""
    steps: list[Node] = []
    value = operand
    while value.op == "call_function" and (is_view(value) or cast_source(value) is not None):
        steps.append(value)
        if not isinstance(value.args[0], Node):
            return None, None
        value = value.args[0]
    if value.op != "placeholder" or not isinstance(value.meta.get("val"), torch.Tensor):
        return None, None
    if weight_of(value) is None or any(same_size(size, 0) for size in value.meta["val"].shape):
        return value, NO_WEIGHT
    if not steps:
        return value, "its weight is used as it is stored, not transposed"
    if len(steps) > 1 or value.meta["val"].dim() != 2 or permutation(steps[0]) != [1, 0]:
        return value, f"its weight is computed in the graph ({', '.join(step.name for step in steps)})"
    return value, None


def _bias_objection(arguments: dict[str, Any], weight: Node) -> str | None:
    bias = arguments["self"]
    if arguments["beta"] != 1 or arguments["alpha"] != 1:
        return "product or bias are scaled"
    if weight_of(bias) is None:
        return "its bias is no parameter or buffer that is only read"
    value, rows = bias.meta["val"], weight.meta["val"].shape[0]
    if value.dim() != 1 or not same_size(value.shape[0], rows) or value.dtype != weight.meta["val"].dtype:
        return "its bias is not one number for each column, in the dtype of the weight"
    return None


def _shared(weights: Sequence[Node]) -> str | None:
    """A weight can be part of one stack only."""
    for weight in weights:
        readers = {u for user in weight.users for u in (user.users if is_view(user) else [user])}
        if sum(reader.target in ANCHORS for reader in readers) > 1:
            return f"its weight {weight.name} is that of other projections too"
    if len(set(weights)) != len(weights):
        return "two of its weights are one"
    return None


def source_of(value: Node) -> Node:
    """What a value is a cast of."""
    while (source := cast_source(value)) is not None:
        value = source
    return value


def family_of(source: Node, taken_whole: Callable[[Node], bool]) -> list[Projection]:
    """The projections of a value and of its casts, in graph order."""
    values, found = [source], []
    for value in values:
        for user in value.users:
            if cast_source(user) is value:
                values.append(user)
            elif (projection := projection_of(user, taken_whole)) is not None and projection.x is value:
                found.append(projection)
    return sorted(found, key=lambda projection: projection.node)


def count(projections: Sequence[Projection]) -> int:
    """An MLP is two projections."""
    return sum(len(projection.weights) for projection in projections)
