"""Values of index notation: what an element of a float tensor is, as an expression over axes.

Element     x[t, c]                  an element of a tensor of the graph, in its dtype
Cast        rounded or widened to a dtype
Apply       an element-wise operator
Product     sum over axes of a * b, accumulated wide, rounded once
Total       sum over axes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from k3rewrite.graph.dtypes import widens
from k3rewrite.graph.shapes import same_size
from k3rewrite.passes.moe.index import (
    OWN,
    Axis,
    Count,
    Element,
    Flat,
    Index,
    Names,
    Position,
    Unreadable,
    position,
    substituted,
)


class Expression:
    """Base of the values; `dtype` is what the element is rounded to, `node` where it is computed."""

    dtype: torch.dtype
    node: Node

    def key(self, names: Names = OWN) -> Any:
        raise NotImplementedError

    def substitute(self, where: Mapping[Axis, Index]) -> Expression:
        raise NotImplementedError

    def parts(self) -> tuple[Expression, ...]:
        return ()


@dataclass(frozen=True, eq=False)
class Load(Expression):
    """An element of a tensor of the graph."""

    node: Node
    index: tuple[Index, ...]
    dtype: torch.dtype

    def key(self, names: Names = OWN) -> Any:
        return ("load", self.node.name, tuple(i.key(names) for i in self.index))

    def substitute(self, where: Mapping[Axis, Index]) -> Expression:
        return Load(self.node, substituted(self.index, where), self.dtype)


@dataclass(frozen=True, eq=False)
class Integer(Expression):
    """An integer as a value."""

    node: Node
    value: Index
    dtype: torch.dtype

    def key(self, names: Names = OWN) -> Any:
        return self.value.key(names)

    def substitute(self, where: Mapping[Axis, Index]) -> Expression:
        return Integer(self.node, self.value.substitute(where), self.dtype)


@dataclass(frozen=True, eq=False)
class Chosen(Expression):
    """1 (or True) where an id is the number `at`, else 0."""

    node: Node
    id: Index
    at: Index
    dtype: torch.dtype

    def key(self, names: Names = OWN) -> Any:
        return ("chosen", self.id.key(names), self.at.key(names))

    def substitute(self, where: Mapping[Axis, Index]) -> Expression:
        return Chosen(self.node, self.id.substitute(where), self.at.substitute(where), self.dtype)


@dataclass(frozen=True, eq=False)
class Rounded(Expression):
    """A cast."""

    node: Node
    of: Expression
    dtype: torch.dtype

    def key(self, names: Names = OWN) -> Any:
        return ("cast", str(self.dtype), self.of.key(names))

    def substitute(self, where: Mapping[Axis, Index]) -> Expression:
        return Rounded(self.node, self.of.substitute(where), self.dtype)

    def parts(self) -> tuple[Expression, ...]:
        return (self.of,)


@dataclass(frozen=True, eq=False)
class Apply(Expression):
    """An element-wise operator (by the name of its op) on values and constants."""

    node: Node
    name: str
    args: tuple[Any, ...]
    dtype: torch.dtype

    def key(self, names: Names = OWN) -> Any:
        return ("apply", self.name, tuple(a.key(names) if isinstance(a, Expression) else repr(a) for a in self.args))

    def substitute(self, where: Mapping[Axis, Index]) -> Expression:
        args = tuple(a.substitute(where) if isinstance(a, Expression) else a for a in self.args)
        return Apply(self.node, self.name, args, self.dtype)

    def parts(self) -> tuple[Expression, ...]:
        return tuple(a for a in self.args if isinstance(a, Expression))


@dataclass(frozen=True, eq=False)
class Product(Expression):
    """The sum over `axes` of left * right."""

    node: Node
    axes: tuple[Axis, ...]
    left: Expression
    right: Expression
    dtype: torch.dtype

    def key(self, names: Names = OWN) -> Any:
        return ("product", tuple(id(a) for a in self.axes), self.left.key(names), self.right.key(names))

    def substitute(self, where: Mapping[Axis, Index]) -> Expression:
        axes = inner_axes(self.axes, where)
        return Product(self.node, axes, self.left.substitute(where), self.right.substitute(where), self.dtype)

    def parts(self) -> tuple[Expression, ...]:
        return (self.left, self.right)


@dataclass(frozen=True, eq=False)
class Total(Expression):
    """The sum over `axes`, rounded to `dtype`; `added_in` is what the partial sums are rounded to, if anything."""

    node: Node
    axes: tuple[Axis, ...]
    of: Expression
    dtype: torch.dtype
    added_in: torch.dtype | None = None

    def key(self, names: Names = OWN) -> Any:
        return ("total", tuple(id(a) for a in self.axes), self.of.key(names))

    def substitute(self, where: Mapping[Axis, Index]) -> Expression:
        return Total(self.node, inner_axes(self.axes, where), self.of.substitute(where), self.dtype, self.added_in)

    def parts(self) -> tuple[Expression, ...]:
        return (self.of,)


def inner_axes(axes: tuple[Axis, ...], where: Mapping[Axis, Index]) -> tuple[Axis, ...]:
    """Summed axes are never substituted from outside: they are objects of their own."""
    assert not any(axis in where for axis in axes)
    return axes


def uncast(value: Expression) -> tuple[Expression, list[torch.dtype]]:
    """What is inside of the casts around a value, and the dtypes that they cast to, in order."""
    casts: list[torch.dtype] = []
    while isinstance(value, Rounded):
        casts.append(value.dtype)
        value = value.of
    return value, casts[::-1]


def unwidened(value: Expression) -> Expression:
    """What is inside of the casts around a value that lose nothing."""
    while isinstance(value, Rounded) and widens(value.of.dtype, value.dtype):
        value = value.of
    return value


def walk(expression: Expression) -> Iterator[Expression]:
    """The expression and everything in it."""
    yield expression
    for part in expression.parts():
        yield from walk(part)


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor: for each dimension the axes that it runs over (row-major; none for size one), and its element."""

    dims: tuple[tuple[Axis, ...], ...]
    element: Expression

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(axis for dim in self.dims for axis in dim)

    def substitute(self, where: Mapping[Axis, Index]) -> Expression:
        return self.element.substitute(where)


def leaf(node: Node) -> Value:
    value = node.meta["val"]
    dims = tuple(() if same_size(size, 1) else (Axis(size),) for size in value.shape)
    index = tuple(position(dim[0]) if dim else Position(0) for dim in dims)
    return Value(dims, Load(node, index, value.dtype))


def as_index(element: Expression) -> Index:
    """A value of an integer dtype as an index. Casts that keep every integer there may be are looked through."""
    if isinstance(element, Integer):
        return element.value
    if isinstance(element, Load) and not element.dtype.is_floating_point:
        return Element(element.node, element.index)
    if isinstance(element, Rounded) and keeps_integers(element.dtype):
        return as_index(element.of)
    one_hot = uncast(element.of)[0] if isinstance(element, Total) else None
    if isinstance(element, Total) and isinstance(one_hot, Chosen) and keeps_integers(element.dtype):
        return Count(Flat(element.axes, one_hot.id), one_hot.at)
    raise Unreadable("an index that is computed in another way")


def keeps_integers(dtype: torch.dtype) -> bool:
    """False for a dtype that wraps or rounds numbers of experts or rows: bool, 8 and 16 bits."""
    return dtype.itemsize >= 4


def dimension(argument: int, rank: int) -> int:
    return argument % rank if rank else 0
