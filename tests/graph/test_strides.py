"""Strides that nobody can tell: only pointwise readers, which give the same from another layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_graphs import traced
from torch import Tensor

from k3rewrite.graph.strides import strides_unseen

aten = torch.ops.aten
UNSEEN: dict[str, Callable[[Tensor], Any]] = {
    "sum of elements": lambda part: part + 1,
    "copied": lambda part: aten.copy(torch.zeros(4, 3), part),
    "written at an index": lambda part: torch.zeros(9, 3).index_put((torch.arange(4),), part),
    "put together": lambda part: torch.cat([part, torch.zeros(1, 3)]),
    "chosen": lambda part: torch.where(part > 0, part, 0.0),
}
SEEN: dict[str, Callable[[Tensor], Any]] = {
    "returned": lambda part: part,
    "viewed": lambda part: part.unsqueeze(0) + 1,
    "one reader of two": lambda part: (part + 1, part.t()),
    "strides handed on": lambda part: torch.empty_like(part) * 0 + 1,
    "summed": lambda part: part.sum(1),
    "transposed as it is": lambda part: part.sin(),
}


def _slice_and_its_copy(function: Callable[[Tensor], Any], columns_first: bool) -> tuple[torch.fx.Node, Tensor]:
    module = traced(lambda x: function(x[:, 1:]), (torch.randn(4, 4),))
    (node,) = module.graph.find_nodes(op="call_function", target=aten.slice.Tensor)
    value = node.meta["val"]
    return node, value.new_empty_strided(value.shape, (1, 4) if columns_first else (3, 1))


@pytest.mark.parametrize("name", UNSEEN)
def test_nobody_can_tell(name: str) -> None:
    assert strides_unseen(*_slice_and_its_copy(UNSEEN[name], columns_first=False))


@pytest.mark.parametrize("name", SEEN)
def test_somebody_can_tell(name: str) -> None:
    node, value = _slice_and_its_copy(SEEN[name], columns_first=name == "transposed as it is")
    assert not strides_unseen(node, value)
    assert strides_unseen(node, value, inside=set(node.users)) is True
