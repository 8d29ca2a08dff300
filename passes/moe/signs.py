"""Ids below zero. As an index such a number counts from the last expert; for the op it is an expert of another rank.

Ids of a top-k are numbers of experts. What a model computes from them may not be, and where the graph shows it, as in
`ids - 1` or `where(kept, ids, -1)`, a spelling that takes the ids as an index is left alone.
"""

from __future__ import annotations

from torch.fx import Node

from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.passes.moe.neighbourhood import VIEWS
from k3rewrite.passes.moe.routing import aten, constant
from k3rewrite.patterns import OPERATORS

SIGNED = OPERATORS["sub"] | OPERATORS["neg"] | {aten.rsub.Scalar, aten.bitwise_not.default}
CHOICES = frozenset({aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.masked_fill.Scalar,
                     aten.masked_fill.Tensor, aten.add.Tensor, aten.add.Scalar})  # fmt: skip
LEVELS = 8


def may_be_negative(node: Node, levels: int = LEVELS) -> bool:
    """True for a difference, or for a sum or a choice with a negative number, also behind views and casts. A choice
    between a difference and another number is taken to be there to avoid the negative ones."""
    if node.op != "call_function" or levels == 0:
        return False
    arguments = bound_arguments(node)
    if node.target in VIEWS or node.target in OPERATORS["cast"]:
        source = arguments.get("self", arguments.get("a"))
        return isinstance(source, Node) and may_be_negative(source, levels - 1)
    if node.target in CHOICES:
        numbers = [constant(arguments.get(name)) for name in ("self", "other", "value")]
        return any(number is not None and number < 0 for number in numbers)
    return node.target in SIGNED
