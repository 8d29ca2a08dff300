"""Finalise a graph with Inductor: what no kernel of ours took is compiled by `compile_fx_inner`.

    take out what runs once -> expand ops -> pin reads before writes -> mark roundings, outputs and strides
    -> compile_fx_inner

Roundings: Inductor drops the cast down and up between two low-precision operators. By default they are kept, so that a
compiled model rounds where the eager one does; switching that off changes rounding and is a policy of the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from k3rewrite import _torch_private as private
from k3rewrite.errors import UnsupportedError
from k3rewrite.finalise.compiled import CompiledGraph, aliasing_outputs, check_graph
from k3rewrite.finalise.decompose import decompose
from k3rewrite.finalise.hazards import keep_reads_before_writes
from k3rewrite.finalise.overlap import OverlapCheck
from k3rewrite.finalise.prologue import hoist
from k3rewrite.finalise.splice import add_eager_input_values
from k3rewrite.graph import effects
from k3rewrite.graph.purity import eliminate_dead_code
from k3rewrite.ops.vocabulary import KERNEL_NAMESPACE, NAMESPACE, Op

LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})


def finalise_inductor(
    module: GraphModule,
    example_inputs: Sequence[Any],
    static_input_idxs: Sequence[int] = (),
    *,
    ops: Mapping[torch._ops.OpOverload, Op] | None = None,
    keep_roundings: bool = True,
    cuda_graphs: bool = False,
) -> CompiledGraph:
    """Compile `module`, a functional ATen graph, which it takes over and changes.

    Args:
        module: graph of ATen ops and chosen kernels; input writes are trailing `copy_` nodes; it returns a tuple.
        example_inputs: one for each input, real or fake.
        static_input_idxs: inputs whose address never changes.
        ops: `k3::` ops without a kernel, by target; they are expanded to their references.
        keep_roundings: round between low-precision operators as eager does.
        cuda_graphs: replay the compiled graph as one CUDA graph.

    Raises:
        ContractError: the graph does not return a tuple, or an op's fake and reference disagree.
        UnsupportedError: CUDA graphs are asked for and no input is on a CUDA device, or Inductor itself fails.
    """
    output = check_graph(module, example_inputs)
    if cuda_graphs and not _on_cuda(example_inputs):
        raise UnsupportedError(
            "no input of the graph is on a CUDA device", place="cuda_graphs", remedy="leave CUDA graphs off"
        )
    prologue, example_inputs, static_input_idxs = hoist(module, example_inputs, static_input_idxs)
    check = OverlapCheck(module.graph, static_input_idxs)
    mode = private.graph_fake_mode(module.graph) or private.detect_fake_mode(example_inputs)
    if keep_roundings:
        mark_roundings(module.graph)
    with private.emulated_rounding(keep_roundings), private.eager_random():
        expansion = decompose(module, ops or {}, private.inductor_decompositions())
        eliminate_dead_code(module.graph)
        hazards = keep_reads_before_writes(module)
        _prepare_calls(module.graph)
        values = output.args[0]
        assert isinstance(values, (tuple, list))
        output.meta["user_visible_output_idxs"] = [i for i, value in enumerate(values) if isinstance(value, Node)]
        apart = aliasing_outputs(module)
        try:
            compiled = private.inductor_compile(
                module, example_inputs, static_input_idxs=static_input_idxs, cuda_graphs=cuda_graphs, mode=mode
            )
        except private.inductor_error() as error:
            raise UnsupportedError(
                f"Inductor cannot compile what no kernel took: {_gist(str(error))}",
                place="finalise: inductor",
                remedy="set 'finalise: eager'; the whole message is in the cause of this error",
            ) from error
    reason = getattr(compiled, "disabled_cudagraphs_reason", None) if cuda_graphs else None
    return CompiledGraph(
        function=compiled,
        check=check,
        prologue=prologue,
        apart=apart,
        expanded=expansion.records,
        hazards=hazards,
        guards=expansion.guards,
        notes=[f"no CUDA graph: {reason}"] if reason else [],
    )


def _gist(message: str) -> str:
    """The first line of a message that may hold a whole compiler log, and the first error in that log."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    error = next((line[line.index("error:") :] for line in lines[1:] if "error:" in line), "")
    return " ".join(part for part in (*lines[:1], error) if part) or "no reason given"


def mark_roundings(graph: Graph) -> None:
    """Mark every operator of the model that reads or gives a low-precision tensor: eager rounds there.

    Tracing marks its own nodes only if it was told to, and nodes that a pass made have no mark. To be called before
    operators are expanded: inside of one, eager does not round.
    """
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or effects.is_view(node):
            continue
        if _is_low_precision(node.meta.get("val")) or any(
            _is_low_precision(argument.meta.get("val")) for argument in node.all_input_nodes
        ):
            node.meta[private.ROUNDING_MARK] = True


def _is_low_precision(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in LOW_PRECISION


def _on_cuda(values: Sequence[Any]) -> bool:
    return any(isinstance(v, torch.Tensor) and v.device.type == "cuda" for v in values)


def _prepare_calls(graph: Graph) -> None:
    """Nodes that passes made: note the strides that an op insists on, and let an op of ours write after all readers."""
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if "eager_input_vals" not in node.meta:
            add_eager_input_values(node)
        if node.target.namespace in (NAMESPACE, KERNEL_NAMESPACE) and effects.writes(node):
            private.realise_readers_before(node.target)
