"""What a partial match knows, what a whole one is, and the deepest failure of the tries that were none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.provenance import source_line
from k3rewrite.patterns.pattern import OPERATORS


@dataclass(frozen=True)
class Bindings:
    """What a partial match has bound (name -> node, number, dtype ...) and which nodes it covers, in match order."""

    values: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()

    def bind(self, name: str | None, value: Any) -> Bindings | None:
        """With `name` bound; None if it is bound to something else."""
        if name is None:
            return self
        if name in self.values:
            return self if same(self.values[name], value) else None
        return Bindings({**self.values, name: value}, self.nodes)

    def cover(self, node: Node) -> Bindings:
        return self if node in self.nodes else Bindings(self.values, (*self.nodes, node))


def same(a: Any, b: Any) -> bool:
    """Identity for nodes, equality with equal types for numbers (1 is not 1.0, True is not 1), also inside of lists."""
    if isinstance(a, Node) or isinstance(b, Node):
        return a is b
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


class Unlike(Exception):
    """What is not as a rule expects, and where: for rules that read the graph in their own way."""

    def __init__(self, reason: str, node: Node | None = None) -> None:
        super().__init__(reason)
        self.reason, self.node = reason, node


@dataclass
class Attempt:
    """The deepest failure seen while one site was tried.

    Failures of partial matches that hold the site outrank those that do not: a root further down may belong to a
    neighbouring site, and what is wrong there is no reason for this one.
    """

    anchor: Node
    rank: tuple[bool, int] = (False, -1)
    node: Node | None = None
    expected: str = ""
    found: str = ""
    reason: str = ""

    def fail(self, env: Bindings, at: Any, expected: str, found: str, reason: str = "") -> None:
        rank = (self.anchor in env.nodes, len(env.nodes))
        if rank > self.rank:
            self.rank = rank
            self.node = at if isinstance(at, Node) else (env.nodes[-1] if env.nodes else None)
            self.expected, self.found = expected, found
            self.reason = reason or f"expected {expected}, found {found}"

    def because(self, unlike: Unlike) -> None:
        """The reason of a site that a rule has read itself."""
        self.node, self.reason = unlike.node, unlike.reason

    def absorb(self, other: Attempt) -> None:
        """Keep what the other has seen if it is deeper."""
        if other.rank > self.rank:
            self.rank, self.node, self.reason = other.rank, other.node, other.reason
            self.expected, self.found = other.expected, other.found


@dataclass(frozen=True)
class Match:
    """A pattern found: the root's node, everything bound, and the nodes that the rewrite would replace."""

    root: Node
    bindings: Mapping[str, Any]
    nodes: frozenset[Node]

    def __getitem__(self, name: str) -> Any:
        return self.bindings[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.bindings.get(name, default)

    def value(self, name: str) -> torch.Tensor:
        """The fake tensor of a bound node."""
        return self.bindings[name].meta["val"]


def cast_source(node: Node) -> Node | None:
    """The node that `node` casts, if it changes the dtype and nothing else (device, layout, strides)."""
    if node.op != "call_function" or node.target not in OPERATORS["cast"] or not isinstance(node.args[0], Node):
        return None
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    arguments = bound_arguments(node)
    plain = before.device == after.device and arguments.get("memory_format") in (None, torch.preserve_format)
    return node.args[0] if plain and before.dtype != after.dtype else None


def dtype_of(value: Any) -> torch.dtype | None:
    tensor = value.meta.get("val") if isinstance(value, Node) else None
    return tensor.dtype if isinstance(tensor, torch.Tensor) else None


def describe(value: Any) -> str:
    """`mul (net.py:12 in forward)` for a node, the value itself for a constant."""
    if not isinstance(value, Node):
        return repr(value) if not isinstance(value, (list, tuple)) else f"a list of {len(value)}"
    if value.op != "call_function":
        return "the output of the graph" if value.op == "output" else f"{value.op} {value.name}"
    target = value.target
    label = target._opname if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    return f"{label} '{value.name}' ({source_line(value)})"
