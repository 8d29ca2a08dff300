"""A call's arguments by parameter name, with the schema's defaults filled in.

    aten.sum.dim_IntList(x, [1])          ->  {self: x, dim: [1], keepdim: False, dtype: None}
    aten.sum.dim_IntList(x, dim=[1])      ->  the same

Patterns compare these, so that an optional fourth argument that is present in one graph and left out in another is
no reason for a miss.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg


@lru_cache(maxsize=4096)
def parameters(target: torch._ops.OpOverload) -> tuple[tuple[str, Any], ...]:
    """(name, default) of each parameter of an op, in order; a parameter without default has `MISSING`."""
    return tuple((a.name, a.default_value if a.has_default_value() else MISSING) for a in target._schema.arguments)


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"


MISSING = _Missing()


def bound_arguments(node: Node) -> dict[str, Any]:
    """Parameter name -> argument of a call of an op with a schema; empty for other nodes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    bound: dict[str, Any] = {}
    for index, (name, default) in enumerate(parameters(node.target)):
        if index < len(node.args):
            bound[name] = node.args[index]
        else:
            bound[name] = node.kwargs.get(name, default)
    return bound


def every_node(value: Any) -> list[Node]:
    """The nodes in an argument structure, in order, each as often as it stands there."""
    found: list[Node] = []

    def note(node: Node) -> Node:
        found.append(node)
        return node

    map_arg(value, note)
    return found
