"""What operators do to ranges of numbers, for `ranges.py`.

A rule gets the ranges of arguments by name, the arguments, its node, and the range of any node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from math import inf
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node

from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.passes.moe.intervals import ANY, ZERO, Range, held, is_integral, name_of
from k3rewrite.patterns import OPERATORS

Arguments = Mapping[str, Any]
Of = Callable[..., Range]
Rule = Callable[[Of, Arguments, Node, Callable[[Any], Range]], Range]
MOST_PLACES, MOST_EXPERTS = 2**40, 2**20
"""more than a tensor has elements, and a layer experts"""


def _integral(node: Node) -> bool:
    return is_integral(node.meta.get("val"))


def _product(of: Of, arguments: Arguments, node: Node, ranges: Callable[[Any], Range]) -> Range:
    """Also with a condition, as 0 or 1: a choice between the other factor and zero."""
    for one, other in (("self", "other"), ("other", "self")):
        condition = _condition(arguments.get(one))
        if condition is not None:
            return _where(of(other), arguments[other], condition, True, ranges) | ZERO
    return of("self") * of("other")


def _condition(value: Any) -> Node | None:
    """The booleans that a number of 0 and 1 is made of."""
    while isinstance(value, Node) and value.target in OPERATORS["cast"]:
        value = value.all_input_nodes[0]
    known = value.meta.get("val") if isinstance(value, Node) else None
    return value if isinstance(known, torch.Tensor) and known.dtype == torch.bool else None


def _quotient(of: Of, arguments: Arguments, node: Node, ranges: Callable[[Any], Range]) -> Range:
    """Of numbers from zero by numbers from one."""
    one, other = of("self"), of("other")
    return Range(0, one.high) if one.low >= 0 and other.low >= 1 else ANY


def _remainder(of: Of, arguments: Arguments, node: Node, ranges: Callable[[Any], Range]) -> Range:
    """Has the sign of what is divided by. By zero a GPU gives any integer."""
    other = of("other")
    return Range(0, max(other.high - _integral(node), 0)) if other.low > 0 else ANY


def _truncated_remainder(of: Of, arguments: Arguments, node: Node, ranges: Callable[[Any], Range]) -> Range:
    """Has the sign of what is divided. By zero as above."""
    other = of("other")
    return Range(0, of("self").high) if of("self").low >= 0 and (other.low > 0 or other.high < 0) else ANY


def _absolute(of: Of, arguments: Arguments, node: Node, ranges: Callable[[Any], Range]) -> Range:
    found = of("self")
    return Range(0, max(abs(found.low), abs(found.high)))


def _to_integers(of: Of, arguments: Arguments, node: Node, ranges: Callable[[Any], Range]) -> Range:
    found = of("self")
    if not found.is_bounded or arguments.get("decimals"):
        return ANY
    return Range(math.floor(found.low), math.ceil(found.high))


def _and(of: Of, arguments: Arguments, node: Node, ranges: Callable[[Any], Range]) -> Range:
    high = [r.high for r in (of("self"), of("other")) if r.low >= 0]
    return Range(0, min(high)) if high else ANY


def _or(of: Of, arguments: Arguments, node: Node, ranges: Callable[[Any], Range]) -> Range:
    """The bits of both: below the next power of two."""
    one, other = of("self"), of("other")
    if min(one.low, other.low) < 0 or not (one.is_bounded and other.is_bounded):
        return ANY
    return Range(0, 2 ** max(int(one.high).bit_length(), int(other.high).bit_length()) - 1)


def _shifted(of: Of, arguments: Arguments, node: Node, ranges: Callable[[Any], Range]) -> Range:
    return Range(0, of("self").high) if of("self").low >= 0 else ANY


def _total(of: Of, arguments: Arguments, node: Node, ranges: Callable[[Any], Range]) -> Range:
    """A sum of as many numbers as there are, or of some of them."""
    count = arguments["self"].meta["val"].numel()
    found = of("self")
    if not isinstance(count, int) or not found.is_bounded:
        return ANY
    return Range(min(found.low, 0) * count, max(found.high, 0) * count)


def _choice(of: Of, arguments: Arguments, node: Node, ranges: Callable[[Any], Range]) -> Range:
    """Each side as far as the condition lets it be chosen: `where(ids >= first, ids - first, 0)`."""
    if "mask" in arguments:
        return _where(of("self"), arguments["self"], arguments["mask"], False, ranges) | of("value")
    condition = arguments["condition"]
    chosen, other = arguments["self"], arguments["other"]
    return _where(of("self"), chosen, condition, True, ranges) | _where(of("other"), other, condition, False, ranges)


def _put(of: Of, arguments: Arguments, node: Node, ranges: Callable[[Any], Range]) -> Range:
    """What was there, and what is written: a `src`, `values`, `source` or `value`. Where a mask says what is
    overwritten, the rest is what it does not say it of."""
    written = next((name for name in ("src", "values", "source", "value") if name in arguments), None)
    if written is None or arguments.get("accumulate") or arguments.get("reduce") not in (None, "amax", "amin"):
        return ANY
    indices = arguments.get("indices")
    if isinstance(indices, (list, tuple)) and len(indices) == 1 and (mask := _condition(indices[0])) is not None:
        return _where(of("self"), arguments["self"], mask, False, ranges) | of(written)
    return of("self") | of(written)


def _counting(of: Of, arguments: Arguments, node: Node, ranges: Callable[[Any], Range]) -> Range:
    start, end, step = arguments.get("start", 0), arguments.get("end"), arguments.get("step", 1)
    forward = isinstance(start, int) and isinstance(step, int) and start >= 0 and step > 0
    return Range(0, end if isinstance(end, int) and end >= 0 else MOST_PLACES) if forward else ANY


def _drawn(of: Of, arguments: Arguments, node: Node, ranges: Callable[[Any], Range]) -> Range:
    return Range(of("low").low, of("high").high - 1)


def _where(found: Range, chosen: Any, condition: Any, holds: bool, ranges: Callable[[Any], Range]) -> Range:
    """The range of what is chosen where the condition holds, or does not."""
    if not isinstance(chosen, Node):
        return found
    least = _least(condition, holds, chosen, ranges)
    shift = bound_arguments(chosen)
    if name_of(chosen) in ("sub", "add") and _integral(chosen) and shift.get("alpha", 1) == 1:
        moved = ranges(shift["other"])
        start = ranges(shift["self"])
        known = _least(condition, holds, shift["self"], ranges)
        if known > -inf:  # of those alone that are chosen the shift must not wrap
            part = Range(max(start.low, known), max(start.high, known))
            after = held(part + (moved if name_of(chosen) == "add" else -moved), chosen.meta["val"].dtype)
            found = Range(max(found.low, after.low), max(found.high, after.low))
    return Range(max(found.low, least), max(found.high, least))


def _least(condition: Any, holds: bool, node: Any, ranges: Callable[[Any], Range]) -> float:
    """What a number is at least where the condition holds, or does not; minus infinity if it does not say."""
    if not isinstance(condition, Node) or not isinstance(node, Node):
        return -inf
    name, arguments = name_of(condition), bound_arguments(condition)
    parts = [arguments[n] for n in ("self", "other") if n in arguments]
    if name in ("logical_not", "bitwise_not"):
        return _least(parts[0], not holds, node, ranges)
    if name in (("logical_and", "bitwise_and", "mul") if holds else ("logical_or", "bitwise_or")):
        return max(_least(part, holds, node, ranges) for part in parts)
    if len(parts) != 2 or parts[0] is not node:
        return -inf
    bound = ranges(parts[1])
    number = bound.low
    above = math.floor(number) + 1 if _integral(node) and number > -inf else number
    known = {("ge", True): number, ("lt", False): number, ("gt", True): above, ("le", False): above,
             ("eq", True): number, ("ne", False): number}  # fmt: skip
    found = known.get((name, holds), -inf)
    if name in ("ne", "eq") and holds is (name == "ne"):  # the least of all may be the one that it is not
        return number + 1 if _integral(node) and ranges(node).low == number == bound.high else -inf
    return found if holds or _integral(node) else -inf  # not being less is also said of NaN


def _plain(rule: Callable[[Of], Range]) -> Rule:
    return lambda of, arguments, node, ranges: rule(of)


RULES: Mapping[str, Rule] = MappingProxyType({
    "add": _plain(lambda of: of("self") + of("other") * of("alpha", 1)),
    "sub": _plain(lambda of: of("self") + -(of("other") * of("alpha", 1))),
    "rsub": _plain(lambda of: of("other") + -(of("self") * of("alpha", 1))),
    "mul": _product, "neg": _plain(lambda of: -of("self")), "abs": _absolute,
    "floor_divide": _quotient, "div": _quotient, "remainder": _remainder, "fmod": _truncated_remainder,
    "clamp": _plain(lambda of: of("self").above(of("min", -inf)).below(of("max", inf))),
    "clamp_min": _plain(lambda of: of("self").above(of("min", -inf))),
    "clamp_max": _plain(lambda of: of("self").below(of("max", inf))),
    "minimum": _plain(lambda of: of("self").below(of("other"))),
    "maximum": _plain(lambda of: of("self").above(of("other"))),
    "relu": _plain(lambda of: of("self").above(ZERO)),
    "round": _to_integers, "trunc": _to_integers, "floor": _to_integers, "ceil": _to_integers,
    "bitwise_and": _and, "bitwise_or": _or, "bitwise_xor": _or,
    "bitwise_not": _plain(lambda of: Range(-1, -1) + -of("self")),
    "__rshift__": _shifted, "bitwise_right_shift": _shifted, "sum": _total, "cumsum": _total,
    "where": _choice, "masked_fill": _choice, "copy": _plain(lambda of: of("src")),
    "constant_pad_nd": _plain(lambda of: of("self") | of("value")),
    "scatter": _put, "index_put": _put, "index_copy": _put, "index_fill": _put, "select_scatter": _put,
    "slice_scatter": _put, "scatter_reduce": _put, "arange": _counting, "iota": _counting, "randint": _drawn,
})  # fmt: skip
