"""Put copies of a traced body into a graph in place of a call.

A body is a small functional graph whose inputs are the call's argument nodes. Copies get values (fake tensors) of
their own, the call's place in the model, and fresh names for constants and sub-graphs, so that nothing that the graph
holds already is overwritten.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from k3rewrite import _torch_private as private
from k3rewrite.graph import effects
from k3rewrite.graph.provenance import inherit_meta
from k3rewrite.graph.purity import eliminate_dead_code
from k3rewrite.graph.shapes import metadata_difference

PASS_NAME = "decompose"

_KEPT_META = (private.ROUNDING_MARK, "unbacked_bindings")
_aten = torch.ops.aten


@dataclass(frozen=True)
class Body:
    """A traced call. `results[i]` is the node of `module` that gives result i (or a plain number).

    `aliased` are results that share storage with an input, or are a constant, although the call's result may not: a
    copy of each is made. `single_use` bodies name sizes that every call must name anew.
    """

    module: GraphModule
    inputs: tuple[Node, ...]
    results: tuple[Any, ...]
    aliased: frozenset[int]
    single_use: bool

    def result_values(self) -> list[Any]:
        return [r.meta.get("val") if isinstance(r, Node) else r for r in self.results]


def make_body(traced: GraphModule, call: Node) -> Body:
    """A body out of a trace of `call`."""
    eliminate_dead_code(traced.graph)
    output = traced.graph.output_node().args[0]
    results = tuple(output) if isinstance(output, (tuple, list)) else (output,)
    allowed = effects.result_aliases(call)
    shared = [_shares_with_outside(r) for r in results]
    declared = [bool(allowed[min(i, len(allowed) - 1)]) if allowed else False for i in range(len(results))]
    return Body(
        module=traced,
        inputs=tuple(n for n in traced.graph.nodes if n.op == "placeholder"),
        results=results,
        aliased=frozenset(i for i, (s, d) in enumerate(zip(shared, declared, strict=True)) if s and not d),
        single_use=any(n.meta.get("unbacked_bindings") for n in traced.graph.nodes),
    )


def _shares_with_outside(node: Any) -> bool:
    """True if a value of a body is, or is a view of, one of its inputs or constants."""
    pending, seen = [node], set()
    while pending:
        current = pending.pop()
        if not isinstance(current, Node) or current in seen:
            continue
        seen.add(current)
        if current.op in ("placeholder", "get_attr"):
            if isinstance(current.meta.get("val"), (torch.Tensor, type(None))):
                return True
            continue
        pending += effects.aliases_of(current)
    return False


def splice(module: GraphModule, call: Node, body: Body, arguments: Sequence[Any]) -> dict[Node, Any]:
    """Replace `call` by a copy of `body` on `arguments`, directly before it, and erase it.

    Returns what stands for each erased node (the call, and the items taken from its results) from now on.
    """
    graph = module.graph
    copies: dict[Node, Any] = dict(zip(body.inputs, arguments, strict=True))
    with graph.inserting_before(call):
        for node in body.module.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copy = _copy_node(module, body.module, node, copies)
            inherit_meta(copy, [call], PASS_NAME)
            copies[node] = copy
        results = [_result(call, body, i, copies) for i in range(len(body.results))]
    replaced = _redirect(call, results)
    graph.erase_node(call)
    return replaced


def _copy_node(module: GraphModule, source: GraphModule, node: Node, copies: dict[Node, Any]) -> Node:
    graph = module.graph
    if node.op == "get_attr":
        assert isinstance(node.target, str)
        copy = graph.get_attr(attach(module, node.target, operator.attrgetter(node.target)(source)))
    else:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: copies[n])
        copy = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
    if "val" in node.meta:
        copy.meta["val"] = fresh_value(node.meta["val"])
    for key in _KEPT_META:
        if key in node.meta:
            copy.meta[key] = node.meta[key]
    add_eager_input_values(copy)
    return copy


def fresh_value(value: Any) -> Any:
    """The same metadata in fake tensors of their own."""
    if isinstance(value, private.FakeTensor):
        return private.fresh_fake(value.fake_mode, value)
    if isinstance(value, (tuple, list)):
        return type(value)(fresh_value(item) for item in value)
    return value


def add_eager_input_values(node: Node) -> None:
    """Note the argument values of an op that insists on its inputs' strides, as tracing does."""
    if private.needs_eager_input_values(node.target):
        values = map_arg((node.args, node.kwargs), lambda n: fresh_value(n.meta.get("val")))
        node.meta["eager_input_vals"] = values


def attach(module: GraphModule, name: str, value: Any) -> str:
    """Make `value` an attribute of `module` under `name` or a free name like it; one value is attached once."""
    base = name.replace(".", "_")
    candidate, number = base, 0
    while hasattr(module, candidate):
        if getattr(module, candidate) is value:
            return candidate
        number += 1
        candidate = f"{base}_{number}"
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        module.register_buffer(candidate, value, persistent=False)
    else:
        setattr(module, candidate, value)
    return candidate


def _result(call: Node, body: Body, index: int, copies: dict[Node, Any]) -> Any:
    """Node (or number) that stands for a result, laid out and owned as the call's was."""
    result = body.results[index]
    if not isinstance(result, Node):
        return result
    node = copies[result]
    expected = call.meta.get("val")
    if isinstance(expected, (tuple, list)):
        expected = expected[index]
    difference = metadata_difference(expected, node.meta.get("val")) if isinstance(expected, torch.Tensor) else None
    if difference is None and index not in body.aliased:
        return node
    made = _copy_laid_out(call.graph, node, expected if isinstance(expected, torch.Tensor) else node.meta["val"])
    for new in made:
        inherit_meta(new, [call], PASS_NAME)
    return made[-1]


def _copy_laid_out(graph: Any, node: Node, like: torch.Tensor) -> list[Node]:
    """Nodes that copy `node` into memory laid out as `like`."""
    device = {"dtype": like.dtype, "device": like.device}
    buffer = graph.call_function(_aten.empty_strided.default, (list(like.shape), list(like.stride())), device)
    buffer.meta["val"] = fresh_value(like)
    copy = graph.call_function(_aten.copy.default, (buffer, node))
    copy.meta["val"] = fresh_value(like)
    return [buffer, copy]


def _redirect(call: Node, results: Sequence[Any]) -> dict[Node, Any]:
    """Point the users of a call, or of the items taken from it, to the results; what stands for each old node."""
    several = isinstance(call.meta.get("val"), (tuple, list))
    replaced: dict[Node, Any] = {call: list(results) if several else results[0]}
    if several:
        for user in [u for u in call.users if u.target is operator.getitem]:
            index = user.args[1]
            assert isinstance(index, int)
            replaced[user] = results[index]
            _replace(user, results[index])
            user.graph.erase_node(user)
    _replace(call, replaced[call])
    return replaced


def _replace(old: Node, new: Any) -> None:
    """Let every user of `old` take `new`: a node, a number, or a list of such."""
    if isinstance(new, Node):
        old.replace_all_uses_with(new)
        return
    for user in list(old.users):
        user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda n: new if n is old else n)


def give_constants_values(module: GraphModule, mode: private.FakeTensorMode) -> None:
    """Give every tensor constant of a graph the fake value that tracing may have left out."""
    for node in module.graph.nodes:
        if node.op == "get_attr" and "val" not in node.meta:
            assert isinstance(node.target, str)
            value = operator.attrgetter(node.target)(module)
            if isinstance(value, torch.Tensor):
                node.meta["val"] = mode.from_tensor(value, static_shapes=True)
