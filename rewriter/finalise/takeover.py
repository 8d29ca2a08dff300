"""May the result of an op be written into the storage of one of its arguments? Liveness, and chains into an input.

    new = index_put(pool, [slot], row)          index_put_(pool, [slot], row)
    copy_(pool, new)                       ->   (the copy is gone: new is where pool is)

An offer says "this result may take that argument's storage" (from an op's declaration or a table of ATen ops). The
planner accepts an offer only if nobody can tell the difference: the old value has no later reader, no other name that
is read later, no view of another dtype; it is not returned; and no other argument of the op lives in that storage. The
storage of an input may be taken only by a chain of offers that ends in a `copy_` of the last result into that same
input, because then the input was to hold that value in the end anyway.

Planning changes nothing. It works on one snapshot of the graph and is linear in the size of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from k3rewrite import _torch_private as private
from k3rewrite.finalise.replay import replay, view_source
from k3rewrite.graph import effects
from k3rewrite.graph.arguments import every_node
from k3rewrite.graph.shapes import metadata_difference, same_size, same_sizes
from k3rewrite.graph.storage import END, Root, StorageMap, tensor_value

COPY = torch.ops.aten.copy_.default
FUNCTIONAL_COPY = torch.ops.aten.copy.default


@dataclass(frozen=True, eq=False)
class Offer:
    """Result `results` (the nodes that stand for it) of `node` may take the storage of `value`, its argument."""

    node: Node
    argument: str
    value: Node
    results: tuple[Node, ...]
    overlap: Callable[[Offer, StorageMap], str | None] | None = None
    """asked when another argument lives in the same storage; None: that is always an objection"""
    part: Callable[[torch.Tensor], torch.Tensor] | None = None
    """for a scatter of `source` into a part of `value`: the part, as a view"""
    source: Node | None = None
    only_if_there: bool = False
    """to be accepted only if the source is computed in place already, so that the node falls away"""


def copy_offer(node: Node, *, only_if_there: bool = False) -> Offer | None:
    """`aten.copy(value, source)` as a scatter of the source into the whole: nothing is left of it if that is there."""
    if node.target is not FUNCTIONAL_COPY:
        return None
    value, source = node.args[0], node.args[1]
    if not isinstance(value, Node) or not isinstance(source, Node):
        return None
    return Offer(node, "self", value, (node,), None, lambda whole: whole, source, only_if_there)


OffersOf = Callable[[Node], Sequence[Offer]]


@dataclass
class Plan:
    """What to do: accepted offers in graph order, copies that become superfluous, and who was refused and why."""

    accepted: list[Offer] = field(default_factory=list)
    already_there: list[Offer] = field(default_factory=list)
    """accepted scatters whose source is computed in place already: there is nothing left to copy"""
    superfluous: list[Node] = field(default_factory=list)
    """`copy_` nodes into an input that holds the value already"""
    refused: list[tuple[Offer, str]] = field(default_factory=list)


@dataclass(frozen=True)
class _Place:
    """Where a value would live if every offer on the way were accepted: a view of the input `root`."""

    root: Node
    view: torch.Tensor
    chain: tuple[Offer, ...]
    """offers on the way, last first"""
    inner: frozenset[Offer]
    """scatters on the way whose source is computed in place as well, so that nothing is left to copy"""

    def same(self, other: torch.Tensor) -> bool:
        """True if a view of the root covers exactly the same elements in the same order."""
        return (
            same_sizes(self.view.shape, other.shape)
            and same_sizes(self.view.stride(), other.stride())
            and same_size(self.view.storage_offset(), other.storage_offset())
            and self.view.dtype == other.dtype
        )


def plan_takeovers(graph: Graph, offers_of: OffersOf) -> Plan:
    """Decide about every offer of a graph. Copies into inputs first (all of a chain or none), then temporaries."""
    return _Planner(graph, offers_of).plan()


class _Planner:
    def __init__(self, graph: Graph, offers_of: OffersOf) -> None:
        self.graph = graph
        self.storage = StorageMap(graph)
        offers = {node: tuple(offers_of(node)) for node in graph.nodes if node.op == "call_function"}
        self.offers = {node: each for node, each in offers.items() if each}
        self.by_result = {result: o for each in self.offers.values() for o in each for result in o.results}
        self.reasons: dict[Offer, str] = {}
        self.resident: dict[Root, Node] = {}
        """storages of results that will live in an input"""
        self.result = Plan()

    def plan(self) -> Plan:
        if not self.offers:
            return self.result
        decided = self._into_inputs()
        for offers in self.offers.values():
            for offer in offers:
                if offer in decided or offer.only_if_there:
                    continue
                reason = self._objection(offer, frozenset())
                if reason is None:
                    self.result.accepted.append(offer)
                else:
                    self.result.refused.append((offer, self.reasons.get(offer, reason)))
        self.result.accepted.sort(key=lambda o: self.storage.position[o.node])
        return self.result

    # ---------------------------------------------------------------- chains into an input

    def _into_inputs(self) -> set[Offer]:
        """Accept every chain that ends in a `copy_` into the input where it starts; returns the offers accepted."""
        decided: set[Offer] = set()
        copies = [n for n in self.graph.nodes if n.target is COPY and _is_input(n.args[0])]
        if not copies:
            return decided
        places = self._places({n.args[0] for n in copies}, frozenset())
        for copy in copies:
            place, barred = self._whole_place(copy, places), frozenset[Offer]()
            while place is not None:
                failed = self._accept_chain(copy, place)
                if failed is None:
                    decided.update(place.chain)
                    break
                if not place.inner:
                    break
                # computing a scatter's source in place is optional: try again with the source computed apart
                barred = barred | {failed}
                place = self._whole_place(copy, self._places({copy.args[0]}, barred))
        return decided

    def _whole_place(self, copy: Node, places: Mapping[Node, _Place]) -> _Place | None:
        """Place of the copied value, if it is exactly where the input is."""
        target, value = copy.args[0], copy.args[1]
        if isinstance(value, Node) and value not in places and value.target is FUNCTIONAL_COPY:
            value = value.args[1]  # not where it should be: see where it is, for the reason
        place = places.get(value) if isinstance(value, Node) else None
        if place is None or not place.chain or place.root is not target:
            return None
        assert isinstance(target, Node)
        if place.same(places[target].view):
            return place
        for offer in place.chain:
            self.reasons[offer] = f"the copy into {target.name} puts the elements in another order"
        return None

    def _places(self, inputs: set[Any], barred: frozenset[Offer]) -> dict[Node, _Place]:
        """Place of every value that is, or would be, a view of one of `inputs`, if no barred offer were accepted."""
        mode = private.graph_fake_mode(self.graph)
        places: dict[Node, _Place] = {}
        if mode is None:
            return places
        with private.no_modes(), mode, torch.no_grad():
            for node in self.graph.nodes:
                if node in inputs:
                    value = tensor_value(node)
                    if value is not None:
                        places[node] = _Place(node, private.fresh_fake(mode, value), (), frozenset())
                elif (offer := self.by_result.get(node)) is not None:
                    place = places.get(offer.value) if offer not in barred else None
                    if place is not None and (extended := _extended(place, offer, places)) is not None:
                        places[node] = extended
                elif effects.is_view(node):
                    source = view_source(node)
                    if source is not None and source in places:
                        view = replay(node, source, places[source].view)
                        if isinstance(view, torch.Tensor):
                            places[node] = replace(places[source], view=view)
        return places

    def _accept_chain(self, copy: Node, place: _Place) -> Offer | None:
        """Accept all offers of a chain, or none; the offer that failed, or None if all were accepted."""
        unread = frozenset(offer.node for offer in place.inner) | {copy}
        for offer in place.chain:
            reason = self._objection(offer, unread, copy=copy, source_in_place=offer in place.inner)
            if reason is not None:
                for each in place.chain:
                    self.reasons[each] = reason if each is offer else f"{offer.node.name}, in the same chain: {reason}"
                return offer
        self.result.accepted += [offer for offer in place.chain if offer not in place.inner]
        self.result.already_there += [offer for offer in place.chain if offer in place.inner]
        self.result.superfluous.append(copy)
        for offer in place.chain:
            for result in offer.results:
                self.resident.update(dict.fromkeys(self.storage.roots(result), place.root))
        return None

    # ---------------------------------------------------------------- one offer

    def _objection(
        self, offer: Offer, unread: frozenset[Node], *, copy: Node | None = None, source_in_place: bool = False
    ) -> str | None:
        """Why the result may not take the argument's storage, or None.

        `copy` ends the chain that `offer` is in; the nodes `unread` will be gone and read nothing.
        """
        if not any(result.users for result in offer.results):
            return "the result is not used"
        roots = self.storage.roots(offer.value)
        if len(roots) != 1:
            return f"{offer.value.name} may share storage with several values"
        (root,) = roots
        return (
            self._origin_objection(offer, root, copy)
            or self._metadata_objection(offer, root, unread)
            or self._argument_objection(offer, root, source_in_place)
            or self._reader_objection(offer, root, unread, copy)
            or self._output_objection(offer, root, copy)
        )

    def _origin_objection(self, offer: Offer, root: Root, copy: Node | None) -> str | None:
        node = root.node
        if copy is None and root in self.resident:
            return f"{offer.value.name} will live in the input {self.resident[root].name}"
        if node.op == "get_attr":
            return f"{offer.value.name} is a constant of the graph"
        if node.op == "placeholder":
            if private.is_synthetic_base(node):
                return f"{node.name} stands for several overlapping inputs"
            if copy is None or copy.args[0] is not node:
                return f"{offer.value.name} belongs to the caller, and the result is not what it holds in the end"
            others = [w for _, w in self.storage.writes(root) if w is not copy]
            if others:
                return f"{node.name} is also written by {others[0].name}"
            return None
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or (
            target.namespace not in effects.TRUSTED_NAMESPACES | effects.COLLECTIVE_NAMESPACES
        ):
            return f"{node.name} may return storage of its arguments"
        return None

    def _metadata_objection(self, offer: Offer, root: Root, unread: frozenset[Node]) -> str | None:
        value = tensor_value(offer.value)
        if value is None:
            return f"nothing is known about {offer.value.name}"
        for size, stride in zip(value.shape, value.stride(), strict=True):
            if same_size(stride, 0) and not same_size(size, 1):
                return f"{offer.value.name} is expanded: its elements share memory"
        for result in offer.results:
            difference = metadata_difference(value, result.meta.get("val"))
            if difference is not None and difference.startswith("stride") and unread.issuperset(result.users):
                continue  # nobody is left to see the strides
            if difference is not None:
                return f"the result is not laid out as {offer.value.name}: {difference}"
        for storage in {root, *(r for result in offer.results for r in self.storage.roots(result))}:
            for alias in self.storage.aliases(storage):
                other = tensor_value(alias)
                if other is not None and other.dtype != value.dtype:
                    return f"{alias.name} views the same memory as {other.dtype}"
                if alias.target is torch.ops.aten.as_strided.default:
                    return f"{alias.name} views the same memory with strides of its own"
        return None

    def _argument_objection(self, offer: Offer, root: Root, source_in_place: bool) -> str | None:
        """Other arguments of the op in the same storage (an argument given twice counts as another)."""
        others = [n for n in every_node((offer.node.args, offer.node.kwargs)) if root in self.storage.roots(n)]
        others.remove(offer.value)
        if source_in_place and offer.source in others:
            others.remove(offer.source)
        if not others:
            return None
        if offer.overlap is None:
            return f"{others[0].name}, another argument, is in the same storage"
        return offer.overlap(offer, self.storage)

    def _reader_objection(self, offer: Offer, root: Root, unread: frozenset[Node], copy: Node | None) -> str | None:
        here = self.storage.position[offer.node]
        renewed = self.storage.position[copy] if copy is not None else END
        for use in self.storage.uses(root):
            if use.node is offer.node or use.node in unread or use.node.op == "output" or use.until <= here:
                continue
            if use.position > renewed or effects.is_view(use.node):
                continue  # a view reads nothing; who reads through it is a use of its own
            if use.position <= here:
                return f"{use.node.name} is still in flight and reads {offer.value.name}"
            return f"{use.node.name} reads the old value of {offer.value.name} later"
        return None

    def _output_objection(self, offer: Offer, root: Root, copy: Node | None) -> str | None:
        if copy is None:
            return f"the old value of {offer.value.name} is returned" if self.storage.in_outputs(root) else None
        for result in offer.results:
            if any(self.storage.in_outputs(r) for r in self.storage.roots(result)):
                return f"{result.name} is returned, and would share storage with the input {root.node.name}"
        return None


def _is_input(value: Any) -> bool:
    return isinstance(value, Node) and value.op == "placeholder"


def _extended(place: _Place, offer: Offer, places: Mapping[Node, _Place]) -> _Place | None:
    """Place of an offer's result. A scatter's source may itself be in place, on top of the same earlier offers."""
    inner = places.get(offer.source) if offer.source is not None else None
    if (
        inner is not None
        and offer.part is not None
        and inner.root is place.root
        and inner.chain[len(inner.chain) - len(place.chain) :] == place.chain
        and inner.same(offer.part(place.view))
    ):
        return _Place(place.root, place.view, (offer, *inner.chain), inner.inner | {offer})
    return None if offer.only_if_there else _Place(place.root, place.view, (offer, *place.chain), place.inner)
