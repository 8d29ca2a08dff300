"""Integers of index notation: which element of a tensor a value is.

    position        a + 3 * b          over axes, each of which runs from 0 to its size
    element         ids[t, k]          of an integer tensor
    order           order(s)           where the s-th smallest of some ids stands;     inverse(order)(r) is its inverse
    sorted          sorted(s)          the s-th smallest itself
    quotient, remainder                of a position and a number

Substituting a position simplifies: order(inverse(r)) is r, (k * t + j) // k is t. What is left in the end is what a
piece of graph computes, however it is spelled; an order that is not undone stays visible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch.fx import Node

from k3rewrite.graph.shapes import same_size

Size = Any  # an int or a torch.SymInt


class Axis:
    """One index variable; two axes are the same only if they are one object."""

    __slots__ = ("size",)

    def __init__(self, size: Size) -> None:
        self.size = size


Names = Mapping[Axis, Any]  # what axes are called in a key, where it is not themselves
OWN: Names = MappingProxyType({})


class Index:
    """Base of the integers. `key()` compares structure without asking anything of symbolic sizes."""

    def key(self, names: Names = OWN) -> Any:
        raise NotImplementedError

    def substitute(self, where: Mapping[Axis, Index]) -> Index:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Position(Index):
    """offset + the sum of coefficient * axis; an axis stands in it once."""

    offset: int = 0
    terms: tuple[tuple[Axis, Size], ...] = ()

    def key(self, names: Names = OWN) -> Any:
        return ("at", str(self.offset), tuple(sorted((str(names.get(a, id(a))), str(c)) for a, c in self.terms)))

    def substitute(self, where: Mapping[Axis, Index]) -> Index:
        if not any(axis in where for axis, _ in self.terms):
            return self
        if len(self.terms) == 1 and self.offset == 0 and same_size(self.terms[0][1], 1):
            return where[self.terms[0][0]]
        parts = [(c, where.get(axis, Position(0, ((axis, 1),)))) for axis, c in self.terms]
        offset: int = self.offset
        found: dict[Axis, Size] = {}
        for coefficient, inner in _recombined(parts):
            if not isinstance(inner, Position):
                raise Unreadable("a computed index is scaled or shifted")
            offset = offset + coefficient * inner.offset
            for deeper, factor in inner.terms:
                found[deeper] = found.get(deeper, 0) + coefficient * factor
        return Position(offset, tuple(found.items()))


@dataclass(frozen=True, eq=False)
class Element(Index):
    """An element of an integer tensor."""

    node: Node
    index: tuple[Index, ...]

    def key(self, names: Names = OWN) -> Any:
        return ("load", self.node.name, tuple(i.key(names) for i in self.index))

    def substitute(self, where: Mapping[Axis, Index]) -> Index:
        return Element(self.node, substituted(self.index, where))


@dataclass(frozen=True)
class Flat:
    """Integers in a row, row-major over `axes`: what is sorted, counted, or looked up."""

    axes: tuple[Axis, ...]
    value: Index

    def at(self, row: Index) -> Index:
        return self.value.substitute(dict(zip(self.axes, unflattened(row, self.axes), strict=True)))

    def key(self) -> Any:
        rows = {axis: (number, str(axis.size)) for number, axis in enumerate(self.axes)}
        return ("flat", tuple(rows.values()), self.value.key(rows))

    @property
    def rows(self) -> Size:
        return product_of(self.axes)


@dataclass(frozen=True, eq=False)
class Order(Index):
    """Where the element that `sort` puts into place `at` has come from. `sort` is the node: orders of ties differ."""

    sort: Node
    of: Flat
    at: Index

    def key(self, names: Names = OWN) -> Any:
        return ("order", self.sort.name, self.at.key(names))

    def substitute(self, where: Mapping[Axis, Index]) -> Index:
        at = self.at.substitute(where)
        if isinstance(at, Inverse) and at.sort is self.sort:
            return at.at
        return Order(self.sort, self.of, at)


@dataclass(frozen=True, eq=False)
class Inverse(Index):
    """The place into which the order of `sort` puts the element `at`."""

    sort: Node
    of: Flat
    at: Index

    def key(self, names: Names = OWN) -> Any:
        return ("inverse", self.sort.name, self.at.key(names))

    def substitute(self, where: Mapping[Axis, Index]) -> Index:
        at = self.at.substitute(where)
        if isinstance(at, Order) and at.sort is self.sort:
            return at.at
        return Inverse(self.sort, self.of, at)


@dataclass(frozen=True, eq=False)
class Sorted(Index):
    """The `at`-th smallest element of `of`. With `at` the place of an element in any order of `of`: that element."""

    of: Flat
    at: Index

    def key(self, names: Names = OWN) -> Any:
        return ("sorted", self.of.key(), self.at.key(names))

    def substitute(self, where: Mapping[Axis, Index]) -> Index:
        at = self.at.substitute(where)
        if isinstance(at, Inverse) and at.of.key() == self.of.key():
            return self.of.at(at.at)
        return self.of.value if not self.of.axes else Sorted(self.of, at)


@dataclass(frozen=True, eq=False)
class Present(Index):
    """The `at`-th smallest of the different elements of `of`; what follows these is not looked at."""

    of: Flat
    at: Index

    def key(self, names: Names = OWN) -> Any:
        return ("present", self.of.key(), self.at.key(names))

    def substitute(self, where: Mapping[Axis, Index]) -> Index:
        at = self.at.substitute(where)
        if isinstance(at, Rank) and at.of.key() == self.of.key():
            return Sorted(self.of, at.at).substitute({})
        if not self.of.axes and at.key() == Position(0).key():
            return self.of.value
        return Present(self.of, at)


@dataclass(frozen=True, eq=False)
class Rank(Index):
    """How many different elements of `of` are smaller than its `at`-th smallest."""

    of: Flat
    at: Index

    def key(self, names: Names = OWN) -> Any:
        return ("rank", self.of.key(), self.at.key(names))

    def substitute(self, where: Mapping[Axis, Index]) -> Index:
        return Rank(self.of, self.at.substitute(where))


@dataclass(frozen=True, eq=False)
class Count(Index):
    """How often `at` stands in `of`."""

    of: Flat
    at: Index

    def key(self, names: Names = OWN) -> Any:
        return ("count", self.of.key(), self.at.key(names))

    def substitute(self, where: Mapping[Axis, Index]) -> Index:
        return Count(self.of, self.at.substitute(where))


@dataclass(frozen=True, eq=False)
class End(Index):
    """How many elements of `of` are at most `at`; of the `at`-th different one if `present`: a group's end in rows."""

    of: Flat
    at: Index
    present: bool = False

    def key(self, names: Names = OWN) -> Any:
        return ("end", self.of.key(), self.at.key(names), self.present)

    def substitute(self, where: Mapping[Axis, Index]) -> Index:
        return End(self.of, self.at.substitute(where), self.present)


@dataclass(frozen=True, eq=False)
class Absent(Index):
    """1 where the count is 0, else 0."""

    count: Count

    def key(self, names: Names = OWN) -> Any:
        return ("absent", self.count.key(names))

    def substitute(self, where: Mapping[Axis, Index]) -> Index:
        count = self.count.substitute(where)
        assert isinstance(count, Count)
        return Absent(count)


@dataclass(frozen=True, eq=False)
class Quotient(Index):
    """of // by, rounded down; `remainder`: of % by."""

    of: Index
    by: Size
    remainder: bool = False

    def key(self, names: Names = OWN) -> Any:
        return ("remainder" if self.remainder else "quotient", self.of.key(names), str(self.by))

    def substitute(self, where: Mapping[Axis, Index]) -> Index:
        return divided(self.of.substitute(where), self.by, self.remainder)


class Unreadable(Exception):
    """This node has no form in index notation. `telling`: that is a reason for the whole site, wherever it stands."""

    def __init__(self, reason: str, *, telling: bool = False) -> None:
        super().__init__(reason)
        self.telling = telling


def position(axis: Axis) -> Position:
    return Position(0, ((axis, 1),))


def substituted(index: tuple[Index, ...], where: Mapping[Axis, Index]) -> tuple[Index, ...]:
    return tuple(i.substitute(where) for i in index)


def axes_of(index: Index) -> set[Axis]:
    """The axes with which an index changes."""
    if isinstance(index, Position):
        return {axis for axis, _ in index.terms}
    if isinstance(index, Element):
        return {axis for inner in index.index for axis in axes_of(inner)}
    if isinstance(index, (Quotient, Order, Inverse)):
        return axes_of(index.of if isinstance(index, Quotient) else index.at)
    return set()


def divided(of: Index, by: Size, remainder: bool) -> Index:
    """of // by or of % by, simplified where the terms divide or stay below `by`."""
    if same_size(by, 1):
        return Position(0) if remainder else of
    if isinstance(of, Position) and of.offset == 0:
        whole: list[tuple[Axis, Size]] = []
        rest: list[tuple[Axis, Size]] = []
        for axis, coefficient in of.terms:
            factor = quotient_of(coefficient, by)
            if factor is not None:
                whole.append((axis, factor))
            else:
                rest.append((axis, coefficient))
        if _below(rest, by):
            return Position(0, tuple(rest if remainder else whole))
    return Quotient(of, by, remainder)


def _recombined(parts: list[tuple[Size, Index]]) -> list[tuple[Size, Index]]:
    """n * (p // n) + p % n is p."""
    for high, (coefficient, quotient) in enumerate(parts):
        if not isinstance(quotient, Quotient) or quotient.remainder:
            continue
        for low, (factor, rest) in enumerate(parts):
            if not isinstance(rest, Quotient) or not rest.remainder or rest.of.key() != quotient.of.key():
                continue
            if same_size(rest.by, quotient.by) and same_size(coefficient, factor * quotient.by):
                others = [part for i, part in enumerate(parts) if i not in (high, low)]
                return _recombined([*others, (factor, quotient.of)])
    return parts


def _below(terms: list[tuple[Axis, Size]], by: Size) -> bool:
    """True if the terms are the digits of a number below `by`. Of an axis of no element nothing is said: it may be cut
    later, and what it is cut into would be lost."""
    reach: Size = 1
    for axis, coefficient in sorted(terms, key=lambda term: str(term[1]).zfill(24)):
        if not same_size(coefficient, reach):
            return False
        reach = reach * axis.size
    return same_size(reach, by) or (isinstance(reach, int) and isinstance(by, int) and 0 < reach <= by)


def quotient_of(a: Size, b: Size) -> Size | None:
    """a / b if that is known to be whole, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    if same_size(b, 1):
        return a
    if same_size(a, b):
        return 1
    whole = a // b
    return whole if same_size(whole * b, a) else None


def product_of(axes: tuple[Axis, ...]) -> Size:
    size: Size = 1
    for axis in axes:
        size = size * axis.size
    return size


def flattened(axes: tuple[Axis, ...]) -> Position:
    """The row-major position over several axes."""
    terms: list[tuple[Axis, Size]] = []
    step: Size = 1
    for axis in reversed(axes):
        terms.append((axis, step))
        step = step * axis.size
    return Position(0, tuple(terms))


def unflattened(row: Index, axes: tuple[Axis, ...]) -> list[Index]:
    """The indices along `axes` of the row-major position `row`."""
    found: list[Index] = []
    for axis in reversed(axes):
        last = axis is axes[0]
        found.append(row if last else divided(row, axis.size, True))
        row = row if last else divided(row, axis.size, False)
    return found[::-1]
