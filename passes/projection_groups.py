"""Groups of projections: which of a family become one GEMM, where each weight lies in its stack, and why others stay.

    q [1536], b [12], k [1536] of one x       ->     q 0..1536 | k 1536..3072 | b 3072..3084 | padding to 3088

A group is merged or not as a whole; what keeps a single projection out of it (its weight cannot move, a reader needs
its rows to be neighbours) makes that one stay alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.strides import NeedsStrides, with_strides
from k3rewrite.graph.weights import Weight, cannot_move, lie_together, weight_of
from k3rewrite.ops.vocabulary import size_hint
from k3rewrite.passes.projections import MLP, Projection, aten, count

ReaderObjection = Callable[[Node, Callable[[Node], Any]], "str | None"]
MOST = 64
"""projections of a group"""
_ALIGNED_BYTES = 16
"""where a part of a row of the result begins: what vector loads and the GEMM libraries ask for"""


@dataclass(frozen=True)
class Limits:
    """What is merged. See the options of the pass."""

    min_group: int = 2
    max_rows: int = 131072
    max_tokens: int = 256
    multiple: int = 16


@dataclass(frozen=True)
class Part:
    """A weight's place in the stack."""

    projection: Projection
    weight: Node
    start: int
    rows: int


@dataclass(frozen=True)
class Group:
    """Projections that become one, or stay as they are for a `reason`; `place` is the node that decides it.

    `declined` says that they could be one, and that it is not worth it, or that all of their weights are held.
    """

    members: tuple[Projection, ...]
    reason: str = ""
    place: Node | None = None
    declined: bool = False
    parts: tuple[Part, ...] = ()
    rows: int = 0
    joined: tuple[tuple[Node, Part, Part], ...] = ()
    """concatenations of neighbours in the stack, with the first and the last of them"""

    @property
    def leader(self) -> Node:
        return self.members[0].node


@dataclass(frozen=True)
class Grouping:
    """Makes groups within limits. `objection` is asked whether a reader can do with other strides."""

    limits: Limits
    objection: ReaderObjection

    def groups_of(self, family: Sequence[Projection]) -> list[Group]:
        """Of the projections of one value: what becomes one, and each that stays, with a reason."""
        if count(family) < 2:
            return []
        alone = [Group((p,), p.objection, p.node) for p in family if p.objection]
        alike: dict[tuple[Node, bool], list[Projection]] = {}
        for projection in family:
            if projection.objection is None:
                alike.setdefault((projection.x, projection.bias is not None), []).append(projection)
        groups = alone
        for members in alike.values():
            groups += self._fitted(members, len(alike) > 1)
        return groups

    def _fitted(self, members: Sequence[Projection], different: bool) -> list[Group]:
        """The members that can be one, and those of them that cannot."""
        left_out: list[Group] = []
        left_out += [Group((p,), f"at most {MOST} projections are merged", p.node) for p in members[MOST:]]
        members = members[:MOST]
        while True:
            if reason := self._too_few(members, different, bool(left_out)):
                return [*left_out, Group(tuple(members), reason, members[0].node)] if members else left_out
            if reason := self._too_large(members):
                return [*left_out, Group(tuple(members), reason, members[0].node, declined=True)]
            group = self._laid_out(members)
            held = self._immovable(group)
            if count([member for member in members if member not in held]) < self.limits.min_group:
                reason, place = next(iter(held.values()))
                return [*left_out, Group(tuple(members), reason, place, declined=True)]
            bad = held or self._unreadable(group)
            if not bad:
                return [*left_out, group]
            left_out += [Group((p,), why, place) for p, (why, place) in bad.items()]
            members = [member for member in members if member not in bad]

    def _too_few(self, members: Sequence[Projection], different: bool, left_out: bool) -> str:
        found = count(members)
        if found >= self.limits.min_group:
            return ""
        if found > 1:
            return f"{found} projections of one value, and 'min_group' is {self.limits.min_group}"
        if left_out or not different or not members:
            return "no other projection of its input can be merged with it"
        dtype, bias = members[0].x.meta["val"].dtype, "a" if members[0].bias is not None else "no"
        return f"no other projection of its input reads it in {str(dtype).removeprefix('torch.')} and has {bias} bias"

    def _too_large(self, members: Sequence[Projection]) -> str:
        tokens = size_hint(members[0].x.meta["val"].shape[0])
        if tokens > self.limits.max_tokens:
            return f"{tokens} rows of input, and 'max_tokens' is {self.limits.max_tokens}"
        sizes = [size for member in members for weight in member.weights for size in weight.meta["val"].shape]
        if not all(isinstance(size, int) for size in sizes):
            return "a weight has a symbolic size"
        rows = sum(weight.meta["val"].shape[0] for member in members for weight in member.weights)
        return f"{rows} rows, and 'max_rows' is {self.limits.max_rows}" if rows > self.limits.max_rows else ""

    def _laid_out(self, members: Sequence[Projection]) -> Group:
        each = [(member, weight) for member in members for weight in member.weights]
        each.sort(key=lambda pair: -pair[1].meta["val"].shape[0])  # stable; what needs padding stands at the end
        aligned = max(1, _ALIGNED_BYTES // each[0][1].meta["val"].element_size())
        parts, end = [], 0
        for member, weight in each:
            start = _rounded_up(end, aligned)
            parts.append(Part(member, weight, start, weight.meta["val"].shape[0]))
            end = start + parts[-1].rows
        rows = _rounded_up(end, self.limits.multiple)
        return Group(tuple(members), parts=tuple(parts), rows=rows, joined=tuple(self._joined(parts, rows)))

    def _joined(self, parts: Sequence[Part], rows: int) -> Iterator[tuple[Node, Part, Part]]:
        """Concatenations of whole results that are neighbours in the stack: they are there already."""
        by_result = {part.projection.node: i for i, part in enumerate(parts) if part.projection.node.target is not MLP}
        seen = set()
        for cat in (user for part in parts for user in part.projection.node.users):
            if cat.target is not aten.cat.default or cat in seen:
                continue
            seen.add(cat)
            arguments = bound_arguments(cat)
            places = [by_result.get(value) for value in arguments["tensors"]]
            first = places[0]
            if first is None or arguments["dim"] not in (1, -1) or places != [*range(first, first + len(places))]:
                continue
            run = parts[first : first + len(places)]
            if all(b.start == a.start + a.rows for a, b in pairwise(run)):
                try:
                    with_strides(cat, _view(run[0], run[-1], rows), (), self.objection)
                except NeedsStrides:
                    continue  # it copies, as before
                yield cat, run[0], run[-1]

    def _immovable(self, group: Group) -> dict[Projection, tuple[str, Node | None]]:
        """Members whose weights cannot move into the stack."""
        if all(lie_together(*stored) for stored in stacks_of(group)):
            return {}
        owners = [member for member in group.members for _ in member.stored]
        reasons = cannot_move([_weight(node) for member in group.members for node in member.stored])
        return {
            owners[i]: (f"a weight cannot move into a stack: {reason}", owners[i].node) for i, reason in reasons.items()
        }

    def _unreadable(self, group: Group) -> dict[Projection, tuple[str, Node | None]]:
        """Members of which a reader cannot do with rows that lie apart."""
        found: dict[Projection, tuple[str, Node | None]] = {}
        inside = {cat for cat, _, _ in group.joined}
        for part in group.parts:
            node = part.projection.node
            if node.target is not MLP:
                try:
                    with_strides(node, _view(part, part, group.rows), inside, self.objection)
                except NeedsStrides as reader:
                    found[part.projection] = (f"its rows would lie apart: {reader.reason}", reader.node)
        return found


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _view(first: Part, last: Part, rows: int) -> torch.Tensor:
    """The columns of a merged result that are those of the parts, as a fake tensor."""
    like = first.projection.node.meta["val"]
    return like.new_empty((like.shape[0], rows)).narrow(1, first.start, last.start + last.rows - first.start)


def _weight(node: Node) -> Weight:
    weight = weight_of(node)
    assert weight is not None, "no projection without one"
    return weight


def stacks_of(group: Group) -> Iterator[tuple[list[Weight], list[int], int]]:
    """Of weights, and of biases if there are any: the members, where they begin, and the size, in bytes."""
    kinds: list[list[Node]] = [[part.weight for part in group.parts]]
    if group.members[0].bias is not None:
        kinds.append([part.projection.bias for part in group.parts if part.projection.bias is not None])
    for nodes in kinds:
        value = nodes[0].meta["val"]
        row = value.element_size() * (value.shape[1] if value.dim() > 1 else 1)
        yield [_weight(node) for node in nodes], [part.start * row for part in group.parts], group.rows * row
