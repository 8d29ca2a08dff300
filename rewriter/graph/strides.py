"""Whether anybody could tell which strides a value has, and who can do with others.

moved = window[:, 1:]; line.copy_(moved)      only its elements are read: a contiguous `moved` does as well
return window[:, 1:]                          whoever gets it sees strides
y.view(-1, 12, 128).sum(1)                    a `y` of rows that lie apart does as well, with another view of it
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from k3rewrite.graph.effects import TRUSTED_NAMESPACES, is_view, writes
from k3rewrite.graph.shapes import metadata_difference

_aten = torch.ops.aten
_READERS = frozenset({_aten.cat.default, _aten.stack.default, _aten.index_put.default, _aten.copy.default})
"""ops beside pointwise ones that read elements one by one, wherever they lie"""


def strides_unseen(node: Node, value: torch.Tensor, inside: Collection[Node] = ()) -> bool:
    """True if all users of `node`, but for those `inside`, read its elements only, and would give the same results,
    with the same strides, from one laid out as `value` is."""
    return all(_is_reader(user) and _same_result(user, node, value) for user in node.users if user not in inside)


def _is_reader(user: Node) -> bool:
    target = user.target
    if user.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return target in _READERS or (torch.Tag.pointwise in target.tags and not target._schema.is_mutable)


def _same_result(user: Node, node: Node, value: torch.Tensor) -> bool:
    def of(argument: Node) -> Any:
        return value if argument is node else argument.meta["val"]

    arguments, named = map_arg(user.args, of), map_arg(dict(user.kwargs), of)
    again = user.target(*arguments, **named)  # type: ignore[operator, misc]
    return metadata_difference(user.meta["val"], again) is None


class NeedsStrides(Exception):
    """A reader cannot do with the other strides; `node` is the reader."""

    def __init__(self, reason: str, node: Node) -> None:
        super().__init__(reason)
        self.reason, self.node = reason, node


def with_strides(
    node: Node,
    value: torch.Tensor,
    inside: Collection[Node] = (),
    objection: Callable[[Node, Callable[[Node], Any]], str | None] = lambda user, value_of: None,
) -> dict[Node, Any]:
    """The values that the views of `node` would have if it were laid out as `value`; readers `inside` do not count.

    Every other reader must give what it gives now, with the same strides, and take no part of a layout for granted:
    only ATen and the vocabulary do not. `objection` is asked about each reader, with a function that gives the new
    value of any of its arguments.

    Raises NeedsStrides if a reader cannot do with it, if it is returned, or if it is written.
    """
    changed: dict[Node, Any] = {node: value}

    def of(argument: Node) -> Any:
        return changed[argument] if argument in changed else argument.meta.get("val")

    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user in inside or user in changed:
                continue
            if user.op == "output":
                raise NeedsStrides("it is returned, and whoever gets it sees its strides", user)
            target = user.target
            plain = target is operator.getitem or (
                isinstance(target, torch._ops.OpOverload) and target.namespace in TRUSTED_NAMESPACES
            )
            if not plain or "unbacked_bindings" in user.meta:
                raise NeedsStrides(f"{user.name} may need a contiguous tensor", user)
            if writes(user):
                raise NeedsStrides(f"{user.name} writes it", user)
            if (reason := objection(user, of)) is not None:
                raise NeedsStrides(reason, user)
            arguments, named = map_arg(user.args, of), map_arg(dict(user.kwargs), of)
            try:
                again = target(*arguments, **named)  # type: ignore[operator]
            except (RuntimeError, ValueError) as error:
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                raise NeedsStrides(f"{user.name} does not take it: {reason}", user) from error
            if is_view(user):
                changed[user] = again
                pending.append(user)
            elif difference := metadata_difference(user.meta.get("val"), again):
                raise NeedsStrides(f"{user.name} would give another result: {difference}", user)
    del changed[node]
    return changed
