"""The sites of a graph: the down projection of some experts, and the largest value around it that is their mixture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.passes.moe.experts import Experts, experts_of
from k3rewrite.passes.moe.expression import Apply, Product, uncast
from k3rewrite.passes.moe.index import Axis, Unreadable
from k3rewrite.passes.moe.neighbourhood import is_separate_expert, roots_of
from k3rewrite.passes.moe.ranges import Ranges
from k3rewrite.passes.moe.reader import Reader
from k3rewrite.passes.moe.routing import is_constant
from k3rewrite.passes.moe.tables import check_tables
from k3rewrite.passes.moe.views import SPLITS
from k3rewrite.passes.moe.weights import NotExperts, Weight


@dataclass(frozen=True)
class Site:
    """A mixture in the graph: its root, the nodes that go away with it, and the nodes that the op reads."""

    root: Node
    nodes: frozenset[Node]
    experts: Experts
    x: Node
    ids: Node
    weights: Node
    distinct: bool = False
    """whether the model means the same only if no id stands twice in a row, as its top-k sees to"""


def site_around(anchor: Node) -> Iterator[Site | NotExperts]:
    """Every mixture with `anchor` as its down projection, the largest first; then the reasons of the other roots."""
    if is_separate_expert(anchor):
        yield NotExperts(
            "each expert's weights are a tensor of its own, and stacking them would copy them in every call: keep them "
            "in one tensor, and take w[e] in the loop",
            anchor,
        )
        return
    reader = Reader(anchor)
    reasons: list[NotExperts] = []
    wrong_sum = False
    for root in roots_of(reader.region, reader.seeds):
        is_sum = _is_sum(reader, root)
        if wrong_sum and is_sum:
            continue  # a part of a loop in which something is wrong
        try:
            yield _site(root, anchor, reader)
        except Unreadable as reason:
            reasons.append(NotExperts(str(reason), root))
        except NotExperts as reason:
            reasons.append(reason)
            wrong_sum |= is_sum and reason.progress > 0
    blocked = [NotExperts(text, node) for node, text in sorted(reader.blocked.items())]
    yield from [*blocked, *_most_telling(reasons)] or [NotExperts("its result is used by nothing that sums routes")]


def _is_sum(reader: Reader, root: Node) -> bool:
    bare, _ = uncast(reader.value(root).element)
    return isinstance(bare, Apply) and bare.name == "add"


def _most_telling(reasons: list[NotExperts]) -> list[NotExperts]:
    """The reasons of roots that look like a mixture come first."""
    return sorted(reasons, key=lambda reason: -reason.progress)


def _site(root: Node, anchor: Node, reader: Reader) -> Site:
    value = reader.value(root)
    bare, _ = uncast(value.element)
    if root not in reader.products or (isinstance(bare, Product) and bare.node in reader.seeds):
        raise NotExperts("its result is used by nothing that sums routes", root, progress=0)
    experts = experts_of(value)
    tokens = tuple(axis for dim in experts.tokens for axis in dim)
    x = _input(reader, "the input", experts, (experts.inputs,), experts.x, tokens)
    ids = _input(reader, "the ids", experts, (experts.slots,), experts.ids, tokens)
    weights = _input(reader, "the routing weights", experts, (experts.slots,), experts.weights, tokens)
    stops = {x, ids, weights}
    for weight in (experts.w_gate, experts.w_up, experts.w_down):
        stops |= _storage(weight)
    nodes = _between(root, stops, reader)
    if anchor not in nodes:
        raise NotExperts("the down projection is not part of this sum", root, progress=0)
    _check_sizes(experts, ids, weights)
    _check_groups(reader, nodes, experts.w_down)
    if ids.meta["val"].dtype == torch.bool:
        raise NotExperts("the ids are booleans", ids, progress=4)
    if not experts.compared:
        _check_signs(ids)
    for weight in (experts.w_gate, experts.w_up, experts.w_down):
        check_tables(weight)
    return Site(root, frozenset(nodes), experts, x, ids, weights, distinct=not nodes.isdisjoint(reader.distinct))


def _input(
    reader: Reader, what: str, experts: Experts, last: tuple[tuple[Axis, ...], ...], element: Any,
    tokens: tuple[Axis, ...],
) -> Node:  # fmt: skip
    node = reader.find((tokens, *last), element) or reader.find((*experts.tokens, *last), element)
    if node is None:
        raise NotExperts(f"{what} of the experts are not rows of a tensor, one for each token", None, progress=3)
    return node


def _check_sizes(experts: Experts, ids: Node, weights: Node) -> None:
    one, other = ids.meta["val"].shape, weights.meta["val"].shape
    if not experts.slots and not same_sizes(one, other) and not same_size(one[-1], 1):
        raise NotExperts("ids and routing weights have different shapes", ids)
    counts = [w.values.node.meta["val"].shape[w.values.expert_dim] for w in (experts.w_gate, experts.w_up)]
    last = experts.w_down.values
    if not same_sizes(counts, [last.node.meta["val"].shape[last.expert_dim]] * 2):
        raise NotExperts("gate, up and down projection are stacks of different numbers of experts", last.node)


def _check_groups(reader: Reader, nodes: set[Node], weight: Weight) -> None:
    """Groups must have been counted for every expert: rows of one that was not counted are taken for another's."""
    stored = weight.values
    count = stored.node.meta["val"].shape[stored.expert_dim]
    for node in sorted(nodes & reader.counted.keys()):
        groups, spare = reader.counted[node]
        if not same_size(groups, count) and not (spare and same_size(groups + spare, count)):
            raise NotExperts(
                f"the groups are looked for among the ends of {groups}, of {count} experts", node, progress=4
            )


def _check_signs(ids: Node) -> None:
    """Ids that are an index must be known to be none below zero."""
    ranges = Ranges()
    if ranges.of_ids(ids).low >= 0:
        return
    reason = "the ids may be negative: as an index such a number counts from the last expert"
    if ranges.unknown:
        source = ranges.unknown[0]
        reason += f"; nothing is known of what {source.target} gives"
    raise NotExperts(f"{reason}; if none is below zero, .clamp(min=0) says so", ids, progress=4)


def _storage(weight: Weight) -> set[Node]:
    nodes = {weight.values.node} | ({weight.scales.node} if weight.scales is not None else set())
    return nodes | {node for node, _ in weight.tables}


def _between(root: Node, stops: set[Node], reader: Reader) -> set[Node]:
    """What the root is computed from, down to the nodes that the op reads."""
    found: set[Node] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        inside = node.op == "call_function" and (node in reader.read or is_constant(node) or node.target in SPLITS)
        if node in found or node in stops or not inside:
            continue
        found.add(node)
        stack.extend(node.all_input_nodes)
    return found
