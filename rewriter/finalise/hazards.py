"""Keep reads of the old value of a written input in front of the write, where Inductor would let them slip behind.

    copy = aten.copy(dst, slice(src))            kept = k3::materialise(slice(src))
    copy_(src, add)                       ->     copy = aten.copy(dst, kept)
    copy_(dst, copy)                             copy_(src, add); copy_(dst, copy)

Inductor takes a copy for the thing itself when the layouts agree, and does not know that its fallback for a view of
another element size shares memory. Both are harmless unless the source is written later (2.13: pytorch issues 198131
and 198101). `materialise` is opaque to it: it is made where it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from k3rewrite import _torch_private as private
from k3rewrite.finalise.splice import add_eager_input_values, fresh_value
from k3rewrite.graph import effects
from k3rewrite.graph.provenance import inherit_meta, source_line
from k3rewrite.graph.shapes import metadata_difference
from k3rewrite.graph.storage import Root, StorageMap, tensor_value
from k3rewrite.ops.inplace_variant import ensure_registered
from k3rewrite.ops.vocabulary import Cost, Op, tensor_bytes

PASS_NAME = "keep_reads_before_writes"

_aten, _prims = torch.ops.aten, torch.ops.prims

COPIES: Mapping[Any, int] = {
    _aten.clone.default: 0,
    _aten.copy.default: 1,
    _aten.alias.default: 0,
    _aten._to_copy.default: 0,
    _aten.lift_fresh_copy.default: 0,
    _aten.slice_scatter.default: 1,
    _aten.repeat.default: 0,
    _aten.constant_pad_nd.default: 0,
    _aten.ceil.default: 0,
    _aten.floor.default: 0,
    _aten.round.default: 0,
    _aten.trunc.default: 0,
    _aten.pow.Tensor_Scalar: 0,
    _aten.cat.default: 0,
    _aten.expand_copy.default: 0,
    _prims.convert_element_type.default: 0,
    _prims.device_put.default: 0,
}
"""ops that Inductor may drop as doing nothing, with the position of what is then used instead"""

UNTRACKED_VIEWS = frozenset({_aten.view.dtype, _aten.view_as_complex.default, _aten.view_as_real.default})
"""views whose fallback shares memory without Inductor knowing"""


def _materialise_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _materialise_cost(x: torch.Tensor) -> Cost:
    return Cost(1, tensor_bytes(x), tensor_bytes(x))


MATERIALISE = Op(
    name="materialise",
    schema="(Tensor x) -> Tensor",
    reference=lambda x: x.clone(),
    fake=_materialise_fake,
    cost=_materialise_cost,
)
ensure_registered(MATERIALISE)


@dataclass(frozen=True)
class Hazard:
    """A read that was pinned to its place: the node, the write that it could have slipped behind, its source line."""

    node: str
    write: str
    source: str


def keep_reads_before_writes(module: GraphModule) -> list[Hazard]:
    """Insert a `k3::materialise` before every read that Inductor could delay past a write; says where."""
    graph = module.graph
    storage = StorageMap(graph)
    found: list[tuple[Node, Node, Node]] = []
    for node in graph.nodes:
        source = _source(node)
        if source is None:
            continue
        for root in storage.roots(source):
            write = _endangering_write(storage, node, root)
            if write is not None:
                found.append((node, source, write))
                break
    for node, source, _ in found:
        _pin(graph, node, source)
    if found:
        graph.lint()
        module.recompile()
    return [Hazard(node.name, write.name, source_line(node)) for node, _, write in found]


def _source(node: Node) -> Node | None:
    """What a node that may be taken for a copy, or is an untracked view, reads."""
    position = 0 if node.target in UNTRACKED_VIEWS else COPIES.get(node.target)
    if position is None or position >= len(node.args):
        return None
    source = node.args[position]
    if isinstance(source, (list, tuple)):
        source = source[0] if len(source) == 1 else None
    return source if isinstance(source, Node) else None


def _endangering_write(storage: StorageMap, node: Node, root: Root) -> Node | None:
    """The first write to `root` behind `node` that something read through `node` must not see."""
    later = [w for position, w in storage.writes(root) if position > storage.position[node] and w is not node]
    if not later:
        return None
    if node.target in UNTRACKED_VIEWS:
        value, source = tensor_value(node), tensor_value(_source(node) or node)
        same_width = value is not None and source is not None and value.dtype.itemsize == source.dtype.itemsize
        return None if same_width and node.target is _aten.view.dtype else later[0]
    if metadata_difference(tensor_value(_source(node) or node), tensor_value(node)) is not None:
        return None  # Inductor drops a copy only if nothing about it differs
    last = max((storage.position[user] for user in _readers(node)), default=-1)
    write, place = later[0], storage.position[later[0]]
    # a plain copy reads its source before it writes; what another op reads and writes at once must be apart
    return write if last > place or (last == place and write.target is not _aten.copy_.default) else None


def _readers(node: Node) -> set[Node]:
    """Everything that reads a value through views and copies that may be dropped."""
    found: set[Node] = set()
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user in found:
                continue
            found.add(user)
            if effects.is_view(user) or user.target in COPIES:
                pending.append(user)
    return found


def _pin(graph: Graph, node: Node, source: Node) -> None:
    with graph.inserting_before(node):
        kept = graph.call_function(MATERIALISE.overload, (source,))
    inherit_meta(kept, [node], PASS_NAME)
    if "val" in source.meta:
        with torch.no_grad():
            kept.meta["val"] = _laid_out_as_clone(source.meta["val"])
    add_eager_input_values(kept)
    node.replace_input_with(source, kept)


def _laid_out_as_clone(value: Any) -> Any:
    fresh = fresh_value(value)
    if isinstance(fresh, private.FakeTensor):
        with fresh.fake_mode:
            return torch.empty_like(fresh)
    return fresh
