"""Inductor as the last stage: roundings, strides, symbolic batch, errors."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from finalised import compile_and_run

from k3rewrite import _torch_private as private
from k3rewrite.capture import capture
from k3rewrite.errors import ContractError, UnsupportedError
from k3rewrite.finalise import finalise, finalise_eager, finalise_inductor
from k3rewrite.ops.inplace_variant import ensure_registered
from k3rewrite.ops.vocabulary import Cost, Op

Tensor = torch.Tensor
BF16 = torch.bfloat16
ON_2_13 = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    value = x.float()
    return (value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


NORM = Op(
    "test_inductor_norm",
    "(Tensor x, Tensor weight, float eps) -> Tensor",
    _norm,
    lambda x, w, e: torch.empty_like(x),
    cost=lambda *a, **k: Cost(1, 0, 0),
)
ensure_registered(NORM)
OPS = {NORM.overload: NORM}


def rounds_in_between(x: Tensor, y: Tensor) -> Tensor:
    total = x + y  # eager rounds the sum to bf16
    return (total * y).float() - x.float() * 1.5


def _bf16_inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(64, 33).to(BF16), torch.randn(64, 33).to(BF16)


@pytest.mark.skipif(not ON_2_13, reason="2.11's CPU code drops the casts in any case")
def test_roundings_between_operators_are_eagers_unless_switched_off() -> None:
    inputs = _bf16_inputs()
    kept = compile_and_run(rounds_in_between, inputs, "inductor")
    kept.assert_equal()
    off = compile_and_run(rounds_in_between, inputs, "inductor", keep_roundings=False)
    assert not torch.equal(off.outputs, off.expected)
    exact = rounds_in_between(*(i.double() for i in inputs)).double()
    assert (off.outputs - exact).norm() < (kept.outputs - exact).norm()


@pytest.mark.skipif(not ON_2_13, reason="2.11's CPU code drops the casts in any case")
def test_roundings_inside_of_an_expanded_op_are_its_references() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        return NORM.overload(x + 1, w, 1e-6) + x

    run = compile_and_run(model, (torch.randn(16, 64).to(BF16), torch.randn(64).to(BF16)), "inductor", ops=OPS)
    difference = (run.outputs.float() - run.expected.float()).abs()
    assert (difference > 0).float().mean() < 0.01  # a last bit of the fp32 mean may tip a rounding, no more
    (record,) = run.graph.expanded
    assert (record.op, record.reason) == (NORM.name, "no kernel was chosen for it")


def test_strides_that_the_caller_sees_are_kept() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.sin()
        return y.t(), (x * 2).permute(1, 0).contiguous().t(), torch.softmax(x.t(), -1)

    run = compile_and_run(model, (torch.randn(5, 7),), "inductor")
    assert [o.stride() for o in run.outputs] == [o.stride() for o in run.expected]
    torch.testing.assert_close(run.outputs, run.expected)


@pytest.mark.parametrize("how", ["eager", "inductor"])
def test_a_symbolic_batch_is_one_graph(how: str) -> None:
    def model(x: Tensor, w: Tensor, state: Tensor, slots: Tensor) -> Tensor:
        y = NORM.overload(x, w, 1e-6) + F.silu(x)
        state[slots] = y.to(state.dtype)
        return y[:, :4] * x.shape[0]

    def inputs(rows: int) -> tuple[Any, ...]:
        x, state = torch.randn(rows, 8), torch.zeros(40, 8)
        for tensor in (x, slots := torch.randperm(40)[:rows]):
            torch._dynamo.mark_dynamic(tensor, 0)
        return x, torch.ones(8), state, slots

    run = compile_and_run(model, inputs(9), how, ops=OPS)
    for rows in (3, 17):
        given = inputs(rows)
        expected = tuple(t.clone() for t in given)
        torch.testing.assert_close(run.function(*given), model(*expected))
        torch.testing.assert_close(given[2], expected[2])
    assert len(run.graphs) == 1 and run.graph.guards == []
    assert run.added_guards == [] or how == "inductor"


def test_a_capture_can_be_finalised_outside_of_a_trace_by_name() -> None:
    x, w = torch.randn(4, 8), torch.randn(8)

    def model(x: Tensor, w: Tensor) -> Tensor:
        return NORM.overload(x, w, 1e-6) * 2

    for how in ("eager", "inductor"):
        captured = capture(model, (x, w))
        names = [n.name for n in captured.module.graph.nodes if n.op == "placeholder"]
        compiled, expanded = finalise(captured.module, captured.inputs, ops=OPS, how=how)  # type: ignore[arg-type]
        given = [x if value.dim() == 2 else w for value in captured.inputs]
        (result,) = compiled(given)
        assert given == [] and len(names) == 2  # boxed: the list is emptied
        torch.testing.assert_close(result, model(x, w))
        assert [e.op for e in expanded] == [NORM.name]


def test_dead_values_are_freed_while_an_eager_graph_runs() -> None:
    def model(x: Tensor) -> Tensor:
        for _ in range(20):
            x = x.sin()
        return x

    captured = capture(model, (torch.randn(8),))
    compiled = finalise_eager(captured.module, captured.inputs)
    alive: list[Any] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:

            result = func(*args, **(kwargs or {}))
            alive.append(weakref.ref(result))
            assert sum(ref() is not None for ref in alive) <= 3
            return result

    inputs = [torch.randn(8)]
    with Count():
        compiled(inputs)
    assert len(alive) == 20


def test_what_cannot_be_finalised_is_one_clear_error() -> None:
    captured = capture(lambda x: x + 1, (torch.randn(3),))
    with pytest.raises(UnsupportedError, match="no input of the graph is on a CUDA device"):
        finalise_inductor(captured.module, captured.inputs, cuda_graphs=True)
    with pytest.raises(ContractError, match="1 inputs and 2 examples"):
        finalise_inductor(captured.module, [*captured.inputs, 1])
    output = captured.module.graph.output_node()
    output.args = (output.args[0][0],)
    for finaliser in (finalise_inductor, finalise_eager):
        with pytest.raises(ContractError, match="returns a single value"):
            finaliser(captured.module, captured.inputs)


def test_no_guard_is_lost_or_made_by_the_private_helpers() -> None:
    captured = capture(lambda x: x + x.shape[0], (torch.randn(5, 3),), dynamic=True)
    mode = private.graph_fake_mode(captured.module.graph)
    assert mode is not None
    before = private.guard_count(mode)
    for node in captured.module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            fresh = private.fresh_fake(mode, value)
            assert fresh.shape == value.shape and fresh.stride() == value.stride() and fresh is not value
            assert private.storage_id(fresh) != private.storage_id(value)
    assert private.guard_count(mode) == before and private.guard_texts(mode, before) == ()
