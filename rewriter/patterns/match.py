"""The matcher: from an anchor node to the largest match around it, or to the deepest reason for a miss.

    site = the anchor op (say rsqrt)  ->  its possible roots, a few users away  ->  pattern matched downwards from each
    root, with backtracking over alternatives and argument orders  ->  matches, largest first, or the deepest failure

Matching reads the graph and never changes it. An attempt that fails remembers the place at which the most nodes had
already matched: that is the reason a reader of the report wants.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import islice, permutations
from typing import Any

import torch
from torch.fx import Node

from k3rewrite.graph.arguments import MISSING, bound_arguments, parameters
from k3rewrite.graph.layout import keeps_order
from k3rewrite.patterns.bindings import Attempt, Bindings, Match, cast_source, describe, dtype_of, same
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
MAX_READINGS = 16
"""how many further ways to read one root as the pattern are offered, after the first"""


def match_site(pattern: Pattern, anchor: Node, *, reach: int) -> tuple[Iterator[Match], Attempt]:
    """All matches that cover `anchor` under the name "anchor", largest root first, and the deepest failure.

    Roots are the anchor and its users up to `reach` steps away, nearest first; the order is that of the graph, so the
    result does not depend on hashing. A root can be an instance of the pattern in several ways (with and without a
    cast, with its operands exchanged); the second and later ones are looked for only when they are asked for.
    """
    attempt = Attempt(anchor)
    wanted = heads(pattern)
    found: list[tuple[Match, Iterator[Match]]] = []
    for root in _roots(anchor, reach):
        if wanted is not None and root.target not in wanted:
            continue
        readings = _readings(pattern, root, anchor, attempt)
        if (first := next(readings, None)) is not None:
            found.append((first, readings))
    found.sort(key=lambda pair: -len(pair[0].nodes))
    if not found and not attempt.reason:
        names = ", ".join(sorted({t.__name__ if hasattr(t, "__name__") else str(t) for t in wanted or ()}))
        users = ", ".join(describe(u) for u in anchor.users) or "no user"
        attempt.fail(Bindings(), anchor, f"a use in {names}" if names else "a use", users)
    return _in_turn(found), attempt


def _in_turn(found: list[tuple[Match, Iterator[Match]]]) -> Iterator[Match]:
    for first, rest in found:
        yield first
        yield from islice(rest, MAX_READINGS)


def _readings(pattern: Pattern, root: Node, anchor: Node, attempt: Attempt) -> Iterator[Match]:
    """The different ways in which `root` is an instance of the pattern with `anchor` in its place."""
    seen: list[Bindings] = []
    here, elsewhere = Attempt(anchor), False
    for env in _match(pattern, root, Bindings(), here):
        if env.values.get("anchor") is not anchor:
            elsewhere = True
        elif not any(set(env.nodes) == set(e.nodes) and _same_values(env, e) for e in seen):
            seen.append(env)
            yield Match(root, env.values, frozenset(env.nodes))
    if not elsewhere:
        attempt.absorb(here)
    elif not seen:  # what failed on the way to a match of a neighbour is no reason for this site
        attempt.fail(Bindings(), root, "this site in the pattern", "a match around another site")


def _same_values(a: Bindings, b: Bindings) -> bool:
    return a.values.keys() == b.values.keys() and all(same(value, b.values[name]) for name, value in a.values.items())


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
            if (bound := _bind(inner, pattern.name, value, attempt)) is not None:
                yield bound
    elif isinstance(pattern, Item):
        if isinstance(value, Node) and value.target is operator.getitem and value.args[1] == pattern.index:
            if (covered := _bind(env.cover(value), pattern.name, value, attempt)) is not None:
                yield from _match(pattern.inner, value.args[0], covered, attempt)
        else:
            attempt.fail(env, value, pattern.describe(), describe(value))
    elif isinstance(pattern, Product):
        yield from _match_product(pattern, value, env, attempt)
    elif isinstance(pattern, ListOf):
        yield from _match_list(pattern, value, env, attempt)
    else:
        yield from _match_leaf(pattern, value, env, attempt)


def _bind(env: Bindings, name: str | None, value: Any, attempt: Attempt) -> Bindings | None:
    """`env` with `name` bound to `value`; None, and the failure noted, if it is bound to something else."""
    bound = env.bind(name, value)
    if bound is None:
        assert name is not None
        other = describe(env.values[name])
        attempt.fail(
            env, value, f"'{name}' to be {other}", describe(value),
            f"'{name}' is {other} in one place and {describe(value)} in another",
        )  # fmt: skip
    return bound


def _match_leaf(pattern: Pattern, value: Any, env: Bindings, attempt: Attempt) -> Iterator[Bindings]:
    if isinstance(pattern, Var):
        fits = isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)
    elif isinstance(pattern, Number):
        fits = _is_number(value, pattern.value)
    elif isinstance(pattern, Anything):
        fits = True
    else:
        raise TypeError(f"no matcher for {type(pattern).__name__}")
    if not fits:
        attempt.fail(env, value, pattern.describe(), describe(value))
    elif (bound := _bind(env, pattern.name, value, attempt)) is not None:
        yield bound


def _is_number(value: Any, wanted: float | None) -> bool:
    """True for a Python number of the wanted value, whatever it is if None: 2 and 2.0 are one value, True is not 1."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) != isinstance(wanted, bool):
        return False
    return wanted is None or value == wanted


def _match_call(pattern: Call, node: Any, env: Bindings, attempt: Attempt) -> Iterator[Bindings]:
    if not isinstance(node, Node) or node.op != "call_function" or node.target not in pattern.targets:
        attempt.fail(env, node, pattern.describe(), describe(node))
        return
    covered = _bind(env.cover(node), pattern.name, node, attempt)
    if covered is None:
        return
    arguments = bound_arguments(node)
    names = [name for name, _ in parameters(node.target)]
    if len(pattern.args) > len(names):
        attempt.fail(covered, node, f"{pattern.label} with {len(pattern.args)} parameters", describe(node))
        return
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
    if node.target in COMMUTATIVE and len(pattern.args) >= 2 and arguments.get("alpha", 1) == 1:
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
    bound = _bind(env, pattern.name, dtype_of(value), attempt)
    if bound is None:
        return
    if isinstance(value, Node) and cast_source(value) is not None:
        yield from _match(pattern.inner, cast_source(value), bound.cover(value), attempt)
    yield from _match(pattern.inner, value, bound, attempt)


def _match_views(pattern: Views, value: Any, env: Bindings, attempt: Attempt) -> Iterator[Bindings]:
    bound = _bind(env, pattern.name, value, attempt)
    for _ in range(MAX_VIEWS + 1):
        if bound is None:
            return
        yield from _match(pattern.inner, value, bound, attempt)
        if not (isinstance(value, Node) and keeps_order(value)):
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
    bound = _bind(env, pattern.scale, scale, attempt)
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
