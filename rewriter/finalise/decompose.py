"""Expand ops in place: what Inductor wants to see expanded, and `k3::` ops for which no kernel was chosen.

    y = k3::rms_norm(x, w, 1e-6)     ->     pow, mean, add, rsqrt, mul, ... (the op's reference, traced)

A model repeats its layers, so each distinct call is traced once, on fresh fake tensors, and copies of that trace are
spliced in: 93 layers of Kimi K3 take seconds, tracing the whole graph again takes half a minute. Two calls are the
same if target, metadata of the tensors, the pattern in which nodes repeat among the arguments, the other arguments
with their types (1 is not 1.0) and the expressions of symbolic sizes are the same.

All calls are traced before the first one is replaced: a failure leaves the graph as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from k3rewrite import _torch_private as private
from k3rewrite.errors import ContractError
from k3rewrite.finalise import splice
from k3rewrite.graph import effects
from k3rewrite.graph.provenance import source_line
from k3rewrite.graph.shapes import metadata_difference
from k3rewrite.ops.binding import REASON_KEY
from k3rewrite.ops.vocabulary import Op
from k3rewrite.report.schema import Decomposed

Table = Mapping[Any, Callable[..., Any]]


@dataclass
class Expansion:
    """What `decompose` did: a record for each `k3::` op, how many bodies were traced, and the guards that this added
    (none, if all bodies are well written)."""

    records: list[Decomposed] = field(default_factory=list)
    traces: int = 0
    guards: list[str] = field(default_factory=list)


def decompose(module: GraphModule, ops: Mapping[torch._ops.OpOverload, Op], table: Table) -> Expansion:
    """Expand every call of an op of `ops` (to its reference) and of `table` (by its function) in `module`.

    Every result keeps dtype, shape, device and stride. New nodes take over where the old one came from; a result
    never shares storage with an argument unless the old op's schema says so.

    Raises ContractError if a body gives another dtype, shape or number of results than the op's fake says, or expands
    to itself.
    """
    graph = module.graph
    mode = private.graph_fake_mode(graph)
    expander = _Expander(mode, ops, table)
    if mode is not None:
        splice.give_constants_values(module, mode)
    calls = [(node, *planned) for node in graph.nodes if (planned := expander.body_of(node)) is not None]
    replaced: dict[Node, Any] = {}
    for node, body, arguments in calls:
        if node.target in ops:
            expander.result.records.append(_record(node, ops[node.target]))
        replaced |= splice.splice(module, node, body, [replaced.get(n, n) for n in arguments])
    if calls:
        graph.lint()
        module.recompile()
    return expander.result


def _record(node: Node, op: Op) -> Decomposed:
    reason = node.meta.get(REASON_KEY) or "no kernel was chosen for it"
    return Decomposed(op=op.name, site=node.name, source=source_line(node), reason=reason)


class _Expander:
    def __init__(self, mode: Any, ops: Mapping[torch._ops.OpOverload, Op], table: Table) -> None:
        self.mode = mode
        self.ops, self.table = ops, table
        self.cache: dict[Any, splice.Body | None] = {}
        self.result = Expansion()
        self.active: list[Any] = []

    def body_of(self, node: Node) -> tuple[splice.Body, tuple[Node, ...]] | None:
        """The traced body of a call and its argument nodes, or None if it is not to be (or cannot be) expanded."""
        if node.op != "call_function" or (node.target not in self.ops and node.target not in self.table):
            return None
        if self.mode is None:
            raise ContractError(
                "the graph carries no fake tensors", place=node.name, remedy="capture it with k3rewrite.capture"
            )
        arguments = _Arguments.of(node)
        if arguments.key not in self.cache:
            self.cache[arguments.key] = self._trace(node, arguments)
        body = self.cache[arguments.key]
        if body is not None and body.single_use:
            del self.cache[arguments.key]
        return (body, arguments.nodes) if body is not None else None

    def _trace(self, node: Node, arguments: _Arguments) -> splice.Body | None:
        if node.target in self.active:
            raise ContractError(
                f"the reference of {node.target} calls itself",
                place=source_line(node),
                remedy="write the reference in plain PyTorch, or call other k3:: ops from it",
            )
        target: Any = node.target
        function = self.ops[target].reference if target in self.ops else target
        guards = private.guard_count(self.mode)
        call = arguments.caller(function)
        traced = private.trace(call, arguments.fakes(), self.table, self.mode)
        if any(effects.writes(n) for n in traced.graph.nodes):
            traced = private.trace(call, arguments.fakes(), self.table, self.mode, functionalise=True)
        self.result.traces += 1
        self.result.guards += [f"{node.target}: {g}" for g in private.guard_texts(self.mode, guards)]
        if _is_itself(traced.graph, node.target, arguments):
            return None
        self.active.append(node.target)
        self._expand_inside(traced)
        self.active.pop()
        body = splice.make_body(traced, node)
        _check(node, body)
        return body

    def _expand_inside(self, traced: GraphModule) -> None:
        """A reference may call other ops of the vocabulary: expand these in the trace, with roundings between them."""
        for inner in list(traced.graph.nodes):
            if inner.target in self.ops and (planned := self.body_of(inner)) is not None:
                splice.splice(traced, inner, *planned)


def _is_itself(graph: Graph, target: Any, arguments: _Arguments) -> bool:
    """A decomposition may decline; the trace then holds the call itself, with the same arguments."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    if len(calls) != 1 or calls[0].target is not target:
        return False
    return _freeze(_Arguments.of(calls[0]).form) == _freeze(arguments.form)


def _check(node: Node, body: splice.Body) -> None:
    """`ContractError` if the body's results differ from what the graph says in more than their strides."""
    expected = node.meta.get("val")
    expected = list(expected) if isinstance(expected, (tuple, list)) else [expected]
    if len(expected) != len(body.results):
        found = f"{len(body.results)} results instead of {len(expected)}"
        raise ContractError(
            f"the body of {node.target} gives {found}",
            place=source_line(node),
            remedy="make the op's schema, fake and reference agree",
        )
    for index, (old, new) in enumerate(zip(expected, body.result_values(), strict=True)):
        difference = metadata_difference(old, new) if old is not None else None
        if difference is not None and not difference.startswith("stride"):
            raise ContractError(
                f"the body of {node.target} gives result {index} with {difference}",
                place=source_line(node),
                remedy="make the op's fake and its reference agree",
            )


# --------------------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class _Arguments:
    """A call's arguments, apart from which nodes they are: `form` holds positions of `nodes` in place of nodes."""

    nodes: tuple[Node, ...]
    form: Any
    key: Any

    @staticmethod
    def of(node: Node) -> _Arguments:
        index: dict[Node, int] = {}
        form = _slotted((node.args, node.kwargs), index)
        values = [n.meta.get("val") for n in index]
        key = (node.target, _freeze(form), tuple(_describe(v) for v in values), _layout(node.meta.get("val")))
        return _Arguments(tuple(index), form, key)

    def fakes(self) -> list[Any]:
        """A fresh fake tensor for each tensor node; sizes are what they are."""
        return [splice.fresh_value(n.meta.get("val")) for n in self.nodes]

    def caller(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of `nodes`' values alone."""

        def call(*values: Any) -> Any:
            args, kwargs = _fill(self.form, values)
            return function(*args, **kwargs)

        return call


@dataclass(frozen=True)
class _Slot:
    position: int


def _slotted(value: Any, index: dict[Node, int]) -> Any:
    """`value` with the position in `index` in place of each node; new nodes are added to `index`."""
    if isinstance(value, Node):
        return _Slot(index.setdefault(value, len(index)))
    if isinstance(value, (tuple, list)):
        return type(value)([_slotted(item, index) for item in value])
    if isinstance(value, dict):
        return {name: _slotted(item, index) for name, item in value.items()}
    return value


def _fill(form: Any, values: Sequence[Any]) -> Any:
    if isinstance(form, _Slot):
        return values[form.position]
    if isinstance(form, (tuple, list)):
        return type(form)([_fill(item, values) for item in form])
    if isinstance(form, dict):
        return {name: _fill(item, values) for name, item in form.items()}
    return form


def _freeze(value: Any) -> Any:
    """A hashable form in which 1, 1.0 and True differ."""
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(_freeze, value))
    if isinstance(value, dict):
        return ("dict", *((name, _freeze(item)) for name, item in value.items()))
    if isinstance(value, slice):
        return ("slice", _freeze(value.start), _freeze(value.stop), _freeze(value.step))
    if isinstance(value, float):
        return ("float", repr(value))
    return (type(value).__name__, value)


def _describe(value: Any) -> Any:
    """Hashable description of what a node stands for."""
    if isinstance(value, torch.Tensor):
        return _layout(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_describe, value))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(value).__name__, private.symbolic_text(value))
    return _freeze(value)


def _layout(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_layout, value))
    if not isinstance(value, torch.Tensor):
        return None
    sizes = tuple(s if isinstance(s, int) else private.symbolic_text(s) for s in (*value.shape, *value.stride()))
    return (value.dtype, value.device, len(value.shape), sizes)
