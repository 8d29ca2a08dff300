"""Stacked experts' weights: which rows and columns of which stored tensor a factor of a product is.

dense   w[e, first + step * r, c]
mxfp4   pairs[bytes[e, r, c // 2], c % 2] * scales[s[e, r, c // 32]]      pairs, scales: tables of 256 entries
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from k3rewrite.graph.shapes import same_size
from k3rewrite.kernels.experts.formats import GROUP
from k3rewrite.passes.moe.expression import Apply, Expression, Load, unwidened
from k3rewrite.passes.moe.index import (
    Axis,
    Element,
    Index,
    Position,
    Quotient,
    Size,
    divided,
    flattened,
    product_of,
)
from k3rewrite.patterns import Builder


class NotExperts(Exception):
    """This value is no mixture of experts that the op can say; `node` is the place. Ends the reading of one root.

    `progress` says how far the value was a mixture: not at all (0), a sum that might be one (1), one with something
    wrong inside (2), or in what it reads (3).
    """

    def __init__(self, reason: str, node: Node | None = None, *, progress: int = 2) -> None:
        super().__init__(reason)
        self.reason, self.node, self.progress = reason, node, progress


@dataclass(frozen=True)
class Part:
    """One dimension of a stored tensor, or every step-th element of it from `start`."""

    dim: int
    start: int
    step: Size
    length: Size


@dataclass(frozen=True)
class Stored:
    """A stored tensor [E, rows, columns] in some order of its dimensions, parts of it taken."""

    node: Node
    expert: Index
    expert_dim: int
    rows: Part
    columns: Part
    experts: Part | None = None
    """the experts that are meant, if not all"""

    def place(self) -> tuple[Any, ...]:
        """Everything but the expert, to be compared."""
        parts = [(p.dim, p.start, str(p.step), str(p.length)) for p in (self.rows, self.columns)]
        return (self.node, self.expert_dim, *parts)

    def build(self, builder: Builder) -> Node:
        """The tensor [E, rows, columns] as views of the stored one."""
        result, shape = self.node, self.node.meta["val"].shape
        for part in (self.rows, self.columns, *([self.experts] if self.experts else [])):
            whole = part.start == 0 and same_size(part.step, 1) and same_size(shape[part.dim], part.length)
            if not whole:
                end = part.start + part.step * part.length
                arguments = (result, part.dim, part.start, end, part.step)
                result = builder.call(torch.ops.aten.slice.Tensor, *arguments)
        order = [self.expert_dim, self.rows.dim, self.columns.dim]
        if order != [0, 1, 2]:
            result = builder.call(torch.ops.aten.permute.default, result, order)
        return result


@dataclass(frozen=True)
class Weight:
    """A factor of an expert's product: its storage, and for MXFP4 its scales and the tables that were looked up."""

    format: str
    values: Stored
    scales: Stored | None = None
    tables: tuple[tuple[Node, str], ...] = ()

    @property
    def expert(self) -> Index:
        return self.values.expert

    def stored(self) -> tuple[Stored, ...]:
        return (self.values,) if self.scales is None else (self.values, self.scales)

    def window(self, first: int, count: int) -> Weight:
        """The weights of `count` experts from `first`."""

        def part(stored: Stored) -> Stored:
            return replace(stored, experts=Part(stored.expert_dim, first, 1, count))

        return replace(self, values=part(self.values), scales=part(self.scales) if self.scales is not None else None)


def weight_of(factor: Expression, rows: tuple[Axis, ...], columns: tuple[Axis, ...]) -> Weight:
    """The weight that `factor` is an element of, with rows and columns running over the given axes.

    Raises NotExperts if it is none.
    """
    factor = unwidened(factor)
    if isinstance(factor, Load):
        return Weight("dense", _stored(factor.node, factor.index, flattened(rows), flattened(columns),
                                       product_of(rows), product_of(columns)))  # fmt: skip
    if isinstance(factor, Apply) and factor.name == "mul":
        return _mxfp4(factor, rows, columns)
    raise NotExperts("the weights of the experts are computed in a way that has no format here", factor.node)


def _stored(
    node: Node, index: tuple[Index, ...], row: Position, column: Index, row_count: Size, column_count: Size
) -> Stored:
    if len(index) != 3:
        raise NotExperts(f"the weights have {len(index)} dimensions, and a stack of experts has three", node)
    rows = [i for i, at in enumerate(index) if _offset(at, row) is not None and row.terms]
    columns = [i for i, at in enumerate(index) if i not in rows and _offset(at, column) is not None]
    experts = [i for i in range(3) if i not in rows and i not in columns]
    if len(rows) != 1 or len(columns) != 1 or len(experts) != 1:
        raise NotExperts("rows and columns of the experts' weights are not two of their dimensions", node)
    (row_start, row_step), (start, step) = _parts(index[rows[0]], row), _parts(index[columns[0]], column)
    return Stored(
        node, index[experts[0]], experts[0], Part(rows[0], row_start, row_step, row_count),
        Part(columns[0], start, step, column_count),
    )  # fmt: skip


def _parts(index: Index, wanted: Index) -> tuple[int, Size]:
    found = _offset(index, wanted)
    assert found is not None
    return found


def _offset(index: Index, wanted: Index) -> tuple[int, Size] | None:
    """(start, step) with index = start + step * wanted."""
    if not isinstance(index, Position) or not isinstance(wanted, Position) or not wanted.terms:
        return (0, 1) if index.key() == wanted.key() else None
    mine, theirs = dict(index.terms), dict(wanted.terms)
    if mine.keys() != theirs.keys():
        return None
    innermost = wanted.terms[0][0]
    step = mine[innermost]
    scaled = all(same_size(mine[axis], step * theirs[axis]) for axis in mine)
    return (index.offset, step) if scaled else None


def _mxfp4(factor: Apply, rows: tuple[Axis, ...], columns: tuple[Axis, ...]) -> Weight:
    tables = [argument for argument in factor.args[:2] if isinstance(argument, Load)]
    pairs = next((t for t in tables if len(t.index) == 2 and _byte(t) is not None), None)
    scales = next((t for t in tables if len(t.index) == 1 and _byte(t) is not None), None)
    if pairs is None or scales is None:
        raise NotExperts("the weights of the experts are a product that is not one of MXFP4 tables", factor.node)
    packed, scale = _byte(pairs), _byte(scales)
    assert packed is not None and scale is not None
    column = flattened(columns)
    half, group = divided(column, 2, False), divided(column, GROUP, False)
    if pairs.index[1].key() != divided(column, 2, True).key():
        raise NotExperts("the two values of a byte do not lie in neighbouring columns", factor.node)
    count = product_of(columns)
    if isinstance(half, Quotient) or isinstance(group, Quotient) or not isinstance(count, int) or count % GROUP:
        raise NotExperts(f"the columns of the experts' weights are no whole groups of {GROUP}", factor.node)
    values = _stored(packed.node, packed.index, flattened(rows), half, product_of(rows), count // 2)
    factors = _stored(scale.node, scale.index, flattened(rows), group, product_of(rows), count // GROUP)
    if values.expert.key() != factors.expert.key():
        raise NotExperts("bytes and scales are those of different experts", factor.node)
    if values.node.meta["val"].dtype != torch.uint8 or factors.node.meta["val"].dtype != torch.uint8:
        raise NotExperts("bytes and scales of MXFP4 weights are not uint8", factor.node)
    return Weight("mxfp4", values, factors, ((pairs.node, "E2M1 pairs"), (scales.node, "E8M0 scales")))


def _byte(table: Load) -> Element | None:
    """The stored byte that a table is looked up with."""
    at: Any = table.index[0]
    return at if isinstance(at, Element) and len(at.index) == 3 else None
