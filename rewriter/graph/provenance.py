"""Where a node came from: the user's source line, the module path, the nodes that it replaced.

    stack_trace      '... File "net.py", line 12, in forward ...'   ->  'net.py:12 in forward'
    nn_module_stack  {id: ("L['self'].layers.3.mlp", MLP)}          ->  'layers.3.mlp'

Every node that a pass makes goes through `inherit_meta`, so that a kernel's name leads back to the model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.fx import Node

UNKNOWN_SOURCE = "<unknown>"
ORIGIN_KEY = "k3_origin"
"""node.meta key: tuple of 'node name @ source line' of the nodes that this one stands for"""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_INDEX = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")


def source_line(node: Node) -> str:
    """`file.py:123 in forward` of the innermost user frame, or `<unknown>`."""
    trace = node.meta.get("stack_trace") or node.stack_trace
    return trace_source_line(trace) if trace else UNKNOWN_SOURCE


@lru_cache(maxsize=65536)
def trace_source_line(trace: str) -> str:
    """The innermost frame of a formatted stack that is not torch's own."""
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return UNKNOWN_SOURCE
    user = [f for f in frames if not is_torchs(f["file"])]
    frame = (user or frames)[-1]
    return f"{_short_path(frame['file'])}:{frame['line']} in {frame['function']}"


def is_torchs(file: str) -> bool:
    """True for a file of torch itself: no place of the user's."""
    return file.startswith(_TORCH)


def _short_path(path: str) -> str:
    """From the folder of a package that is installed, or from the one at hand; else as it is."""
    _, installed, inside = path.rpartition(f"{os.sep}site-packages{os.sep}")
    relative = os.path.relpath(path)
    return inside if installed else path if relative.startswith("..") else relative


def module_path(node: Node) -> str:
    """`layers.3.self_attn` of the innermost module, or `` outside of any module."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    return normalise_module_path(list(stack.values())[-1][0])


@lru_cache(maxsize=65536)
def normalise_module_path(raw: str) -> str:
    """Dynamo writes paths as Python expressions that start with the local's name; dots and names remain."""
    path = _INDEX.sub(r".\1", raw).replace("._modules", "").replace("L__self___", "")
    parts = [p for p in path.split(".") if p]
    if parts[:2] == ["L", "self"]:
        parts = parts[2:]
    elif parts[:1] in (["self"], ["L"]):
        parts = parts[1:]
    return ".".join(parts)


def inherit_meta(new: Node, sources: Sequence[Node], origin: str) -> None:
    """Give `new` the place in the model of the nodes that it stands for.

    The last source with a stack trace names the line (it is the one that produced the result). `origin` is the pass
    that made the node. `val` is not touched: a fake tensor belongs to exactly one node.
    """
    for source in reversed(sources):
        if "stack_trace" in source.meta:
            new.meta["stack_trace"] = source.meta["stack_trace"]
            break
    for source in reversed(sources):
        if source.meta.get("nn_module_stack"):
            new.meta["nn_module_stack"] = source.meta["nn_module_stack"]
            break
    from_node = [entry for s in sources for entry in s.meta.get("from_node", ())]
    if from_node:
        new.meta["from_node"] = from_node
    origins: dict[str, None] = {}
    for source in sources:
        for entry in source.meta.get(ORIGIN_KEY) or (f"{source.name} @ {source_line(source)}",):
            origins[entry] = None
    new.meta[ORIGIN_KEY] = tuple(origins)
    new.meta["k3_made_by"] = origin


def origin_names(node: Node) -> tuple[str, ...]:
    """Names of the nodes of the captured graph that this one stands for; none for a node that was captured."""
    return tuple(entry.split(" @ ", 1)[0] for entry in node.meta.get(ORIGIN_KEY, ()))


def model_lines(node: Node) -> tuple[str, ...]:
    """The distinct model lines that this node computes, in order: the provenance of its kernel."""
    entries = node.meta.get(ORIGIN_KEY)
    lines = [e.split(" @ ", 1)[1] for e in entries] if entries else [source_line(node)]
    return tuple(dict.fromkeys(line for line in lines if line != UNKNOWN_SOURCE))
