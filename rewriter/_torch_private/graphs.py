"""FX graphs and nodes, the dispatcher's schemas, and the log that `tlparse` shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node


def has_registered_side_effect(target: Any) -> bool:
    """True for functions that torch.fx was told to keep (assertions, `wait_tensor`, profiler marks). (2.1+)"""
    from torch.fx.node import _side_effectful_functions

    return target in _side_effectful_functions


def node_order_key(node: Node) -> Any:
    """Changes when a node is moved within its graph. (2.6+)"""
    return node._sort_key


def names_used(graph: torch.fx.Graph) -> int:
    """Grows with every node ever made in a graph; with the node count it shows that a graph has changed."""
    return len(graph._graph_namespace._used_names)


def boxed_codegen() -> Any:
    """FX code generator whose `forward` takes one list and empties it, so that inputs are freed early. (2.10+)"""
    from torch.fx.graph import _BoxedCodeGen

    return _BoxedCodeGen()


def needs_eager_input_values(target: Any) -> bool:
    """True for an op that insists on the strides its inputs had when it was captured.

    Inductor restores them from node.meta["eager_input_vals"]. (torch._library, 2.7+)
    """
    from torch._library.utils import get_layout_constraint_tag

    if not isinstance(target, torch._ops.OpOverload):
        return False
    return get_layout_constraint_tag(target) == torch._C.Tag.needs_exact_strides


def parse_schema(text: str) -> Any:
    """The schema "ns::name(Tensor x) -> Tensor", as the dispatcher reads it; malformed text raises RuntimeError."""
    return torch._C.parse_schema(text)


def trace_structured_text(name: str, text: Callable[[], str]) -> None:
    """An artifact that `tlparse` shows beside the compiler's own; `text` is called only if a trace is being written."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


def graph_break(module: torch.fx.GraphModule) -> tuple[str, list[Any]] | None:
    """(why, the stack of frames) if Dynamo ended this graph at something that it cannot capture. (2.1+)"""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return str(reason.reason), list(reason.user_stack or [])
