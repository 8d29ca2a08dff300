"""The one place through which private PyTorch interfaces are reached.

fake.py         fake tensors, symbolic sizes, guards
graphs.py       FX graphs, the dispatcher's schemas, the structured trace
tracing.py      dispatch modes, `make_fx`, AOTAutograd
inductor.py     Inductor
distributed.py  process groups and functional collectives

Each wrapper is small and typed, and says what it stands on and since which torch that is there. All of it is written
against torch 2.11 to current; where the versions differ the wrapper says how. Beside this package only
`capture/dynamo.py` (Dynamo's errors and state) names private parts of torch; the types of the dispatcher
(`torch._ops.OpOverload`) and the namespaces of `torch.ops` are used everywhere.
"""

from k3rewrite._torch_private.distributed import group_of_name, register_functional_collectives, start_fake_group
from k3rewrite._torch_private.fake import (
    FakeTensor,
    FakeTensorMode,
    convertible_fakes,
    definitely_disjoint,
    detect_fake_mode,
    fresh_fake,
    graph_fake_mode,
    guard_count,
    guard_texts,
    statically_known,
    storage_id,
    storage_owners,
    symbolic_hint,
    symbolic_least,
    symbolic_text,
)
from k3rewrite._torch_private.graphs import (
    boxed_codegen,
    graph_break,
    has_registered_side_effect,
    names_used,
    needs_eager_input_values,
    node_order_key,
    parse_schema,
    trace_structured_text,
)
from k3rewrite._torch_private.inductor import (
    ROUNDING_MARK,
    eager_random,
    emulated_rounding,
    inductor_compile,
    inductor_decompositions,
    inductor_error,
    realise_readers_before,
)
from k3rewrite._torch_private.tracing import (
    aot_module_simplified,
    is_synthetic_base,
    leaves,
    make_boxed,
    mark_static_address,
    no_modes,
    static_input_indices,
    trace,
)

__all__ = [
    "ROUNDING_MARK",
    "FakeTensor",
    "FakeTensorMode",
    "aot_module_simplified",
    "boxed_codegen",
    "convertible_fakes",
    "definitely_disjoint",
    "detect_fake_mode",
    "eager_random",
    "emulated_rounding",
    "fresh_fake",
    "graph_break",
    "graph_fake_mode",
    "group_of_name",
    "guard_count",
    "guard_texts",
    "has_registered_side_effect",
    "inductor_compile",
    "inductor_decompositions",
    "inductor_error",
    "is_synthetic_base",
    "leaves",
    "make_boxed",
    "mark_static_address",
    "names_used",
    "needs_eager_input_values",
    "no_modes",
    "node_order_key",
    "parse_schema",
    "realise_readers_before",
    "register_functional_collectives",
    "start_fake_group",
    "static_input_indices",
    "statically_known",
    "storage_id",
    "storage_owners",
    "symbolic_hint",
    "symbolic_least",
    "symbolic_text",
    "trace",
    "trace_structured_text",
]
