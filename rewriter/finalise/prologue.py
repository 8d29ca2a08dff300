"""What depends on weights alone is no work of a step: it leaves the graph, and is done before the first one.

    stack = k3::pack_rows([w_q, w_k, w_v], ...)            an input of the graph more
    y = mm(x, t(stack))                             ->     y = mm(x, t(stack))
                                                           and once: p.data = stack[a:b] for each weight

The weights move into the stack, so that it is no second copy of them and what is written to a weight later is in the
stack at once, by whatever way it was written. Before each step the addresses of the weights are looked at: a weight
that was given other memory (`p.data = ...`, a checkpoint loaded with `assign=True`, another layer that runs the same
compiled code) is found, and a new stack is made. Memory of a stack is never written here, only handed to the weights:
a stack that was left belongs to those who live in it, and nothing here keeps it alive.

Where a weight cannot move (another tensor lives in its memory since the graph was made) the stack is made anew in that
step: slow, right, and logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from k3rewrite import _torch_private as private
from k3rewrite.graph.arguments import bound_arguments, every_node
from k3rewrite.graph.effects import writes
from k3rewrite.graph.weights import Weight, cannot_move
from k3rewrite.ops.vocabulary import Op, op_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Weight:
    """Stands for weight `index` among the arguments of a call: a node would keep its whole graph alive."""

    index: int


@dataclass
class Pack:
    """One call of a `weight_only` op that was taken out of a graph."""

    op: Op
    arguments: tuple[Any, ...]
    """of the call, with a `_Weight` for each weight"""
    positions: tuple[int, ...]
    """of the weights among the inputs of the graph"""
    starts: list[int]
    """byte of the result at which each of them lies; the first is 0"""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int
    """bytes of the result"""
    warned: bool = False

    def value(self, inputs: Sequence[Any]) -> torch.Tensor:
        """The result for these inputs: where the weights lie, after the first time."""
        weights = [inputs[position] for position in self.positions]
        first = weights[0]
        if isinstance(first, private.FakeTensor):
            return self._call(weights)
        base = first.data_ptr()
        if [weight.data_ptr() - base for weight in weights] == self.starts:
            # Two storages may be neighbours by chance. One that holds all of the stack is all of it.
            offset = first.storage_offset()
            if first.untyped_storage().nbytes() >= offset * first.element_size() + self.size:
                return first.as_strided(self.shape, self.strides, offset)
        return self._moved(weights)

    def _moved(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """A new stack, in which the weights live from now on."""
        # A tensor that is made in inference mode would stay one, and with it the parameter that lives there.
        with torch.inference_mode(False), torch.no_grad():
            stack = self._call(weights)
            if reasons := cannot_move([Weight.of(weight) for weight in weights]):
                if not self.warned:
                    _log.warning(
                        "%s is made anew in every step, for a weight cannot live in it: %s",
                        self.op.qualified_name, next(iter(reasons.values())),
                    )  # fmt: skip
                self.warned = True
                return stack
            for weight, part in zip(weights, self._parts(stack, weights), strict=True):
                weight.data = part
        return stack

    def _call(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = self.op.overload(*self._given(weights))
        return result

    def _parts(self, stack: torch.Tensor, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        assert self.op.parts is not None
        return self.op.parts(stack, *self._given(weights))

    def _given(self, weights: Sequence[torch.Tensor]) -> Any:
        return map_aggregate(self.arguments, lambda a: weights[a.index] if isinstance(a, _Weight) else a)


@dataclass
class Prologue:
    """Everything that was taken out of a graph. Called with the inputs of a step, it appends the values to them."""

    packs: list[Pack] = field(default_factory=list)

    def __call__(self, inputs: list[Any]) -> None:
        inputs += [pack.value(inputs) for pack in self.packs]


def hoist(
    module: GraphModule, example_inputs: Sequence[Any], static_inputs: Sequence[int]
) -> tuple[Prologue, list[Any], list[int]]:
    """Take calls of `weight_only` ops out of a graph; each becomes a further input, with a static address.

    Taken out are those whose arguments are static inputs that the graph does not write, and whose op says where in the
    result they can live. Others stay and run in every step. Returns the prologue, and the examples and positions of
    static inputs of the graph as it is then.
    """
    graph = module.graph
    prologue, examples, static = Prologue(), list(example_inputs), list(static_inputs)
    placeholders = list(graph.find_nodes(op="placeholder"))
    positions = {node: position for position, node in enumerate(placeholders)}
    written = {argument for node in graph.nodes for argument in writes(node)}
    held = {placeholders[i] for i in static if i < len(placeholders)} - written
    for node in [n for n in graph.nodes if _is_weight_only(n)]:
        weights = tuple(every_node(node.args))
        if not node.kwargs and held.issuperset(weights) and (pack := _pack(node, weights, positions)) is not None:
            prologue.packs.append(pack)
            placeholder = _add_input(graph, placeholders[-1], node)
            placeholders.append(placeholder)
            examples.append(placeholder.meta["val"])
            static.append(len(examples) - 1)
            node.replace_all_uses_with(placeholder)
            graph.erase_node(node)
    if prologue.packs:
        module.recompile()
    return prologue, examples, static


def _is_weight_only(node: Node) -> bool:
    word = op_of(node.target)
    return word is not None and "weight_only" in word.traits and word.parts is not None


def _pack(node: Node, weights: tuple[Node, ...], positions: dict[Node, int]) -> Pack | None:
    """The call outside of its graph; None if its result is not in one piece, or begins with none of the weights."""
    op, like = op_of(node.target), node.meta["val"]
    assert op is not None and op.parts is not None
    shape, strides = tuple(like.shape), tuple(like.stride())
    if not all(isinstance(n, int) for n in (*shape, *strides)) or len(set(weights)) != len(weights):
        return None
    arguments = tuple(bound_arguments(node).values())
    parts = op.parts(like, *map_arg(arguments, lambda n: n.meta["val"]))
    starts = [int(part.storage_offset()) * part.element_size() for part in parts]
    if not like.is_contiguous() or len(starts) != len(weights) or starts[0] != 0:
        return None
    order: dict[Node, Any] = {weight: _Weight(index) for index, weight in enumerate(weights)}
    return Pack(
        op, map_arg(arguments, order.__getitem__), tuple(positions[w] for w in weights), starts, shape, strides,
        like.numel() * like.element_size(),
    )  # fmt: skip


def _add_input(graph: Graph, last: Node, made: Node) -> Node:
    with graph.inserting_after(last):
        placeholder = graph.placeholder(f"{made.name}_once")
    placeholder.meta["val"] = private.fresh_fake(made.meta["val"].fake_mode, made.meta["val"])
    return placeholder
