"""Capture a model as one functional ATen graph, apart from what is then done with it.

    captured = capture(model, args, kwargs)
    captured.module     GraphModule of ATen ops; meta["val"] are fake tensors; input writes are trailing copy_ nodes
    captured.inputs     what the graph is called with

A capture can be rewritten many times (bisection, ablation, comparison of pipelines): `captured.fresh()` gives a copy
that a pipeline may change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from k3rewrite import _torch_private as private
from k3rewrite.capture import dynamo
from k3rewrite.capture.constants import note_constants
from k3rewrite.errors import CaptureError, K3RewriteError
from k3rewrite.graph.weights import note_weights

AtenCompiler = Callable[["Captured"], Callable[..., Any]]


@dataclass(frozen=True)
class Captured:
    """A functional ATen graph with what is known about its inputs.

    `static_inputs` are the positions of inputs whose address never changes (parameters, buffers, marked states).
    """

    module: GraphModule
    inputs: tuple[Any, ...]
    static_inputs: tuple[int, ...]

    def fresh(self) -> Captured:
        """A copy whose graph may be changed; fake values and weights are shared."""
        graph = torch.fx.Graph()
        value_map: dict[torch.fx.Node, torch.fx.Node] = {}
        result = graph.graph_copy(self.module.graph, value_map)
        output = graph.output(result)
        output.meta = copy.copy(self.module.graph.output_node().meta)
        for old, new in value_map.items():
            new.meta = copy.copy(old.meta)
        return Captured(GraphModule(self.module, graph), self.inputs, self.static_inputs)


def lower(module: GraphModule, inputs: Sequence[Any], compiler: AtenCompiler) -> Callable[..., Any]:
    """Functionalise a Dynamo graph and hand the ATen graph to `compiler`, whose result becomes the compiled function.

    Raises CaptureError when the graph needs gradients: this project compiles for inference.
    """

    def receive(aten: GraphModule, aten_inputs: Sequence[Any]) -> Callable[..., Any]:
        static = private.static_input_indices()
        note_constants(aten.graph, inputs, static)
        note_weights(aten.graph, inputs, static)
        return compiler(Captured(aten, tuple(aten_inputs), static))

    def refuse(aten: GraphModule, aten_inputs: Sequence[Any]) -> Callable[..., Any]:
        raise CaptureError(
            "the model is compiled with gradients enabled",
            remedy="call it under torch.no_grad() or torch.inference_mode()",
        )

    return private.aot_module_simplified(module, inputs, receive, refuse)


def capture(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: bool = False,
    reset: bool = False,
) -> Captured:
    """Trace `model(*args, **kwargs)` as one graph. Nothing is executed but the tracing.

    `reset` makes Dynamo forget all that it has compiled in this process first. It is needed where one model is captured
    for several ranks in one process; without it, what the caller has compiled stays compiled.

    Raises CaptureError with the user's source line if the model cannot be captured whole.
    """
    received: list[Captured] = []

    def compiler(captured: Captured) -> Callable[..., Any]:
        received.append(captured)
        raise _Received("the graph is there")

    def backend(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return lower(module, inputs, compiler)

    if reset:
        dynamo.reset()
    run_captured(model, backend, args, kwargs or {}, dynamic=dynamic, stop=_Received)
    if not received:
        raise CaptureError("the model computes nothing on tensors", remedy="compile a callable that uses its inputs")
    return received[0]


def _with_its_hooks(model: Callable[..., Any]) -> Callable[..., Any]:
    """What is to be compiled: a module with hooks as a call of it, as Dynamo gives hooks graphs of their own."""
    if not isinstance(model, torch.nn.Module) or not (model._forward_hooks or model._forward_pre_hooks):
        return model

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return call


class _Received(K3RewriteError):
    """Ends a trace once the graph is there."""


def run_captured(
    model: Callable[..., Any],
    backend: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    dynamic: bool = False,
    stop: type[BaseException] | None = None,
) -> Any:
    """Call the model compiled whole with `backend`; errors of tracing become CaptureError, `stop` ends quietly."""
    compiled = torch.compile(_with_its_hooks(model), backend=backend, fullgraph=True, dynamic=dynamic)
    try:
        with torch.no_grad(), dynamo.quiet_shape_functions():
            return compiled(*args, **kwargs)
    except dynamo.DYNAMO_ERRORS as error:
        inner = dynamo.inner_exception(error)
        if stop is not None and isinstance(inner, stop):
            return None
        if not isinstance(inner, dynamo.DYNAMO_ERRORS):
            raise inner from error  # our own error, or a defect of ours: not something about the user's line
        raise dynamo.capture_error(error) from error
    except K3RewriteError as error:
        if stop is not None and isinstance(error, stop):
            return None
        raise
