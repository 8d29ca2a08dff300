"""The one place through which private PyTorch interfaces are reached.

Each wrapper is small and typed, and says what it stands on. All of it is written against torch 2.11 to current; where
the versions differ the wrapper says how. Beside this module only `capture/dynamo.py` (Dynamo's errors and state) names
private parts of torch; the types of the dispatcher (`torch._ops.OpOverload`) are used everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node

FakeTensor = FakeTensor
FakeTensorMode = FakeTensorMode

# --------------------------------------------------------------------------------------------- fake tensors


def detect_fake_mode(values: Sequence[Any]) -> FakeTensorMode | None:
    """The fake mode of the tensors among `values`, or the one that is active. (torch._guards, 2.1+)"""
    return torch._guards.detect_fake_mode(list(values))


def graph_fake_mode(graph: torch.fx.Graph) -> FakeTensorMode | None:
    """The fake mode in which a captured graph's values live: that of the first fake `val` found."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            value = next((v for v in value if isinstance(v, FakeTensor)), None)
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def fresh_fake(mode: FakeTensorMode, like: torch.Tensor, device: torch.device | None = None) -> FakeTensor:
    """A new fake tensor with the metadata of `like` and storage of its own; nothing is run and no guard is added.

    Three times quicker than `torch.empty_strided` under the mode, which decides for the 10,000 nodes of a large graph.
    (The constructor's form FakeTensor(mode, meta tensor, device) has not changed from 2.0 to current.)
    """
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return FakeTensor(mode, meta, device or like.device)


def storage_id(value: torch.Tensor) -> int:
    """Equal for two tensors exactly if they share storage."""
    return value.untyped_storage()._cdata


def definitely_disjoint(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two views of one storage are known not to overlap; sizes must be plain integers for a `True`.

    AOTAutograd decides with the same function whether two inputs may stay apart. (torch._C._dynamo, 2.6+)
    """
    from torch._C._dynamo.guards import compute_overlapping_tensors

    numbers = [*a.shape, *a.stride(), a.storage_offset(), *b.shape, *b.stride(), b.storage_offset()]
    if not all(isinstance(n, int) for n in numbers):
        return False
    return not compute_overlapping_tensors([a, b], symbolic=False)


# --------------------------------------------------------------------------------------------- symbolic sizes


def symbolic_text(value: Any) -> str:
    """The expression of a SymInt, SymFloat or SymBool, as text; equal expressions of one ShapeEnv give equal text."""
    return str(value.node.expr)


def guard_count(mode: FakeTensorMode | None) -> int:
    """How many guards the mode's shape environment holds so far."""
    return len(mode.shape_env.guards) if mode is not None and mode.shape_env is not None else 0


def guard_texts(mode: FakeTensorMode | None, start: int = 0) -> tuple[str, ...]:
    """The guards added since there were `start` of them, as text."""
    if mode is None or mode.shape_env is None:
        return ()
    return tuple(str(guard.expr) for guard in mode.shape_env.guards[start:])


# --------------------------------------------------------------------------------------------- tracing


def no_modes() -> AbstractContextManager[Any]:
    """Outside of every dispatch mode (fake, proxy, functional), whatever the caller is in. (2.1+)"""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


@contextmanager
def emulated_rounding(enabled: bool) -> Iterator[None]:
    """Inductor's `emulate_precision_casts`: keep the casts between two low-precision operators.

    Must be active while AOTAutograd traces (it marks nodes then) and while Inductor compiles. 2.13 keeps `.to(bf16)
    .float()` with it on CPU and GPU; on 2.11 the marks exist, but its CPU code still drops the pair.
    """
    with inductor_options({"emulate_precision_casts": enabled}):
        yield


def eager_random() -> AbstractContextManager[Any]:
    """Random ops draw from torch's generator, in the order of the graph, as eager does.

    Must be active while ops are expanded (the table of `inductor_decompositions` depends on it) and while Inductor
    compiles. Inductor's own generator is given to them by the joint-graph passes only, which do not run here: without
    this, lowering `rand` is an error.
    """
    return inductor_options({"fallback_random": True})


ROUNDING_MARK = "low_precision_pointwise_barrier"
"""node.meta key by which Inductor knows that eager would have rounded here. (2.9+)"""


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


def needs_eager_input_values(target: Any) -> bool:
    """True for an op that insists on the strides its inputs had when it was captured.

    Inductor restores them from node.meta["eager_input_vals"]. (torch._library, 2.7+)
    """
    from torch._library.utils import get_layout_constraint_tag

    if not isinstance(target, torch._ops.OpOverload):
        return False
    return get_layout_constraint_tag(target) == torch._C.Tag.needs_exact_strides


def is_synthetic_base(placeholder: Node) -> bool:
    """True for an input that AOTAutograd made up to stand for several overlapping ones. (descriptors: 2.9+)"""
    return type(placeholder.meta.get("desc")).__name__ in ("SyntheticBaseAOTInput", "ViewBaseAOTInput")


def parse_schema(text: str) -> Any:
    """The schema "ns::name(Tensor x) -> Tensor", as the dispatcher reads it; malformed text raises RuntimeError."""
    return torch._C.parse_schema(text)


def has_registered_side_effect(target: Any) -> bool:
    """True for functions that torch.fx was told to keep (assertions, `wait_tensor`, profiler marks). (2.1+)"""
    from torch.fx.node import _side_effectful_functions

    return target in _side_effectful_functions


def node_order_key(node: Node) -> Any:
    """Changes when a node is moved within its graph. (2.6+)"""
    return node._sort_key


def names_used(graph: torch.fx.Graph) -> int:
    """Grows with every node ever made in a graph; with the node count it shows that a graph has changed."""
    return len(graph._graph_namespace._used_names)


# --------------------------------------------------------------------------------------------- AOTAutograd


def aot_module_simplified(
    module: GraphModule,
    example_inputs: Sequence[Any],
    compiler: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
    training_compiler: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Functionalise `module` and hand the ATen graph to `compiler`; input writes stay as trailing `copy_` nodes.

    A graph of which something needs a gradient goes to `training_compiler` instead: AOTAutograd knows it when the graph
    is traced (gradients may be switched within a model). 2.11 and 2.13 differ in keyword arguments that are not used
    here.
    """
    from torch._functorch.aot_autograd import aot_module_simplified as aot

    table = dict(decompositions) if decompositions is not None else None
    hook: Any = compiler  # the hook's type names its parameters, and they differ between versions
    training_hook: Any = training_compiler
    return aot(
        module,
        list(example_inputs),
        fw_compiler=training_hook,
        inference_compiler=hook,
        decompositions=table,
        keep_inference_input_mutations=True,
    )


def static_input_indices() -> tuple[int, ...]:
    """Inputs with a fixed address (parameters, buffers, marked tensors), known while AOTAutograd calls its compiler."""
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return ()
    return tuple(context.fw_metadata.static_input_indices)


def make_boxed(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """A function of one list, which it empties, as AOTAutograd calls compiled graphs."""

    def boxed(arguments: list[Any]) -> Any:
        values = tuple(arguments)
        arguments.clear()
        return function(*values)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def boxed_codegen() -> Any:
    """FX code generator whose `forward` takes one list and empties it, so that inputs are freed early. (2.10+)"""
    from torch.fx.graph import _BoxedCodeGen

    return _BoxedCodeGen()


# --------------------------------------------------------------------------------------------- Inductor


def inductor_options(options: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Inductor configuration for the duration of a block; an unknown name raises AttributeError."""
    from torch._inductor import config

    return config.patch(dict(options))


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The ops that Inductor expects to see expanded (a copy: the table itself is never handed out)."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def inductor_error() -> type[Exception]:
    """What `inductor_compile` raises when Inductor itself fails: generated code that does not compile, say. (2.7+)"""
    from torch._inductor.exc import InductorError

    return InductorError


def inductor_compile(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    static_input_idxs: Sequence[int],
    cuda_graphs: bool,
    mode: FakeTensorMode | None,
) -> Callable[[list[Any]], Any]:
    """`compile_fx_inner` on an inference graph; the result takes one list and empties it.

    It does not expand ops, run the joint-graph passes or decide which outputs the user sees: the caller does. Works
    inside AOTAutograd's compiler hook and by itself (it makes a tracing context where there is none).
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    capture = {"boxed_forward_device_index": _device_index()} if cuda_graphs else {}
    context = torch._guards.TracingContext.try_get()
    tracing = nullcontext() if context is not None else torch._guards.tracing(torch._guards.TracingContext(mode))
    with tracing, V.set_fake_mode(mode):
        return compile_fx_inner(
            module,
            list(example_inputs),
            static_input_idxs=list(static_input_idxs),
            cudagraphs=BoxedBool(cuda_graphs),
            is_inference=True,
            **capture,
        )


def realise_readers_before(target: torch._ops.OpOverload) -> None:
    """Make Inductor compute whatever still has to read the old values before it calls an op that writes arguments.

    2.11 to 2.14 realise those readers only after the writing call has its place in the schedule: `seen = pool.sum(1);
    step_(x, pool)` gives the sum of the new pool. Done once for each op, in Inductor's own table of lowerings.
    """
    from torch._inductor import lowering
    from torch._inductor.virtualized import V
    from torch._library.utils import get_layout_constraint_tag

    known = lowering.lowerings.get(target)
    if getattr(known, "realises_readers", False):
        return
    constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(target))
    lowering.make_fallback(target, layout_constraint=constraint, warn=False)
    call = lowering.lowerings[target]
    written = [
        (position, argument.name)
        for position, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def lowered(*args: Any, **kwargs: Any) -> Any:
        for position, name in written:
            value = args[position] if position < len(args) else kwargs.get(name)
            if value is not None:
                value.realize()
                V.graph.mark_buffer_mutated(value.get_name())
        return call(*args, **kwargs)

    lowered.realises_readers = True  # type: ignore[attr-defined]
    lowering.lowerings[target] = lowered


def _device_index() -> Any:
    """The box in which Inductor notes the device of a graph that is to be captured; required for capture."""
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex

    return BoxedDeviceIndex(None)


# --------------------------------------------------------------------------------------------- logging


def trace_structured_text(name: str, text: Callable[[], str]) -> None:
    """An artifact that `tlparse` shows beside the compiler's own; `text` is called only if a trace is being written."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)
