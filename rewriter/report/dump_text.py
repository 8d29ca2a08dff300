"""A graph as text: one line a node, in execution order, under a heading for each module.

    # layers.0.mlp
      mm_3        bf16[4, 64][64, 1]    aten.mm.default(view_7, t_3)               # net.py:31 in forward
    + k3_mlp      bf16[4, 64][64, 1]    k3.mlp.default(view_7, w1, w2)             # net.py:33 in forward

`+` marks nodes that the pass made. A value is written as dtype[shape][strides].
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

import torch
from torch.fx import GraphModule, Node

from k3rewrite.graph.provenance import module_path, source_line

_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "b8",
}
_NAME_WIDTH, _TYPE_WIDTH, _CALL_WIDTH = 24, 32, 64


def graph_text(module: GraphModule, *, title: str = "", new: Set[str] = frozenset()) -> str:
    """The whole graph, nested graphs (of higher-order ops) below it. `new` are the names of the nodes to mark."""
    devices = sorted({str(v.device) for node in module.graph.nodes for v in _tensors(node.meta.get("val"))})
    count = len(module.graph.nodes)
    heading = f"# {title}\n" if title else ""
    heading += f"# {count} nodes on {', '.join(devices) or 'no device'}\n"
    return heading + "\n".join(_lines(module, new, several_devices=len(devices) > 1)) + "\n"


def _lines(module: GraphModule, new: Set[str], several_devices: bool) -> Iterator[str]:
    last: str | None = None
    for node in module.graph.nodes:
        path = module_path(node) if node.op not in ("placeholder", "output") else f"<{node.op}>"
        if path != last:
            yield f"\n# {path or '<outside of modules>'}"
            last = path
        mark = "+" if node.name in new else " "
        value = describe_value(node.meta.get("val"), with_device=several_devices)
        line = f"{mark} {node.name:{_NAME_WIDTH}} {value:{_TYPE_WIDTH}} {call_text(node):{_CALL_WIDTH}}"
        source = "" if node.op in ("placeholder", "output") else f" # {source_line(node)}"
        yield (line + source).rstrip()
    for node in module.graph.nodes:
        inner = getattr(module, node.target, None) if node.op == "get_attr" and "." not in str(node.target) else None
        if isinstance(inner, GraphModule):
            yield f"\n# graph {node.target} ({len(inner.graph.nodes)} nodes)"
            yield from (f"  {line}" if line else "" for line in _lines(inner, frozenset(), several_devices))


def target_name(node: Node) -> str:
    """`aten.mm.default`, `k3.rms_norm.default`, or the target's own name."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, str):
        return target
    return getattr(target, "__name__", None) or getattr(target, "_name", None) or str(target)


def call_text(node: Node) -> str:
    """The call as it would be written: `aten.add.Tensor(x, y, alpha = 2)`."""
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return f"attribute {node.target}"
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    arguments = [_argument(arg) for arg in node.args]
    arguments += [f"{key} = {_argument(value)}" for key, value in node.kwargs.items()]
    return f"{target_name(node)}({', '.join(arguments)})"


def _argument(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inside = ", ".join(_argument(entry) for entry in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_argument(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, torch.dtype):
        return _DTYPES.get(value, str(value).removeprefix("torch."))
    if isinstance(value, (torch.device, torch.memory_format, torch.layout)):
        return str(value)
    if isinstance(value, slice):
        return ":".join("" if part is None else _argument(part) for part in (value.start, value.stop, value.step))
    return repr(value)


def describe_value(value: Any, *, with_device: bool = False) -> str:
    """A node's value: `bf16[4, 64][64, 1]`, a tuple of such, a number's type, or "" if it is not known."""
    if isinstance(value, torch.Tensor):
        dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        shape = ", ".join(str(size) for size in value.shape)
        strides = (
            ", ".join(str(size) for size in value.stride()) if value.layout is torch.strided else str(value.layout)
        )
        return f"{dtype}[{shape}][{strides}]" + (f"@{value.device}" if with_device else "")
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(describe_value(entry, with_device=with_device) for entry in value) + ")"
    return "" if value is None else type(value).__name__


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)
