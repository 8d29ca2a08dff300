"""A rule: a pattern, a guard that gives reasons, a replacement, examples and counterexamples.

    class LiftRmsNorm(Rule):
        anchors = OPERATORS["rsqrt"]                     # every node of these is a candidate site and is counted
        pattern = call("mul", Var("x"), call("rsqrt", ..., name="anchor"))
        def check(self, match): ...                      # None, or a Refusal with the reason
        def build(self, match, builder, exposed): ...    # new nodes: {"root": ...} and one for each name in exposed

A rule without an example and a counterexample cannot be instantiated: a pattern that nobody has seen match, or seen
refuse, is not known to work.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from k3rewrite import _torch_private as private
from k3rewrite.errors import UnsupportedError
from k3rewrite.graph.cost import node_value
from k3rewrite.graph.provenance import inherit_meta
from k3rewrite.patterns.bindings import Attempt, Match
from k3rewrite.patterns.match import match_site
from k3rewrite.patterns.pattern import Pattern


class Policy(str, Enum):
    """What a rewrite may do to numbers."""

    EXACT = "exact"
    """the same operations in the same order: bit-equal"""
    REASSOCIATES = "reassociates"
    """the same roundings to narrow dtypes; sums and products inside the compute dtype may associate differently"""
    CHANGES_ROUNDING = "changes_rounding"
    """a rounding to a narrow dtype is added or dropped; must be switched on in YAML"""


@dataclass(frozen=True)
class Refusal:
    """Why a match is not rewritten; `node` is the place that decides it, `built` says that the replacement was there
    and was turned down (contract, storage, `Rule.accept`), `declined` that it was by `Rule.accept`. A rule that knows
    so without building sets both."""

    reason: str
    node: Node | None = None
    built: bool = False
    declined: bool = False


@dataclass(frozen=True)
class Example:
    """A function whose graph the rule must rewrite exactly `sites` times; `inputs` makes its arguments."""

    name: str
    function: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    sites: int = 1


@dataclass(frozen=True)
class CounterExample:
    """A function that looks like the pattern and must be left alone, for a reason that contains `reason`.

    `others` are in the reasons of what else the anchor sees in it.
    """

    name: str
    function: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    reason: str
    others: tuple[str, ...] = ()


class Builder:
    """Makes the nodes of a replacement: values are computed on fake tensors, metadata is inherited."""

    def __init__(self, graph: Graph, before: Node, sources: Sequence[Node], origin: str) -> None:
        self._graph, self.before, self._sources, self._origin = graph, before, sources, origin
        self.made: list[Node] = []

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A call with its fake value; errors of the op's shape function surface here, before anything is replaced.

        Raises UnsupportedError, which makes the match a miss, if an argument is a symbolic size itself and not the node
        that computes it: the graph would hold the number that it was traced with.
        """
        _refuse_raw_sizes(target, (args, kwargs))
        with self._graph.inserting_before(self.before):
            node = self._graph.call_function(target, args, kwargs)
        self.made.append(node)
        node.meta["val"] = target(*node_value(args), **node_value(kwargs))
        inherit_meta(node, self._sources, self._origin)
        return node

    def item(self, node: Node, index: int) -> Node:
        """Result `index` of a call with several results."""
        with self._graph.inserting_before(self.before):
            item = self._graph.call_function(operator.getitem, (node, index))
        self.made.append(item)
        item.meta["val"] = node.meta["val"][index]
        inherit_meta(item, self._sources, self._origin)
        return item

    def discard(self) -> None:
        """Take back everything made; the graph is as it was."""
        for node in reversed(self.made):
            self._graph.erase_node(node)
        self.made.clear()


def _refuse_raw_sizes(target: Callable[..., Any], arguments: Any) -> None:
    def check(value: Any) -> Any:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise UnsupportedError(
                f"the symbolic size {private.symbolic_text(value)} would be frozen to the number of the first call",
                place=f"Builder.call({target})",
                remedy="give the node that computes the size, or count from the end (-1)",
            )
        return value

    map_aggregate(arguments, check)


class Rule(ABC):
    """See the module docstring. `reach` bounds how many users away from the anchor the root may lie."""

    name: ClassVar[str]
    policy: ClassVar[Policy]
    anchors: ClassVar[frozenset[Any]]
    pattern: ClassVar[Pattern]
    reach: ClassVar[int] = 6
    exposable: ClassVar[frozenset[str]] = frozenset()
    """names of inner values that may have users outside of the match: the replacement returns them too"""
    may_move_strides: ClassVar[bool] = False
    """whether a replacement may be laid out in another way than what it replaces, where every reader can do with that
    (`graph/strides.py`)"""

    def __init__(self) -> None:
        if not self.examples() or not self.counterexamples():
            raise TypeError(f"rule {self.name} needs at least one example and one counterexample")

    def is_site(self, node: Node) -> bool:
        """Narrow the anchors where the target alone says too little (say, pow with one exponent)."""
        return True

    def matches(self, anchor: Node) -> tuple[Iterator[Match], Attempt]:
        """What may be rewritten around an anchor, best first, and why there is nothing if there is not: the pattern's
        matches. A rule whose sites have too many forms for a pattern reads the graph in its own way here."""
        return match_site(self.pattern, anchor, reach=self.reach)

    def check(self, match: Match) -> Refusal | None:
        """None if the match means what the rule takes it for."""
        return None

    def policy_of(self, match: Match) -> Policy:
        """The numerics policy of this very match (a rule's modes may differ)."""
        return self.policy

    def region_values(self, match: Match, seed: int) -> Mapping[Node, Tensor]:
        """Values for inputs of a site that a check by execution takes instead of random ones, where those say little:
        ids of experts, packed bytes, a table of the model."""
        return {}

    @abstractmethod
    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        """New nodes by name: "root" and every name in `exposed`."""

    def reader_objection(self, reader: Node, value_of: Callable[[Node], Any]) -> str | None:
        """Why a reader of a result cannot do with other strides though its op could, or None. `value_of` gives the
        value that an argument would have."""
        return None

    def describe(self, match: Match, new: Mapping[str, Node]) -> str:
        """What stands there now, for the report."""
        return new["root"].name

    def accept(self, match: Match, new: Mapping[str, Node]) -> Refusal | None:
        """A last condition, on the nodes that `build` has made: None, or why they are taken away again. The site then
        counts as refused and not as missed, because it was recognised."""
        return None

    @abstractmethod
    def examples(self) -> Sequence[Example]:
        """Functions that must be rewritten."""

    @abstractmethod
    def counterexamples(self) -> Sequence[CounterExample]:
        """Functions that must be left alone, each with the reason that the rule must give."""
