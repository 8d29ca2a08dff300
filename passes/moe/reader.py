"""Graph nodes as values in index notation.

    reader = Reader(anchor)
    reader.value(node)          what the node computes, down to elements of tensors that are not looked into

Everything may be left unread: a node whose op is not known here, or whose form has no place in the notation, is a
tensor of its own. Element-wise operators, sums and products are read in the neighbourhood of one down projection only,
so that the reading ends at the inputs of its mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.passes.moe import neighbourhood, operations, routing, shares, views
from k3rewrite.passes.moe.expression import Expression, Value, as_index, leaf
from k3rewrite.passes.moe.index import (
    Axis,
    Index,
    Unreadable,
    flattened,
    product_of,
    unflattened,
)

aten = torch.ops.aten
MAX_NODES = 1500
"""how many nodes one reading looks at; what lies further up is not looked into"""
MAX_DEPTH = 120

Arguments = Mapping[str, Any]


class Reader:
    """Reads one state of a graph. `read` are the nodes that were looked into, `blocked` those of them above an expert
    product that could not be, each with the reason."""

    def __init__(self, anchor: Node) -> None:
        self.values: dict[Node, Value] = {}
        self.read: set[Node] = set()
        self.products: set[Node] = set()
        """nodes with a product with experts' weights in them"""
        self.blocked: dict[Node, str] = {}
        self.distinct: set[Node] = set()
        """nodes that mean what they are read as because no id stands twice in a row"""
        self.counted: dict[Node, tuple[Any, int]] = {}
        """groups that are looked for among the ends of some: of how many, and how many of the last may be left out"""
        self.seeds = neighbourhood.seeds(anchor)
        self.region = neighbourhood.region_of(self.seeds, anchor)
        self._unpacking = neighbourhood.unpacking(self.seeds)
        self._known: dict[Any, Node] = {}
        self._named: set[Node] = set()
        self._depth = 0

    def looks_into(self, node: Node) -> bool:
        """True if an element-wise operator, a sum or a product belongs to the mixture as far as its ops tell."""
        return node in self.region or node in self._unpacking or neighbourhood.leads_to_mask(node)

    def value(self, node: Node) -> Value:
        if node not in self.values:
            self.values[node] = self._read(node)
        return self.values[node]

    def index(self, node: Node) -> tuple[tuple[tuple[Axis, ...], ...], Index]:
        """The dims and the element of a tensor of integers."""
        value = self.value(node)
        return value.dims, as_index(value.element)

    def find(self, dims: Sequence[tuple[Axis, ...]], element: Expression | Index) -> Node | None:
        """A node of the graph that has these dims and this element, the first of them; None if there is none."""
        for node in sorted(n for n in self.values if n not in self._named and n not in self.products):
            value = self.values[node]
            for key in (_key(value.dims, value.element), _joined_key(value.dims, value.element)):
                if key is not None:
                    self._known.setdefault(key, node)
            self._named.add(node)
        for variant in (_key(dims, element), _joined_key(dims, element)):
            if variant in self._known:
                return self._known[variant]
        return None

    # ---------------------------------------------------------------- one node

    def _read(self, node: Node) -> Value:
        handler = self._handler(node)
        if handler is not None and len(self.values) < MAX_NODES and self._depth < MAX_DEPTH:
            self._depth += 1
            try:
                value = handler(self, node, bound_arguments(node))
            except Unreadable as reason:
                if reason.telling or any(i in self.products for i in node.all_input_nodes):
                    self.blocked[node] = str(reason)
                value = None
            finally:
                self._depth -= 1
            if value is not None:
                self.read.add(node)
                self._note(node)
                return value
        return leaf(node)

    def _handler(self, node: Node) -> Callable[[Reader, Node, Arguments], Value | None] | None:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        target = node.target
        for table in (views.HANDLERS, operations.HANDLERS, shares.HANDLERS, routing.HANDLERS):
            if target in table:
                return table[target]
        if neighbourhood.is_grouped(node):
            return operations.grouped_fallback
        return operations.pointwise if neighbourhood.is_pointwise(node) else None

    def _note(self, node: Node) -> None:
        inputs = node.all_input_nodes
        if any(i in self.products for i in inputs):
            self.products.add(node)


def _key(dims: Sequence[tuple[Axis, ...]], element: Expression | Index) -> Any:
    names = {axis: (i, j, str(axis.size)) for i, dim in enumerate(dims) for j, axis in enumerate(dim)}
    return tuple(names.values()), element.key(names)


def _joined_key(dims: Sequence[tuple[Axis, ...]], element: Expression | Index) -> Any:
    """The key with the axes of each dimension made one; as it is where an element tells them apart."""
    joined = [(Axis(product_of(dim)),) if dim else () for dim in dims]
    where: dict[Axis, Index] = {}
    for dim, one in zip(dims, joined, strict=True):
        where.update(zip(dim, unflattened(flattened(one), dim), strict=True))
    try:
        return _key(joined, element.substitute(where))
    except Unreadable:
        return None
