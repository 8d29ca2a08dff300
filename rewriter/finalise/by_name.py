"""Finalise a graph as the pipeline says: `finalise: inductor` or `finalise: eager`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from k3rewrite.finalise.compiled import CompiledGraph
from k3rewrite.finalise.eager import finalise_eager
from k3rewrite.finalise.inductor import finalise_inductor
from k3rewrite.ops.vocabulary import Op
from k3rewrite.report.schema import Decomposed


def finalise(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    ops: Mapping[torch._ops.OpOverload, Op],
    how: Literal["inductor", "eager"] = "inductor",
    static_inputs: Sequence[int] = (),
    keep_roundings: bool = True,
    cuda_graphs: bool = False,
) -> tuple[CompiledGraph, list[Decomposed]]:
    """The callable of a rewritten graph, which is taken over, and the ops that had to be expanded to their references.

    `ops` are the `k3::` ops by target; arguments and errors as in `finalise_inductor` and `finalise_eager`.
    """
    if how == "eager":
        compiled = finalise_eager(module, example_inputs, static_inputs, ops=ops)
    else:
        compiled = finalise_inductor(
            module, example_inputs, static_inputs, ops=ops, keep_roundings=keep_roundings, cuda_graphs=cuda_graphs
        )
    return compiled, compiled.expanded
