"""The activation of a gated unit, read off a product of its factors: SiLU, SiTU, or the reason why it is neither.

silu   silu(g) * u  |  g * sigmoid(g) * u
situ   b * tanh(g / b) * sigmoid(g) * l * tanh(u / l), in any order; without l: * u
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from k3rewrite.passes.moe.expression import Apply, Expression, Load, Product, Rounded, walk
from k3rewrite.passes.moe.weights import NotExperts

CLAMPS = frozenset({"clamp", "clamp_min", "clamp_max", "minimum", "maximum", "hardtanh", "clip"})


@dataclass(frozen=True)
class Gated:
    """An activation, the values of its gate and up half, and whether the op computes it in the very same steps."""

    name: str
    beta: float
    linear_beta: float
    gate: Expression
    up: Expression
    dtype: torch.dtype
    literal: bool


def gated_unit(value: Expression) -> Gated:
    """Raises NotExperts for another function of the two halves."""
    _refuse_others(value)
    factors, number = _factors(value, value.dtype)
    names = [_name(factor) for factor in factors]
    where = value.node
    if not all(_reads_product(f) for f in factors):
        raise NotExperts("the routing weights (or another factor) are applied before the down projection", where)
    dtypes = {f.dtype for f in factors if isinstance(f, Apply)} | {value.dtype}
    if len(dtypes) != 1:
        raise NotExperts(f"the activation is computed in several dtypes: {sorted(map(str, dtypes))}", where)
    if names.count("silu") == 1 and len(factors) == 2 and number == 1.0:
        silu = factors.pop(names.index("silu"))
        return Gated("silu", 0.0, 0.0, silu.parts()[0], factors[0], value.dtype, True)
    if names.count("sigmoid") != 1:
        raise NotExperts(_unknown(names), where)
    gate = factors.pop(names.index("sigmoid")).parts()[0]
    rest = [f for f in factors if f.key() != gate.key()]
    if len(rest) == 1 and len(factors) == 2 and number == 1.0 and _name(rest[0]) == "":
        return Gated("silu", 0.0, 0.0, gate, rest[0], value.dtype, False)
    return _situ(value, gate, factors, number)


def _situ(value: Expression, gate: Expression, factors: Sequence[Expression], number: float) -> Gated:
    tanhs = [(f, *_scaled(f.parts()[0])) for f in factors if _name(f) == "tanh"]
    plain = [f for f in factors if _name(f) == ""]
    of_gate = [t for t in tanhs if t[1].key() == gate.key()]
    of_up = [t for t in tanhs if t not in of_gate]
    if len(of_gate) != 1 or len(factors) != 2 or len(of_up) + len(plain) != 1:
        raise NotExperts(_unknown([_name(f) for f in factors]), value.node)
    beta, linear = of_gate[0][2], of_up[0][2] if of_up else 0.0
    if not (math.isfinite(beta) and math.isfinite(linear) and beta):
        raise NotExperts(f"the scales of the two halves are {beta:g} and {linear:g}: that is no SiTU", value.node)
    expected = beta * (linear or 1.0)
    if not math.isclose(number, expected, rel_tol=8 * torch.finfo(torch.float64).eps):
        raise NotExperts(
            f"the product's constant is {number:g}, and SiTU needs beta * linear_beta = {expected:g}", value.node
        )
    up = of_up[0][1] if of_up else plain[0]
    return Gated("situ", beta, linear, gate, up, value.dtype, value.dtype.itemsize >= 4)


def _unknown(names: Sequence[str]) -> str:
    found = ", ".join(sorted({n for n in names if n})) or "a plain product"
    return f"the activation is neither SiLU nor SiTU of a gate times an up half: {found}"


def _refuse_others(value: Expression) -> None:
    """A function that is not in the two activations, named; a sum with something is a bias."""
    if isinstance(value, Rounded):
        raise NotExperts("the activation is rounded inside", value.node)
    for inner in _above_products(value):
        if not isinstance(inner, Apply) or inner.name in ("mul", "div", "silu", "sigmoid", "tanh"):
            continue
        if inner.name == "add" and any(not _reads_product(p) for p in inner.parts()) and len(inner.parts()) == 2:
            raise NotExperts("the experts have a bias", inner.node)
        if inner.name in CLAMPS:
            raise NotExperts(f"the gated unit is clamped ({inner.name}): another activation than SiLU", inner.node)
        raise NotExperts(f"the activation is neither SiLU nor SiTU: {inner.name}", inner.node)


def _above_products(value: Expression) -> list[Expression]:
    """The expression and what is in it, down to the products with weights."""
    found, stack = [], [value]
    while stack:
        inner = stack.pop()
        if not isinstance(inner, (Product, Load)):
            found.append(inner)
            stack.extend(inner.parts())
    return found


def _factors(value: Expression, dtype: torch.dtype) -> tuple[list[Expression], float]:
    """A product in any association, flattened: its factors, and its numbers multiplied."""
    if not isinstance(value, Apply) or value.name != "mul" or value.dtype != dtype:
        return [value], 1.0
    factors: list[Expression] = []
    number = 1.0
    for argument in value.args[:2]:
        if isinstance(argument, Expression):
            inner, more = _factors(argument, dtype)
            factors += inner
            number *= more
        else:
            number *= argument
    return factors, number


def _scaled(value: Expression) -> tuple[Expression, float]:
    """(v, c) of v / c, also spelled v * (1 / c)."""
    if isinstance(value, Apply) and value.name in ("div", "mul"):
        one, two, *rest = value.args
        plain = value.name == "mul" or not any(r is not None for r in rest)
        if isinstance(one, Expression) and isinstance(two, (int, float)) and plain and two:
            return one, float(two) if value.name == "div" else 1 / float(two)
        if isinstance(two, Expression) and isinstance(one, (int, float)) and value.name == "mul" and one:
            return two, 1 / float(one)
    return value, 1.0


def _name(value: Any) -> str:
    """The operator of a factor; empty for a product with weights (cast or not)."""
    return value.name if isinstance(value, Apply) else ""


def _reads_product(value: Expression) -> bool:
    return any(isinstance(inner, Product) for inner in walk(value))
