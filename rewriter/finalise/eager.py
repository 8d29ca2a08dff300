"""Finalise a graph without a compiler: the FX graph runs node by node, and frees what is dead.

Left-over `k3::` ops become their references; writes to parts of inputs are made in place (reinplace.py). Results are
those of PyTorch's own kernels: the yardstick for everything else, and the choice where compile time matters more than
run time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from k3rewrite import _torch_private as private
from k3rewrite.finalise.compiled import CompiledGraph, aliasing_outputs, check_graph
from k3rewrite.finalise.decompose import decompose
from k3rewrite.finalise.overlap import OverlapCheck
from k3rewrite.finalise.prologue import hoist
from k3rewrite.finalise.reinplace import reinplace
from k3rewrite.graph.purity import eliminate_dead_code
from k3rewrite.ops.vocabulary import Op


def finalise_eager(
    module: GraphModule,
    example_inputs: Sequence[Any],
    static_input_idxs: Sequence[int] = (),
    *,
    ops: Mapping[torch._ops.OpOverload, Op] | None = None,
) -> CompiledGraph:
    """A callable that runs `module`, a functional ATen graph, which it takes over and changes.

    Args:
        module: graph of ATen ops and chosen kernels; input writes are trailing `copy_` nodes; it returns a tuple.
        example_inputs: one for each input, real or fake.
        static_input_idxs: inputs whose address never changes.
        ops: `k3::` ops without a kernel, by target; they are expanded to their references.

    Raises:
        ContractError: the graph does not return a tuple, or an op's fake and reference disagree.
    """
    check_graph(module, example_inputs)
    prologue, _, static_input_idxs = hoist(module, example_inputs, static_input_idxs)
    check = OverlapCheck(module.graph, static_input_idxs)
    expansion = decompose(module, ops or {}, {})
    eliminate_dead_code(module.graph)
    written = reinplace(module)
    module.graph.set_codegen(private.boxed_codegen())
    module.recompile()
    return CompiledGraph(
        function=module.forward,
        check=check,
        prologue=prologue,
        apart=aliasing_outputs(module),
        expanded=expansion.records,
        in_place=written,
        guards=expansion.guards,
    )
