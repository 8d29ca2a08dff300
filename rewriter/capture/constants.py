"""Values of small tensors that belong to the model, kept with the captured graph.

A lookup table in a buffer is an input of the graph, and its contents decide what the graph computes. A pass that must
know them reads them here: a copy of every parameter or buffer of at most `MAX_ELEMENTS` elements, as it was when the
graph was captured; of integers up to `MAX_INTEGERS` the smallest and the largest. A table that is changed afterwards
without a new compilation is not seen, as with every constant that torch.compile bakes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch.fx import Graph, Node

from k3rewrite import _torch_private as private
from k3rewrite.graph.effects import writes

KEY, RANGE_KEY = "k3_constant", "k3_range"
MAX_ELEMENTS, MAX_INTEGERS = 1024, 2**22


class NoValues(Enum):
    """Why a small static input has no values."""

    FAKE = "the model was captured from fake tensors: nothing of it can run"


def note_constants(graph: Graph, inputs: Sequence[Any], static: Sequence[int]) -> None:
    """Keep the values of small static inputs in `meta`, unless the graph writes one of them."""
    written = {argument for node in graph.nodes for argument in writes(node)}
    placeholders = list(graph.find_nodes(op="placeholder"))
    if len(placeholders) != len(inputs):
        return  # inputs that overlap were merged: which is which is not worth finding out
    for position, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
        described = getattr(node.meta.get("desc"), "idx", position)
        if position not in static or node in written or described != position:
            continue
        fake = node.meta.get("val")
        same = isinstance(value, torch.Tensor) and isinstance(fake, torch.Tensor) and value.shape == fake.shape
        if not same or value.dtype != fake.dtype:
            continue
        with private.no_modes():
            if value.numel() <= MAX_ELEMENTS:
                is_fake = isinstance(value, private.FakeTensor)
                node.meta[KEY] = NoValues.FAKE if is_fake else value.detach().cpu().clone()
            if 0 < value.numel() <= MAX_INTEGERS and (ends := integer_range(value)) is not None:
                node.meta[RANGE_KEY] = ends


def integer_range(value: torch.Tensor) -> tuple[int, int] | None:
    """(smallest, largest) of a tensor of integers that has values; None of others, and of bytes, which say little."""
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return None
    if value.dtype in (torch.bool, torch.uint8, torch.uint64):
        return None
    if isinstance(value, private.FakeTensor) or value.is_meta or not value.numel():
        return None
    with private.no_modes():
        low, high = value.detach().to(torch.int64).aminmax()
        return int(low), int(high)


def range_of(node: Node) -> tuple[int, int] | None:
    """(smallest, largest) of an input of the graph that holds integers, or None if nothing is known of it."""
    return node.meta.get(RANGE_KEY)


def constant_of(node: Node) -> torch.Tensor | NoValues | None:
    """The values of an input of the graph, the reason why there are none, or None if nothing is known of it."""
    return node.meta.get(KEY)
