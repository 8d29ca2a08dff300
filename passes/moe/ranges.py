"""The range of the integers in a node, read off the graph: may an id be negative?

As an index a number below zero counts from the last expert; for the op it is an expert of another rank. So a spelling
that takes ids as an index is lifted only where they are known to be no less than zero:

    topk(scores, k).indices                              from 0 to the size of the dimension
    (ids - first).clamp(min=0), where(ids >= 2, ids - 2, 0)   from 0
    ids - 1, where(kept, ids, -1)                        from -1
    ids.to(int8), ids * 2**62                            from 0 if every number fits, else anything: it wraps
    a table in a buffer                                  from its smallest to its largest number
    an integer input, if it is the only one              taken to be numbers of experts, from 0
    several inputs, an op that is not known              any number of their dtype

A range holds for every input, NaN included: a float that is computed from one without bounds has none, and becomes any
integer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from k3rewrite import _torch_private as private
from k3rewrite.capture.constants import integer_range, range_of
from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.passes.moe.intervals import ANY, BIT, ZERO, Range, held, is_integral, name_of, of_dtype, of_number
from k3rewrite.passes.moe.range_rules import MOST_EXPERTS, MOST_PLACES, RULES
from k3rewrite.passes.moe.routing import FILLED, FULL, SCALAR
from k3rewrite.patterns import OPERATORS

Arguments = Mapping[str, Any]

_SAME = frozenset({
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t", "slice",
    "select", "alias", "detach", "clone", "contiguous", "flip", "roll", "repeat", "repeat_interleave", "split",
    "split_with_sizes", "chunk", "unbind", "unfold", "diagonal", "as_strided", "gather", "index", "index_select",
    "take", "embedding", "amax", "amin", "max", "min", "sort", "topk", "narrow", "flatten", "lift_fresh_copy",
    "all_gather_into_tensor", "all_to_all_single", "wait_tensor", "broadcast", "cummax", "cummin", "triu", "tril",
    "rot90",
})  # fmt: skip
"""ops whose (first) result holds numbers of their tensor only; `triu` and `tril` zeros beside them"""
_SOURCES = ("self", "input", "weight", "tensor", "a")
"""how such ops call their tensor"""
_PLACES = frozenset({
    "argsort", "argmax", "argmin", "nonzero", "bincount", "histc", "searchsorted", "bucketize", "sym_size",
    "multinomial", "count_nonzero",
})  # fmt: skip
"""ops that give places, or numbers of things"""
_LOOKED_UP = frozenset({"gather", "index", "index_select", "embedding", "take"})
"""ops that read their numbers from a table"""
_PLACES_SECOND = frozenset({"sort", "topk", "max", "min", "kthvalue", "mode", "median", "cummax", "cummin"})
"""ops whose second result is the places of the first"""
LEVELS = 64
"""how far up a range is looked for: far more than a router has steps"""


@dataclass
class Ranges:
    """Ranges of the nodes of one graph, each found once."""

    known: dict[Node, Range] = field(default_factory=dict)
    unknown: list[Node] = field(default_factory=list)
    """nodes of ops of which nothing is known"""

    def of_ids(self, node: Node) -> Range:
        """The range of ids: of what is computed from one input alone, which then holds numbers of experts."""
        given = _inputs_of(node)
        if len(given) == 1 and range_of(given[0]) is None:
            self.known[given[0]] = Range(0, min(MOST_EXPERTS, of_dtype(given[0].meta["val"]).high))
        return self.of(node)

    def of(self, node: Any, levels: int = LEVELS) -> Range:
        """The range of a tensor, or of a number that stands for one."""
        if not isinstance(node, Node):
            return of_number(node)
        if node not in self.known:
            self.known[node] = self._found(node, levels - 1) if levels else of_dtype(node.meta.get("val"))
        return self.known[node]

    def _found(self, node: Node, levels: int) -> Range:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return Range(private.symbolic_least(value), inf)
        if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
            return BIT
        if node.op != "call_function":
            return _of_input(node, value)
        found = self._filled(node)
        if found is None:
            found = self._computed(node, levels)
        if not isinstance(value, torch.Tensor):
            return found
        if value.dtype.is_floating_point and not self._is_bounded(node, levels):
            return ANY  # it may be NaN
        return held(found, value.dtype)

    def _is_bounded(self, node: Node, levels: int) -> bool:
        inputs = (n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor))
        return all(self.of(n, levels).is_bounded for n in inputs)

    def _filled(self, node: Node) -> Range | None:
        """Of a tensor that is filled with a number."""
        if node.target in FILLED:
            return Range(FILLED[node.target], FILLED[node.target])
        if node.target in FULL or node.target is SCALAR:
            arguments = bound_arguments(node)
            return self.of(arguments["s" if node.target is SCALAR else "fill_value"])
        return None

    def _computed(self, node: Node, levels: int) -> Range:
        if node.target is getitem:
            return self._item(node, levels)
        name, arguments, value = name_of(node), bound_arguments(node), node.meta.get("val")

        def of(argument: str, default: float = 0) -> Range:
            given = arguments.get(argument)
            return Range(default, default) if given is None else self.of(given, levels)

        if name in _PLACES:
            most = _places(arguments) if name in ("argsort", "argmax", "argmin") else MOST_PLACES
            return Range(0, min(most, of_dtype(value).high))
        source = next((arguments[n] for n in _SOURCES if n in arguments), None)
        if (
            source is not None
            and "other" not in arguments
            and (node.target in OPERATORS["cast"] or (name in _SAME and _same_dtype(source, value)))
        ):
            found = self.of(source, levels)
            return found | ZERO if name in ("triu", "tril") else found
        if name in ("cat", "stack"):
            parts = [self.of(part, levels) for part in arguments["tensors"]]
            return Range(min(r.low for r in parts), max(r.high for r in parts))
        if name not in RULES:
            self.unknown.append(node)
            return of_dtype(value)
        return RULES[name](of, arguments, node, lambda n: self.of(n, levels))

    def _item(self, node: Node, levels: int) -> Range:
        """One result of an op that has several."""
        source, number = node.args
        assert isinstance(source, Node)
        name, arguments = name_of(source), bound_arguments(source)
        if number == 1 and (name in _PLACES_SECOND or name == "route"):
            return Range(0, _places(arguments))
        if (number == 0 and name in _PLACES_SECOND) or name in _SAME:
            return self.of(arguments["self"], levels)
        self.unknown.append(source)
        return of_dtype(node.meta.get("val"))


def _places(arguments: Arguments) -> int:
    """The last place of what is sorted, or looked through: of a dimension, or of all elements."""
    value = arguments.get("self", arguments.get("logits")).meta["val"]  # type: ignore[union-attr]
    dim = arguments.get("dim", -1)
    size = value.numel() if dim is None or not value.dim() else value.shape[dim]
    return max(size - 1, 0) if isinstance(size, int) else MOST_PLACES


def _same_dtype(source: Any, value: Any) -> bool:
    before = source.meta.get("val") if isinstance(source, Node) else None
    after = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.dtype == after.dtype


def _of_input(node: Node, value: Any) -> Range:
    if not is_integral(value):
        return ANY
    if node.op == "get_attr":  # a tensor that the model makes of numbers
        number = getattr(node.graph.owning_module, str(node.target), None)
        known = integer_range(number) if isinstance(number, torch.Tensor) else None
    else:
        known = range_of(node)
    return of_dtype(value) if known is None else Range(*known)


def _inputs_of(node: Node) -> list[Node]:
    """Tensors of integers that are inputs of the graph, from which the node is computed place by place: not the tables
    that something is looked up in."""
    found: dict[Node, None] = {}
    stack, seen = [node], {node}
    while stack:
        at = stack.pop()
        if at.op == "placeholder":
            found[at] = None
        if name_of(at) in _LOOKED_UP:
            continue
        for above in at.all_input_nodes:
            value = above.meta.get("val")
            if above not in seen and is_integral(value) and value.dtype != torch.bool and value.dim() > 0:
                seen.add(above)
                stack.append(above)
    return list(found)
