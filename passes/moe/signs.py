"""Ids below zero. As an index such a number counts from the last expert; for the op it is an expert of another rank.

Ids of a top-k are numbers of experts. What a model computes from them may not be, and where the graph shows it, as in
`ids - 1` or `where(kept, ids, -1)`, a spelling that takes the ids as an index is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Node

from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.passes.moe.neighbourhood import VIEWS
from k3rewrite.passes.moe.routing import aten, constant
from k3rewrite.patterns import OPERATORS

SIGNED = OPERATORS["sub"] | OPERATORS["neg"] | {aten.rsub.Scalar, aten.bitwise_not.default}
CHOICES = frozenset({aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.masked_fill.Scalar,
                     aten.masked_fill.Tensor, aten.add.Tensor, aten.add.Scalar})  # fmt: skip
NUMBERED = frozenset({
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default,
    aten.clamp.default, aten.clamp.Tensor, aten.clamp_max.default, aten.minimum.default, aten.remainder.Scalar,
    aten.remainder.Tensor, aten.bitwise_xor.Scalar, aten.bitwise_xor.Tensor, aten.constant_pad_nd.default,
    aten.full.default, aten.full_like.default, aten.new_full.default,
})  # fmt: skip
"""negative with a negative number, or on what may be negative"""
RAISED = frozenset({
    aten.clamp.default, aten.clamp.Tensor, aten.remainder.Scalar, aten.remainder.Tensor,
})  # fmt: skip
_NUMBERS = ("self", "other", "value", "alpha", "min", "max", "fill_value")
LEVELS = 8


def may_be_negative(node: Node, levels: int = LEVELS) -> bool:
    """True for a difference, or for a sum, a product, a choice and the like with a negative number, also behind views
    and casts. A choice between a difference and another number is taken to be there to avoid the negative ones."""
    if node.op != "call_function" or levels == 0:
        return False
    arguments = bound_arguments(node)
    if node.target in VIEWS or node.target in OPERATORS["cast"]:
        source = arguments.get("self", arguments.get("a"))
        return isinstance(source, Node) and may_be_negative(source, levels - 1)
    if node.target in CHOICES:
        return _has_negative_number(arguments)
    if node.target is aten.cat.default:
        parts = [part for part in arguments["tensors"] if isinstance(part, Node)]
        return any(may_be_negative(part, levels - 1) for part in parts)
    if node.target in RAISED:
        bound = constant(arguments.get("min", arguments.get("other")))
        if bound is not None and bound >= 0:
            return False  # at least a number that is none below zero, or the remainder of one above
    if node.target in NUMBERED:
        inputs = [arguments[name] for name in ("self", "other") if isinstance(arguments.get(name), Node)]
        return _has_negative_number(arguments) or any(may_be_negative(n, levels - 1) for n in inputs)
    return node.target in SIGNED


def _has_negative_number(arguments: Mapping[str, Any]) -> bool:
    numbers = [constant(arguments.get(name)) for name in _NUMBERS]
    return any(number is not None and number < 0 for number in numbers)
