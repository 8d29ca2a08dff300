"""The matcher: from an anchor node to the largest match around it, or to the deepest reason for a miss.

    site = the anchor op (say rsqrt)  ->  its possible roots, a few users away  ->  pattern matched downwards from each
    root, with backtracking over alternatives and argument orders  ->  matches ordered from large to small, or a `Miss`

Matching reads the graph and never changes it. An attempt that fails remembers the place at which the most nodes had
already matched: that is the reason a reader of the report wants.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch.fx import Node

from k3rewrite.graph.arguments import MISSING, bound_arguments, parameters
from k3rewrite.graph.cost import is_view
from k3rewrite.graph.provenance import source_line
from k3rewrite.patterns.pattern import (
    COMMUTATIVE,
    OPERATORS,
    Anything,
    Call,
    Cast,
    Dims,
    Either,
    Item,
    ListOf,
    Named,
    Number,
    Pattern,
    Product,
    Var,
    Views,
)

MAX_VIEWS = 6
"""longest chain of views that `Views` looks through"""


@dataclass(frozen=True)
class Bindings:
    """What a partial match has bound (name -> node, number, dtype ...) and which nodes it covers, in match order."""

    values: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()

    def bind(self, name: str | None, value: Any) -> Bindings | None:
        """With `name` bound; None if it is bound to something else."""
        if name is None:
            return self
        if name in self.values:
            return self if same(self.values[name], value) else None
        return Bindings({**self.values, name: value}, self.nodes)

    def cover(self, node: Node) -> Bindings:
        return self if node in self.nodes else Bindings(self.values, (*self.nodes, node))


def same(a: Any, b: Any) -> bool:
    """Identity for nodes, equality with equal types for numbers (1 is not 1.0, True is not 1)."""
    if isinstance(a, Node) or isinstance(b, Node):
        return a is b
    return type(a) is type(b) and a == b


@dataclass
class Attempt:
    """The deepest failure seen while one site was tried."""

    depth: int = -1
    node: Node | None = None
    expected: str = ""
    found: str = ""
    reason: str = ""

    def fail(self, env: Bindings, at: Any, expected: str, found: str, reason: str = "") -> None:
        if len(env.nodes) > self.depth:
            self.depth = len(env.nodes)
            self.node = at if isinstance(at, Node) else (env.nodes[-1] if env.nodes else None)
            self.expected, self.found = expected, found
            self.reason = reason or f"expected {expected}, found {found}"


@dataclass(frozen=True)
class Match:
    """A pattern found: the root's node, everything bound, and the nodes that the rewrite would replace."""

    root: Node
    bindings: Mapping[str, Any]
    nodes: frozenset[Node]

    def __getitem__(self, name: str) -> Any:
        return self.bindings[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.bindings.get(name, default)

    def value(self, name: str) -> torch.Tensor:
        """The fake tensor of a bound node."""
        return self.bindings[name].meta["val"]


def match_site(pattern: Pattern, anchor: Node, *, reach: int) -> tuple[list[Match], Attempt]:
    """All matches that cover `anchor` under the name "anchor", largest first, and the deepest failure.

    Roots are the anchor and its users up to `reach` steps away, nearest first; the order is that of the graph, so the
    result does not depend on hashing.
    """
    attempt = Attempt()
    wanted = heads(pattern)
    found: list[Match] = []
    for root in _roots(anchor, reach):
        if wanted is not None and root.target not in wanted:
            continue
        for env in _match(pattern, root, Bindings(), attempt):
            if env.values.get("anchor") is anchor:
                found.append(Match(root, env.values, frozenset(env.nodes)))
                break
            attempt.fail(env, root, "this site in the pattern", "a match around another site")
    found.sort(key=lambda m: -len(m.nodes))
    if not found and attempt.depth < 0:
        names = ", ".join(sorted({t.__name__ if hasattr(t, "__name__") else str(t) for t in wanted or ()}))
        users = ", ".join(describe(u) for u in anchor.users) or "no user"
        attempt.fail(Bindings(), anchor, f"a use in {names}", users)
    return found, attempt


def _roots(anchor: Node, reach: int) -> Iterator[Node]:
    seen, ring = {anchor}, [anchor]
    for _ in range(reach + 1):
        yield from ring
        following: list[Node] = []
        for node in ring:
            for user in node.users:
                if user not in seen and user.op == "call_function":
                    seen.add(user)
                    following.append(user)
        ring = following


def heads(pattern: Pattern) -> frozenset[Any] | None:
    """Targets that a root of the pattern can have; None if any."""
    if isinstance(pattern, Call):
        return pattern.targets
    if isinstance(pattern, Item):
        return frozenset({operator.getitem})
    if isinstance(pattern, Named):
        return heads(pattern.inner)
    if isinstance(pattern, Cast):
        inner = heads(pattern.inner)
        return None if inner is None else inner | OPERATORS["cast"]
    if isinstance(pattern, Product):
        return OPERATORS["mul"]
    if isinstance(pattern, Either):
        parts = [heads(o) for o in pattern.options]
        return None if any(p is None for p in parts) else frozenset().union(*[p for p in parts if p is not None])
    return None


def _match(pattern: Pattern, value: Any, env: Bindings, attempt: Attempt) -> Iterator[Bindings]:
    """Every way in which `value` is an instance of `pattern`, given what is bound already."""
    if isinstance(pattern, Call):
        yield from _match_call(pattern, value, env, attempt)
    elif isinstance(pattern, Either):
        for option in pattern.options:
            yield from _match(option, value, env, attempt)
    elif isinstance(pattern, Cast):
        yield from _match_cast(pattern, value, env, attempt)
    elif isinstance(pattern, Views):
        yield from _match_views(pattern, value, env, attempt)
    elif isinstance(pattern, Named):
        for inner in _match(pattern.inner, value, env, attempt):
            if bound := inner.bind(pattern.name, value):
                yield bound
    elif isinstance(pattern, Item):
        if isinstance(value, Node) and value.target is operator.getitem and value.args[1] == pattern.index:
            covered = env.cover(value).bind(pattern.name, value)
            if covered:
                yield from _match(pattern.inner, value.args[0], covered, attempt)
        else:
            attempt.fail(env, value, pattern.describe(), describe(value))
    elif isinstance(pattern, Product):
        yield from _match_product(pattern, value, env, attempt)
    elif isinstance(pattern, ListOf):
        yield from _match_list(pattern, value, env, attempt)
    else:
        yield from _match_leaf(pattern, value, env, attempt)


def _match_leaf(pattern: Pattern, value: Any, env: Bindings, attempt: Attempt) -> Iterator[Bindings]:
    if isinstance(pattern, Var):
        if not isinstance(value, Node) or not isinstance(value.meta.get("val"), torch.Tensor):
            attempt.fail(env, value, pattern.describe(), describe(value))
            return
        bound = env.bind(pattern.name, value)
        if bound is None:
            other = env.values[pattern.name]
            attempt.fail(
                env, value, f"'{pattern.name}' to be {describe(other)}", describe(value),
                f"'{pattern.name}' is {describe(other)} in one place and {describe(value)} in another",
            )  # fmt: skip
            return
        yield bound
    elif isinstance(pattern, Number):
        if isinstance(value, bool) != isinstance(pattern.value, bool) or not isinstance(value, (int, float)):
            attempt.fail(env, value, pattern.describe(), describe(value))
        elif pattern.value is not None and value != pattern.value:
            attempt.fail(env, value, pattern.describe(), describe(value))
        else:
            bound = env.bind(pattern.name, value)
            if bound is None:
                attempt.fail(env, value, f"'{pattern.name}' again", describe(value))
            else:
                yield bound
    elif isinstance(pattern, Anything):
        if bound := env.bind(pattern.name, value):
            yield bound
    else:
        raise TypeError(f"no matcher for {type(pattern).__name__}")


def _match_call(pattern: Call, node: Any, env: Bindings, attempt: Attempt) -> Iterator[Bindings]:
    if not isinstance(node, Node) or node.op != "call_function" or node.target not in pattern.targets:
        attempt.fail(env, node, pattern.describe(), describe(node))
        return
    covered = env.cover(node).bind(pattern.name, node)
    if covered is None:
        attempt.fail(env, node, f"'{pattern.name}' to be one node", describe(node))
        return
    arguments = bound_arguments(node)
    names = [name for name, _ in parameters(node.target)]
    wanted = dict(zip(names, pattern.args, strict=False))
    wanted.update(pattern.kwargs)
    if not pattern.open:
        for name, default in parameters(node.target):
            if name not in wanted and default is not MISSING and not same(arguments[name], default):
                attempt.fail(covered, node, f"{pattern.label} with {name}={default}", f"{name}={arguments[name]}")
                return
    if missing := [n for n in wanted if n not in arguments]:
        attempt.fail(covered, node, f"{pattern.label} with a parameter '{missing[0]}'", describe(node))
        return
    pairs = [(p, _normalise(p, arguments[n], node)) for n, p in wanted.items()]
    yield from _match_all(pairs, covered, attempt)
    if node.target in COMMUTATIVE and len(pattern.args) >= 2:
        yield from _match_all([(pairs[0][0], pairs[1][1]), (pairs[1][0], pairs[0][1]), *pairs[2:]], covered, attempt)


def _normalise(pattern: Pattern, value: Any, node: Node) -> Any:
    """Dimension arguments are counted from the end of the tensor that the op reads."""
    if not isinstance(pattern, Dims) or not isinstance(node.args[0], Node):
        return value
    rank = node.args[0].meta["val"].dim()
    listed = value if isinstance(value, (list, tuple)) else [value]
    return (
        tuple(sorted(d - rank if d >= 0 else d for d in listed)) if all(isinstance(d, int) for d in listed) else value
    )


def _match_all(pairs: list[tuple[Pattern, Any]], env: Bindings, attempt: Attempt) -> Iterator[Bindings]:
    if not pairs:
        yield env
        return
    (pattern, value), rest = pairs[0], pairs[1:]
    if isinstance(pattern, Dims):
        if value == pattern.dims:
            yield from _match_all(rest, env, attempt)
        else:
            attempt.fail(env, None, f"a reduction over {pattern.describe()}", f"dims {value} (from the end)")
        return
    for inner in _match(pattern, value, env, attempt):
        yield from _match_all(rest, inner, attempt)


def _match_cast(pattern: Cast, value: Any, env: Bindings, attempt: Attempt) -> Iterator[Bindings]:
    dtype = dtype_of(value)
    bound = env.bind(pattern.name, dtype)
    if bound is None:
        attempt.fail(env, value, f"dtype '{pattern.name}' to be {env.values[pattern.name]}", str(dtype))
        return
    if isinstance(value, Node) and cast_source(value) is not None:
        yield from _match(pattern.inner, cast_source(value), bound.cover(value), attempt)
    yield from _match(pattern.inner, value, bound, attempt)


def _match_views(pattern: Views, value: Any, env: Bindings, attempt: Attempt) -> Iterator[Bindings]:
    bound = env.bind(pattern.name, value)
    for _ in range(MAX_VIEWS + 1):
        if bound is None:
            return
        yield from _match(pattern.inner, value, bound, attempt)
        if not (isinstance(value, Node) and isinstance(value.target, torch._ops.OpOverload) and is_view(value.target)):
            return
        bound, value = bound.cover(value), value.args[0]


def _match_product(pattern: Product, value: Any, env: Bindings, attempt: Attempt) -> Iterator[Bindings]:
    if not isinstance(value, Node) or value.target not in OPERATORS["mul"]:
        attempt.fail(env, value, pattern.describe(), describe(value))
        return
    inner, factors, scale = _flatten(value, dtype_of(value))
    if len(factors) != len(pattern.factors):
        attempt.fail(env, value, pattern.describe(), f"a product of {len(factors)} tensors")
        return
    bound = env.bind(pattern.scale, scale)
    if bound is None:
        return
    for node in inner:
        bound = bound.cover(node)
    for order in permutations(factors):
        yield from _match_all(list(zip(pattern.factors, order, strict=True)), bound, attempt)


def _flatten(node: Node, dtype: torch.dtype | None) -> tuple[list[Node], list[Any], float]:
    """Multiplications of one dtype below `node`, their tensor factors, and the product of their numbers."""
    inner, factors, scale = [node], [], 1.0
    for argument in node.args[:2]:
        if isinstance(argument, Node):
            if argument.target in OPERATORS["mul"] and dtype_of(argument) == dtype and len(argument.users) == 1:
                below, more, number = _flatten(argument, dtype)
                inner += below
                factors += more
                scale *= number
            else:
                factors.append(argument)
        elif isinstance(argument, (int, float)):
            scale *= argument
        else:
            factors.append(argument)
    return inner, factors, scale


def _match_list(pattern: ListOf, value: Any, env: Bindings, attempt: Attempt) -> Iterator[Bindings]:
    if not isinstance(value, (list, tuple)):
        attempt.fail(env, value, pattern.describe(), describe(value))
    elif pattern.each is not None:
        head, tail = (value[:-1], value[-1:]) if pattern.last is not None else (value, ())
        bound = env.bind(pattern.each, tuple(head)) if all(isinstance(v, Node) for v in value) else None
        if bound is None or (pattern.last is not None and not tail):
            attempt.fail(env, None, pattern.describe(), f"a list of {len(value)} that does not fit")
        elif pattern.last is not None:
            yield from _match(pattern.last, tail[0], bound, attempt)
        else:
            yield bound
    elif len(value) != len(pattern.items):
        attempt.fail(env, None, pattern.describe(), f"a list of {len(value)}")
    else:
        yield from _match_all(list(zip(pattern.items, value, strict=True)), env, attempt)


def cast_source(node: Node) -> Node | None:
    """The node that `node` casts, if it changes the dtype and nothing else (device, layout, strides)."""
    if node.op != "call_function" or node.target not in OPERATORS["cast"] or not isinstance(node.args[0], Node):
        return None
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    arguments = bound_arguments(node)
    plain = before.device == after.device and arguments.get("memory_format") in (None, torch.preserve_format)
    return node.args[0] if plain and before.dtype != after.dtype else None


def dtype_of(value: Any) -> torch.dtype | None:
    tensor = value.meta.get("val") if isinstance(value, Node) else None
    return tensor.dtype if isinstance(tensor, torch.Tensor) else None


def describe(value: Any) -> str:
    """`mul (net.py:12 in forward)` for a node, the value itself for a constant."""
    if not isinstance(value, Node):
        return repr(value) if not isinstance(value, (list, tuple)) else f"a list of {len(value)}"
    if value.op != "call_function":
        return f"{value.op} {value.name}"
    target = value.target
    label = target._opname if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    return f"{label} '{value.name}' ({source_line(value)})"
