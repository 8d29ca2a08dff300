"""Whether anybody could tell which strides a value has.

moved = window[:, 1:]; line.copy_(moved)      only its elements are read: a contiguous `moved` does as well
return window[:, 1:]                          whoever gets it sees strides
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

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
