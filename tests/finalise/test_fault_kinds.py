"""Faults of compilers on the same road, each with the right answer from both finalisers.

Where stock Inductor gives another answer (seen on 2.11, 2.13 and 2.14), a strict xfail says so for 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from finalised import compile_and_run

from k3rewrite import _torch_private as private
from k3rewrite.errors import UnsupportedError
from k3rewrite.finalise.hazards import keep_reads_before_writes

Tensor = torch.Tensor


def slice_assigned_then_source_written(dst: Tensor, src: Tensor) -> Tensor:
    """Kind 64: the copy must hold the source as it was."""
    dst[0:] = src[0:]
    src += 1
    return dst


def result_changed_in_place(x: Tensor) -> Tensor:
    """Kind 65: x / 1 is not x."""
    o = x / 1
    o += 5
    return o


def read_through_a_view_of_another_width(x: Tensor) -> Tensor:
    """Kind 87: the product is of the values before x[:, 2:5] = 2."""
    y = x.view(torch.int32) * 2
    y.sub_(-4)
    x[:, 2:5] = 2
    return y.view(torch.int64)


def read_through_a_view_of_the_same_width(x: Tensor) -> Tensor:
    y = x.view(torch.float64).to(torch.int64) * 2
    x[:, 2:5] = 2
    return y


def base_resized_through_a_view(x: Tensor) -> Tensor:
    """Kind 88: resizing a view must not resize what it was taken of."""
    base = x + 1
    base.view(-1).resize_(12)
    return base + 1


def clone_of_an_input_that_is_written(x: Tensor) -> Tensor:
    old = x.clone()
    x.mul_(3)
    return old.view(-1) + x.view(-1)


def two_inputs_exchange(a: Tensor, b: Tensor) -> Tensor:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)
    return a - b


def clone_given_beside_its_source(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    return y, y.clone()


def _long() -> tuple[Tensor]:
    return (torch.arange(24).view(4, 6),)


CASES: list[tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = [
    (slice_assigned_then_source_written, lambda: (torch.zeros(4), torch.arange(4.0))),
    (result_changed_in_place, lambda: (torch.ones(3),)),
    (read_through_a_view_of_another_width, _long),
    (read_through_a_view_of_the_same_width, _long),
    (base_resized_through_a_view, lambda: (torch.ones(1),)),
    (clone_of_an_input_that_is_written, lambda: (torch.arange(6.0).view(2, 3),)),
    (two_inputs_exchange, lambda: (torch.arange(3.0), torch.arange(3.0) + 7)),
    (clone_given_beside_its_source, lambda: (torch.ones(3),)),
]
WRONG_IN_STOCK_INDUCTOR = (
    slice_assigned_then_source_written,
    read_through_a_view_of_another_width,
    base_resized_through_a_view,
)


@pytest.mark.parametrize("how", ["eager", "inductor"])
@pytest.mark.parametrize(("function", "inputs"), CASES)
def test_the_answer_is_eagers(function: Callable[..., Any], inputs: Callable[[], Any], how: str) -> None:
    run = compile_and_run(function, inputs(), how, fullgraph=False)
    run.assert_equal()


@pytest.mark.xfail(strict=True, reason="torch 2.13: pytorch issues 198131, 198101, 191449")
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="pinned for 2.13 only")
@pytest.mark.parametrize("function", WRONG_IN_STOCK_INDUCTOR)
def test_stock_inductor_gives_another(function: Callable[..., Any]) -> None:
    inputs = dict(CASES)[function]
    given, expected = inputs(), inputs()
    with torch.no_grad():
        got, want = torch.compile(function, backend="inductor")(*given), function(*expected)
    assert got.shape == want.shape and torch.equal(got, want)


def test_the_answer_holds_an_input_apart_from_the_result() -> None:
    """Kind 65, once more: the input keeps its value, and two outputs stay two tensors."""
    for how in ("eager", "inductor"):
        run = compile_and_run(result_changed_in_place, (torch.ones(3),), how)
        assert torch.equal(run.inputs[0], torch.ones(3))
        first, second = compile_and_run(clone_given_beside_its_source, (torch.ones(3),), how).outputs
        first += 1
        assert torch.equal(second, torch.full((3,), 2.0))


def test_only_reads_that_could_slip_are_pinned() -> None:
    """Pinning costs a copy: ordinary updates of a state must not pay for it."""

    def update(x: Tensor, state: Tensor) -> Tensor:
        old = state.clone()
        state[:, :-1] = state[:, 1:].clone()
        state[:, -1] = x
        return old.sum(1) * x

    def slips(x: Tensor, state: Tensor) -> Tensor:
        x[:] = state[0]
        state.mul_(2)
        return x + 1

    run = compile_and_run(update, (torch.randn(3), torch.randn(3, 4)), "inductor")
    run.assert_equal()
    assert run.graph.hazards == []
    run = compile_and_run(slips, (torch.randn(4), torch.randn(3, 4)), "inductor")
    run.assert_equal()
    (hazard,) = run.graph.hazards
    assert hazard.source.endswith("in slips")


def test_inputs_that_overlap_are_refused_when_one_is_written() -> None:
    """Two views of one buffer, given to a graph that was made for separate inputs: 2.13 computes [3, 3, 3, 3]."""

    def model(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2

    for how in ("eager", "inductor"):
        run = compile_and_run(model, (torch.ones(4), torch.ones(4)), how)
        run.assert_equal()
        base = torch.ones(8)
        run.function(base[:4], base[4:])
        assert torch.equal(base, torch.tensor([2.0, 2, 2, 2, 1, 1, 1, 1]))
        graph = run.graph
        overlapping = [base[:4], base[2:6]]
        with pytest.raises(UnsupportedError, match="overlap in memory and one of them is written"):
            graph(overlapping)
        run.function(base[:4], torch.ones(4))  # and goes on with inputs that are apart


def test_a_copy_that_another_op_writes_beside_is_pinned() -> None:
    """An op that reads a clone of what it writes must not be given the thing itself."""
    mode = private.FakeTensorMode()
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    kept = graph.call_function(torch.ops.aten.clone.default, (x,))
    graph.call_function(torch.ops.aten.addcmul_.default, (x, kept, kept))
    graph.output((x,))
    for node in graph.nodes:
        node.meta["val"] = mode.from_tensor(torch.ones(3))
    module = torch.fx.GraphModule({}, graph)
    (hazard,) = keep_reads_before_writes(module)
    assert (hazard.node, hazard.write) == (kept.name, "addcmul__default")
    value = torch.full((3,), 2.0)
    module(value)
    assert torch.equal(value, torch.full((3,), 6.0))
