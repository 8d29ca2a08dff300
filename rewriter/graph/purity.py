"""What may be deleted, merged or moved: proved from schemas, asked of a snapshot of the graph.

    a = s * 2;  s.add_(1);  x + a          a may not move behind the write: 4.0 instead of 2.0, and `lint()` passes
    all_reduce -> wait_tensor              neither is ever moved or deleted
    bump(x) of somebody else's library     never deleted: its schema may not say that it writes

Facts of one node are in `effects.py`; those most asked for can be imported from here. Questions about order need a
`PurityIndex`, a snapshot that refuses to answer once the graph has changed: regions found by an earlier pass are never
trusted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable

from torch.fx import Graph, Node

from k3rewrite import _torch_private as private
from k3rewrite.errors import ContractError
from k3rewrite.graph.effects import aliases_of, delete_objection, effect, is_view, may_delete, writes
from k3rewrite.graph.storage import StorageMap

__all__ = [
    "PurityIndex",
    "aliases_of",
    "delete_objection",
    "effect",
    "eliminate_dead_code",
    "is_view",
    "may_delete",
    "writes",
]


class PurityIndex:
    """Answers many questions about one state of a graph.

    Making one is a sweep over the graph; a question costs a binary search. A question after a node was added, erased
    or moved raises `ContractError`: make a new index.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._state = self._fingerprint()
        self.storage = StorageMap(graph)
        self._keys = {node: private.node_order_key(node) for node in graph.nodes}

    # ---------------------------------------------------------------- questions

    def written_between(self, value: Node | Iterable[Node], first: Node, last: Node) -> Node | None:
        """The first node strictly between `first` and `last` that writes storage in which the value(s) live."""
        values = [value] if isinstance(value, Node) else list(value)
        self._check(first, last, *values)
        low, high = sorted((self.storage.position[first], self.storage.position[last]))
        return self._first_write(values, low + 1, high)

    def region_objection(self, nodes: Collection[Node], before: Node) -> str | None:
        """Why `nodes` may not be computed together directly before `before` (as a fused op would), or None.

        Every node must be pure, and nothing between a node and `before` may write what the node reads. Where the
        region stands in terms of definitions is the caller's concern.
        """
        self._check(before, *nodes)
        for node in nodes:
            if (reason := effect(node)) is not None:
                return f"{node.name} {reason}"
            if (overtaken := self._overtakes(node, before)) is not None:
                return overtaken
        return None

    def merge_objection(self, kept: Node, dropped: Node) -> str | None:
        """Why two equal calls may not become one, or None. Two equal factory calls are two buffers once one is written.

        That the calls are equal (same target, same arguments, same types of constants) is the caller's concern.
        """
        self._check(kept, dropped)
        for node in (kept, dropped):
            if (reason := effect(node)) is not None:
                return f"{node.name} {reason}"
            for root in self.storage.roots(node):
                if root.node is node and self.storage.writes(root):
                    return f"{node.name} is written by {self.storage.writes(root)[0][1].name}"
        write = self.written_between(kept.all_input_nodes, kept, dropped)
        return f"{write.name} writes what {dropped.name} reads in between" if write is not None else None

    # ---------------------------------------------------------------- inside

    def _overtakes(self, node: Node, before: Node) -> str | None:
        if is_view(node):
            return None
        here, there = self.storage.position[node], self.storage.position[before]
        low, high = (here + 1, there) if here < there else (there, here)
        write = self._first_write(node.all_input_nodes, low, high)
        return f"{write.name} writes what {node.name} reads in between" if write is not None else None

    def _first_write(self, values: Iterable[Node], low: int, high: int) -> Node | None:
        """The first write at a position in [low, high) to storage of the values."""
        found: tuple[int, Node] | None = None
        for root in {root for value in values for root in self.storage.roots(value)}:
            entries = self.storage.writes(root)
            for _, writer in entries:
                self._check_place(writer)
            index = bisect_left(entries, low, key=lambda entry: entry[0])
            if index < len(entries) and entries[index][0] < high and (found is None or entries[index][0] < found[0]):
                found = entries[index]
        return found[1] if found is not None else None

    def _fingerprint(self) -> tuple[int, int]:
        return len(self._graph.nodes), private.names_used(self._graph)

    def _check(self, *nodes: Node) -> None:
        if self._fingerprint() != self._state:
            raise _stale("nodes were added or erased")
        for node in nodes:
            self._check_place(node)

    def _check_place(self, node: Node) -> None:
        if node not in self._keys:
            raise _stale(f"{node.name} is new")
        if private.node_order_key(node) != self._keys[node]:
            raise _stale(f"{node.name} was moved")


def _stale(what: str) -> ContractError:
    return ContractError(
        f"the graph changed since it was analysed: {what}", place="PurityIndex", remedy="make a new index"
    )


def eliminate_dead_code(graph: Graph) -> int:
    """Erase every node that has no user and is nothing but its value; returns how many were erased.

    Unlike torch.fx's own, it keeps in-place calls, out-variants, ops of libraries whose schemas need not be complete,
    collectives and their waits.
    """
    erased = 0
    for node in reversed(graph.nodes):
        if not node.users and may_delete(node):
            graph.erase_node(node)
            erased += 1
    return erased
