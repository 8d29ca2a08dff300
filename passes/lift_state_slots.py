"""Take the gather of states by slot, and the scatter of the new ones, into the op between them.

    rows = pool[slots]                                              -> o, pool = k3::kda_step(..., pool, slots, False)
    o, new = k3::kda_step(..., rows, None, False)
    pool = pool.index_put((slots,), new)

    dead = slots <= 0; at = slots.masked_fill(dead, 0)              -> the same, null_slot True
    rows = pool[at].masked_fill(dead[:, None, None], 0)
    o, new = k3::short_conv(..., rows, None, False, ...)
    pool = pool.index_put((at,), torch.where(dead[:, None, None], pool[0], new))

Slots that are an index as they are must be known to be none below zero, as with ids of experts (moe/ranges.py).
Slot 0 is taken for nobody's only where the graph shows it: rows of it read zeros and write back what was there, and
the output of `kda_step` is masked for them, `o.masked_fill(dead, 0)`. In a pool without that rule it is a slot as any
other. Two rows that share a slot mean nothing in either spelling.

A pool of which only the first columns move, `pool[:, :3]`, is written through a slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

import k3rewrite.kernels  # noqa: F401  registers the ops that are built
from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.layout import keeps_order
from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.ops.vocabulary import size_hint
from k3rewrite.passes.moe.ranges import Ranges
from k3rewrite.patterns import Anything, Attempt, Builder, CounterExample, Example, Match, Policy, Rule, Unlike
from k3rewrite.pipeline.pass_base import RulePass

aten = torch.ops.aten
_CONV, _STEP = torch.ops.k3.short_conv.default, torch.ops.k3.kda_step.default


class LiftStateSlots(Rule):
    """See the module docstring."""

    name = "state_slots"
    policy = Policy.EXACT
    anchors = frozenset({_CONV, _STEP})
    pattern = Anything()
    exposable = frozenset({"step[0]", "masked"})

    def is_site(self, node: Node) -> bool:
        """A state that is computed: an input of the graph has no slots."""
        arguments = bound_arguments(node)
        return arguments["slots"] is None and arguments["state"].op == "call_function"

    def matches(self, anchor: Node) -> tuple[Iterator[Match], Attempt]:
        attempt = Attempt(anchor)
        try:
            return iter([_read(anchor)]), attempt
        except Unlike as unlike:
            attempt.because(unlike)
            return iter([]), attempt

    def region_values(self, match: Match, seed: int) -> Mapping[Node, Tensor]:
        return {match["slots"]: drawn_slots(match.value("slots"), match.value("pool"), match["null_slot"], seed)}

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        arguments = bound_arguments(match["step"]) | {
            "state": match["pool"],
            "slots": match["slots"],
            "null_slot": match["null_slot"],
        }
        step = builder.call(match["step"].target, *arguments.values())
        new = {"root": builder.item(step, 1)}
        return new | {name: builder.item(step, 0) for name in exposed}

    def examples(self) -> Sequence[Example]:
        return (
            Example("slots as they are", _plain, _inputs),
            Example("slot 0 is nobody's", _with_null_slot, _inputs),
            Example("the first columns of a pool", _first_columns, _lines),
        )

    def counterexamples(self) -> Sequence[CounterExample]:
        def elsewhere(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            out, new = _kda(q, k, v, pool[slots])
            return out, pool.index_put((slots + 1,), new)

        def added(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            out, new = _kda(q, k, v, pool[slots])
            return out, pool.index_put((slots,), new, accumulate=True)

        def dropped(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            dead = slots <= 0
            at = slots.masked_fill(dead, 0)
            out, new = _kda(q, k, v, pool[at].masked_fill(dead.view(-1, 1, 1, 1), 0))
            return out, pool.index_put((at,), new)

        def moved(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            return _plain(q, k, v, pool, slots - 2)

        def unmasked(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            dead = slots <= 0
            at, rows = slots.masked_fill(dead, 0), dead.view(-1, 1, 1, 1)
            out, new = _kda(q, k, v, pool[at].masked_fill(rows, 0))
            return out, pool.index_put((at,), torch.where(rows, pool[0], new))

        def below_zero(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            dead = slots < 0
            at, rows = slots.masked_fill(dead, 0), dead.view(-1, 1, 1, 1)
            out, new = _kda(q, k, v, pool[at].masked_fill(rows, 0))
            return out, pool.index_put((at,), torch.where(rows, pool[0], new))

        return (
            CounterExample("written elsewhere", elsewhere, _inputs, "written to other slots than it was read from"),
            CounterExample("added to what is there", added, _inputs, "added to what is there"),
            CounterExample("null rows overwrite slot 0", dropped, _inputs, "null rows are read as zeros and written"),
            CounterExample("null rows give what they hold", unmasked, _inputs, "null rows do not give zeros"),
            CounterExample("slots below zero", moved, _inputs, "slots may be below zero"),
            CounterExample("another null slot", below_zero, _inputs, "slots at or below zero"),
            CounterExample("no pool", lambda q, k, v, pool, slots: _kda(q, k, v, pool[1:4]), _inputs, "not gathered"),
        )


def drawn_slots(slots: Tensor, pool: Tensor, null_slot: bool, seed: int) -> Tensor:
    """Slots like these for a check by execution: no two rows have the same, but for those of nobody, which are some,
    and all rows that a pool is too small for."""
    rows, count, lowest = size_hint(slots.shape[0]), size_hint(pool.shape[0]), int(null_slot)
    free = torch.randperm(count - lowest, generator=torch.Generator().manual_seed(seed)) + lowest
    drawn = torch.zeros(rows, dtype=torch.int64)
    drawn[: len(free)] = free[:rows]
    if null_slot:
        drawn[:: seed + 2] = -seed
    return drawn.to(slots.dtype).to(slots.device)


def _read(step: Node) -> Match:
    rows = bound_arguments(step)["state"]
    gather, masks = (rows.args[0], [rows]) if rows.target is aten.masked_fill.Scalar else (rows, [])
    at = _only_index(gather) if isinstance(gather, Node) and gather.target is aten.index.Tensor else None
    if not isinstance(gather, Node) or at is None:
        raise Unlike("the state is not gathered from a pool by slot", rows)
    pool = gather.args[0]
    assert isinstance(pool, Node)
    put, value, views = _put(step, pool, at)
    inside = {step, gather, *masks, *views, put}
    bindings: dict[str, Any] = {"step": step, "pool": pool, "slots": at, "null_slot": False}
    if not masks and Ranges().of_ids(at).low < 0:
        raise Unlike("slots may be below zero: as an index such a number counts from the last one", at)
    if masks or value.target is aten.where.self:
        bindings |= {"slots": _raw_slots(at, rows, value, pool), "null_slot": True}
        inside |= {value, *(n for n in value.args if isinstance(n, Node) and n.target is aten.select.int)}
        if step.target is _STEP and (out := next((u for u in step.users if u.args[1] == 0), None)) is not None:
            bindings["masked"] = _masked(out, at.args[1])
            inside |= {out, bindings["masked"]}
    inside.add(_item(step, 1))
    if pool.target is aten.slice.Tensor:
        whole = _written_back(put, pool)
        inside.add(whole)
        bindings["pool"], put = pool.args[0], whole
    return Match(put, {**bindings, "anchor": step}, frozenset(inside))


def _only_index(node: Node) -> Node | None:
    """What the first dimension is indexed with, if nothing else is."""
    indices = bound_arguments(node)["indices"]
    return indices[0] if len(indices) == 1 and isinstance(indices[0], Node) else None


def _item(step: Node, index: int) -> Node:
    for user in step.users:
        if user.target is getitem and user.args[1] == index:
            return user
    raise Unlike("the new state is not kept", step)


def _put(step: Node, pool: Node, at: Node) -> tuple[Node, Node, list[Node]]:
    """(the scatter of the new state, what it writes, a view of that on the way, as torch writes a single row)."""
    new = _item(step, 1)
    for value in [new, *(u for u in new.users if u.target is aten.where.self)]:
        views = [user for user in value.users if keeps_order(user)]
        for written in [value, *views]:
            for user in written.users:
                if user.target is aten.index_put.default and user.args[2] is written:
                    _check_put(user, pool, at)
                    return user, value, [written] if written in views else []
    raise Unlike("the new state is not scattered into a pool by slot", new)


def _check_put(put: Node, pool: Node, at: Node) -> None:
    arguments = bound_arguments(put)
    if put.args[0] is not pool:
        raise Unlike("the new state is written to another pool than it was read from", put)
    if _only_index(put) is not at:
        raise Unlike("the new state is written to other slots than it was read from", put)
    if arguments["accumulate"]:
        raise Unlike("the new state is added to what is there", put)


def _raw_slots(at: Node, rows: Node, value: Node, pool: Node) -> Node:
    """The slots before those of nobody were pointed at slot 0, if the graph does with such rows as the op does."""
    if rows.target is not aten.masked_fill.Scalar or value.target is not aten.where.self:
        raise Unlike("null rows are read as zeros and written, or read and left alone: one without the other", value)
    if at.target is not aten.masked_fill.Scalar or at.args[2] != 0:
        raise Unlike("rows are masked, and their slots are not pointed at slot 0", at)
    raw, dead = at.args[0], at.args[1]
    assert isinstance(raw, Node) and isinstance(dead, Node)
    if dead.target is not aten.le.Scalar or dead.args != (raw, 0):
        raise Unlike("null rows are not those of slots at or below zero", dead)
    for mask in (rows.args[1], value.args[0]):
        if not _is_of_rows(mask, dead, rows):
            raise Unlike("the mask of null rows is another one where states are read or written", rows)
    kept = value.args[1]
    same = isinstance(kept, Node) and kept.target is aten.select.int and kept.args == (pool, 0, 0)
    if rows.args[2] != 0 or not same:
        raise Unlike("null rows are not read as zeros, or slot 0 does not keep what it has", value)
    return raw


def _masked(out: Node, dead: Any) -> Node:
    """The output with zeros for null rows."""
    users = list(out.users)
    if len(users) == 1 and users[0].target is aten.masked_fill.Scalar and users[0].args[2] == 0:
        if _is_of_rows(users[0].args[1], dead, out):
            return users[0]
    raise Unlike("null rows do not give zeros", out)


def _is_of_rows(mask: Any, dead: Node, rows: Node) -> bool:
    """True for a view of `dead` with one entry for each row."""
    if not isinstance(mask, Node) or not isinstance(mask.meta.get("val"), Tensor):
        return False
    shape, source = mask.meta["val"].shape, mask
    while source is not dead and keeps_order(source):
        source = source.args[0]  # type: ignore[assignment]
    rank = rows.meta["val"].dim()
    return source is dead and len(shape) == rank and all(same_size(s, 1) for s in shape[1:])


def _written_back(put: Node, part: Node) -> Node:
    """The scatter of a slice of a pool, back into the pool."""
    pool, arguments = part.args[0], bound_arguments(part)
    for user in put.users:
        if user.target is aten.slice_scatter.default and user.args[:2] == (pool, put):
            own = bound_arguments(user)
            first = all(not found["start"] and found["step"] == 1 for found in (arguments, own))
            back = own["dim"] == arguments["dim"] and same_sizes(_sliced(own, user), part.meta["val"].shape)
            if first and back:
                return user
    raise Unlike("a slice of a pool is written, and not back into it", put)


def _sliced(arguments: Mapping[str, Any], user: Node) -> list[Any]:
    shape = list(user.meta["val"].shape)
    dim, end = arguments["dim"], arguments["end"]
    if end is not None and isinstance(shape[dim], int):
        shape[dim] = min(end, shape[dim])
    return shape


# ------------------------------------------------------------------ examples


def _kda(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    beta: Tensor = q.sum(-1).sigmoid()
    step: tuple[Tensor, Tensor] = torch.ops.k3.kda_step(q, k, v, -q.abs(), beta, rows, None, False, True)
    return step


def _plain(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    out, new = _kda(q, k, v, pool[slots])
    return out, pool.index_put((slots,), new)


def _with_null_slot(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    dead = slots <= 0
    at, rows = slots.masked_fill(dead, 0), dead.view(-1, 1, 1)
    out, new = _kda(q, k, v, pool[at].masked_fill(rows.unsqueeze(3), 0))
    return out.masked_fill(rows, 0), pool.index_put((at,), torch.where(rows.unsqueeze(3), pool[0], new))


def _first_columns(x: Tensor, weight: Tensor, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    dead, part = slots <= 0, pool[:, :3]
    at, rows = slots.masked_fill(dead, 0), dead.view(-1, 1, 1)
    dtypes = (torch.float32, torch.float32, x.dtype)
    y, new = torch.ops.k3.short_conv(x, weight, part[at].masked_fill(rows, 0), None, False, 3, True, True, *dtypes)
    moved = part.index_put((at,), torch.where(rows, part[0], new))
    return y, torch.slice_scatter(pool, moved, 1, 0, 3)


def _inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, 4, generator=generator) for _ in range(3))
    return q, k, v, torch.randn(6, 2, 4, 4, generator=generator), torch.tensor([4, 1, 2])


def _lines() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 8, generator=generator), torch.randn(8, 4, generator=generator)
    return x, weight, torch.randn(6, 5, 8, generator=generator), torch.tensor([4, 0, 2])


@dataclass(frozen=True)
class LiftStateSlotsPass(RulePass):
    """Take gather and scatter of states by slot into k3::short_conv and k3::kda_step."""

    name: ClassVar[str] = "lift_state_slots"
    requires: ClassVar[frozenset[str]] = frozenset({"lift_short_conv", "lift_kda_step"})
    provides: ClassVar[frozenset[str]] = frozenset({"short_conv", "kda_step"})

    def rules(self) -> tuple[Rule, ...]:
        return (LiftStateSlots(),)
