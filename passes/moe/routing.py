"""The integer side of a mixture: orders, counts, offsets and groups, in the spellings that models use.

order    = flat.argsort()                          inverse  = order.argsort(), or order scattered over 0, 1, 2, ...
counts   = scatter_add of ones | histc | a sum of one-hot rows
offsets  = counts.cumsum(0) | searchsorted(sorted ids, 0 .. E - 1, right=True)
group    = searchsorted(offsets, 0 .. R - 1, right=True)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.shapes import same_size
from k3rewrite.passes.moe.expression import Integer, Rounded, Value, keeps_integers
from k3rewrite.passes.moe.index import (
    Absent,
    Axis,
    Count,
    End,
    Flat,
    Index,
    Inverse,
    Order,
    Position,
    Present,
    Quotient,
    Rank,
    Size,
    Sorted,
    Unreadable,
    divided,
    flattened,
    product_of,
)

if TYPE_CHECKING:
    from k3rewrite.passes.moe.reader import Reader

aten = torch.ops.aten
Arguments = Mapping[str, Any]
FILLED = {
    aten.zeros.default: 0, aten.zeros_like.default: 0, aten.new_zeros.default: 0, aten.ones.default: 1,
    aten.ones_like.default: 1, aten.new_ones.default: 1,
}  # fmt: skip
FULL = frozenset({aten.full.default, aten.full_like.default, aten.new_full.default})
SCALAR = aten.scalar_tensor.default
COUNTING = frozenset({aten.arange.default, aten.arange.start, aten.arange.start_step})
EMPTY = frozenset({aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default})


def constant(node: Any) -> float | None:
    """The number that every element of a tensor is, or None."""
    if isinstance(node, (int, float)):
        return node
    if not isinstance(node, Node):
        return None
    if node.target in FILLED:
        return FILLED[node.target]
    arguments = bound_arguments(node)
    if node.target is SCALAR:
        return arguments["s"] if isinstance(arguments["s"], (int, float)) else None
    if node.target in FULL:
        return arguments["fill_value"] if isinstance(arguments["fill_value"], (int, float)) else None
    if node.target in (aten.expand.default, aten.view.default, aten._to_copy.default, aten.clone.default):
        return constant(arguments["self"])
    return None


def is_constant(node: Node) -> bool:
    """True for a tensor that is filled with a number, or with nothing, or counts up: its inputs lend it a shape."""
    return node.target in (*EMPTY, *COUNTING, *FILLED, *FULL, SCALAR)


def integer(node: Node, dims: Sequence[tuple[Axis, ...]], value: Index) -> Value:
    return Value(tuple(dims), Integer(node, value, node.meta["val"].dtype))


def flat_of(reader: Reader, node: Node) -> Flat:
    """The integers of a one-dimensional tensor."""
    dims, value = reader.index(node)
    if len(dims) != 1:
        raise Unreadable("integers that are not in a row")
    if isinstance(value, Sorted) and _is_whole(value.at, dims[0], value.of):
        return value.of  # what is counted in a sorted row is what is counted in the row
    return Flat(dims[0], value)


def _is_row(index: Index, axes: tuple[Axis, ...]) -> bool:
    """True if the index runs through 0, 1, 2, ... with the axes."""
    return index.key() == flattened(axes).key()


def _is_whole(index: Index, axes: tuple[Axis, ...], of: Flat) -> bool:
    """True if the index runs through every element of a row, in order: not through the first ones alone."""
    return _is_row(index, axes) and same_size(product_of(axes), of.rows)


# ------------------------------------------------------------------ orders


def sort_result(reader: Reader, node: Node, number: int) -> Value | None:
    """The values (0) or the order (1) of a sort."""
    arguments = bound_arguments(node)
    if arguments.get("descending") or node.meta["val"][0].dim() != 1:
        return None
    reader.read.add(node)
    dims, value = reader.index(arguments["self"])
    return _ordered(node, dims, value, number, bool(arguments.get("stable")))


def _ordered(node: Node, dims: Sequence[tuple[Axis, ...]], value: Index, number: int, stable: bool) -> Value:
    flat = Flat(dims[0], value)
    places = (Axis(flat.rows),) if dims[0] else ()
    row, found = flattened(places), value
    if isinstance(value, Absent) and number == 1 and stable and _is_row(value.count.at, dims[0]):
        found = Present(value.count.of, row)
    elif isinstance(value, Order) and number == 1 and _is_whole(value.at, dims[0], value.of):
        found = Inverse(value.sort, value.of, row)
    elif not dims[0]:
        found = Position(0) if number else value
    else:
        found = Order(node, flat, row) if number else Sorted(flat, row)
    return Value((places,), Integer(node, found, torch.int64))


def _argsort(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    if arguments["descending"] or node.meta["val"].dim() != 1:
        return None
    dims, value = reader.index(arguments["self"])
    return _ordered(node, dims, value, 1, bool(arguments.get("stable")))


def inverse_put(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    """empty[order] = 0, 1, 2, ...: the inverse of the order."""
    if "indices" in arguments:
        if len(arguments["indices"]) != 1 or arguments["accumulate"]:
            return None
        places, numbers = arguments["indices"][0], arguments["values"]
    else:
        if len(node.meta["val"].shape) != 1:
            return None
        places, numbers = arguments["index"], arguments["src"]
    if node.meta["val"].dtype.is_floating_point or len(node.meta["val"].shape) != 1:
        return None
    dims, value = reader.index(places)
    if len(dims) == 1 and not dims[0] and same_size(node.meta["val"].shape[0], 1):
        return integer(node, dims, Position(0))
    if not isinstance(value, Order) or len(dims) != 1 or not _is_whole(value.at, dims[0], value.of):
        return None
    count, order = reader.index(numbers)
    whole = same_size(node.meta["val"].shape[0], value.of.rows)
    if len(count) != 1 or not _is_whole(order, count[0], value.of) or not whole:
        return None  # also one number that is put everywhere
    return integer(node, dims, Inverse(value.sort, value.of, flattened(dims[0])))


# ------------------------------------------------------------------ counts and offsets


def _counted(node: Node, flat: Flat) -> Value:
    if not keeps_integers(node.meta["val"].dtype):
        raise Unreadable("counts in a dtype that may not hold them")
    size = node.meta["val"].shape[0]
    dims = ((),) if same_size(size, 1) else ((Axis(size),),)
    return Value(dims, Integer(node, Count(flat, flattened(dims[0])), node.meta["val"].dtype))


def counts_scattered(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    source = arguments.get("src", arguments.get("source"))
    if constant(arguments["self"]) != 0 or constant(source) != 1 or node.meta["val"].dim() != 1:
        return None
    return _counted(node, flat_of(reader, arguments["index"]))


def _bincount(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    raise Unreadable(
        "a bincount is as long as its largest number asks for, minlength or not: count with scatter_add or histc",
        telling=True,
    )


def _histc(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    """Bins of width one around 0, 1, ... up to the last; what is outside is not counted."""
    bins = arguments["bins"]
    if arguments["min"] != 0 or arguments["max"] != bins - 1 or bins < 2:
        return None
    source = reader.value(arguments["self"]).element
    if isinstance(source, Rounded) and source.dtype.itemsize < 4:
        return None
    return _counted(node, flat_of(reader, arguments["self"]))


def _cumsum(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    if node.meta["val"].dim() != 1:
        return None
    dims, value = reader.index(arguments["self"])
    if not isinstance(value, Count) or not keeps_integers(node.meta["val"].dtype):
        return None
    if _is_row(value.at, dims[0]):
        return integer(node, dims, End(value.of, value.at))
    if isinstance(value.at, Present) and value.at.of.key() == value.of.key() and _is_row(value.at.at, dims[0]):
        return integer(node, dims, End(value.of, flattened(dims[0]), present=True))
    return None


def _searchsorted(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    if not (arguments["right"] or arguments["side"] == "right") or arguments["sorter"] is not None:
        return None
    sequence, wanted = arguments["sorted_sequence"], arguments["self"]
    if not isinstance(wanted, Node) or node.meta["val"].dim() != 1 or sequence.meta["val"].dim() != 1:
        return None
    dims, numbers = reader.index(wanted)
    row, first = reader.index(sequence)
    if not _is_row(numbers, dims[0]):
        return None
    if isinstance(first, Sorted) and _is_whole(first.at, row[0], first.of):
        return integer(node, dims, End(first.of, flattened(dims[0])))
    whole = same_size(node.meta["val"].shape[0], first.of.rows) if isinstance(first, End) else False
    if isinstance(first, End) and _is_row(first.at, row[0]) and whole:
        kept = sequence.meta["val"].shape[0]
        if not (first.present and same_size(kept, first.of.rows)):  # no more experts are hit than there are rows
            reader.counted[node] = (kept, 1)  # the last group has no end to be looked for
        return integer(node, dims, _group(first, flattened(dims[0])))
    return None


def _group(ends: End, row: Index) -> Index:
    if not ends.of.axes:
        return Position(0) if ends.present else ends.of.value
    return Rank(ends.of, row) if ends.present else Sorted(ends.of, row)


def group_of_row(reader: Reader, offsets: Node, rows: tuple[Axis, ...], groups: Size) -> Index:
    """The group of each row, from the rows before which the groups end.

    Raises Unreadable if the offsets are not those of a sorted row of ids, as long as the rows, for every group.
    """
    dims, ends = reader.index(offsets)
    if not isinstance(ends, End) or not _is_row(ends.at, dims[0]):
        raise Unreadable("the offsets of the groups are not counted from a row of ids")
    if not same_size(product_of(rows), ends.of.rows):
        raise Unreadable("the offsets of the groups are counted from other rows")
    if not same_size(offsets.meta["val"].shape[0], groups):
        raise Unreadable("there are not as many offsets as matrices")
    if ends.present and not (same_size(groups, ends.of.rows)):
        raise Unreadable("the experts that are hit may be more than those that are kept")
    return _group(ends, flattened(rows))


# ------------------------------------------------------------------ arithmetic of positions


def _arange(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    if arguments.get("start", 0) != 0 or arguments.get("step", 1) != 1 or node.meta["val"].dtype.is_floating_point:
        return None
    size = node.meta["val"].shape[0]
    axes = () if same_size(size, 1) else (Axis(size),)
    return integer(node, (axes,), flattened(axes))


def _divide(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    by = arguments["other"]
    if "rounding_mode" in arguments and arguments["rounding_mode"] not in ("floor", "trunc"):
        return None
    if not isinstance(by, (int, torch.SymInt)) or (isinstance(by, int) and by <= 0):
        return None
    if node.meta["val"].dtype.is_floating_point:
        return None
    dims, value = reader.index(arguments["self"])
    if not isinstance(value, (Order, Position, Inverse, Quotient)):
        return None
    return integer(node, dims, divided(value, by, node.target is aten.remainder.Scalar))


def is_absent(reader: Reader, node: Node, arguments: Arguments) -> Value | None:
    """count == 0"""
    if arguments["other"] != 0:
        return None
    dims, value = reader.index(arguments["self"])
    if not isinstance(value, Count) or len(dims) != 1:
        return None
    reader.counted[node] = (node.meta["val"].shape[0], 0)
    return integer(node, dims, Absent(value))


SORTS = frozenset({aten.sort.default, aten.sort.stable})
HANDLERS: dict[Any, Callable[[Reader, Node, Arguments], Value | None]] = {
    aten.argsort.default: _argsort, aten.argsort.stable: _argsort, aten.bincount.default: _bincount,
    aten.histc.default: _histc, aten.cumsum.default: _cumsum, aten.searchsorted.Tensor: _searchsorted,
    aten.arange.default: _arange, aten.arange.start: _arange, aten.arange.start_step: _arange,
    aten.floor_divide.default: _divide, aten.div.Tensor_mode: _divide, aten.div.Scalar_mode: _divide,
    aten.remainder.Scalar: _divide,
}  # fmt: skip
