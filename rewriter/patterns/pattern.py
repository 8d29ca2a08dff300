"""Patterns are values: a small tree that says what a piece of graph computes.

    x = Var("x")
    statistic = call("mean", call("mul", x, x), LAST_DIM, keepdim=True)
    norm = call("mul", x, call("rsqrt", call("add", statistic, Number("eps"))))

* `Var` binds a tensor; a name used twice must be the same node. It never binds a number.
* `Number` captures a scalar, or demands one by value (2 and 2.0 are the same, True and 1 are not); there are no
  wildcards for literals.
* `call` names an operator, whose overloads are in `OPERATORS` (`sorted(OPERATORS)` lists the names), or is given one
  overload: `call("mul", ...)`, `call(torch.ops.aten.erf.default, ...)`. Arguments are compared by parameter name with
  the schema's defaults filled in; commutative operators are tried both ways.
* `Cast` is an optional dtype cast around a value; the dtype there is bound, so that a rule can check it.
* `Views` looks through reshapes, never through transpositions or slices. `Product` is a product in any association.
* `a | b` are alternatives. `ListOf` matches list arguments. `Item` is one result of a call with several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from k3rewrite.errors import ConfigError, did_you_mean

aten = torch.ops.aten


class _Operators(dict[str, frozenset[Any]]):
    """Overloads by name; an unknown name is a `ConfigError` that says which names there are."""

    def __missing__(self, name: str) -> frozenset[Any]:
        raise ConfigError(
            f"no operator '{name}'",
            place="patterns.OPERATORS",
            remedy=f"{did_you_mean(str(name), self)} (an op without a name here is given by its overload: "
            "call(torch.ops.aten.erf.default, ...))",
        )


_NAMED = {
    "add": frozenset({aten.add.Tensor, aten.add.Scalar}),
    "sub": frozenset({aten.sub.Tensor, aten.sub.Scalar}),
    "mul": frozenset({aten.mul.Tensor, aten.mul.Scalar}),
    "div": frozenset({aten.div.Tensor, aten.div.Scalar}),
    "pow": frozenset({aten.pow.Tensor_Scalar}),
    "neg": frozenset({aten.neg.default}),
    "square": frozenset({aten.square.default}),
    "sqrt": frozenset({aten.sqrt.default}),
    "rsqrt": frozenset({aten.rsqrt.default}),
    "reciprocal": frozenset({aten.reciprocal.default}),
    "mean": frozenset({aten.mean.dim}),
    "sum": frozenset({aten.sum.dim_IntList}),
    "var": frozenset({aten.var.correction}),
    "vector_norm": frozenset({aten.linalg_vector_norm.default}),
    "clamp": frozenset({aten.clamp.default}),
    "clamp_min": frozenset({aten.clamp_min.default}),
    "sigmoid": frozenset({aten.sigmoid.default}),
    "silu": frozenset({aten.silu.default}),
    "tanh": frozenset({aten.tanh.default}),
    "softmax": frozenset({aten._softmax.default}),
    "topk": frozenset({aten.topk.default}),
    "gather": frozenset({aten.gather.default}),
    "mm": frozenset({aten.mm.default}),
    "mv": frozenset({aten.mv.default}),
    "bmm": frozenset({aten.bmm.default}),
    "t": frozenset({aten.t.default}),
    "permute": frozenset({aten.permute.default}),
    "transpose": frozenset({aten.transpose.int}),
    "view": frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default}),
    "unsqueeze": frozenset({aten.unsqueeze.default}),
    "squeeze": frozenset({aten.squeeze.dim, aten.squeeze.dims}),
    "expand": frozenset({aten.expand.default}),
    "stack": frozenset({aten.stack.default}),
    "cat": frozenset({aten.cat.default}),
    "slice": frozenset({aten.slice.Tensor}),
    "select": frozenset({aten.select.int}),
    "select_scatter": frozenset({aten.select_scatter.default}),
    "split": frozenset({aten.split.Tensor, aten.split_with_sizes.default}),
    "fused_rms_norm": frozenset({aten._fused_rms_norm.default}),
    "cast": frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default}),
}
OPERATORS: Mapping[str, frozenset[Any]] = MappingProxyType(_Operators(_NAMED))
"""Names of operators for `call` and for `Rule.anchors`, each with its overloads. `ConfigError` for another name."""
COMMUTATIVE = OPERATORS["add"] | OPERATORS["mul"]


class Pattern:
    """Base of all patterns; `|` makes an alternative."""

    def __or__(self, other: Pattern) -> Either:
        left = self.options if isinstance(self, Either) else (self,)
        right = other.options if isinstance(other, Either) else (other,)
        return Either(left + right)

    def describe(self) -> str:
        """What a reader of a miss sees as the expectation."""
        raise NotImplementedError


@dataclass(frozen=True)
class Var(Pattern):
    """Any tensor-valued node; the same name again must be the same node."""

    name: str

    def describe(self) -> str:
        return f"the tensor '{self.name}'"


@dataclass(frozen=True)
class Number(Pattern):
    """A Python number: captured under `name`, or equal to `value`."""

    name: str | None = None
    value: float | None = None

    def describe(self) -> str:
        return f"the number {self.value:g}" if self.value is not None else f"a number ('{self.name}')"


@dataclass(frozen=True)
class Anything(Pattern):
    """Any argument at all (a list, a dtype, None); bound under `name` if there is one."""

    name: str | None = None

    def describe(self) -> str:
        return "anything"


@dataclass(frozen=True)
class Dims(Pattern):
    """The dimension argument of a reduction: equal to `dims`, counted from the end of the reduced tensor."""

    dims: tuple[int, ...]

    def describe(self) -> str:
        return f"dim {self.dims[0] if len(self.dims) == 1 else self.dims}"


LAST_DIM = Dims((-1,))


@dataclass(frozen=True)
class Call(Pattern):
    """A call of one of `targets`. Parameters that are not mentioned must have their default, unless `open`."""

    label: str
    targets: frozenset[Any]
    args: tuple[Pattern, ...]
    kwargs: tuple[tuple[str, Pattern], ...] = ()
    name: str | None = None
    open: bool = False

    def describe(self) -> str:
        return self.label


@dataclass(frozen=True)
class Cast(Pattern):
    """`inner`, with or without one dtype cast around it. `name` binds the dtype of the value as it is used."""

    inner: Pattern
    name: str

    def describe(self) -> str:
        return self.inner.describe()


@dataclass(frozen=True)
class Views(Pattern):
    """`inner` behind any chain of views that show all of its elements in the same order (see graph/layout.py); `name`
    binds the outermost node. What is left to the rule is to check its shape."""

    inner: Pattern
    name: str | None = None

    def describe(self) -> str:
        return self.inner.describe()


@dataclass(frozen=True)
class Product(Pattern):
    """A product in any association and order: a tree of multiplications flattened to tensor factors and one number.

    `4 * tanh(g / 4) * sigmoid(g) * u` and `(tanh(g / 4) * 4) * (u * sigmoid(g))` are one pattern. `scale` binds the
    product of the numbers (1.0 if there is none).
    """

    factors: tuple[Pattern, ...]
    scale: str

    def describe(self) -> str:
        return "a product of " + ", ".join(f.describe() for f in self.factors)


@dataclass(frozen=True)
class Either(Pattern):
    """The first alternative that leads to a whole match; a miss reports the one that got furthest."""

    options: tuple[Pattern, ...]

    def describe(self) -> str:
        return " or ".join(dict.fromkeys(o.describe() for o in self.options))


@dataclass(frozen=True)
class Item(Pattern):
    """Result number `index` of a call with several results."""

    inner: Pattern
    index: int
    name: str | None = None

    def describe(self) -> str:
        return f"result {self.index} of {self.inner.describe()}"


@dataclass(frozen=True)
class ListOf(Pattern):
    """A list argument: element patterns in order, or (`each`) any number of tensors bound as a tuple, of which `last`
    may be told apart."""

    items: tuple[Pattern, ...] = ()
    each: str | None = None
    last: Pattern | None = None

    def describe(self) -> str:
        return f"a list ('{self.each}')" if self.each else f"a list of {len(self.items)}"


@dataclass(frozen=True)
class Named(Pattern):
    """Bind the node that `inner` matches."""

    inner: Pattern
    name: str = field(default="")

    def describe(self) -> str:
        return self.inner.describe()


def call(operator: str | Any, *args: Pattern | float, name: str | None = None, open: bool = False,
         **kwargs: Pattern | float | bool) -> Call:  # fmt: skip
    """A call of a named operator (see `OPERATORS`) or of an overload (`torch.ops.aten.erf.default`, not
    `torch.ops.aten.erf`); plain numbers stand for themselves. `ConfigError` for a name that `OPERATORS` has not."""
    if isinstance(operator, str):
        label, targets = operator, OPERATORS[operator]
    else:
        label, targets = str(operator).replace(".default", ""), frozenset({operator})
    return Call(
        label,
        targets,
        tuple(_lift(a) for a in args),
        tuple((k, _lift(v)) for k, v in kwargs.items()),
        name=name,
        open=open,
    )


def _lift(value: Any) -> Pattern:
    if isinstance(value, Pattern):
        return value
    if not isinstance(value, (bool, int, float)):
        raise TypeError(f"{value!r} is neither a pattern nor a number")
    return Number(value=value)
