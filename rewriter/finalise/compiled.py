"""What a finalised graph is: a boxed callable with a record of how it came about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from k3rewrite.errors import ContractError
from k3rewrite.finalise.hazards import Hazard
from k3rewrite.finalise.overlap import OverlapCheck
from k3rewrite.finalise.prologue import Prologue
from k3rewrite.finalise.reuse_storage import ReuseRecord
from k3rewrite.graph.storage import StorageMap
from k3rewrite.report.schema import Decomposed


@dataclass
class CompiledGraph:
    """A finalised graph. It takes one list of inputs and empties it, as AOTAutograd's compiler hook expects.

    `expanded` are `k3::` ops that ran into no kernel, `in_place` what was written in place, `hazards` reads that were
    pinned before a write, `guards` guards that were added while finalising (none is right), `notes` what was asked for
    and could not be done.
    """

    function: Callable[[list[Any]], Any]
    check: OverlapCheck
    prologue: Prologue = field(default_factory=Prologue)
    """makes the further inputs that depend on weights alone"""
    apart: tuple[int, ...] = ()
    """outputs that must not be the same object as an earlier one"""
    expanded: list[Decomposed] = field(default_factory=list)
    in_place: list[ReuseRecord] = field(default_factory=list)
    hazards: list[Hazard] = field(default_factory=list)
    guards: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    _boxed_call = True

    def __call__(self, inputs: list[Any]) -> Any:
        if self.prologue.packs:
            self.prologue(inputs)
        if self.check.needed:
            self.check(inputs)
        outputs = self.function(inputs)
        if self.apart:
            outputs = list(outputs)
            for index in self.apart:
                if any(outputs[index] is other for other in outputs[:index]):
                    outputs[index] = torch.ops.aten.alias.default(outputs[index])
        return outputs


def check_graph(module: GraphModule, example_inputs: Sequence[Any]) -> Node:
    """The output node of a graph that can be finalised; ContractError otherwise."""
    output = module.graph.output_node()
    if not isinstance(output.args[0], (tuple, list)):
        raise ContractError("the graph returns a single value, not a tuple", place="output", remedy="return a tuple")
    inputs = sum(node.op == "placeholder" for node in module.graph.nodes)
    if inputs != len(example_inputs):
        raise ContractError(
            f"the graph has {inputs} inputs and {len(example_inputs)} examples",
            place="example_inputs",
            remedy="give one example for each placeholder, in their order",
        )
    return output


def aliasing_outputs(module: GraphModule) -> tuple[int, ...]:
    """Outputs that share storage with an earlier one: they must stay different tensors.

    Inductor returns one object for both if the view between them does nothing, and a pass may have made one node of
    two; resizing one resizes both then. (What a model returns twice itself is one output of a captured graph.)
    """
    storage = StorageMap(module.graph)
    values = module.graph.output_node().args[0]
    assert isinstance(values, (tuple, list))
    found = []
    for index, value in enumerate(values):
        earlier = [v for v in values[:index] if isinstance(v, Node)]
        if isinstance(value, Node) and any(storage.same_storage(value, other) for other in earlier):
            found.append(index)
    return tuple(found)
