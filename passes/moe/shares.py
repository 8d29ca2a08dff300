"""Weights and sums by expert or by token: masks, one-hot rows, scattered weights, accumulation at an index.

(ids == e)                                  1 where the id is e
zeros.scatter_add(1, ids, weights)          [T, E]: the sum of the weights of the slots whose id is e
out.index_add(0, order // k, routes)        the sum over the slots of a token
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.passes.moe import routing
from k3rewrite.passes.moe.expression import Apply, Chosen, Expression, Load, Rounded, Total, Value, as_index, uncast
from k3rewrite.passes.moe.index import (
    Axis,
    Element,
    Index,
    Inverse,
    Order,
    Position,
    Quotient,
    Unreadable,
    axes_of,
    flattened,
    position,
    quotient_of,
    unflattened,
)
from k3rewrite.passes.moe.layout import broadcast

if TYPE_CHECKING:
    from k3rewrite.passes.moe.reader import Reader

aten = torch.ops.aten
Arguments = Mapping[str, Any]


def _equal_number(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    absent = routing.is_absent(reader, node, arguments)
    if absent is not None:
        return absent
    number = arguments["other"]
    dims, value = reader.index(arguments["self"])
    if not isinstance(number, int) or isinstance(number, bool) or not isinstance(value, Element):
        return None
    return Value(dims, Chosen(node, value, Position(number), node.meta["val"].dtype))


def _equal(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    """ids[..., None] == arange(E)"""
    if not all(isinstance(arguments[name], Node) for name in ("self", "other")):
        return None
    if any(arguments[name].meta["val"].dtype.is_floating_point for name in ("self", "other")):
        return None
    one, two = broadcast(reader.value(arguments["self"]), reader.value(arguments["other"]))
    a, b = as_index(one.element), as_index(two.element)
    if isinstance(b, Element) and isinstance(a, Position):
        a, b = b, a
    if not isinstance(a, Element) or not isinstance(b, Position):
        return None
    return Value(one.dims, Chosen(node, a, b, node.meta["val"].dtype))


def _scatter(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    """Weights [T, k] laid out over the experts, [T, E]; or an inverse permutation; or sums by token."""
    value, adds = node.meta["val"], node.target is not aten.scatter.src
    if not value.dtype.is_floating_point:
        return routing.counts_scattered(reader, node, arguments) if adds else routing.inverse_put(
            reader, node, arguments
        )  # fmt: skip
    rank, source = value.dim(), reader.value(arguments["src"])
    shape = arguments["src"].meta["val"].shape
    whole = same_sizes(arguments["index"].meta["val"].shape, shape)  # what the index is too short for is left out
    if arguments["src"] in reader.products:
        if not adds or not whole or arguments["dim"] % rank != 0:
            return None
        return _accumulated(reader, node, arguments["self"], arguments["index"], arguments["src"])
    whole &= same_sizes(value.shape[:-1], shape[:-1])
    if routing.constant(arguments["self"]) != 0 or arguments["dim"] % rank != rank - 1 or rank < 2 or not whole:
        return None
    ids, weights = broadcast(reader.value(arguments["index"]), source)
    chosen = as_index(ids.element)
    if not isinstance(chosen, Element):
        return None
    if not adds:
        if not _are_distinct(chosen, set(ids.dims[-1])):
            reason = "an id may stand twice in a row, and a weight that is scattered replaces another"
            raise Unreadable(reason, telling=True)
        reader.distinct.add(node)
    slots = ids.dims[-1]
    bound = {axis: Axis(axis.size) for axis in slots}
    renamed = {old: position(new) for old, new in bound.items()}
    expert = Axis(value.shape[-1])
    mask = Chosen(node, chosen.substitute(renamed), position(expert), torch.bool)
    share = Apply(node, "mul", (mask, weights.element.substitute(renamed)), value.dtype)
    return Value((*ids.dims[:-1], (expert,)), Total(node, tuple(bound.values()), share, value.dtype))


def _are_distinct(ids: Element, slots: set[Axis]) -> bool:
    """True for ids that one top-k or route has chosen, for each of the slots another of them."""
    node = ids.node
    if node.target is not operator.getitem or node.args[1] != 1:
        return False
    source, last = node.args[0], len(ids.index) - 1
    if not isinstance(source, Node) or source.target not in (aten.topk.default, torch.ops.k3.route.default):
        return False
    over = bound_arguments(source).get("dim", -1) % len(ids.index)
    place = ids.index[last]
    one_each = isinstance(place, Position) and slots <= {axis for axis, _ in place.terms}
    return over == last and one_each and not any(slots & axes_of(at) for at in ids.index[:last])


def _index_add(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    if arguments["dim"] != 0 or arguments["alpha"] != 1:
        return None
    return _accumulated(reader, node, arguments["self"], arguments["index"], arguments["source"])


def _index_put(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    if not arguments["accumulate"]:
        return routing.inverse_put(reader, node, arguments)
    if len(arguments["indices"]) != 1 or arguments["indices"][0] is None:
        return None
    return _accumulated(reader, node, arguments["self"], arguments["indices"][0], arguments["values"])


def _accumulated(reader: Reader, node: Node, base: Node, index: Node, source: Node) -> Value | None:
    """base[index[s]] += source[s], as a sum over the slots of each row of the result."""
    rows = reader.value(source)
    if source not in reader.products:
        return None
    shape, added = node.meta["val"].shape, source.meta["val"].shape
    if not same_sizes(shape[1:], added[1:]) or not same_size(index.meta["val"].shape[0], added[0]):
        raise Unreadable("a sum of rows into wider ones, or of one row at several places")
    places = reader.value(index)
    place = as_index(places.element)
    columns = [axis for dim in places.dims[1:] for axis in dim]
    if any(axis in axes_of(place) for axis in columns):
        raise Unreadable("a sum at places that differ from column to column")
    total = node.meta["val"].shape[0]
    if (
        isinstance(place, Position)
        and place.key() == flattened(places.dims[0]).key()
        and same_size(source.meta["val"].shape[0], total)
    ):
        held, added = broadcast(reader.value(base), rows)
        element = Apply(node, "add", (held.element, added.element, 1), node.meta["val"].dtype)
        return Value(held.dims, element)
    slots = quotient_of(source.meta["val"].shape[0], total)
    if routing.constant(base) != 0 or slots is None:
        raise Unreadable("a sum at places that are not the tokens of the rows")
    token = (Axis(total),) if not same_size(total, 1) else ()
    slot = (Axis(slots),) if not same_size(slots, 1) else ()
    row: Index = flattened((*token, *slot))
    order = _order_in(place)
    if order is not None:
        row = Inverse(order.sort, order.of, row)
    found = place.substitute(dict(zip(places.dims[0], unflattened(row, places.dims[0]), strict=True)))
    if found.key() != flattened(token).key():
        raise Unreadable("a sum at places that are not the tokens of the rows")
    where = dict(zip(rows.dims[0], unflattened(row, rows.dims[0]), strict=True))
    summed = Total(node, slot, rows.substitute(where), node.meta["val"].dtype, added_in=source.meta["val"].dtype)
    return Value((token, *rows.dims[1:]), summed)


def _order_in(index: Index) -> Order | None:
    while isinstance(index, Quotient):
        index = index.of
    return index if isinstance(index, Order) else None


def share_of(value: Expression) -> tuple[Chosen, Expression, tuple[Axis, ...]] | None:
    """(which id against which expert, the weight of a slot, the axes of the slots) of the sum of the weights with which
    a token goes to an expert; None for another value. Casts around the sum are put around the weight."""
    if isinstance(value, Rounded):
        inner = share_of(value.of)
        return None if inner is None else (inner[0], Rounded(value.node, inner[1], value.dtype), inner[2])
    axes: tuple[Axis, ...] = ()
    if isinstance(value, Total):
        axes, value = value.axes, value.of
    if not isinstance(value, Apply):
        return None
    args = [a for a in value.args if a is not None]
    if value.name == "where" and len(args) == 3 and isinstance(args[1], Expression) and _is_zero(args[2]):
        mask, weight = args[0], args[1]
    elif value.name == "mul" and len(args) == 2 and all(isinstance(a, Expression) for a in args):
        mask, weight = args if isinstance(uncast(args[0])[0], Chosen) else args[::-1]
    else:
        return None
    chosen, _ = uncast(mask)
    if not isinstance(chosen, Chosen) or isinstance(uncast(weight)[0], (Chosen, Apply, Total)):
        return None
    return chosen, weight, axes


def _is_zero(value: Any) -> bool:
    value, _ = uncast(value)
    return routing.constant(value.node if isinstance(value, Load) else value) == 0


HANDLERS: dict[Any, Callable[[Reader, Node, Arguments], Value | None]] = {
    aten.eq.Scalar: _equal_number, aten.eq.Tensor: _equal, aten.scatter.src: _scatter,
    aten.scatter_add.default: _scatter, aten.index_add.default: _index_add, aten.index_put.default: _index_put,
}  # fmt: skip
