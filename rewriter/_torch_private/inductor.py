"""Inductor: its options, its table of decompositions, compiling a graph, and one repair of its lowerings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.fx import GraphModule

from k3rewrite._torch_private.fake import FakeTensorMode


def inductor_options(options: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Inductor configuration for the duration of a block; an unknown name raises AttributeError."""
    from torch._inductor import config

    return config.patch(dict(options))


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


def _device_index() -> Any:
    """The box in which Inductor notes the device of a graph that is to be captured; required for capture."""
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex

    return BoxedDeviceIndex(None)


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
