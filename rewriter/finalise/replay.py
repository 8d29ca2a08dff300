"""The views of a graph, made again of another tensor.

Values in a rewritten graph have storage of their own each, so their fake tensors do not say where in a common storage
they lie. Taking the same views of one fake tensor does.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from k3rewrite import _torch_private as private
from k3rewrite.graph import effects
from k3rewrite.graph.storage import tensor_value


def view_source(node: Node) -> Node | None:
    """The one tensor that a view is taken of."""
    source = node.args[0] if node.args else None
    return source if isinstance(source, Node) else None


def replay(node: Node, source: Node, view: Any) -> Any:
    """The same view of another tensor; None if that tensor cannot be viewed so."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: view if n is source else n.meta.get("val"))
    if node.target is operator.getitem:
        return view[args[1]]
    assert callable(node.target)
    try:
        return node.target(*args, **kwargs)
    except RuntimeError:  # `view` of a layout that the original did not have
        return None


def relative_views(graph: Graph, nodes: Sequence[Node]) -> list[torch.Tensor] | None:
    """Fake tensors of `nodes` as views of one storage, so that offsets can be compared; None if they are not all views
    of one value of the graph."""
    mode = private.graph_fake_mode(graph)
    lines = [_ancestry(node) for node in nodes]
    common = next((n for n in lines[0] if all(n in line for line in lines[1:])), None)
    base = tensor_value(common) if common is not None else None
    if mode is None or common is None or base is None:
        return None
    views = []
    with private.no_modes(), mode, torch.no_grad():
        start = private.fresh_fake(mode, base)
        for line in lines:
            value: Any = start
            for node in reversed(line[: line.index(common)]):
                source = view_source(node)
                assert source is not None
                value = replay(node, source, value)
            views.append(value)
    return views


def _ancestry(node: Node) -> list[Node]:
    """The node, what it is a view of, what that is a view of, and so on."""
    line = [node]
    while effects.is_view(line[-1]) and (source := view_source(line[-1])) is not None:
        line.append(source)
    return line
