"""Views, slices and casts in index notation."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.layout import permutation
from k3rewrite.passes.moe import routing
from k3rewrite.passes.moe.expression import Integer, Rounded, Value, dimension, keeps_integers
from k3rewrite.passes.moe.index import Position, Size, Unreadable
from k3rewrite.passes.moe.layout import expanded, selected, sliced, viewed
from k3rewrite.patterns.bindings import cast_source

if TYPE_CHECKING:
    from k3rewrite.passes.moe.reader import Reader

aten = torch.ops.aten
Arguments = Mapping[str, Any]


def shape_of(node: Node) -> Sequence[Size]:
    return node.meta["val"].shape


def _view(reader: Reader, node: Node, arguments: Arguments) -> Value:
    return viewed(reader.value(arguments["self"]), shape_of(node))


def _same(reader: Reader, node: Node, arguments: Arguments) -> Value:
    return reader.value(arguments["self"])


def _unsqueeze(reader: Reader, node: Node, arguments: Arguments) -> Value:
    value = reader.value(arguments["self"])
    at = dimension(arguments["dim"], len(value.dims) + 1)
    return Value((*value.dims[:at], (), *value.dims[at:]), value.element)


def _transposed(reader: Reader, node: Node, arguments: Arguments) -> Value:
    value, order = reader.value(arguments["self"]), permutation(node)
    assert order is not None
    return Value(tuple(value.dims[i] for i in order), value.element)


def _expand(reader: Reader, node: Node, arguments: Arguments) -> Value:
    return expanded(reader.value(arguments["self"]), shape_of(node))


def _slice(reader: Reader, node: Node, arguments: Arguments) -> Value:
    value = reader.value(arguments["self"])
    start = arguments["start"] or 0
    before, dim = shape_of(arguments["self"]), dimension(arguments["dim"], len(value.dims))
    if not isinstance(start, int) or (start < 0 and not isinstance(before[dim], int)):
        raise Unreadable("a slice from a computed place")
    start = max(0, start + before[dim]) if start < 0 else start  # as torch does
    return sliced(value, dim, start, arguments["step"], shape_of(node)[dim])


def _select(reader: Reader, node: Node, arguments: Arguments) -> Value:
    value = reader.value(arguments["self"])
    dim, index = dimension(arguments["dim"], len(value.dims)), arguments["index"]
    size = shape_of(arguments["self"])[dim]
    if not isinstance(index, int) or (index < 0 and not isinstance(size, int)):
        raise Unreadable("a computed place")
    return selected(value, dim, Position(index + size if index < 0 else index))


def _item(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    source, number = node.args
    assert isinstance(source, Node)
    if source.target in routing.SORTS and isinstance(number, int):
        return routing.sort_result(reader, source, number)
    if source.target not in SPLITS or not isinstance(number, int):
        return None
    inner = bound_arguments(source)
    value = reader.value(inner["self"])
    if inner["self"] in reader.products:
        reader.products.add(source)
    reader.read.add(source)
    dim = dimension(inner["dim"], len(value.dims))
    lengths = [part.shape[dim] for part in source.meta["val"]]
    start = sum(lengths[:number])
    if not isinstance(start, int):
        raise Unreadable("a slice from a computed place")
    return sliced(value, dim, start, 1, lengths[number])


def _cast(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    source = arguments.get("self", arguments.get("a"))
    value, dtype = reader.value(source), node.meta["val"].dtype
    if source.meta["val"].dtype == dtype:
        return value if source.meta["val"].device == node.meta["val"].device else None
    if cast_source(node) is None:
        return None
    if isinstance(value.element, Integer) and not dtype.is_floating_point and keeps_integers(dtype):
        return Value(value.dims, Integer(node, value.element.value, dtype))
    return Value(value.dims, Rounded(node, value.element, dtype))


SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default})
HANDLERS: dict[Any, Callable[[Reader, Node, Arguments], Value | None]] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.squeeze.dim: _view,
    aten.squeeze.dims: _view,
    aten.squeeze.default: _view,
    aten.unsqueeze.default: _unsqueeze,
    aten.permute.default: _transposed,
    aten.transpose.int: _transposed,
    aten.t.default: _transposed,
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.clone.default: _same,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten._to_copy.default: _cast,
    torch.ops.prims.convert_element_type.default: _cast,
    operator.getitem: _item,
}
