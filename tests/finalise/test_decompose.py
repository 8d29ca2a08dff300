"""Expanding ops in place: exact, traced once, symbolic, with values and names of their own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from graphs import capture_with_inputs
from torch.fx import GraphModule, Node

from k3rewrite import _torch_private as private
from k3rewrite.capture import capture as trace
from k3rewrite.errors import ContractError
from k3rewrite.finalise import decompose
from k3rewrite.finalise.splice import attach
from k3rewrite.graph.provenance import source_line
from k3rewrite.ops.inplace_variant import ensure_registered, inplace_variant
from k3rewrite.ops.vocabulary import Cost, Op

aten = torch.ops.aten
Tensor = torch.Tensor


def _op(name: str, schema: str, reference: Callable[..., Any], fake: Callable[..., Any], **extra: Any) -> Op:
    op = Op(f"test_decompose_{name}", schema, reference, fake, cost=lambda *a, **k: Cost(1, 0, 0), **extra)
    ensure_registered(op)
    return op


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    value = x.float()
    return (value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


NORM = _op("norm", "(Tensor x, Tensor weight, float eps) -> Tensor", _norm, lambda x, w, e: torch.empty_like(x))
SAME = _op("same", "(Tensor x) -> Tensor", lambda x: x.contiguous(), lambda x: torch.empty_like(x))
SPLIT = _op(
    "split",
    "(Tensor x, int at) -> (Tensor, Tensor)",
    lambda x, at: (x[:, :at].clone(), x[:, at:].clone()),
    lambda x, at: (x.new_empty(x.shape[0], at), x.new_empty(x.shape[0], x.shape[1] - at)),
)
NESTED = _op(
    "nested",
    "(Tensor x, Tensor weight) -> Tensor",
    lambda x, w: NORM.overload(NORM.overload(x, w, 1e-6), w, 1e-6) + 1,
    lambda x, w: torch.empty_like(x),
)


def _writes_inside(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[1:] = x[:-1]
    out.add_(1)
    return out


SHIFT = _op("shift", "(Tensor x) -> Tensor", _writes_inside, lambda x: torch.empty_like(x))
TABLE = _op(
    "table",
    "(Tensor x) -> Tensor",
    lambda x: x * torch.tensor([2.0, 3.0, 4.0], dtype=x.dtype),
    lambda x: torch.empty_like(x),
)
CONSTANT = _op("constant", "(Tensor x) -> Tensor", lambda x: torch.zeros(2), lambda x: x.new_empty(2))
LIES = _op("lies", "(Tensor x) -> Tensor", lambda x: x.double(), lambda x: torch.empty_like(x))
LOOPS = _op("loops", "(Tensor x) -> Tensor", lambda x: LOOPS.overload(x) + 1, lambda x: torch.empty_like(x))
BRANCHES = _op(
    "branches", "(Tensor x) -> Tensor", lambda x: x + 1 if x.shape[0] > 5 else x - 1, lambda x: torch.empty_like(x)
)
STEP = _op(
    "step",
    "(Tensor x, Tensor state) -> (Tensor, Tensor)",
    lambda x, s: (x * s, s + 1),
    lambda x, s: (torch.empty_like(x), torch.empty_like(s)),
    inplace={"state": 1},
)


def expand(module: GraphModule, *ops: Op, table: dict[Any, Any] | None = None) -> Any:
    return decompose(module, {op.overload: op for op in ops}, table or {})


def capture(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> tuple[GraphModule, list[Any]]:
    captured, real = capture_with_inputs(function, inputs, dynamic=dynamic)
    return captured.module, real


def copies(values: Sequence[Any]) -> list[Any]:
    return [v.clone() if isinstance(v, Tensor) else v for v in values]


def targets(module: GraphModule) -> list[str]:
    ops = [n.target for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return [f"{op.namespace}.{op._opname}" for op in ops]


def values(module: GraphModule) -> Iterator[Tensor]:
    for node in module.graph.nodes:
        found = node.meta.get("val")
        yield from (v for v in (found if isinstance(found, (tuple, list)) else [found]) if isinstance(v, Tensor))


def assert_bit_equal(module: GraphModule, function: Callable[..., Any], inputs: Sequence[Any]) -> None:
    got, want = copies(inputs), copies(inputs)
    torch.testing.assert_close(module(*got), (function(*want),), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


# --------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_left_over_op_becomes_its_reference_bit_for_bit(dtype: torch.dtype) -> None:
    x, w = torch.randn(5, 8).to(dtype), torch.randn(8).to(dtype)

    def model(x: Tensor, w: Tensor) -> Tensor:
        return NORM.overload(NORM.overload(x, w, 1e-6), w, 1e-5) - x

    module, inputs = capture(model, x, w)
    result = expand(module, NORM)
    assert not any(t.startswith("k3.") for t in targets(module))
    assert (len(result.records), result.traces, result.guards) == (2, 2, [])
    assert_bit_equal(module, model, inputs)


def test_several_results_a_nested_op_and_writes_inside_of_a_reference() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        a, b = SPLIT.overload(NESTED.overload(x, w), 3)
        return SHIFT.overload(b) * a.sum()

    module, inputs = capture(model, torch.randn(4, 8), torch.randn(8))
    result = expand(module, SPLIT, NESTED, SHIFT, NORM)
    assert not any(t.startswith("k3.") or t.endswith("_") for t in targets(module))
    assert [r.op for r in result.records] == [o.name for o in (NESTED, SPLIT, SHIFT)]
    assert_bit_equal(module, model, inputs)


def test_inductors_table_is_applied_to_every_op_in_it() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        y = torch.nn.functional.silu(torch.nn.functional.layer_norm(x, (6,), w))
        y = torch.softmax(y, -1) + torch.nn.functional.softplus(x).masked_fill(x > 0, 2.0)
        return torch.nn.functional.pad(y, (1, 1)).addmm(x, y.new_ones(6, 8))

    module, inputs = capture(model, torch.randn(8, 6).double(), torch.randn(6).double())
    wanted = {f"aten.{name}" for name in ("silu", "native_layer_norm", "_softmax", "softplus", "masked_fill")}
    assert wanted <= set(targets(module))
    expand(module, table=private.inductor_decompositions())
    assert not wanted & set(targets(module))
    got = module(*copies(inputs))[0]
    torch.testing.assert_close(got, model(*copies(inputs)), rtol=1e-12, atol=1e-12)


def test_an_integer_and_a_float_constant_are_two_calls() -> None:
    """Fault kind 73: x - 1 stays int64, x - 1.0 becomes float32; True is neither."""
    add = _op(
        "add_scalar",
        "(Tensor x, Scalar value) -> Tensor",
        lambda x, value: x + value,
        lambda x, value: torch.empty_like(x, dtype=torch.result_type(x, value)),
    )

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        return add.overload(x, -1), add.overload(x, -1.0)

    module, inputs = capture(model, torch.arange(3))
    assert expand(module, add).traces == 2
    integer, floating = module(*inputs)
    assert integer.dtype == torch.int64 and floating.dtype == torch.float32


def test_a_trace_for_one_type_of_constant_does_not_serve_another() -> None:
    typed = _op(
        "typed",
        "(Tensor x, Scalar value) -> Tensor",
        lambda x, value: x + {bool: 10, int: 20, float: 30}[type(value)],
        lambda x, value: torch.empty_like(x),
    )

    def model(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return typed.overload(x, True), typed.overload(x, 1), typed.overload(x, 1.0)

    module, (x,) = capture(model, torch.zeros(2))
    assert expand(module, typed).traces == 3
    assert [r[0].item() for r in module(x)] == [10, 20, 30]


def test_one_trace_serves_equal_calls_and_only_those() -> None:
    def model(x: Tensor, w: Tensor, wide: Tensor) -> Tensor:
        for _ in range(5):
            x = NORM.overload(x, w, 1e-6)
        return NORM.overload(wide, w, 1e-6).sum() + NORM.overload(w, w, 1e-6) + x

    module, inputs = capture(model, torch.randn(4, 8), torch.randn(8), torch.randn(9, 8))
    result = expand(module, NORM)
    assert (len(result.records), result.traces) == (7, 3)
    assert_bit_equal(module, model, inputs)


def test_a_node_given_twice_is_not_two_nodes() -> None:
    outer = _op("outer", "(Tensor x, Tensor y) -> Tensor", lambda x, y: x * 2 + y, lambda x, y: torch.empty_like(x))

    def model(x: Tensor, y: Tensor) -> Tensor:
        return outer.overload(x, y) - outer.overload(y, x) * outer.overload(x, x)

    module, inputs = capture(model, torch.randn(4), torch.randn(4))
    assert expand(module, outer).traces == 2
    assert_bit_equal(module, model, inputs)


# --------------------------------------------------------------------------------------------- symbolic sizes


def test_symbolic_sizes_stay_symbolic_and_add_no_guard() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        a, b = SPLIT.overload(NORM.overload(x, w, 1e-6), 3)
        return TABLE.overload(a).reshape(-1)[: x.shape[0]] + b[:, 0]

    module, inputs = capture(model, torch.randn(7, 8), torch.randn(8), dynamic=True)
    mode = private.graph_fake_mode(module.graph)
    before = private.guard_count(mode)
    assert any(n.op == "placeholder" and isinstance(n.meta["val"], torch.SymInt) for n in module.graph.nodes)
    result = expand(module, NORM, SPLIT, TABLE)
    assert result.guards == [] and private.guard_count(mode) == before
    for rows in (7, 3, 20):
        x = torch.randn(rows, 8)
        replaced = [rows if isinstance(i, int) else x if i.dim() == 2 else i for i in inputs]
        weight = next(i for i in inputs if isinstance(i, Tensor) and i.dim() == 1)
        got = module(*replaced)[0]
        torch.testing.assert_close(got, model(x, weight), rtol=0, atol=0)


def test_a_reference_that_adds_a_guard_is_reported() -> None:
    module, _ = capture(lambda x: BRANCHES.overload(x), torch.randn(7, 2), dynamic=True)
    result = expand(module, BRANCHES)
    assert len(result.guards) == 1 and "test_decompose_branches" in result.guards[0]


# --------------------------------------------------------------------------------------------- ownership and names


def test_no_two_nodes_share_a_fake_tensor_or_its_storage() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = NORM.overload(x, w, 1e-6)
        return x

    module, _ = capture(model, torch.randn(4, 8), torch.randn(8))
    expand(module, NORM)
    gc.collect()
    made = [n for n in module.graph.nodes if n.meta.get("k3_made_by") == "decompose"]
    assert len(made) > 15
    found = list(values(module))
    assert len({id(v) for v in found}) == len(found)
    assert len({private.storage_id(v) for v in found}) == len(found)


def test_new_nodes_take_over_where_the_call_came_from() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        return NORM.overload(x, w, 1e-6)

    module, _ = capture(model, torch.randn(4, 8), torch.randn(8))
    (call,) = (n for n in module.graph.nodes if n.target is NORM.overload)
    line = source_line(call)
    call.meta["k3_reason"] = "no kernel of this op for the target"
    (record,) = expand(module, NORM).records
    assert line.endswith("in model")
    assert (record.source, record.reason, record.op) == (line, "no kernel of this op for the target", NORM.name)
    made = [n for n in module.graph.nodes if n.op == "call_function"]
    assert made and all(source_line(n) == line and n.meta["val"] is not None for n in made)


def test_a_result_never_shares_storage_with_an_argument() -> None:
    """Fault kind 65: a body that returns its input, when the caller changes the result in place."""
    x = torch.ones(3)
    module = trace(lambda x: SAME.overload(x), (x,)).module
    expand(module, SAME)
    (result,) = module(x)
    result += 5
    assert torch.equal(x, torch.ones(3)) and torch.equal(result, torch.full((3,), 6.0))


def test_a_constant_result_is_new_on_every_call() -> None:
    """Fault kind 78: y = zeros(2) folded into a constant, returned, and changed by the caller."""
    module, (x,) = capture(lambda x: CONSTANT.overload(x), torch.ones(3))
    expand(module, CONSTANT)
    for _ in range(2):
        (y,) = module(x)
        y += 1
        assert torch.equal(y, torch.ones(2))


def test_constants_of_a_body_do_not_replace_those_of_the_graph() -> None:
    """Fault kind 77: both are called `_tensor_constant0`."""

    def model(x: Tensor) -> Tensor:
        return TABLE.overload(TABLE.overload(x) + torch.tensor([10.0, 20.0, 30.0]))

    module, inputs = capture(model, torch.ones(3))
    constants = [n.target for n in module.graph.nodes if n.op == "get_attr"]
    assert constants == ["_tensor_constant0"]
    expand(module, TABLE)
    held = {n.target for n in module.graph.nodes if n.op == "get_attr"}
    assert held == {"_tensor_constant0", "_tensor_constant0_1"}
    assert_bit_equal(module, model, inputs)


def test_attaching_keeps_what_has_the_name_already() -> None:
    """Fault kind 80: a sub-module called as one that is there."""
    module = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
    old, new = torch.nn.Sigmoid(), torch.nn.Tanh()
    module.submod_1 = old
    assert attach(module, "submod_1", new) == "submod_1_1"
    assert attach(module, "submod_1", new) == "submod_1_1"
    assert module.submod_1 is old and module.submod_1_1 is new


def test_strides_of_a_result_are_those_that_the_graph_promises() -> None:
    turned = _op(
        "turned", "(Tensor x) -> Tensor", lambda x: (x + 1).t().contiguous().t(), lambda x: torch.empty_like(x)
    )
    module, (x,) = capture(lambda x: turned.overload(x), torch.arange(6.0).view(2, 3))
    expand(module, turned)
    (result,) = module(x)
    assert result.stride() == (3, 1) and torch.equal(result, x + 1)


def test_an_in_place_variant_expands_to_its_reference_and_the_copy() -> None:
    step = inplace_variant(STEP, ["state"])
    ensure_registered(step)
    module, _ = capture(lambda x, s: STEP.overload(x, s)[0], torch.ones(3), torch.ones(3))
    (call,) = (n for n in module.graph.nodes if n.target is STEP.overload)
    x, state = call.args
    with module.graph.inserting_before(call):
        new = module.graph.call_function(step.overload, (x, state))
    new.meta["val"] = call.meta["val"][0]
    next(iter(call.users)).replace_all_uses_with(new)
    for user in list(call.users):
        module.graph.erase_node(user)
    module.graph.erase_node(call)
    expand(module, step)
    assert "aten.copy_" in targets(module)
    held = {n.name: torch.full((3,), 2.0) for n in module.graph.nodes if n.op == "placeholder"}
    (out,) = module(*held.values())
    assert torch.equal(out, torch.full((3,), 4.0)) and torch.equal(held[state.name], torch.full((3,), 3.0))


# --------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("op", "message"),
    [(LIES, "dtype torch.float32 becomes torch.float64"), (LOOPS, "calls itself")],
)
def test_a_body_that_does_not_fit_leaves_the_graph_as_it_was(op: Op, message: str) -> None:
    """Fault kind 93: everything is checked before the first change."""
    x, w = torch.randn(4, 8), torch.randn(8)
    module = trace(lambda x, w: op.overload(NORM.overload(x, w, 1e-6)), (x, w)).module
    before = str(module.graph)
    with pytest.raises(ContractError, match=message):
        expand(module, NORM, op)
    assert str(module.graph) == before


def test_the_graph_stays_in_topological_order() -> None:
    """Fault kind 89: the second argument is defined after the first one's other users."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        a = torch.relu(x)
        b = NORM.overload(torch.sin(x), w, 1e-6)
        return SHIFT.overload(a) + b * NORM.overload(a, torch.cos(w), 1e-6)

    module, inputs = capture(model, torch.randn(4, 8), torch.randn(8))
    expand(module, NORM, SHIFT)
    module.graph.lint()
    position: dict[Node, int] = {n: i for i, n in enumerate(module.graph.nodes)}
    assert all(position[a] < position[n] for n in module.graph.nodes for a in n.all_input_nodes)
    assert_bit_equal(module, model, inputs)
