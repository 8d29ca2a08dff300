"""Parameters and buffers whose memory may move: who else lives in it, and how a stack of them would lie there.

    q, k, v of their own                        may become parts of one stack: p.data = stack[a:b]
    q, k, v that are parts of such a stack      are the stack: nothing is to be done
    a tied weight, a weight of a state_dict     stays: another tensor would no longer see what is written to it

A moved parameter is the same object with the same values, and what is written to it later is written into the stack.
That is why weights are moved and not copied: no version counter tells of `p.data.add_(...)`, an address does not tell
whether values have changed, and a copy would be twice the memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from k3rewrite import _torch_private as private
from k3rewrite.graph.effects import writes

KEY = "k3_weight"
"""node.meta key of the `Weight` of an input that is a parameter or a buffer which the graph only reads"""


@dataclass(frozen=True)
class Weight:
    """Where a parameter or buffer lies. `owners` is how many tensors live in its storage, None if it has no memory."""

    storage: int
    start: int
    """byte of the storage at which it begins"""
    size: int
    """bytes of the storage"""
    owners: int | None
    fixed: str = ""
    """why its memory cannot move whoever else lives there; "" if nothing speaks against it"""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Weight:
        if isinstance(tensor, private.FakeTensor):
            return cls(private.storage_id(tensor), 0, tensor.numel() * tensor.element_size(), None)
        storage = tensor.untyped_storage()
        start = int(tensor.storage_offset()) * tensor.element_size()
        place = (private.storage_id(tensor), start, storage.nbytes(), private.storage_owners(tensor))
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return cls(*place, f"it is a {type(tensor).__name__}")
        if tensor.is_inference():
            return cls(*place, "it was made in inference mode")
        if tensor.device.type == "cpu" and tensor.is_shared():
            return cls(*place, "its memory is shared between processes")
        return cls(*place)


def note_weights(graph: Graph, inputs: Sequence[object], static: Sequence[int]) -> None:
    """Keep in `meta` where each parameter and buffer lies that the graph only reads."""
    placeholders = list(graph.find_nodes(op="placeholder"))
    if len(placeholders) != len(inputs):
        return  # inputs that overlap were merged, or came apart: which is which is not worth finding out
    written = {argument for node in graph.nodes for argument in writes(node)}
    for position in static:
        node, value = placeholders[position], inputs[position]
        fake = node.meta.get("val")
        if node in written or getattr(node.meta.get("desc"), "idx", position) != position:
            continue
        if not isinstance(value, torch.Tensor) or not isinstance(fake, torch.Tensor) or value.shape != fake.shape:
            continue
        if value.dtype == fake.dtype and value.is_contiguous() and value.layout == torch.strided:
            with private.no_modes():
                node.meta[KEY] = Weight.of(value)


def weight_of(node: Node) -> Weight | None:
    """What was noted of an input; None of every other value."""
    return node.meta.get(KEY)


def lie_together(weights: Sequence[Weight], starts: Sequence[int], size: int) -> bool:
    """True if the weights are where a stack of `size` bytes has them, `starts[i]` bytes from its begin."""
    first = weights[0].start - starts[0]
    return (
        weights[0].owners is not None
        and 0 <= first <= weights[0].size - size
        and all(
            w.storage == weights[0].storage and w.start == first + start
            for w, start in zip(weights, starts, strict=True)
        )
    )


def cannot_move(weights: Sequence[Weight]) -> Mapping[int, str]:
    """Position of each weight that must stay where it is, with the reason. The others may move together."""
    inside = Counter(weight.storage for weight in weights)
    reasons = {}
    for position, weight in enumerate(weights):
        others = 0 if weight.owners is None else weight.owners - inside[weight.storage]
        if weight.fixed:
            reasons[position] = weight.fixed
        elif others > 0:
            reasons[position] = f"{others} more tensor{'s live' if others > 1 else ' lives'} in its memory"
    return reasons
