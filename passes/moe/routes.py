"""One route read off a value: x, three factors of products with experts' weights, an activation, the roundings.

    r = sum over i of  a[i] * w_down[ids[t, j], n, i]        a[i] = activation(g, u)
    g = sum over c of  x[t, c] * w_gate[ids[t, j], i, c]     u likewise

Every cast in between is a rounding point of the op; one that has no argument there is a refusal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from k3rewrite.graph.dtypes import widens
from k3rewrite.passes.moe.activation import Gated, gated_unit
from k3rewrite.passes.moe.expression import Apply, Chosen, Expression, Load, Product, Value, uncast, unwidened, walk
from k3rewrite.passes.moe.index import (
    Axis,
    Element,
    Index,
    Inverse,
    Order,
    Position,
    Quotient,
    Rank,
    Size,
    Sorted,
    axes_of,
)
from k3rewrite.passes.moe.weights import NotExperts, Weight, weight_of

Dims = tuple[tuple[Axis, ...], ...]


@dataclass(frozen=True)
class Experts:
    """The arguments of the op; x, ids and weights as values over the tokens and the slots."""

    x: Expression
    inputs: tuple[Axis, ...]
    """the columns of x"""
    ids: Element
    weights: Expression
    tokens: Dims
    slots: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    w_gate: Weight
    w_up: Weight
    w_down: Weight
    gated: Gated
    product_dtype: torch.dtype
    hidden_dtype: torch.dtype
    route_dtype: torch.dtype
    combine_dtype: torch.dtype
    out_dtype: torch.dtype
    literal: bool
    """whether the op rounds where the graph does; False: some rounding to a narrow dtype is another"""
    compared: bool
    """whether ids are compared with numbers of experts, so that others have no part; else they are an index"""
    first: int = 0
    """the id of the first expert in the weights"""


@dataclass(frozen=True)
class Combination:
    """The output of a route, its weight, the axes of the slots, the dtype in which they are combined. `chosen`: the
    id that the expert stands for, where the route is that of every expert; None where its weights are the id's."""

    route: Expression
    weight: Expression
    slots: tuple[Axis, ...]
    combine: torch.dtype
    literal: bool
    chosen: Chosen | None = None
    experts: Size | None = None
    """where the sum is over experts: over how many, from the first"""


def read_route(value: Value, combination: Combination, out: torch.dtype) -> Experts:
    tokens, columns = value.dims[:-1], value.dims[-1]
    route, slots = combination.route, combination.slots
    if not widens(combination.weight.dtype, combination.combine):
        raise NotExperts(  # a tensor without dimensions, which is no part of the promotion of dtypes
            f"routing weights of {combination.weight.dtype} are applied in {combination.combine}", route.node
        )
    down, casts = uncast(route)
    down = _product_in(down, route)
    route_dtype = _one_rounding([down.dtype, *casts], combination.combine, route)
    hidden, w_down = _factors(down, columns)
    hidden = unwidened(hidden)
    activated, narrow = uncast(hidden)
    gated = gated_unit(activated)
    hidden_dtype = _one_rounding([activated.dtype, *narrow], None, hidden)
    x, inputs, w_gate, product_dtype = _half(gated.gate, down.axes, gated)
    other, others, w_up, product_up = _half(gated.up, down.axes, gated)
    if x.key(places_of(inputs)) != other.key(places_of(others)):
        raise NotExperts("gate and up projection read different inputs", gated.gate.node)
    if product_dtype != product_up:
        raise NotExperts(f"gate and up are rounded differently: {product_dtype} and {product_up}", gated.gate.node)
    ids = _same_expert((w_gate, w_up, w_down), combination.chosen, down)
    if combination.experts is not None:
        w_gate, w_up, w_down = (w.window(0, combination.experts) for w in (w_gate, w_up, w_down))
    axes = {axis for dim in (*tokens, slots) for axis in dim}
    for what, index in (("ids", (ids,)), ("weights", _indices(combination.weight)), ("x", _indices(x))):
        _check_places(what, index, axes, down)
    compared = combination.chosen is not None or combination.experts is not None
    literal = combination.literal and (gated.literal or gated.dtype.itemsize >= 4)
    return Experts(
        x, inputs, ids, combination.weight, tokens, slots, columns, w_gate, w_up, w_down, gated, product_dtype,
        hidden_dtype, route_dtype, combination.combine, out, literal, compared,
    )  # fmt: skip


def _product_in(down: Expression, route: Expression) -> Product:
    if isinstance(down, Product):
        return down
    if isinstance(down, Apply) and down.name == "add":
        raise NotExperts("the experts have a bias", down.node)
    name = down.name if isinstance(down, Apply) else type(down).__name__.lower()
    raise NotExperts(f"the down projection is not what is weighted: {name} comes after it", route.node, progress=1)


def _factors(product: Product, rows: tuple[Axis, ...]) -> tuple[Expression, Weight]:
    """(the other factor, the weight) of a product with experts' weights, whose rows run over `rows`."""
    failure: NotExperts | None = None
    for weight, other in ((product.right, product.left), (product.left, product.right)):
        if any(isinstance(inner, Product) for inner in walk(weight)):
            continue
        try:
            return other, weight_of(weight, rows, product.axes)
        except NotExperts as reason:
            failure = failure or reason
    raise failure or NotExperts("both factors of a product are computed", product.node)


def _half(
    value: Expression, inner: tuple[Axis, ...], gated: Gated
) -> tuple[Expression, tuple[Axis, ...], Weight, torch.dtype]:
    """(x, the axes of its columns, weight, the dtype that the product is rounded to) of gate or up."""
    product, casts = uncast(value)
    if isinstance(product, Apply) and product.name == "add":
        raise NotExperts("the experts have a bias", product.node)
    if not isinstance(product, Product):
        raise NotExperts("a half of the gated unit is not a product with weights", value.node)
    dtype = _one_rounding([product.dtype, *casts], gated.dtype, value)
    other, weight = _factors(product, inner)
    x = unwidened(other)
    bare, _ = uncast(x)
    if not isinstance(bare, Load):
        raise NotExperts("the input of the experts is computed inside", other.node)
    return x, product.axes, weight, dtype


def places_of(axes: tuple[Axis, ...]) -> dict[Axis, object]:
    """Names for summed axes: two products have axes of their own."""
    return {axis: (place, str(axis.size)) for place, axis in enumerate(axes)}


def _same_expert(weights: Sequence[Weight], chosen: Chosen | None, down: Product) -> Element:
    """The id whose expert's matrices all three factors are."""
    keys = {weight.expert.key() for weight in weights}
    expert = weights[-1].expert
    unresolved = next((weight.expert for weight in weights if _unresolved(weight.expert)), None)
    if unresolved is not None:
        raise NotExperts(_out_of_order(unresolved), down.node)
    if len(keys) != 1:
        raise NotExperts("gate, up and down projection take the weights of different experts", down.node)
    if chosen is not None:
        if expert.key() != chosen.at.key() or not isinstance(expert, Position) or expert.terms:
            raise NotExperts("an output is weighted by the share of another expert", down.node)
        expert = chosen.id
    if not isinstance(expert, Element):
        raise NotExperts("the expert of a row is not one of the ids", down.node)
    formats = {weight.format for weight in weights}
    if len(formats) != 1:
        raise NotExperts(f"the experts' weights have different formats: {', '.join(sorted(formats))}", down.node)
    return expert


def _check_places(what: str, index: Sequence[Index], axes: set[Axis], down: Product) -> None:
    for at in index:
        if _unresolved(at):
            raise NotExperts(_out_of_order(at), down.node)
    if what == "ids":
        if not {axis for at in index for axis in axes_of(at)} <= axes:
            raise NotExperts("the ids are not those of the tokens and slots of the result", down.node)


def _unresolved(index: Index) -> bool:
    if isinstance(index, (Order, Inverse, Sorted, Rank)):
        return True
    if isinstance(index, Quotient):
        return _unresolved(index.of)
    return isinstance(index, Element) and any(_unresolved(i) for i in index.index)


def _out_of_order(index: Index) -> str:
    found = index
    while isinstance(found, (Quotient, Element)):
        inner = (found.of,) if isinstance(found, Quotient) else found.index
        found = next(i for i in inner if _unresolved(i))
    if isinstance(found, (Sorted, Rank)) and isinstance(found.at, Inverse):
        return "the offsets of the groups are counted from other ids than those that the rows are sorted by"
    return (
        "the rows are not put back into the order of the tokens: what is indexed with is not the inverse of the "
        "permutation by which they were sorted"
    )


def _indices(value: Expression) -> tuple[Index, ...]:
    bare, _ = uncast(value)
    return bare.index if isinstance(bare, Load) else ()


def _one_rounding(dtypes: list[torch.dtype], used_in: torch.dtype | None, where: Expression) -> torch.dtype:
    """The one dtype that a value is rounded to on its way, ending in `used_in` (None: in any).

    [bf16], [bf16, fp32] and [fp32, bf16, fp32] are one rounding to bf16.
    """
    steps = [dtypes[0]]
    for dtype in dtypes[1:]:
        if dtype.itemsize >= 4 and widens(steps[-1], dtype):
            continue  # widened: nothing is lost
        steps.append(dtype)
    if len(steps) > 1 and steps[0].itemsize == 4:
        steps = steps[1:]  # products accumulate at least this wide
    if len(steps) > 1 or (used_in is not None and not widens(steps[0], used_in) and dtypes[-1] != used_in):
        raise NotExperts(f"roundings {' -> '.join(str(d) for d in dtypes)} in one place", where.node)
    return steps[0]
