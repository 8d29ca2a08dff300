"""The contract that holds after every pass, always: cheap, no tensor is computed.

* inputs and outputs keep number, dtype, symbolic shape, device and stride; the same inputs are written;
* the graph is well-formed (`lint`), and every node of it has a value description;
* only the ops of the level are in it, and of `k3::` ops only those that the model calls or a pass before has announced;
* nothing more is assumed about symbolic sizes;
* collectives stand in the same order as in the captured graph, each with its reduction and its group.

What breaks it is a pass, so each remedy speaks to the author of one.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from k3rewrite import _torch_private as private
from k3rewrite.errors import ContractError
from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.effects import writes
from k3rewrite.graph.provenance import source_line
from k3rewrite.graph.shapes import metadata_difference
from k3rewrite.graph.storage import StorageMap
from k3rewrite.ops.vocabulary import NAMESPACE, op_of

_KEEP = {
    "input": "leave the placeholders as they are, with their meta['val']",
    "output": "leave the output node alone, and let a replacement have the dtype, shape, device and stride of what it "
    "replaces",
}
"""what to do when the inputs or outputs of a graph have changed"""


@dataclass(frozen=True)
class GraphContract:
    """The observable surface of a captured graph."""

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    collectives: tuple[str, ...]
    written: frozenset[int]
    """positions of the inputs that the graph writes"""
    ops: frozenset[str]
    """names of the `k3::` ops in it: a model may call them itself, and passes on Dynamo's graph may have made some"""

    @classmethod
    def of(cls, module: GraphModule) -> GraphContract:
        graph = module.graph
        return cls(
            tuple(n.meta.get("val") for n in graph.find_nodes(op="placeholder")),
            tuple(_value(a) for a in _outputs(graph)),
            tuple(_signature(n) for n in graph.nodes if _is_collective(n)),
            _written_inputs(graph),
            frozenset(name for node in graph.nodes if (name := _vocabulary_name(node)) is not None),
        )

    def check(self, module: GraphModule, stage: str, announced: frozenset[str]) -> None:
        """Raise ContractError if the graph after `stage` breaks it. `announced` are further `k3::` ops allowed."""
        graph, place = module.graph, f"after {stage}"
        try:
            graph.lint()
        except RuntimeError as error:
            raise ContractError(
                f"the graph is not well-formed: {error}",
                place=place,
                remedy="put a node behind all that it reads, and erase a node only when nothing reads it",
            ) from error
        now = GraphContract.of(module)
        for kind, old, new in (("input", self.inputs, now.inputs), ("output", self.outputs, now.outputs)):
            if len(old) != len(new):
                raise ContractError(f"{len(old)} {kind}s became {len(new)}", place=place, remedy=_KEEP[kind])
            for index, (a, b) in enumerate(zip(old, new, strict=True)):
                if difference := metadata_difference(a, b):
                    raise ContractError(f"{kind} {index}: {difference}", place=place, remedy=_KEEP[kind])
        if now.collectives != self.collectives:
            raise ContractError(
                f"collectives {list(self.collectives)} became {list(now.collectives)}",
                place=place,
                remedy="leave every collective and every wait in its place, with its group: other ranks wait for it",
            )
        if lost := sorted(self.written - now.written):
            raise ContractError(
                f"input {lost[0]} is not written any more",
                place=place,
                remedy="keep the node that writes it (a copy_ at the end of the graph): the caller reads that state",
            )
        if gained := sorted(now.written - self.written):
            raise ContractError(
                f"input {gained[0]} is written, which the model does not do",
                place=place,
                remedy="call a functional overload, or write into a tensor that the graph itself makes "
                "(a Python function and an op without its overload count as writing what they read)",
            )
        for node in graph.nodes:
            _check_node(node, stage, announced | self.ops)


def check_guards(graph: Graph, before: int, stage: str) -> None:
    """Raise ContractError if there are more guards on symbolic sizes than the `before` that there were.

    A pass that compares two sizes with `==` or `<`, or takes a size as a number, makes the compiled function one for
    these sizes only, and nobody sees why.
    """
    if added := private.guard_texts(private.graph_fake_mode(graph), before):
        raise ContractError(
            f"{len(added)} more assumption{'s' if len(added) > 1 else ''} about symbolic sizes: {', '.join(added)}",
            place=f"after {stage}",
            remedy="compare sizes with same_size (graph/shapes.py), and give nodes of sizes to new nodes, not numbers",
        )


def _check_node(node: Node, stage: str, announced: frozenset[str]) -> None:
    if node.op in ("placeholder", "output", "get_attr"):
        return
    place = f"after {stage}, node {node.name} ({source_line(node)})"
    if node.op != "call_function":
        raise ContractError(
            f"a {node.op} node in an ATen graph", place=place, remedy="call an ATen overload with builder.call"
        )
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = _vocabulary_name(node)
        if name is not None and name not in announced:
            raise ContractError(
                f"k3::{target._opname} was not announced by any pass",
                place=place,
                remedy=f"name '{name}' in `provides` of the pass that makes it",
            )
        described = not target._schema.returns or "val" in node.meta
    elif target is operator.getitem:
        described = "val" in node.meta
    elif isinstance(target, torch._ops.HigherOrderOperator) or _is_symbolic(node):
        described = True
    else:
        raise ContractError(
            f"{target} is no operator of this level",
            place=place,
            remedy="call an overload (torch.ops.aten.sin.default), no Python function and no op without its overload",
        )
    if not described:
        raise ContractError(
            "a node without a value description",
            place=place,
            remedy="make nodes with builder.call and builder.item, which set meta['val']",
        )


def _vocabulary_name(node: Node) -> str | None:
    """Name of the op of the vocabulary that a `k3::` node calls, in place or not; None for other nodes."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != NAMESPACE:
        return None
    word = op_of(target)
    return target._opname if word is None else word.name


def _is_symbolic(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def _is_collective(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace in ("_c10d_functional", "c10d_functional")


def _signature(collective: Node) -> str:
    """The op with its constants: the same reduction over another group of ranks is another collective."""
    constants = [repr(v) for v in bound_arguments(collective).values() if not isinstance(v, (Node, list, tuple))]
    return f"{collective.target}({', '.join(constants)})"


def _written_inputs(graph: Graph) -> frozenset[int]:
    """Inputs in whose storage some node writes, directly or through a view."""
    arguments = {argument for node in graph.nodes for argument in writes(node)}
    if not arguments:
        return frozenset()
    if all(node.op == "placeholder" for node in arguments) and not _share_storage(graph, arguments):
        return frozenset(i for i, node in enumerate(graph.find_nodes(op="placeholder")) if node in arguments)
    storage = StorageMap(graph)
    written = {root for root, entries in storage.written.items() if entries}
    return frozenset(
        i for i, node in enumerate(graph.find_nodes(op="placeholder")) if not storage.roots(node).isdisjoint(written)
    )


def _share_storage(graph: Graph, inputs: set[Node]) -> bool:
    """True if one of the inputs may live in the storage of another input or constant."""
    places = Counter(
        private.storage_id(value)
        for op in ("placeholder", "get_attr")
        for node in graph.find_nodes(op=op)
        if isinstance(value := node.meta.get("val"), torch.Tensor) and value.layout == torch.strided
    )
    values = [node.meta.get("val") for node in inputs]
    return not all(isinstance(v, torch.Tensor) and places[private.storage_id(v)] == 1 for v in values)


def _outputs(graph: Graph) -> tuple[Any, ...]:
    outputs: Any = graph.output_node().args[0]
    return tuple(outputs) if isinstance(outputs, (list, tuple)) else (outputs,)


def _value(argument: Any) -> Any:
    return map_arg(argument, lambda n: n.meta.get("val"))
