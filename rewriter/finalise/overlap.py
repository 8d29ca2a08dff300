"""Refuse to run a compiled graph on inputs that overlap in memory where one of them is written.

A graph is made for inputs that are apart (AOTAutograd merges those that it sees overlapping), and torch 2.13 calls it
with overlapping ones all the same: two views of one buffer gave [3, 3, 3, 3] instead of [4, 4, 3, 3]. A full check
costs a sort; it is made again only when an address, a size or a stride changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph

from k3rewrite import _torch_private as private
from k3rewrite.errors import UnsupportedError
from k3rewrite.graph.storage import StorageMap

_Place = tuple[int, torch.Size, tuple[int, ...]]
"""first address, sizes and strides of an input: which bytes it may touch (the graph fixes its dtype)"""


class OverlapCheck:
    """Call it with a graph's inputs before they are used.

    Raises UnsupportedError if a written input overlaps another one.
    """

    def __init__(self, graph: Graph, static_inputs: Sequence[int] = ()) -> None:
        storage = StorageMap(graph)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        written = {root.node for root in storage.written if root.node.op == "placeholder"}
        self.names = [node.name for node in placeholders]
        self.written = [i for i, node in enumerate(placeholders) if node in written]
        static = set(static_inputs) - set(self.written)
        self.tensors = [i for i, n in enumerate(placeholders) if isinstance(n.meta.get("val"), torch.Tensor)]
        self._watched = [i for i in self.tensors if i not in static]
        self._checked: tuple[_Place, ...] | None = None

    @property
    def needed(self) -> bool:
        """False for a graph that writes none of its inputs."""
        return bool(self.written)

    def __call__(self, inputs: Sequence[Any]) -> None:
        """Check addresses; at once if no address, no size and no stride has changed since the last check."""
        if not self.written or isinstance(inputs[self.written[0]], private.FakeTensor):
            return
        places = tuple([(t.data_ptr(), t.shape, t.stride()) for i in self._watched if (t := inputs[i]) is not None])
        if places == self._checked:
            return
        self._check(inputs)
        self._checked = places

    def _check(self, inputs: Sequence[Any]) -> None:
        # an effect token is a tensor in the graph and None in a call
        spans = sorted((*_span(t), i) for i in self.tensors if (t := inputs[i]) is not None and t.numel())
        written = set(self.written)
        for place, (_, end, i) in enumerate(spans):
            for start, _, j in spans[place + 1 :]:
                if start >= end:
                    break
                if (i in written or j in written) and not _apart(inputs[i], inputs[j]):
                    raise UnsupportedError(
                        "the two overlap in memory and one of them is written, which this graph was not made for",
                        place=f"inputs {self.names[i]} and {self.names[j]}",
                        remedy="give each a storage of its own, or reset torch.compile and compile with these inputs",
                    )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and byte after the last that a tensor may touch (strides are never negative)."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.element_size()


def _apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and private.definitely_disjoint(a, b)
