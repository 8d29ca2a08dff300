"""The range of the integers in a node, read off the graph: may an id be negative?

As an index a number below zero counts from the last expert; for the op it is an expert of another rank. So a spelling
that takes ids as an index is lifted only where they are known to be no less than zero:

    topk(scores, k).indices               from 0 to the size of the dimension
    (ids - first).clamp(min=0)            from 0
    ids - 1, where(kept, ids, -1)         from -1
    ids.to(int8)                          from 0 if every id fits, else from -128: it wraps
    a table in a buffer                   from its smallest to its largest number
    an integer input                      taken to be numbers of experts, from 0
    an op that is not known               any number
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from k3rewrite import _torch_private as private
from k3rewrite.capture.constants import constant_of
from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.passes.moe.routing import constant

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`, both included; infinite where there is no bound or none is known."""

    low: float = -inf
    high: float = inf

    def __or__(self, other: Range) -> Range:
        return Range(min(self.low, other.low), max(self.high, other.high))

    def __neg__(self) -> Range:
        return Range(-self.high, -self.low)

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def __mul__(self, other: Range) -> Range:
        ends = [_times(a, b) for a in (self.low, self.high) for b in (other.low, other.high)]
        return Range(min(ends), max(ends))

    def below(self, other: Range) -> Range:
        """The smaller of each two."""
        return Range(min(self.low, other.low), min(self.high, other.high))

    def above(self, other: Range) -> Range:
        """The larger of each two."""
        return -((-self).below(-other))


ANY, COUNTED = Range(), Range(low=0)
"""every number; those of things that are counted"""

_SAME = frozenset({
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t", "slice",
    "select", "alias", "detach", "clone", "contiguous", "flip", "roll", "repeat", "repeat_interleave", "split",
    "split_with_sizes", "chunk", "unbind", "unfold", "diagonal", "as_strided", "gather", "index",
    "index_select", "take", "embedding", "amax", "amin", "sort", "topk", "narrow", "broadcast_to", "flatten",
    "lift_fresh_copy", "round", "trunc", "floor", "ceil", "all_gather_into_tensor", "all_to_all_single",
    "wait_tensor", "broadcast", "cummax", "cummin",
})  # fmt: skip
"""ops whose (first) result holds numbers of their first tensor, or those rounded to integers"""
_PLACES = frozenset(
    {"argsort", "argmax", "argmin", "nonzero", "bincount", "histc", "searchsorted", "bucketize", "sym_size"}
)
"""ops that give places, or numbers of things"""
_PLACES_SECOND = frozenset({"sort", "topk", "max", "min", "kthvalue", "mode", "median", "cummax", "cummin"})
"""ops whose second result is the places of the first"""
_SUMS = frozenset({"sum", "cumsum", "prod", "cumprod"})
"""ops that stay at or above zero where their numbers do"""
LEVELS = 64
"""how far up a range is looked for: far more than a router has steps"""


@dataclass
class Ranges:
    """Ranges of the nodes of one graph, each found once."""

    known: dict[Node, Range] = field(default_factory=dict)
    unknown: list[Node] = field(default_factory=list)
    """nodes of ops of which nothing is known"""

    def of(self, node: Any, levels: int = LEVELS) -> Range:
        """The range of a tensor, or of a number that stands for one."""
        if not isinstance(node, Node):
            return Range(node, node) if isinstance(node, (int, float)) else ANY
        if node not in self.known:
            self.known[node] = self._found(node, levels - 1) if levels else ANY
        return self.known[node]

    def _found(self, node: Node, levels: int) -> Range:
        value = node.meta.get("val")
        dtype = value.dtype if isinstance(value, torch.Tensor) else None
        if dtype == torch.bool:
            return Range(0, 1)
        if node.op != "call_function":
            return _input(node, value)
        number = constant(node)
        found = Range(number, number) if number is not None else self._computed(node, levels)
        return found if dtype is None else _held(found, dtype)

    def _computed(self, node: Node, levels: int) -> Range:
        if node.target is getitem:
            return self._item(node, levels)
        name, arguments = name_of(node), bound_arguments(node)

        def of(argument: str, default: float = 0) -> Range:
            value = arguments.get(argument)
            return Range(default, default) if value is None else self.of(value, levels)

        if name in _PLACES:
            return COUNTED
        if name in _SAME or name in ("_to_copy", "convert_element_type"):
            first = next(iter(arguments.values()), None)
            return self.of(first, levels)
        if name in _SUMS:
            return COUNTED if of("self").low >= 0 else ANY
        if name in ("cat", "stack"):
            found = [self.of(part, levels) for part in arguments["tensors"]]
            return found[0] if len(found) == 1 else _union(found)
        if name not in _RULES:
            self.unknown.append(node)
            return ANY
        return _RULES[name](of, arguments)

    def _item(self, node: Node, levels: int) -> Range:
        """One result of an op that has several."""
        source, number = node.args
        assert isinstance(source, Node)
        name, arguments = name_of(source), bound_arguments(source)
        if number == 1 and (name in _PLACES_SECOND or name == "route"):
            values, dim = arguments["logits" if name == "route" else "self"], arguments.get("dim", -1)
            shape = values.meta["val"].shape
            size = shape[-1 if dim is None else dim] if len(shape) else 1
            return Range(0, size - 1 if isinstance(size, int) else inf)
        if name in _PLACES_SECOND or name in _SAME:
            return self.of(arguments["self"], levels)
        self.unknown.append(source)
        return ANY


def name_of(node: Node) -> str:
    """The name of an op, without namespace and overload; empty for other calls."""
    return node.target._schema.name.split("::")[-1] if isinstance(node.target, torch._ops.OpOverload) else ""


def _input(node: Node, value: Any) -> Range:
    if isinstance(value, torch.SymInt):
        return COUNTED  # a size
    if not isinstance(value, torch.Tensor) or value.dtype.is_floating_point or value.dtype.is_complex:
        return ANY
    if node.op == "get_attr":
        known = getattr(node.graph.owning_module, str(node.target), None)  # a tensor that the model makes of numbers
    else:
        known = constant_of(node)
    if isinstance(known, torch.Tensor) and not isinstance(known, private.FakeTensor) and known.numel():
        with private.no_modes():
            return Range(known.min().item(), known.max().item())
    return ANY if node.op == "get_attr" else COUNTED


def _held(found: Range, dtype: torch.dtype) -> Range:
    """What is left in that dtype: integers that do not fit wrap, others are rounded. Sizes that are not known fit
    32 bits and more."""
    if dtype.is_complex:
        return ANY
    if dtype.is_floating_point:
        with private.no_modes():
            low, high = torch.tensor([found.low, found.high], dtype=torch.float64).to(dtype).tolist()
        return Range(low, high)
    holds = torch.iinfo(dtype)
    wide = dtype.itemsize >= 4
    low_fits = found.low >= holds.min
    high_fits = found.high <= holds.max or (wide and found.high == inf)
    return found if low_fits and high_fits else Range(holds.min, holds.max)


def _times(one: float, other: float) -> float:
    return 0 if one == 0 or other == 0 else one * other


def _union(found: list[Range]) -> Range:
    return Range(min(r.low for r in found), max(r.high for r in found)) if found else ANY


# ------------------------------------------------------------------ arithmetic

Of = Callable[..., Range]


def _sum(of: Of, arguments: Arguments) -> Range:
    return of("self") + of("other") * of("alpha", 1)


def _difference(of: Of, arguments: Arguments) -> Range:
    return of("self") + -(of("other") * of("alpha", 1))


def _reversed_difference(of: Of, arguments: Arguments) -> Range:
    return of("other") + -(of("self") * of("alpha", 1))


def _product(of: Of, arguments: Arguments) -> Range:
    return of("self") * of("other")


def _quotient(of: Of, arguments: Arguments) -> Range:
    """Of numbers from zero, divided by numbers from zero; a quotient that is not rounded is no integer."""
    one, other = of("self"), of("other")
    return Range(0, one.high) if one.low >= 0 and other.low >= 1 else COUNTED if min(one.low, other.low) >= 0 else ANY


def _remainder(of: Of, arguments: Arguments) -> Range:
    """Has the sign of what is divided by."""
    other = of("other")
    return Range(0, max(other.high - 1, 0)) if other.low >= 0 else ANY


def _truncated_remainder(of: Of, arguments: Arguments) -> Range:
    """Has the sign of what is divided."""
    return Range(0, of("self").high) if of("self").low >= 0 else ANY


def _clamped(of: Of, arguments: Arguments) -> Range:
    return of("self").above(of("min", -inf)).below(of("max", inf))


def _absolute(of: Of, arguments: Arguments) -> Range:
    """The magnitude of the smallest integer does not fit its own dtype, which a range that is not known allows."""
    found = of("self")
    return ANY if found.low == -inf else Range(0, max(abs(found.low), abs(found.high)))


def _and(of: Of, arguments: Arguments) -> Range:
    high = [r.high for r in (of("self"), of("other")) if r.low >= 0]
    return Range(0, min(high)) if high else ANY


def _or(of: Of, arguments: Arguments) -> Range:
    return COUNTED if min(of("self").low, of("other").low) >= 0 else ANY


def _not(of: Of, arguments: Arguments) -> Range:
    return Range(-1, -1) + -of("self")


def _shifted(of: Of, arguments: Arguments) -> Range:
    return COUNTED if of("self").low >= 0 else ANY


def _either(of: Of, arguments: Arguments) -> Range:
    """A choice, each side of it as far as the condition lets it be chosen: `where(ids >= first, ids - first, 0)`."""
    if "mask" in arguments:
        return _where(of("self"), arguments, "self", False) | of("value")
    return _where(of("self"), arguments, "self", True) | _where(of("other"), arguments, "other", False)


def _where(found: Range, arguments: Arguments, side: str, holds: bool) -> Range:
    """The range of what is chosen where the condition holds, or does not."""
    condition, chosen = arguments.get("condition", arguments.get("mask")), arguments[side]
    if not isinstance(chosen, Node):
        return found
    least = _least(condition, holds, chosen)
    inner = bound_arguments(chosen)
    number = constant(inner.get("other"))
    if name_of(chosen) in ("sub", "add") and number is not None and inner["alpha"] == 1:
        least = max(least, _least(condition, holds, inner["self"]) + (number if name_of(chosen) == "add" else -number))
    return Range(max(found.low, least), max(found.high, least))


def _least(condition: Any, holds: bool, node: Any) -> float:
    """What an integer is at least where the condition holds, or does not; minus infinity if it does not say."""
    if not isinstance(condition, Node) or not isinstance(node, Node):
        return -inf
    name, arguments = name_of(condition), bound_arguments(condition)
    parts = [arguments[n] for n in ("self", "other") if n in arguments]
    if name in ("logical_not", "bitwise_not"):
        return _least(parts[0], not holds, node)
    if name in (("logical_and", "bitwise_and", "mul") if holds else ("logical_or", "bitwise_or")):
        return max(_least(part, holds, node) for part in parts)
    number = constant(parts[1]) if len(parts) == 2 and parts[0] is node else None
    if number is None:
        return -inf
    at_least = {("ge", True): number, ("lt", False): number, ("gt", True): number + 1, ("le", False): number + 1,
                ("eq", True): number}  # fmt: skip
    return at_least.get((name, holds), -inf)


def _put(of: Of, arguments: Arguments) -> Range:
    """What was there, and what is written: a `src`, `values`, `source` or `value`."""
    if arguments.get("accumulate") or arguments.get("reduce") not in (None, "amax", "amin"):
        return ANY
    return of("self") | of(next(name for name in ("src", "values", "source", "value") if name in arguments))


def _added(of: Of, arguments: Arguments) -> Range:
    parts = (of("self"), of("src" if "src" in arguments else "source"), of("alpha", 1))
    return COUNTED if min(part.low for part in parts) >= 0 else ANY


def _counting(of: Of, arguments: Arguments) -> Range:
    start, step = arguments.get("start", 0), arguments.get("step", 1)
    forward = isinstance(start, int) and isinstance(step, int) and start >= 0 and step > 0
    return COUNTED if forward else ANY


_RULES: Mapping[str, Callable[[Of, Arguments], Range]] = {
    "add": _sum, "sub": _difference, "rsub": _reversed_difference, "mul": _product,
    "neg": lambda of, arguments: -of("self"), "abs": _absolute,
    "floor_divide": _quotient, "div": _quotient, "remainder": _remainder, "fmod": _truncated_remainder,
    "clamp": _clamped, "clamp_min": _clamped, "clamp_max": _clamped,
    "minimum": lambda of, arguments: of("self").below(of("other")),
    "maximum": lambda of, arguments: of("self").above(of("other")),
    "relu": lambda of, arguments: of("self").above(Range(0, 0)),
    "bitwise_and": _and, "bitwise_or": _or, "bitwise_xor": _or, "bitwise_not": _not,
    "__rshift__": _shifted, "bitwise_right_shift": _shifted,
    "where": _either, "masked_fill": _either, "constant_pad_nd": lambda of, arguments: of("self") | of("value"),
    "scatter": _put, "index_put": _put, "index_copy": _put, "select_scatter": _put, "slice_scatter": _put,
    "scatter_reduce": _put, "scatter_add": _added, "index_add": _added,
    "arange": _counting, "iota": _counting,
}  # fmt: skip
