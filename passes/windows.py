"""What the rules of verify windows share: slot tables with null rows, scatters into pools, values for their checks.

dead  = table[:, :1] <= 0                               a sequence of nobody: its first slot is none
table = table.masked_fill((table <= 0) | dead, 0)       null slots point to slot 0, which keeps what it has
pool  = pool.index_put((table,), torch.where(..., pool[0], new))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.layout import keeps_order
from k3rewrite.graph.shapes import same_size
from k3rewrite.ops.vocabulary import size_hint
from k3rewrite.passes.moe.intervals import Range, is_integral
from k3rewrite.passes.moe.ranges import Ranges
from k3rewrite.patterns import Unlike

aten = torch.ops.aten
_OR = frozenset({aten.bitwise_or.Tensor, aten.logical_or.default})


@dataclass(frozen=True)
class Put:
    """`pool.index_put(indices, value)`: the node, what is written where rows are masked (`where`), views on the way."""

    node: Node
    where: Node | None
    views: tuple[Node, ...]

    @property
    def nodes(self) -> set[Node]:
        own = {self.node, *self.views}
        return own if self.where is None else own | {self.where, self.where.args[1]}  # type: ignore[arg-type]


def put_of(new: Node) -> Put:
    """The scatter of `new`, as it is or with masked rows. A single row is written through a view."""
    for value in [new, *(user for user in new.users if user.target is aten.where.self and user.args[2] is new)]:
        for written in [value, *(user for user in value.users if keeps_order(user))]:
            for user in written.users:
                if user.target is aten.index_put.default and user.args[2] is written:
                    if bound_arguments(user)["accumulate"]:
                        raise Unlike("the new state is added to what is there", user)
                    where = None if value is new else value
                    return Put(user, where, () if written is value else (written,))
    raise Unlike("the new state is not scattered into a pool by slot", new)


def bare(node: Any) -> Any:
    """What a chain of views shows, all of it in its order."""
    while isinstance(node, Node) and keeps_order(node):
        node = node.args[0]
    return node


def raw_table(table: Node) -> Node:
    """The slots before those of nobody were pointed at slot 0, all of a row whose first slot is null."""
    if table.target is not aten.masked_fill.Scalar or table.args[2] != 0:
        raise Unlike("rows are masked, and their slots are not pointed at slot 0", table)
    raw, mask = table.args[0], table.args[1]
    assert isinstance(raw, Node) and isinstance(mask, Node)
    parts = mask.args[:2] if mask.target in _OR else (mask,)
    own = [part for part in parts if isinstance(part, Node) and _is_at_most_zero(part, raw)]
    rows = [part for part in parts if isinstance(part, Node) and is_dead_row(part, raw)]
    if not own or not all(part in own or part in rows for part in parts):
        raise Unlike("null slots are not those at or below zero", mask)
    if not rows and not same_size(raw.meta["val"].shape[1], 1):
        raise Unlike("a row whose first slot is null keeps its other slots", mask)
    return raw


def is_dead_row(mask: Any, raw: Node) -> bool:
    """True for one number a row, whether the first of its slots is at or below zero, whatever shape it is shown in."""
    mask = bare(mask)
    if not isinstance(mask, Node) or mask.target is not aten.le.Scalar or mask.args[1] != 0:
        return False
    first = mask.args[0]
    if bare(first) is bare(raw):
        return same_size(raw.meta["val"].shape[1], 1)
    while isinstance(first, Node) and keeps_order(first):
        first = first.args[0]
    if not isinstance(first, Node) or not first.args or bare(first.args[0]) is not bare(raw):
        return False
    arguments = bound_arguments(first)
    if first.target is aten.select.int:
        return bool(arguments["dim"] in (1, -1) and arguments["index"] == 0)
    if first.target is not aten.slice.Tensor or arguments["start"] or arguments["step"] != 1:
        return False
    along_row: bool = arguments["dim"] in (1, -1)
    return along_row and same_size(first.meta["val"].shape[1], 1)


def _is_at_most_zero(mask: Node, of: Node) -> bool:
    least = mask.target is aten.le.Scalar and bool(mask.args[1] == 0)
    return least and bare(mask.args[0]) is bare(of)


def is_null_of(mask: Any, slots: Node) -> bool:
    """True for `slots <= 0`, in any shape."""
    mask = bare(mask)
    return isinstance(mask, Node) and _is_at_most_zero(mask, slots)


def is_from_zero(columns: Node) -> bool:
    """True for numbers that are not below zero. What the graph gathers by is none: eager refuses one that is."""
    ranges = Ranges()
    for node in [columns, *_above(columns)]:
        for user in node.users:
            if user.target is aten.gather.default and user.args[2] is node and user.users:
                rows, dim = user.args[0].meta["val"], bound_arguments(user)["dim"]  # type: ignore[union-attr]
                ranges.known[node] = Range(0, max(size_hint(rows.shape[dim]) - 1, 0))
    return ranges.of_ids(columns).low >= 0


def _above(node: Node) -> list[Node]:
    """Integers from which the node is computed."""
    found: dict[Node, None] = {}
    stack = [node]
    while stack:
        for above in stack.pop().all_input_nodes:
            if above not in found and is_integral(above.meta.get("val")):
                found[above] = None
                stack.append(above)
    return list(found)


def keeps_slot_zero(where: Node, pool: Node) -> None:
    kept = where.args[1]
    if not isinstance(kept, Node) or kept.target is not aten.select.int or kept.args != (pool, 0, 0):
        raise Unlike("slot 0 does not keep what it has", where)


def leading(mask: Any, rank: int, dims: int) -> bool:
    """True if a mask lies along the first `dims` dimensions of a value of `rank` dimensions."""
    if not isinstance(mask, Node) or not isinstance(mask.meta.get("val"), Tensor):
        return False
    shape = mask.meta["val"].shape
    return len(shape) == rank and all(same_size(size, 1) for size in shape[dims:])


# ------------------------------------------------------------------ values for checks by execution


def drawn_table(table: Tensor, pool: Tensor, null_slot: bool, seed: int) -> Tensor:
    """A table like this one: no two live entries are the same; with null slots some rows are nobody's, some entries."""
    shape, lowest = [size_hint(size) for size in table.shape], int(null_slot)
    count, wanted = size_hint(pool.shape[0]) - lowest, shape[0] * shape[1]
    free = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) + lowest
    drawn = torch.zeros(wanted, dtype=torch.int64)
    drawn[: min(count, wanted)] = free[:wanted]
    drawn = drawn.view(shape)
    if null_slot:
        drawn[seed % 3 :: 3] = -seed
        if shape[1] > 1:
            drawn[(seed + 1) % 3 :: 3, -1] = 0
    return drawn.to(table.dtype).to(table.device)


def drawn_numbers(like: Tensor, below: int, seed: int) -> Tensor:
    """Integers from 0 to below that."""
    shape = [size_hint(size) for size in like.shape]
    drawn = torch.randint(0, max(1, below), shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(like.dtype).to(like.device)


def computed(leaves: Mapping[Node, Tensor], wanted: Iterable[Any]) -> dict[Node, Tensor]:
    """The leaves, and what the graph computes from them on the way to the wanted nodes."""
    known: dict[Node, Any] = dict(leaves)

    def value(node: Node) -> Any:
        if node not in known:
            args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return known[node]

    for node in wanted:
        if isinstance(node, Node):
            value(node)
    return known
