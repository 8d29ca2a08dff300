"""Lift the tokens of a verify window, each a step of the gated delta rule from the state of the one before, to one op.

    S = pool[start].masked_fill(start_dead, 0)                  -> o, pool = k3::kda_window(q, k, v, g, beta, pool,
    o_i, S = k3::kda_step(q[:, i], ..., S, None, False, True)                               start, table, None, True)
    pool = pool.index_put((table,), where(table_dead, pool[0], stack(states, 1)))
    o = stack(outputs, 1).masked_fill(dead, 0)

The graph gathers every start before it writes, the op need not: a start must be seen to be a slot of the row's own
table, `start = table.gather(1, accepted - 1)`. Any other could be one that another row writes.

Slots at or below zero are taken for nobody's only where the graph shows it, all of it: rows that start from none read
zeros, slot 0 keeps what it has, rows whose first slot is none give zeros. Otherwise slots must be known to be none
below zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

import k3rewrite.kernels  # noqa: F401  registers the ops that are built
from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.shapes import same_sizes
from k3rewrite.passes.moe.ranges import Ranges
from k3rewrite.passes.windows import (
    Put,
    bare,
    computed,
    drawn_numbers,
    drawn_table,
    is_dead_row,
    is_null_of,
    keeps_slot_zero,
    leading,
    put_of,
    raw_table,
)
from k3rewrite.patterns import (
    Anything,
    Attempt,
    Builder,
    CounterExample,
    Example,
    Match,
    Policy,
    Rule,
    Unlike,
)
from k3rewrite.pipeline.pass_base import RulePass

aten = torch.ops.aten
_STEP, _WINDOW = torch.ops.k3.kda_step.default, torch.ops.k3.kda_window.default
_TOKEN = ("q", "k", "v", "g", "beta")


class LiftKdaWindow(Rule):
    """See the module docstring."""

    name = "kda_window"
    policy = Policy.EXACT
    anchors = frozenset({_STEP})
    pattern = Anything()
    exposable = frozenset({"out", "states"})

    def is_site(self, node: Node) -> bool:
        """The first of a chain: a state that no step has left, and new ones that are put together."""
        arguments = bound_arguments(node)
        if arguments["slots"] is not None or _is_new_state(arguments["state"]):
            return False
        return any(user.target in (_STEP, aten.stack.default) for new in _items(node, 1) for user in new.users)

    def matches(self, anchor: Node) -> tuple[Iterator[Match], Attempt]:
        attempt = Attempt(anchor)
        try:
            return iter([_read(anchor)]), attempt
        except Unlike as unlike:
            attempt.because(unlike)
            return iter([]), attempt

    def region_values(self, match: Match, seed: int) -> Mapping[Node, Tensor]:
        pool, table, null = match.value("pool"), match["table"], match["null_slot"]
        raw = raw_table(table) if null else table
        leaves = {raw: drawn_table(raw.meta["val"], pool, null, seed)}
        accepted = bare(match["start"]).args[2]
        leaves[accepted] = drawn_numbers(accepted.meta["val"], table.meta["val"].shape[1], seed)
        return computed(leaves, (table, match["start"], *match["masks"]))

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        node = builder.call(
            _WINDOW, *(match[name] for name in _TOKEN), match["pool"], match["start"], match["table"], None,
            match["null_slot"],
        )  # fmt: skip
        results = {"out": 0, "states": 1, "root": 0 if match.root is match["out"] else 1}
        return {name: builder.item(node, results[name]) for name in ("root", *sorted(exposed))}

    def examples(self) -> Sequence[Example]:
        return (
            Example("three tokens", _window, _inputs),
            Example("one token", _window, lambda: _inputs(tokens=1)),
            Example("one sequence", _window, lambda: _inputs(rows=1)),
        )  # fmt: skip

    def counterexamples(self) -> Sequence[CounterExample]:
        found = (
            ("tokens in another order", {"order": (0, 2, 1)}, "not the next of its window"),
            ("one token left out", {"order": (0, 1)}, "of a window of 3 tokens, 2 are"),
            ("keys of a longer window", {"longer": True}, "of a window of 6 tokens, 3 are"),
            ("outputs in another order", {"outputs": (1, 0, 2)}, "outputs are not put together"),
            ("states in another order", {"states": (1, 0, 2)}, "states are not put together"),
            ("null rows start from slot 0", {"start": False}, "one without the other"),
            ("null rows overwrite slot 0", {"keep": False}, "one without the other"),
            ("null rows give what they hold", {"silent": False}, "null rows do not give zeros"),
            ("null slots below zero alone", {"least": -1}, "at or below zero"),
            ("a start of another row", {"starts": _of_another}, "may start from what another row writes"),
            ("starts of the first row", {"starts": _of_the_first}, "may start from what another row writes"),
            ("starts from anywhere", {"starts": _anywhere}, "may start from what another row writes"),
            ("starts of another table", {"starts": _of_another_table}, "may start from what another row writes"),
            ("slots below zero", {"start": False, "keep": False, "silent": False}, "may be below zero"),
        )
        return tuple(CounterExample(name, partial(_window, **changes), _inputs, why) for name, changes, why in found)  # type: ignore[arg-type]


def _items(step: Node, index: int) -> list[Node]:
    return [user for user in step.users if user.target is getitem and user.args[1] == index]


def _is_new_state(state: Any) -> bool:
    return isinstance(state, Node) and state.target is getitem and state.args[0].target is _STEP  # type: ignore[union-attr]


def _only(nodes: list[Node], what: str, at: Node) -> Node:
    if len(nodes) != 1:
        raise Unlike(f"{what} is used {len(nodes)} times" if nodes else f"{what} is not used", at)
    return nodes[0]


def _chain(first: Node) -> list[Node]:
    steps = [first]
    while True:
        new = _only(_items(steps[-1], 1), "the new state", steps[-1])
        following = [user for user in new.users if user.target is _STEP]
        if not following:
            return steps
        steps.append(_only(following, "the new state", new))


def _token(value: Any, index: int) -> Node:
    """What `value` is token `index` of."""
    if isinstance(value, Node) and value.target is aten.select.int and value.args[1:] == (1, index):
        return value.args[0]  # type: ignore[return-value]
    split = value.args[0] if isinstance(value, Node) and value.target is getitem else None
    if isinstance(split, Node) and split.target is aten.unbind.int and bound_arguments(split)["dim"] == 1:
        if value.args[1] == index:
            return split.args[0]  # type: ignore[return-value]
    raise Unlike("what a step reads is not the next of its window", value if isinstance(value, Node) else None)


def _stacked(parts: list[Node], what: str) -> Node:
    stacks = [user for user in parts[0].users if user.target is aten.stack.default]
    if len(stacks) == 1 and list(stacks[0].args[0]) == parts and bound_arguments(stacks[0])["dim"] == 1:  # type: ignore[arg-type]
        return stacks[0]
    raise Unlike(f"{what} are not put together in the order of their tokens", parts[0])


def _read(first: Node) -> Match:
    steps = _chain(first)
    bindings: dict[str, Any] = {"anchor": first, "null_slot": False, "masks": ()}
    for index, step in enumerate(steps):
        arguments = bound_arguments(step)
        if arguments["slots"] is not None or not arguments["keys_last"]:
            raise Unlike("states of keys by values, or steps with slots of their own", step)
        for name in _TOKEN:
            whole = _token(arguments[name], index)
            if bindings.setdefault(name, whole) is not whole:
                raise Unlike(f"{name} is not the next of its window", step)
    for name in _TOKEN:
        if (count := bindings[name].meta["val"].shape[1]) != len(steps):
            raise Unlike(f"of a window of {count} tokens, {len(steps)} are stepped through", bindings[name])
    news = [_only(_items(step, 1), "the new state", step) for step in steps]
    outs = [_only(_items(step, 0), "the output", step) for step in steps]
    out, put_in = _stacked(outs, "outputs"), _stacked(news, "states")
    put, rows = put_of(put_in), bound_arguments(first)["state"]
    mask = rows if rows.target is aten.masked_fill.Scalar else None
    gather = rows if mask is None else mask.args[0]
    pool, start, table = _pool(gather, put)
    inside = {*steps, *news, *outs, out, put_in, gather, *put.nodes} | ({mask} if mask is not None else set())
    shape = bindings["q"].meta["val"].shape[:2]
    if not same_sizes(table.meta["val"].shape, shape) or not same_sizes(start.meta["val"].shape, shape[:1]):
        raise Unlike("start and table are not one slot for each sequence and each token", table)
    if not _starts_within(start, table):
        raise Unlike("a row may start from what another row writes: start is not gathered from its own slots", start)
    bindings |= {"pool": pool, "start": start, "table": table, "out": out, "states": put.node}
    if mask is not None or put.where is not None:
        silent = _null_masks(mask, put, out, pool, start, table)
        bindings |= {"null_slot": True, "out": silent, "masks": (mask.args[1], put.where.args[0], silent.args[1])}  # type: ignore[union-attr]
        inside.add(silent)
    elif min(Ranges().of_ids(start).low, Ranges().of_ids(table).low) < 0:
        raise Unlike("slots may be below zero: as an index such a number counts from the last one", table)
    tokens = {node for step in steps for node in step.all_input_nodes if node.target is aten.select.int}
    return Match(max(put.node, bindings["out"]), bindings, frozenset(inside | tokens))


def _pool(gather: Node, put: Put) -> tuple[Node, Node, Node]:
    """(pool, where states come from, where they go)."""
    indices = bound_arguments(gather)["indices"] if gather.target is aten.index.Tensor else []
    if len(indices) != 1 or not isinstance(indices[0], Node) or indices[0].meta["val"].dim() != 1:
        raise Unlike("the state is not gathered from a pool by slot", gather)
    targets = bound_arguments(put.node)["indices"]
    if put.node.args[0] is not gather.args[0]:
        raise Unlike("the new states are written to another pool than the first was read from", put.node)
    if len(targets) != 1 or not isinstance(targets[0], Node) or targets[0].meta["val"].dim() != 2:
        raise Unlike("the new states are not written by a table of slots", put.node)
    pool = gather.args[0]
    assert isinstance(pool, Node)
    return pool, indices[0], targets[0]


def _starts_within(start: Node, table: Node) -> bool:
    """True for `table.gather(1, index)` of one index a row, whatever shape it is shown in."""
    start = bare(start)
    if start.target is not aten.gather.default or start.args[0] is not table:
        return False
    shape = (table.meta["val"].shape[0], 1)
    return bound_arguments(start)["dim"] in (1, -1) and same_sizes(start.meta["val"].shape, shape)


def _null_masks(mask: Node | None, put: Put, out: Node, pool: Node, start: Node, table: Node) -> Node:
    """The output with zeros for rows of nobody, if null slots are treated as the op does."""
    if mask is None or put.where is None:
        raise Unlike("null rows start from zeros and write, or not, one without the other", mask or put.node)
    raw = raw_table(table)
    if mask.args[2] != 0 or not is_null_of(mask.args[1], start) or not leading(mask.args[1], 4, 1):
        raise Unlike("rows that start from no slot do not start from zeros, or others do", mask)
    keeps_slot_zero(put.where, pool)
    if put.where.args[0] is not table.args[1] and bare(put.where.args[0]) is not table.args[1]:
        raise Unlike("the mask of null slots is another one where states are written", put.where)
    if not leading(put.where.args[0], 5, 2):
        raise Unlike("the mask of null slots is not one entry for each token", put.where)
    users = list(out.users)
    if len(users) == 1 and users[0].target is aten.masked_fill.Scalar and users[0].args[2] == 0:
        if is_dead_row(users[0].args[1], raw) and leading(users[0].args[1], 4, 1):
            return users[0]
    raise Unlike("null rows do not give zeros", out)


# ------------------------------------------------------------------ examples


def _window(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, table: Tensor, pool: Tensor, accepted: Tensor, *,
    order: tuple[int, ...] | None = None, outputs: tuple[int, ...] | None = None,
    states: tuple[int, ...] | None = None, start: bool = True, keep: bool = True, silent: bool = True, least: int = 0,
    longer: bool = False, starts: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As Kimi K3 writes a window; what a counterexample does otherwise by name."""
    null = start or keep or silent
    k = torch.cat([k, k], 1) if longer else k
    dead = table[:, :1] <= least
    dead_slots = (table <= least) | dead
    at = table.masked_fill(dead_slots, 0) if null else table
    offset = (accepted.unsqueeze(1) - 1).masked_fill(dead, 0)
    begin = starts(at, offset) if starts else at.gather(1, offset)
    state = pool[begin.squeeze(1)]
    if start:
        state = state.masked_fill((begin <= 0)[:, :, None, None], 0)
    outs, news = [], []
    for i in order or range(table.shape[1]):
        out, state = torch.ops.k3.kda_step(q[:, i], k[:, i], v[:, i], g[:, i], beta[:, i], state, None, False, True)
        outs.append(out)
        news.append(state)
    new = torch.stack([news[i] for i in states or range(len(news))], 1)
    if len(news) < table.shape[1]:
        at, dead_slots = at[:, : len(news)], dead_slots[:, : len(news)]
    if keep:
        new = torch.where(dead_slots[:, :, None, None, None], pool[0], new)
    result = torch.stack([outs[i] for i in outputs or range(len(outs))], 1)
    result = result.masked_fill(dead[:, :, None, None], 0) if silent else result + 0
    return result, pool.index_put((at,), new)


def _of_another(table: Tensor, offset: Tensor) -> Tensor:
    return table.gather(0, offset)


def _of_the_first(table: Tensor, offset: Tensor) -> Tensor:
    return table.gather(1, offset.view(1, -1)).view(-1, 1)


def _anywhere(table: Tensor, offset: Tensor) -> Tensor:
    return offset * 1


def _of_another_table(table: Tensor, offset: Tensor) -> Tensor:
    return (table + 1).gather(1, offset)


def _inputs(rows: int = 3, tokens: int = 3) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, tokens, 2, 4, generator=generator) for _ in range(3))
    table = torch.tensor([[4, 1, 8], [0, 0, 0], [2, 3, 0]])[:rows, :tokens].clone()
    pool, accepted = torch.randn(9, 2, 4, 4, generator=generator), torch.tensor([3, 1, 2])[:rows].clamp(max=tokens)
    return q, k, v, -q.abs(), q.sum(-1).sigmoid(), table, pool, accepted


@dataclass(frozen=True)
class LiftKdaWindowPass(RulePass):
    """Lift the steps of a verify window, with the slots of their states, to k3::kda_window."""

    name: ClassVar[str] = "lift_kda_window"
    requires: ClassVar[frozenset[str]] = frozenset({"lift_kda_step"})
    provides: ClassVar[frozenset[str]] = frozenset({"kda_window"})

    def rules(self) -> tuple[Rule, ...]:
        return (LiftKdaWindow(),)
