"""Which values of a graph share storage, and who reads and writes it.

    pool (placeholder)                      storage {pool}
    rows = aten.view(pool, ...)             storage {pool}
    out, state = k3::step(rows, ...)        storage {step[0]}, {step[1]}

A storage is named by the value that brought it into the graph (its root). The map is a snapshot: it describes the
graph as it was when the map was made and is thrown away after a change. Nothing of it is kept in the graph.

Two inputs count as apart unless their fake tensors share storage and may overlap: AOTAutograd merges overlapping
inputs of which one is written, and `finalise.overlap` checks the addresses at run time.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from k3rewrite import _torch_private as private
from k3rewrite.graph import effects

END = 1 << 60
"""a position after every node"""


class Root(NamedTuple):
    """The value that brought a storage into the graph: result `result` of `node`."""

    node: Node
    result: int


class Use(NamedTuple):
    """A node that reads a storage from its own position until `until` (later only for a collective in flight)."""

    position: int
    until: int
    node: Node


NO_STORAGE: frozenset[Root] = frozenset()


class StorageMap:
    """Snapshot of who shares storage with whom. Built in one sweep; O(1) for each question about one value."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.position: dict[Node, int] = {}
        self._roots: dict[Node, frozenset[Root]] = {}
        self._elements: dict[Node, tuple[frozenset[Root], ...]] = {}
        self._writes: defaultdict[Root, list[tuple[int, Node]]] = defaultdict(list)
        self._build()

    # ---------------------------------------------------------------- questions

    def roots(self, node: Node) -> frozenset[Root]:
        """Storages in which a value may live. Empty for a size."""
        return self._roots[node]

    def same_storage(self, a: Node, b: Node) -> bool:
        """True if the two values may share storage."""
        return not self._roots[a].isdisjoint(self._roots[b])

    def writes(self, root: Root) -> Sequence[tuple[int, Node]]:
        """(position, node) of every write to a storage, in order."""
        return self._writes.get(root, ())

    @property
    def written(self) -> Mapping[Root, Sequence[tuple[int, Node]]]:
        """All storages that are written, with their writes in order."""
        return self._writes

    def uses(self, root: Root) -> Sequence[Use]:
        """Every node that takes a value in this storage as an argument, in order."""
        return self._uses.get(root, ())

    def aliases(self, root: Root) -> Sequence[Node]:
        """Every value in this storage, in order."""
        return self._aliases.get(root, ())

    def in_outputs(self, root: Root) -> bool:
        """True if a value in this storage is returned."""
        return root in self._output_roots

    # ---------------------------------------------------------------- the sweep

    def _build(self) -> None:
        for position, node in enumerate(self.graph.nodes):
            self.position[node] = position
            if node.op == "output":
                self._roots[node] = NO_STORAGE
                continue
            self._roots[node] = self._roots_of(node)
            for argument in effects.writes(node):
                for root in self._roots[argument]:
                    self._writes[root].append((position, node))
        self._merge_overlapping_inputs()

    def _roots_of(self, node: Node) -> frozenset[Root]:
        if node.op == "call_function" and node.target is operator.getitem:
            source, index = node.args[0], node.args[1]
            assert isinstance(source, Node)
            elements = self._elements.get(source)
            return elements[index] if elements is not None and isinstance(index, int) else self._roots[source]
        value = node.meta.get("val")
        if value is not None and not isinstance(value, (torch.Tensor, list, tuple)):
            return NO_STORAGE
        results = [self._shared(node, index, shared) for index, shared in enumerate(effects.result_aliases(node))]
        if len(results) == 1:
            return results[0]
        self._elements[node] = tuple(results)
        return frozenset().union(*results)

    def _shared(self, node: Node, index: int, shared: tuple[Node, ...]) -> frozenset[Root]:
        own = frozenset((Root(node, index),))
        if not shared:
            return own
        roots = [self._roots[a] for a in shared if self._roots[a]]
        if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
            roots.append(own)  # no schema: it may return an argument or something new
        if len(roots) == 1:
            return roots[0]
        return frozenset().union(*roots) if roots else own

    def _merge_overlapping_inputs(self) -> None:
        """Inputs whose fake tensors share storage and may overlap name the same storages."""
        groups: defaultdict[int, list[Node]] = defaultdict(list)
        for node in self.graph.nodes:
            if node.op not in ("placeholder", "get_attr"):
                continue
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                groups[private.storage_id(value)].append(node)
        together: dict[Root, frozenset[Root]] = {}
        for nodes in groups.values():
            for a, b in combinations(nodes, 2):
                if not private.definitely_disjoint(a.meta["val"], b.meta["val"]):
                    both = together.get(Root(a, 0), frozenset((Root(a, 0),))) | {Root(b, 0)}
                    for root in both:
                        together[root] = together.get(root, NO_STORAGE) | both
        if not together:
            return
        for node, roots in self._roots.items():
            if any(root in together for root in roots):
                self._roots[node] = frozenset().union(*(together.get(r, frozenset((r,))) for r in roots))
        for node, elements in self._elements.items():
            self._elements[node] = tuple(
                frozenset().union(*(together.get(r, frozenset((r,))) for r in e)) for e in elements
            )
        merged: defaultdict[Root, list[tuple[int, Node]]] = defaultdict(list)
        for root, entries in self._writes.items():
            for each in together.get(root, frozenset((root,))):
                merged[each] = sorted({*merged[each], *entries}, key=lambda entry: entry[0])
        self._writes = merged

    @cached_property
    def _uses(self) -> dict[Root, list[Use]]:
        uses: defaultdict[Root, list[Use]] = defaultdict(list)
        for node, position in self.position.items():
            until = self._in_flight_until(node, position)
            seen: set[Root] = set()
            for argument in node.all_input_nodes:
                for root in self._roots[argument]:
                    if root not in seen:
                        seen.add(root)
                        uses[root].append(Use(position, until, node))
        return uses

    def _in_flight_until(self, node: Node, position: int) -> int:
        """A collective reads its input until its result has been waited for."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace not in effects.COLLECTIVE_NAMESPACES:
            return position
        if "wait_tensor" in target.name():
            return position
        waits = [self.position[user] for user in _through_getitem(node) if "wait_tensor" in str(user.target)]
        return max(waits) if waits else END

    @cached_property
    def _aliases(self) -> dict[Root, list[Node]]:
        aliases: defaultdict[Root, list[Node]] = defaultdict(list)
        for node, roots in self._roots.items():
            for root in roots:
                aliases[root].append(node)
        return aliases

    @cached_property
    def _output_roots(self) -> frozenset[Root]:
        outputs: set[Root] = set()
        for node in self.graph.nodes:
            if node.op == "output":
                for argument in node.all_input_nodes:
                    outputs |= self._roots[argument]
        return frozenset(outputs)


def _through_getitem(node: Node) -> list[Node]:
    users: list[Node] = []
    for user in node.users:
        users.append(user)
        if user.op == "call_function" and user.target is operator.getitem:
            users.extend(_through_getitem(user))
    return users


def tensor_value(node: Node) -> torch.Tensor | None:
    """The node's fake tensor, or None for sizes, lists and nodes without metadata."""
    value: Any = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None
