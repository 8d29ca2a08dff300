"""Which views show the same elements in the same order, so that only a shape is between a value and its view.

x.view(2, 4)   x.unsqueeze(0)   x.reshape(-1)   x.t() of a [1, n]        the same, in row-major order
x.t()   x[:, :4]   x.expand(5, -1) of a [1, n]                           others, or in another order
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.shapes import same_size, same_sizes

_aten = torch.ops.aten
_RESHAPES = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.reshape.default,
        _aten.unsqueeze.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.alias.default,
        _aten.detach.default,
    }
)


def keeps_order(node: Node) -> bool:
    """True for a view that is known to show every element of its argument, in row-major order as there.

    False for everything else, also where a symbolic size leaves it open.
    """
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if node.target in _RESHAPES:
        return True
    if node.target is _aten.expand.default:
        added = after.dim() - before.dim()
        return all(same_size(s, 1) for s in after.shape[:added]) and same_sizes(after.shape[added:], before.shape)
    if node.target is _aten.slice.Tensor:
        return same_sizes(before.shape, after.shape) and bound_arguments(node)["step"] == 1
    if node.target is _aten.select.int:
        return same_size(before.shape[bound_arguments(node)["dim"]], 1)
    order = permutation(node)
    if order is None:
        return False
    moved = [dim for dim in order if not same_size(before.shape[dim], 1)]
    return moved == sorted(moved)


def permutation(node: Node) -> Sequence[int] | None:
    """Which dimension of the argument each dimension of a transposition is: (1, 0) for x.t(); None for another op."""
    arguments: dict[str, Any] = bound_arguments(node)
    source = node.args[0] if node.args else None
    value = source.meta.get("val") if isinstance(source, Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    rank = value.dim()
    order = list(range(rank))
    if node.target is _aten.permute.default:
        return [dim % rank for dim in arguments["dims"]]
    if node.target is _aten.t.default:
        return order[::-1]
    if node.target is _aten.transpose.int and rank:
        first, second = arguments["dim0"] % rank, arguments["dim1"] % rank
        order[first], order[second] = order[second], order[first]
        return order
    return None
