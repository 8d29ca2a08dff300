"""Values of small tensors that belong to the model, kept with the captured graph.

A lookup table in a buffer is an input of the graph, and its contents decide what the graph computes. A pass that must
know them reads them here: a copy of every parameter or buffer of at most `MAX_ELEMENTS` elements, as it was when the
graph was captured. A table that is changed afterwards without a new compilation is not seen, as with every constant
that torch.compile bakes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch.fx import Graph, Node

from k3rewrite import _torch_private as private
from k3rewrite.graph.effects import writes

KEY = "k3_constant"
MAX_ELEMENTS = 1024


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
        if not same or value.dtype != fake.dtype or value.numel() > MAX_ELEMENTS:
            continue
        if isinstance(value, private.FakeTensor):
            node.meta[KEY] = NoValues.FAKE
        else:
            with private.no_modes():
                node.meta[KEY] = value.detach().cpu().clone()


def constant_of(node: Node) -> torch.Tensor | NoValues | None:
    """The values of an input of the graph, the reason why there are none, or None if nothing is known of it."""
    return node.meta.get(KEY)
