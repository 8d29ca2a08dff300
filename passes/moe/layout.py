"""Dimensions of a value as axes: common refinements, views, broadcasting, selections.

[T, k, N].view(T * k, N)     dims (t), (k), (n)         ->  (t, k), (n)
[R, 2 * I].view(R, 2, I)     dims (r), (i)              ->  (r), (a), (b)  with i = I * a + b
a [R, N] * b [T, k, 1] ...   refined until both sides run over the same axes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3rewrite.graph.shapes import same_size
from k3rewrite.passes.moe.expression import Value
from k3rewrite.passes.moe.index import Axis, Index, Position, Size, Unreadable, position, quotient_of

Axes = tuple[Axis, ...]
Where = dict[Axis, Index]


def fresh(value: Value) -> Value:
    """The same tensor over axes of its own."""
    new = {axis: Axis(axis.size) for axis in value.axes}
    dims = tuple(tuple(new[axis] for axis in dim) for dim in value.dims)
    return Value(dims, value.substitute({old: position(axis) for old, axis in new.items()}))


def placed(value: Value, where: Mapping[Axis, Index], dims: Sequence[Axes]) -> Value:
    return Value(tuple(dims), value.substitute(where) if where else value.element)


class _Pieces:
    """One side of a refinement: its axes from the innermost outwards, and the pieces that each was cut into."""

    def __init__(self, axes: Axes) -> None:
        self.left = list(axes)
        self.rest: Size = axes[-1].size if axes else 1
        self.cut: dict[Axis, list[Axis]] = {axis: [] for axis in axes}

    def take(self, piece: Axis, rest: Size | None) -> None:
        self.cut[self.left[-1]].append(piece)
        if rest is None:
            self.left.pop()
            self.rest = self.left[-1].size if self.left else 1
        else:
            self.rest = rest

    def where(self) -> Where:
        """Each axis as a position over its pieces, where it is not the piece itself."""
        found: Where = {}
        for axis, pieces in self.cut.items():
            if pieces == [axis]:
                continue
            terms, step = [], 1
            for piece in pieces:
                terms.append((piece, step))
                step = step * piece.size
            found[axis] = Position(0, tuple(terms))
        return found


def refined(a: Axes, b: Axes) -> tuple[_Pieces, _Pieces, Axes]:
    """Cut two lists of axes that run over equally many elements into the same pieces (axes of `a` where they fit).

    Raises Unreadable if their sizes do not allow it, or are not known to.
    """
    left, right = _Pieces(a), _Pieces(b)
    pieces: list[Axis] = []
    while left.left and right.left:
        one, two = left.rest, right.rest
        whole = left.left[-1]
        if same_size(one, two):
            piece = whole if same_size(whole.size, one) and not left.cut[whole] else Axis(one)
            left.take(piece, None)
            right.take(piece, None)
        elif (outer := quotient_of(one, two)) is not None:
            piece = Axis(two)
            left.take(piece, outer)
            right.take(piece, None)
        elif (outer := quotient_of(two, one)) is not None:
            piece = whole if same_size(whole.size, one) and not left.cut[whole] else Axis(one)
            left.take(piece, None)
            right.take(piece, outer)
        else:
            raise Unreadable("sizes that do not divide each other")
        pieces.append(piece)
    if left.left or right.left:
        raise Unreadable("different numbers of elements")
    return left, right, tuple(reversed(pieces))


def aligned(a: Axes, b: Axes) -> tuple[Where, Where, Axes]:
    """How two dimensions of one size become one: substitutions for both sides, and the axes that remain."""
    if not a or not b:
        return {}, {}, a or b
    left, right, pieces = refined(a, b)
    return left.where(), right.where(), pieces


def viewed(value: Value, shape: Sequence[Size]) -> Value:
    """The value with another shape of equally many elements."""
    wanted = [() if same_size(size, 1) else (Axis(size),) for size in shape]
    left, right, _ = refined(value.axes, tuple(axis for dim in wanted for axis in dim))
    dims = [tuple(piece for axis in dim for piece in reversed(right.cut[axis])) for dim in wanted]
    return placed(value, left.where(), dims)


def broadcast(a: Value, b: Value) -> tuple[Value, Value]:
    """Both over the dims of their common shape; a dimension that one of them has not is left out of its element."""
    rank = max(len(a.dims), len(b.dims))
    b = fresh(b)
    dims_a = ((),) * (rank - len(a.dims)) + a.dims
    dims_b = ((),) * (rank - len(b.dims)) + b.dims
    where_a: Where = {}
    where_b: Where = {}
    dims: list[Axes] = []
    for one, two in zip(dims_a, dims_b, strict=True):
        left, right, axes = aligned(one, two)
        where_a.update(left)
        where_b.update(right)
        dims.append(axes)
    return placed(a, where_a, dims), placed(b, where_b, dims)


def expanded(value: Value, shape: Sequence[Size]) -> Value:
    """Broadcast to a shape; sizes of -1 stay."""
    dims = ((),) * (len(shape) - len(value.dims)) + value.dims
    found = [
        (Axis(size),) if not dim and not same_size(size, -1) and not same_size(size, 1) else dim
        for dim, size in zip(dims, shape, strict=True)
    ]
    return Value(tuple(found), value.element)


def sliced(value: Value, dim: int, start: int, step: int, length: Size) -> Value:
    """Elements start, start + step, ... of one dimension."""
    axes = value.dims[dim]
    if len(axes) == 1 and same_size(axes[0].size, length) and start == 0 and step == 1:
        return value
    if len(axes) != 1:
        raise Unreadable("a slice of merged dimensions")
    dims = list(value.dims)
    if same_size(length, 1):
        dims[dim] = ()
        return placed(value, {axes[0]: Position(start)}, dims)
    part = Axis(length)
    dims[dim] = (part,)
    return placed(value, {axes[0]: Position(start, ((part, step),))}, dims)


def selected(value: Value, dim: int, index: Index) -> Value:
    """One element of a dimension, which goes away."""
    axes = value.dims[dim]
    if len(axes) > 1:
        raise Unreadable("one element of merged dimensions")
    dims = value.dims[:dim] + value.dims[dim + 1 :]
    return placed(value, {axes[0]: index} if axes else {}, dims)
