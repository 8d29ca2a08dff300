"""The one in-place step of a pipeline: a result takes over the storage of the argument that it replaces.

    out, state' = k3::step(x, state)                 out = k3::step_(x, state)        (writes state)
    copy_(state, state')                        ->

State is functional in every pass before this one. Which result may go where is said by the op (`Op.inplace`), whether
nobody can tell the difference is found by `takeover.py`; each decision is recorded with its reason.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from k3rewrite.finalise.replay import relative_views
from k3rewrite.finalise.takeover import Offer, Plan, copy_offer, plan_takeovers
from k3rewrite.graph.arguments import bound_arguments, every_node
from k3rewrite.graph.provenance import inherit_meta, source_line
from k3rewrite.graph.storage import StorageMap
from k3rewrite.ops.binding import KERNEL_KEY, REASON_KEY
from k3rewrite.ops.inplace_variant import InplaceVariant, ensure_registered, inplace_variant
from k3rewrite.ops.vocabulary import Op

PASS_NAME = "reuse_storage"

MakeVariant = Callable[[Op, Sequence[str]], InplaceVariant]


@dataclass(frozen=True)
class ReuseRecord:
    """What was decided about one argument of one node. `reason` is empty if it is written in place."""

    node: str
    op: str
    argument: str
    done: bool
    reason: str
    source: str


def reuse_storage(
    module: GraphModule,
    ops: Mapping[torch._ops.OpOverload, Op],
    *,
    make_variant: MakeVariant = inplace_variant,
) -> list[ReuseRecord]:
    """Rewrite calls of `ops` to their in-place variants where nothing can tell the difference.

    `ops` maps the target of a node to its declaration; calls of other targets are left alone. A variant that is not
    known to the dispatcher yet is registered. Returns one record for each declared argument of each call, in graph
    order. Everything is decided before the first change.
    """
    graph = module.graph
    plan = plan_takeovers(graph, lambda node: _offers(ops, node))
    records = _records(plan, ops)
    by_node: dict[Node, list[Offer]] = {}
    for offer in plan.accepted:
        by_node.setdefault(offer.node, []).append(offer)
    variants = {node: make_variant(ops[_target(node)], _in_order(ops[_target(node)], offers))
                for node, offers in by_node.items()}  # fmt: skip
    for variant in variants.values():
        ensure_registered(variant)
    for node, offers in by_node.items():
        _write_in_place(graph, node, variants[node], offers)
    for offer in plan.already_there:
        drop_copy(offer.node)
    for copy in plan.superfluous:
        drop_copy(copy)
    if plan.accepted:
        graph.lint()
        module.recompile()
    return records


def drop_copy(copy: Node) -> None:
    """Erase a copy into a place that holds the value already; who read its result reads the place."""
    target = copy.args[0]
    assert isinstance(target, Node)
    copy.replace_all_uses_with(target)
    copy.graph.erase_node(copy)


def _target(node: Node) -> torch._ops.OpOverload:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target


def _offers(ops: Mapping[torch._ops.OpOverload, Op], node: Node) -> list[Offer]:
    if (copy := copy_offer(node, only_if_there=True)) is not None:
        return [copy]
    op = ops.get(node.target) if isinstance(node.target, torch._ops.OpOverload) else None
    if op is None or not op.inplace:
        return []
    bound = bound_arguments(node)
    offers = []
    for argument, index in op.inplace.items():
        value = bound.get(argument)
        if not isinstance(value, Node):
            continue
        overlap = partial(_read_objection, op) if op.inplace_reads is not None else None
        offers.append(Offer(node, argument, value, _result_nodes(node, index), overlap))
    return offers


def _result_nodes(node: Node, index: int) -> tuple[Node, ...]:
    if len(_target(node)._schema.returns) == 1:
        return (node,)
    return tuple(u for u in node.users if u.target is operator.getitem and u.args[1] == index)


def _read_objection(op: Op, offer: Offer, storage: StorageMap) -> str | None:
    """Ask the op whether what it reads through another view of the storage is ever what it writes."""
    assert op.inplace_reads is not None
    bound = bound_arguments(offer.node)
    nodes = dict.fromkeys([offer.value, *every_node(bound)])
    shared = [n for n in nodes if storage.same_storage(n, offer.value)]
    views = relative_views(storage.graph, shared)
    if views is None:
        return f"how {', '.join(n.name for n in shared)} overlap is not known"
    place = dict(zip(shared, views, strict=True))
    return op.inplace_reads(map_arg(bound, lambda n: place[n] if n in place else n.meta.get("val")))


def _in_order(op: Op, offers: Sequence[Offer]) -> tuple[str, ...]:
    written = {offer.argument for offer in offers}
    return tuple(name for name in op.inplace if name in written)


def _write_in_place(graph: Graph, node: Node, variant: InplaceVariant, offers: Sequence[Offer]) -> None:
    with graph.inserting_before(node):
        new = graph.call_function(variant.overload, node.args, dict(node.kwargs))
    inherit_meta(new, [node], PASS_NAME)
    new.meta.update({key: node.meta[key] for key in (KERNEL_KEY, REASON_KEY) if key in node.meta})
    assert variant.base is not None
    # Read the arguments now: an earlier call of a chain may have taken over what was offered here.
    current = bound_arguments(node)
    taken = {variant.base.inplace[offer.argument]: current[offer.argument] for offer in offers}
    results = len(_target(node)._schema.returns)
    if results == 1:
        node.replace_all_uses_with(current[offers[0].argument])
        graph.erase_node(node)
        return
    values: Any = node.meta.get("val")
    if values is not None and variant.kept:
        new.meta["val"] = values[variant.kept[0]] if len(variant.kept) == 1 else tuple(values[i] for i in variant.kept)
    for user in list(node.users):
        index = user.args[1]
        assert isinstance(index, int)
        if index in taken:
            user.replace_all_uses_with(taken[index])
        elif len(variant.kept) == 1:
            user.replace_all_uses_with(new)
        else:
            user.args = (new, variant.kept.index(index))
            continue
        graph.erase_node(user)
    graph.erase_node(node)


def _records(plan: Plan, ops: Mapping[torch._ops.OpOverload, Op]) -> list[ReuseRecord]:
    decided = [(offer, "") for offer in plan.accepted] + plan.refused
    position = {node: i for i, node in enumerate(decided[0][0].node.graph.nodes)} if decided else {}
    decided.sort(key=lambda entry: position[entry[0].node])
    return [
        ReuseRecord(o.node.name, ops[_target(o.node)].name, o.argument, not reason, reason, source_line(o.node))
        for o, reason in decided
    ]
