"""From a value in index notation to the arguments of `k3::experts`, or to the reason why it is no mixture of experts.

y[t, n] = sum over slots j of  weights[t, j] * r[t, j, n]                        r: see routes.py
        = sum over experts e of  (sum over j of weights[t, j] where ids[t, j] is e) * r
          ... as a sum over an axis, or written out term by term
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from k3rewrite.graph.dtypes import widens
from k3rewrite.passes.moe.activation import gated_unit
from k3rewrite.passes.moe.expression import Apply, Expression, Load, Product, Total, Value, uncast, walk
from k3rewrite.passes.moe.index import Position, Unreadable, position
from k3rewrite.passes.moe.routes import Combination, Experts, places_of, read_route
from k3rewrite.passes.moe.routing import constant
from k3rewrite.passes.moe.shares import share_of
from k3rewrite.passes.moe.weights import NotExperts


def experts_of(value: Value) -> Experts:
    """Raises NotExperts, with the reason and the place, if the value is none."""
    element, outer = uncast(value.element)
    if len(outer) > 1:
        raise NotExperts(f"the result is rounded several times: {outer}", value.element.node)
    out = outer[-1] if outer else element.dtype
    if isinstance(element, Apply) and element.name == "add":
        return _rolled([_term(value, term, element.dtype, out) for term in _terms(element)], element)
    combination = _combined(element)
    if isinstance(element, Product):
        if outer and not widens(element.dtype, outer[-1]):
            raise NotExperts(f"the result is rounded to {element.dtype}, then to {out}", element.node)
        out = element.dtype
    return read_route(value, combination, out)


# ------------------------------------------------------------------ a loop over the experts


def _terms(element: Expression) -> list[Expression]:
    """The terms of a sum of sums of one dtype, without zeros."""
    if isinstance(element, Apply) and element.name == "add":
        one, two, *factor = element.args
        if factor not in ([], [1]) or not isinstance(one, Expression) or not isinstance(two, Expression):
            raise NotExperts("a number is added to the outputs of the experts", element.node)
        if any(part.dtype != element.dtype for part in (one, two)):
            raise NotExperts("the outputs of the experts are added in several dtypes", element.node)
        return [*_terms(one), *_terms(two)]
    return [] if isinstance(element, Load) and constant(element.node) == 0 else [element]


def _term(value: Value, term: Expression, combine: torch.dtype, out: torch.dtype) -> Experts:
    """What one expert adds, as if it were all of them."""
    if not any(isinstance(inner, Product) for inner in walk(term)):
        raise NotExperts("something else than outputs of experts is added to them", term.node, progress=0)
    if not isinstance(term, Apply) or term.name != "mul" or len(term.parts()) != 2:
        raise NotExperts("something else than outputs of experts, each with its weight, is added up", term.node)
    route, weights = _told_apart(term.parts(), term)
    share = share_of(weights)
    if share is None:
        raise NotExperts("an output is not multiplied by the weights of the slots whose id is the expert", term.node)
    chosen, weight, slots = share
    return read_route(value, Combination(route, weight, slots, combine, combine.itemsize >= 4, chosen), out)


def _rolled(terms: list[Experts], whole: Expression) -> Experts:
    """Terms of neighbouring experts as one mixture.

    Raises NotExperts if they differ in more than the expert, or an expert is left out or stands there twice.
    """
    numbers = sorted(term.w_down.expert.offset for term in terms if isinstance(term.w_down.expert, Position))
    if not terms or numbers != list(range(numbers[0] if numbers else 0, (numbers[0] if numbers else 0) + len(terms))):
        raise NotExperts("the experts that are added up are not neighbours, each once", whole.node)
    first = terms[0]
    for term in terms[1:]:
        if _signature(term) != _signature(first):
            raise NotExperts("the experts that are added up differ in more than their weights' number", whole.node)
    window = (numbers[0], len(numbers))
    return replace(
        first, first=numbers[0], w_gate=first.w_gate.window(*window), w_up=first.w_up.window(*window),
        w_down=first.w_down.window(*window),
    )  # fmt: skip


def _signature(term: Experts) -> tuple[object, ...]:
    """All of a term but the number of its expert."""
    slots = {axis: place for place, axis in enumerate(term.slots)}
    stored = [part.place() for weight in (term.w_gate, term.w_up, term.w_down) for part in weight.stored()]
    gated = (term.gated.name, term.gated.beta, term.gated.linear_beta, term.gated.dtype, term.gated.literal)
    dtypes = (term.product_dtype, term.hidden_dtype, term.route_dtype)
    return (
        term.x.key(places_of(term.inputs)), term.ids.key(slots), term.weights.key(slots), stored, gated, dtypes,
        term.w_down.format, [str(axis.size) for axis in (*term.slots, *term.inputs)],
    )  # fmt: skip


# ------------------------------------------------------------------ one sum over slots or experts


def _combined(element: Expression) -> Combination:
    if isinstance(element, Product):
        route, weights = _told_apart((element.left, element.right), element)
        combine = torch.promote_types(element.dtype, torch.float32)
        return _over_slots(Combination(route, weights, element.axes, combine, True), element)
    if isinstance(element, Apply) and element.name == "mul" and len(element.parts()) == 2:
        route, weights = _told_apart(element.parts(), element, progress=0)
        return Combination(route, weights, (), element.dtype, True)  # one slot: there is nothing to sum
    if not isinstance(element, Total):
        raise NotExperts("the outputs are not summed over the slots of a token", element.node, progress=0)
    product, casts = uncast(element.of)
    if isinstance(product, Product):
        for side in (product.left, product.right):
            if any(isinstance(inner, Product) for inner in walk(side)):
                gated_unit(uncast(side)[0])  # raises where the weights are a factor of the activation
    if not isinstance(product, Apply) or product.name != "mul" or len(product.parts()) != 2:
        raise NotExperts(
            "what is summed over the slots is not an output times a routing weight", element.of.node, progress=1
        )
    if casts or product.dtype != element.dtype:
        raise NotExperts(f"the weighted outputs are {product.dtype}, their sum {element.dtype}", element.node)
    route, weights = _told_apart(product.parts(), product)
    narrow = element.added_in is not None and element.added_in.itemsize < 4
    return _over_slots(Combination(route, weights, element.axes, product.dtype, not narrow), element)


def _over_slots(found: Combination, element: Expression) -> Combination:
    """A sum over all experts, each with the weights of the slots whose id it is, as the sum over the slots."""
    share = share_of(found.weight)
    if share is None:
        return found
    chosen, weight, slots = share
    if len(found.slots) != 1 or chosen.at.key() != position(found.slots[0]).key():
        raise NotExperts("the sum is not over the experts that the ids are compared with", element.node)
    try:
        route = found.route.substitute({found.slots[0]: chosen.id})
    except Unreadable as reason:
        raise NotExperts("an output is weighted by the share of another expert", element.node) from reason
    return replace(found, route=route, weight=weight, slots=slots, experts=found.slots[0].size)


def _told_apart(sides: Sequence[Expression], whole: Expression, progress: int = 1) -> tuple[Expression, Expression]:
    with_products = [any(isinstance(inner, Product) for inner in walk(side)) for side in sides]
    if with_products.count(True) != 1:
        raise NotExperts(
            "the outputs of the experts are not multiplied by routing weights", whole.node, progress=progress
        )
    first = with_products.index(True)
    return sides[first], sides[1 - first]
