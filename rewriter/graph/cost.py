"""Launches and bytes of a node, counted as an eager executor would spend them.

A view costs nothing; a gather reads what it returns, a write to a part moves that part; any other ATen op is one
launch that reads its tensors and writes its results; a `k3::` op asks its own cost function. The figures compare a
graph before and after a pass; they are arithmetic, not measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from k3rewrite.graph.effects import is_view
from k3rewrite.ops.vocabulary import Cost, op_of, tensor_bytes

FREE = Cost(0, 0, 0)


def node_value(arg: Any) -> Any:
    """An argument with nodes replaced by what they stand for (fake tensors)."""
    return map_arg(arg, lambda n: n.meta.get("val"))


def node_cost(node: Node, op_cost: Callable[[str], Callable[..., Cost] | None]) -> Cost:
    """Cost of one node; `op_cost` maps a `k3::` op's name to its cost function, or to None."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return FREE
    if (word := op_of(target)) is not None and (own := op_cost(word.name)) is not None:
        return own(*node_value(node.args), **node_value(node.kwargs))
    if is_view(node):
        return FREE
    if target in _GATHERS:
        out = tensor_bytes(node.meta.get("val"))
        return Cost(1, out + tensor_bytes(node_value(list(node.args[1:]))), out)
    if target in _SCATTERS:
        values = tensor_bytes(node_value(list(node.args[1:])))
        return Cost(1, values, values)
    if target is torch.ops.aten.copy_.default and _is_written_in_place(node):
        return FREE
    read = tensor_bytes(node_value(list(node.args)), node_value(list(node.kwargs.values())))
    return Cost(1, read, tensor_bytes(node.meta.get("val")))


def _is_written_in_place(copy: Node) -> bool:
    """True for `copy_(pool, index_put(pool, ...))`: finalising makes it one write to the rows of the pool."""
    pool, value = copy.args[:2]
    while isinstance(value, Node) and value.target in _SCATTERS:
        value = value.args[0]
    return value is pool


_aten = torch.ops.aten
_GATHERS = frozenset({_aten.index.Tensor, _aten.embedding.default, _aten.index_select.default, _aten.gather.default})
"""ops that read as much of their first argument as they return"""
_SCATTERS = frozenset(
    {_aten.index_put.default, _aten.index_copy.default, _aten.select_scatter.default, _aten.slice_scatter.default}
)
"""ops that change a part of their first argument: they are counted as made in place"""


def sum_costs(costs: Iterable[Cost]) -> Cost:
    launches = read = written = flops = 0
    for cost in costs:
        launches += cost.launches
        read += cost.bytes_read
        written += cost.bytes_written
        flops += cost.flops
    return Cost(launches, read, written, flops)
