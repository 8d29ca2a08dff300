"""Lift a verify window through a causal depthwise convolution, from any place of its line, to one op.

    past   = pool[slots[:, None], history].masked_fill(dead, 0)        -> y, pool = k3::conv_verify(x, w, pool, slots,
    window = torch.cat([past, x], 1)                                                    history, None, True, ...)
    y      = F.silu((window.float().unfold(1, 4, 1) * w).sum(-1)).to(x.dtype)
    pool   = pool.index_put((slots,), where(dead, pool[0], window[:, 1:]))

A pool of which only the first columns move, `pool[:, :kept]`, is written through a slice. Slots at or below zero are
taken for nobody's only where the graph shows it. Columns must be seen not to be below zero, where an index counts from
the last one: by their range, or because the offset that they count from is one that slots are gathered by, as in
`table.gather(1, accepted - 1)`, where eager takes none below zero. Before `lift_short_conv`: a window of one token
would be one of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

import k3rewrite.kernels  # noqa: F401  registers the op that is built
from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.dtypes import widens
from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.passes.moe.ranges import Ranges
from k3rewrite.passes.windows import (
    computed,
    drawn_numbers,
    drawn_table,
    is_dead_row,
    is_from_zero,
    keeps_slot_zero,
    leading,
    put_of,
    raw_table,
)
from k3rewrite.patterns import (
    LAST_DIM,
    Anything,
    Attempt,
    Builder,
    Cast,
    CounterExample,
    Example,
    ListOf,
    Match,
    Named,
    Number,
    Policy,
    Refusal,
    Rule,
    Unlike,
    Var,
    Views,
    call,
)
from k3rewrite.pipeline.pass_base import RulePass

aten = torch.ops.aten
_CONV = torch.ops.k3.conv_verify.default

_GATHERED = call(aten.index.Tensor, Var("pool"), ListOf((Views(Var("slots"), "row"), Var("history"))), name="gather")
_PAST = call(aten.masked_fill.Scalar, _GATHERED, Anything("mask"), 0, name="past") | Named(_GATHERED, "past")
_WINDOW = call("cat", ListOf((_PAST, Var("x"))), Anything("dim"), name="window")
_SUMMED = call(
    "sum",
    call(
        "mul", call(aten.unfold.default, Cast(_WINDOW, "compute"), 1, Number("taps"), 1, name="anchor"), Var("weight")
    ),
    LAST_DIM,
    name="summed",
)


class LiftConvVerify(Rule):
    """See the module docstring."""

    name = "conv_verify"
    policy = Policy.REASSOCIATES  # the sum of the taps
    anchors = frozenset({aten.unfold.default})
    pattern = Cast(call("silu", _SUMMED, name="activated"), "out") | Cast(_SUMMED, "out")
    reach = 6
    exposable = frozenset({"line"})

    def is_site(self, node: Node) -> bool:
        """A window whose past is gathered by slot and column."""
        window = node.args[0]
        while isinstance(window, Node) and window.target is aten._to_copy.default:
            window = window.args[0]
        if not isinstance(window, Node) or window.target is not aten.cat.default:
            return False
        past = window.args[0][0]  # type: ignore[index]
        past = past.args[0] if past.target is aten.masked_fill.Scalar else past  # type: ignore[union-attr]
        return past.target is aten.index.Tensor and len(past.args[1]) == 2  # type: ignore[union-attr,arg-type]

    def matches(self, anchor: Node) -> tuple[Iterator[Match], Attempt]:
        found, attempt = super().matches(anchor)
        whole = []
        for match in found:
            try:
                whole.append(_with_line(match))
            except Unlike as unlike:
                attempt.because(unlike)
        return iter(whole), attempt

    def check(self, match: Match) -> Refusal | None:
        pool, x, weight = match.value("pool"), match.value("x"), match.value("weight")
        if x.dim() != 3 or match["dim"] not in (1, -2) or x.dtype != pool.dtype:
            return Refusal(f"the window is put together along dimension {match['dim']}", match["window"])
        if not same_sizes(weight.shape, (pool.shape[2], match["taps"])):
            return Refusal("the taps are not a row for each channel", match["weight"])
        if not same_sizes(match.value("history").shape, (x.shape[0], match["taps"] - 1)):
            return Refusal(f"the past is not {match['taps'] - 1} columns a row", match["history"])
        if not same_sizes(match.value("row").shape, (x.shape[0], 1)) or match.value("slots").dim() != 1:
            return Refusal("the past is not of one slot a row", match["row"])
        if match.value("summed").dtype != match["compute"] or not widens(x.dtype, match["compute"]):
            return Refusal(f"the window is read as {match['compute']}, and summed as {match.value('summed').dtype}")
        return None

    def region_values(self, match: Match, seed: int) -> Mapping[Node, Tensor]:
        pool, slots, history = match.value("pool"), match["slots"], match["history"]
        leaves = {history: drawn_numbers(match.value("history"), pool.shape[1], seed)}
        if match["null_slot"]:
            raw = raw_table(slots.args[0])
            leaves[raw] = drawn_table(raw.meta["val"], pool, True, seed)
        else:
            leaves[slots] = drawn_table(slots.meta["val"].unsqueeze(1), pool, False, seed).squeeze(1)
        return computed(leaves, (slots, *match["masks"]))

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        compute = match["compute"]
        node = builder.call(
            _CONV, match["x"], match["weight"], match["whole"], match["slots"], match["history"], None,
            match["null_slot"], "activated" in match.bindings, compute, compute, match["out"],
        )  # fmt: skip
        return {"root": builder.item(node, 0)} | {name: builder.item(node, 1) for name in exposed}

    def examples(self) -> Sequence[Example]:
        return (
            Example("two tokens", _conv, _inputs),
            Example("one token", lambda x, *rest: _conv(x[:, :1], *rest), _inputs),
            Example("one sequence", lambda x, w, pool, t, a: _conv(x[:1], w, pool, t[:1], a[:1]), _inputs),
            Example("slots as they are", lambda *inputs: _conv(*inputs, keep=False, start=False), _plain_inputs),
            Example("columns that are clamped", _clamped, _inputs),
            Example("a line as long as needed", lambda x, w, pool, t, a: _conv(x, w, pool[:, :4] + 0, t, a), _inputs),
        )

    def counterexamples(self) -> Sequence[CounterExample]:
        def variant(**changes: Any) -> Any:
            return lambda *inputs: _conv(*inputs, **changes)

        return (
            CounterExample("null rows overwrite slot 0", variant(keep=False), _inputs, "one without the other"),
            CounterExample("null rows start from slot 0", variant(start=False), _inputs, "one without the other"),
            CounterExample("null slots below zero alone", variant(least=-1), _inputs, "at or below zero"),
            CounterExample("the line does not move", variant(first=0), _inputs, "not the window without its oldest"),
            CounterExample("moved to other slots", variant(shift=1), _inputs, "written to other slots"),
            CounterExample("one row of taps", variant(taps=1), _inputs, "taps are not a row for each channel"),
            CounterExample("no column is gathered by", variant(gather=False), _inputs, "columns may be below zero"),
            CounterExample("columns before those", variant(back=1), _inputs, "columns may be below zero"),
            CounterExample("slots below zero", variant(keep=False, start=False, less=2), _inputs, "may be below zero"),
        )


def _with_line(match: Match) -> Match:
    """With the line that the window leaves, and what is known of null slots."""
    pool, slots, window = match["pool"], match["slots"], match["window"]
    new = next((user for user in window.users if user.target is aten.slice.Tensor), None)
    if new is None:
        raise Unlike("the window is not kept", window)
    arguments = bound_arguments(new)
    kept = window.meta["val"].shape[1] - 1
    if (arguments["dim"], arguments["start"], arguments["step"]) != (1, 1, 1) or new.meta["val"].shape[1] != kept:
        raise Unlike("what is kept is not the window without its oldest column", new)
    put = put_of(new)
    line, at = put.node.args[0], bound_arguments(put.node)["indices"]
    assert isinstance(line, Node)
    if list(at) != [slots]:
        raise Unlike("the line is written to other slots than it was read from", put.node)
    nodes, whole = {new, *put.nodes}, put.node
    if line is not pool:
        whole = _written_back(put.node, line, pool, kept)
        nodes |= {line, whole}
    elif not same_size(pool.meta["val"].shape[1], kept):
        raise Unlike("another number of columns is written than the pool has", put.node)
    bindings: dict[str, Any] = {"line": whole, "whole": pool, "null_slot": False, "masks": ()}
    if "mask" in match.bindings or put.where is not None:
        bindings |= {"null_slot": True, "masks": _null_masks(match, put.where, line)}
    elif Ranges().of_ids(slots).low < 0:
        raise Unlike("slots may be below zero: as an index such a number counts from the last one", slots)
    if not is_from_zero(match["history"]):
        raise Unlike("columns may be below zero: as an index such a number counts from the last one", match["history"])
    return Match(match.root, {**match.bindings, **bindings}, match.nodes | nodes)


def _null_masks(match: Match, where: Node | None, line: Node) -> tuple[Any, Any]:
    slots = match["slots"]
    if "mask" not in match.bindings or where is None:
        raise Unlike("null rows start from zeros and write, or not, one without the other", where or match["past"])
    first = slots.target is aten.select.int and slots.args[1:] == (1, 0)
    if not first:
        raise Unlike("slots are not the first of a table", slots)
    raw = raw_table(slots.args[0])
    keeps_slot_zero(where, line)
    masks: tuple[Any, Any] = (match["mask"], where.args[0])
    for mask in masks:
        if not is_dead_row(mask, raw) or not leading(mask, 3, 1):
            raise Unlike("the mask of null rows is another one where lines are read or written", mask)
    return masks


def _written_back(put: Node, line: Node, pool: Node, kept: int) -> Node:
    """The first columns of a pool, written back into it."""
    arguments = bound_arguments(line) if line.target is aten.slice.Tensor else {}
    if (
        not arguments
        or line.args[0] is not pool
        or (arguments["dim"], arguments["start"] or 0, arguments["step"]) != (1, 0, 1)
    ):
        raise Unlike("the line is written to another pool than the past was read from", put)
    for user in put.users:
        if user.target is aten.slice_scatter.default and user.args[:2] == (pool, put):
            own = bound_arguments(user)
            if (own["dim"], own["start"] or 0, own["step"]) == (1, 0, 1) and line.meta["val"].shape[1] == kept:
                return user
    raise Unlike("a slice of a pool is written, and not back into it", put)


# ------------------------------------------------------------------ examples


def _conv(
    x: Tensor, weight: Tensor, pool: Tensor, table: Tensor, accepted: Tensor, *, keep: bool = True, start: bool = True,
    least: int = 0, first: int = 1, shift: int = 0, taps: int = 0, less: int = 0, back: int = 0, gather: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As Kimi K3 writes a window, with its start; what a counterexample does otherwise by name."""
    dead = table[:, :1] <= least
    at = table.masked_fill((table <= least) | dead, 0) if keep or start else table - less
    slots = at[:, 0]
    offset = (accepted.unsqueeze(1) - 1).masked_fill(dead, 0)
    past = pool[slots.unsqueeze(1), offset - back + torch.arange(3)]
    if start:
        past = past.masked_fill(dead.unsqueeze(2), 0)
    window = torch.cat([past, x], dim=1)
    kept = window.shape[1] - 1
    line = pool[:, :kept] if pool.shape[1] > kept else pool
    new = window[:, first : first + kept]
    if keep:
        new = torch.where(dead.unsqueeze(2), line[0], new)
    moved = line.index_put((slots + shift if shift else slots,), new)
    if pool.shape[1] > kept:
        moved = torch.slice_scatter(pool, moved, 1, 0, kept)
    y = F.silu((window.float().unfold(1, 4, 1) * (weight[:taps] if taps else weight)).sum(-1)).to(x.dtype)
    return (y, moved, at.gather(1, offset)) if gather else (y, moved)


def _clamped(x: Tensor, weight: Tensor, pool: Tensor, table: Tensor, accepted: Tensor) -> tuple[Tensor, ...]:
    """Columns whose range is known without a gather."""
    return _conv(x, weight, pool, table, accepted.clamp(min=1), gather=False)


def _inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 2, 8, generator=generator), torch.randn(8, 4, generator=generator)
    pool = torch.randn(9, 6, 8, generator=generator).bfloat16()
    return x.bfloat16(), weight, pool, torch.tensor([[4, 1], [0, 0], [2, 0]]), torch.tensor([2, 1, 1])


def _plain_inputs() -> tuple[Tensor, ...]:
    x, weight, pool, _, accepted = _inputs()
    return x, weight, pool, torch.tensor([[4, 1], [0, 5], [2, 3]]), accepted


@dataclass(frozen=True)
class LiftConvVerifyPass(RulePass):
    """Lift the convolution of a verify window, with its line, to k3::conv_verify."""

    name: ClassVar[str] = "lift_conv_verify"
    provides: ClassVar[frozenset[str]] = frozenset({"conv_verify"})

    def rules(self) -> tuple[Rule, ...]:
        return (LiftConvVerify(),)
