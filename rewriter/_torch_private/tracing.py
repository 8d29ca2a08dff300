"""Tracing: dispatch modes, `make_fx`, and AOTAutograd around a compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import GraphModule, Node

from k3rewrite._torch_private.fake import FakeTensorMode


def no_modes() -> AbstractContextManager[Any]:
    """Outside of every dispatch mode (fake, proxy, functional), whatever the caller is in. (2.1+)"""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def leaves(structure: Any) -> list[Any]:
    """What nested lists, tuples, mappings and registered containers hold in the end. (2.1+)"""
    from torch.utils._pytree import tree_leaves

    return list(tree_leaves(structure))


def trace(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    decompositions: Mapping[Any, Callable[..., Any]],
    mode: FakeTensorMode,
    functionalise: bool = False,
) -> GraphModule:
    """ATen graph of `function` on fake `arguments` (tensors and SymInts), as AOTAutograd traces an inference graph.

    Constants that the function makes stay fake-mode constants; in-place writes stay as they are unless `functionalise`
    turns them into functional ops (a write to an argument then becomes one `copy_` at the end).
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    if functionalise:
        function = torch.func.functionalize(function, remove="mutations")
    with no_modes(), mode, enable_python_dispatcher(), torch.no_grad():
        traced = make_fx(function, decomposition_table=dict(decompositions), tracing_mode="real")(*arguments)
    assert isinstance(traced, GraphModule)
    return traced


def aot_module_simplified(
    module: GraphModule,
    example_inputs: Sequence[Any],
    compiler: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
    training_compiler: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Functionalise `module` and hand the ATen graph to `compiler`; input writes stay as trailing `copy_` nodes.

    A graph of which something needs a gradient goes to `training_compiler` instead: AOTAutograd knows it when the graph
    is traced (gradients may be switched within a model). 2.11 and 2.13 differ in keyword arguments that are not used
    here.
    """
    from torch._functorch.aot_autograd import aot_module_simplified as aot

    hook: Any = compiler  # the hook's type names its parameters, and they differ between versions
    training_hook: Any = training_compiler
    return aot(
        module,
        list(example_inputs),
        fw_compiler=training_hook,
        inference_compiler=hook,
        keep_inference_input_mutations=True,
    )


def static_input_indices() -> tuple[int, ...]:
    """Inputs with a fixed address (parameters, buffers, marked tensors), known while AOTAutograd calls its compiler."""
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return ()
    return tuple(context.fw_metadata.static_input_indices)


def mark_static_address(tensor: torch.Tensor) -> None:
    """Tell the compiler that this input has one address for good, so that a captured graph uses it where it is.

    The tensor is marked, not copied; `static_input_indices` then counts it. There is no public name for this.
    """
    torch._dynamo.mark_static_address(tensor)


def is_synthetic_base(placeholder: Node) -> bool:
    """True for an input that AOTAutograd made up to stand for several overlapping ones. (descriptors: 2.9+)"""
    return type(placeholder.meta.get("desc")).__name__ in ("SyntheticBaseAOTInput", "ViewBaseAOTInput")


def make_boxed(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """A function of one list, which it empties, as AOTAutograd calls compiled graphs."""

    def boxed(arguments: list[Any]) -> Any:
        values = tuple(arguments)
        arguments.clear()
        return function(*values)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed
