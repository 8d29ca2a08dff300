"""Elements by index, element-wise operators, sums and matrix products in index notation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from k3rewrite.passes.moe import routing
from k3rewrite.passes.moe.expression import Apply, Integer, Load, Product, Rounded, Total, Value, as_index, dimension
from k3rewrite.passes.moe.index import Axis, Element, Index, Unreadable, position, unflattened
from k3rewrite.passes.moe.layout import aligned, broadcast, fresh, placed
from k3rewrite.passes.moe.views import shape_of

if TYPE_CHECKING:
    from k3rewrite.passes.moe.reader import Reader

aten = torch.ops.aten
Arguments = Mapping[str, Any]


# ------------------------------------------------------------------ elements by index


def _index(reader: Reader, node: Node, arguments: Arguments) -> Value:
    indices = list(arguments["indices"])
    value = reader.value(arguments["self"])
    used = [i for i, index in enumerate(indices) if index is not None]
    if any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in indices if index is not None):
        raise Unreadable("a selection by a mask")
    if used != list(range(used[0], used[-1] + 1)):
        raise Unreadable("an index in dimensions that are not neighbours")
    return _taken(reader, node, value, used[0], [indices[i] for i in used])


def _index_select(reader: Reader, node: Node, arguments: Arguments) -> Value:
    value = reader.value(arguments["self"])
    return _taken(reader, node, value, dimension(arguments["dim"], len(value.dims)), [arguments["index"]])


def _embedding(reader: Reader, node: Node, arguments: Arguments) -> Value:
    return _taken(reader, node, reader.value(arguments["weight"]), 0, [arguments["indices"]])


def _taken(reader: Reader, node: Node, value: Value, first: int, indices: Sequence[Node]) -> Value:
    """value[..., indices, ...]: the dims of the (broadcast) indices take the place of those that they choose from."""
    chosen = [reader.value(index) for index in indices]
    for number in range(1, len(chosen)):
        chosen[0], chosen[number] = broadcast(chosen[0], chosen[number])
    value = fresh(value)
    where: dict[Axis, Index] = {}
    for number, choice in enumerate(chosen):
        axes = value.dims[first + number]
        where.update(zip(axes, unflattened(as_index(choice.element), axes), strict=True))
    dims = (*value.dims[:first], *chosen[0].dims, *value.dims[first + len(chosen) :])
    element = value.element.substitute(where)
    if isinstance(element, Load) and not element.dtype.is_floating_point:
        element = Integer(node, Element(element.node, element.index), element.dtype)
    return Value(dims, element)


# ------------------------------------------------------------------ arithmetic


def pointwise(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    if not reader.looks_into(node):
        return None
    total: Value | None = None
    elements: dict[str, Any] = {}
    for name, argument in arguments.items():
        if not isinstance(argument, Node) or not isinstance(argument.meta.get("val"), torch.Tensor):
            elements[name] = argument
            continue
        value = reader.value(argument)
        if total is None:
            total, elements[name] = value, value.element
            continue
        held = Value(total.dims, Apply(node, "held", tuple(elements.values()), node.meta["val"].dtype))
        held, value = broadcast(held, value)
        assert isinstance(held.element, Apply)
        elements = dict(zip(elements, held.element.args, strict=True))
        total, elements[name] = held, value.element
    if total is None:
        return None
    packet = node.target
    assert isinstance(packet, torch._ops.OpOverload)
    args = tuple(v for v in elements.values())
    return Value(total.dims, Apply(node, packet._schema.name.split("::")[1], args, node.meta["val"].dtype))


def _sum(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    if not reader.looks_into(node):
        return None
    source = arguments["self"]
    value = reader.value(source)
    rank = len(value.dims)
    listed = arguments["dim"] if arguments["dim"] else list(range(rank))
    over = {dimension(d, rank) for d in ([listed] if isinstance(listed, int) else listed)}
    element = value.element
    if arguments["dtype"] is not None and arguments["dtype"] != source.meta["val"].dtype:
        element = Rounded(node, element, arguments["dtype"])
    bound = {axis: Axis(axis.size) for d in over for axis in value.dims[d]}
    element = element.substitute({old: position(new) for old, new in bound.items()})
    dims = tuple(() if d in over else dim for d, dim in enumerate(value.dims) if d not in over or arguments["keepdim"])
    return Value(dims, Total(node, tuple(bound.values()), element, node.meta["val"].dtype))


def _mm(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    return _product(reader, node, arguments["self"], arguments["mat2"])


def _addmm(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    first = arguments.get("mat1", arguments.get("batch1"))
    second = arguments.get("mat2", arguments.get("batch2"))
    product = _product(reader, node, first, second)
    if product is None:
        return None
    held, bias = broadcast(product, reader.value(arguments["self"]))
    return Value(held.dims, Apply(node, "add", (held.element, bias.element, 1), node.meta["val"].dtype))


def _product(reader: Reader, node: Node, first: Node, second: Node) -> Value | None:
    """A (batched) matrix product of the mixture."""
    if node not in reader.region:
        return None
    a, b = fresh(reader.value(first)), fresh(reader.value(second))
    return contracted(reader, node, a, b)


def contracted(reader: Reader, node: Node, a: Value, b: Value) -> Value:
    """a [..., m, c] times b [..., c, n], over axes of their own."""
    where_a, where_b = {}, {}
    dims = []
    for one, two in zip(a.dims[:-2], b.dims[:-2], strict=True):
        left, right, axes = aligned(one, two)
        where_a.update(left)
        where_b.update(right)
        dims.append(axes)
    left, right, summed = aligned(a.dims[-1], b.dims[-2])
    where_a.update(left)
    where_b.update(right)
    bound = {axis: Axis(axis.size) for axis in summed}
    renamed = {old: position(new) for old, new in bound.items()}
    left_side, right_side = (placed(v, where, ()).substitute(renamed) for v, where in ((a, where_a), (b, where_b)))
    reader.products.add(node)
    product = Product(node, tuple(bound.values()), left_side, right_side, node.meta["val"].dtype)
    return Value((*dims, a.dims[-2], b.dims[-1]), product)


def _grouped(reader: Reader, node: Node, arguments: Arguments) -> Value:
    if arguments["bias"] is not None or arguments["offs"] is None:
        raise Unreadable("a grouped product with a bias or without offsets")
    return _grouped_product(reader, node, arguments["self"], arguments["mat2"], arguments["offs"])


def grouped_fallback(reader: Reader, node: Node, arguments: Arguments) -> Value:
    return _grouped_product(reader, node, arguments["input"], arguments["weight"], arguments["offs"])


def _grouped_product(reader: Reader, node: Node, rows: Node, weight: Node, offsets: Node) -> Value:
    """Rows [R, c] by the matrix [c, n] of their group [G, c, n]; group g ends before row offsets[g]."""
    a, b = fresh(reader.value(rows)), fresh(reader.value(weight))
    if len(a.dims) != 2 or len(b.dims) != 3:
        raise Unreadable("a grouped product of other than rows and a stack of matrices")
    reader.products.add(node)  # also where the offsets have no form: then this is the reason
    group = routing.group_of_row(reader, offsets, a.dims[0], shape_of(weight)[0])
    where = dict(zip(b.dims[0], unflattened(group, b.dims[0]), strict=True)) if b.dims[0] else {}
    return contracted(reader, node, a, placed(b, where, b.dims[1:]))


HANDLERS: dict[Any, Callable[[Reader, Node, Arguments], Value | None]] = {
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.embedding.default: _embedding,
    aten.sum.dim_IntList: _sum,
    aten.mm.default: _mm,
    aten.bmm.default: _mm,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
    aten._grouped_mm.default: _grouped,
}
