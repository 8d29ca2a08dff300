"""Writes to parts of inputs without a copy of the whole, for graphs that run as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from finalised import compile_and_run
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rewrite.capture import capture
from k3rewrite.finalise import finalise_eager

Tensor = torch.Tensor


def rows(x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    old = p[i]
    p[i] = x
    return old


def rows_of_a_slice(x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    p[:, :2][i] = x[:, :2]
    return p.sum()


def one_row(x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    p[1] = x[0]
    p[2, 1:] = x[1, 1:]
    return x * 2


def window(x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    p[:, :-1] = p[:, 1:].clone()
    p[:, -1] = x[:, 0].repeat(2)[:4]
    return p * 2


def scattered(x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    p.scatter_(0, i[:, None].expand(2, 3), x)
    p.index_add_(0, i, x)
    p.masked_fill_(p > 3, 1.5)
    p.diagonal().fill_(9.0)
    return p + 1


def transposed(x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    p.t()[:, i] = x.t()
    return x + 1


def through_a_view(x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    p.view(2, 2, 3)[0, i - 1] = x
    return x + 1


def temporary(x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    out = torch.zeros(4, 3)
    out[i] = x
    return out * p


ALL_IN_PLACE = [rows, rows_of_a_slice, one_row, window, scattered, transposed, through_a_view, temporary]


def values() -> tuple[Tensor, Tensor, Tensor]:
    return torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3) / 2, torch.tensor([2, 1])


@pytest.mark.parametrize("function", ALL_IN_PLACE)
def test_the_input_is_written_where_it_is(function: Callable[..., Any]) -> None:
    x, p, i = values()
    run = compile_and_run(function, (x, p, i), "eager")
    run.assert_equal()
    assert run.graph.in_place and all(r.done for r in run.graph.in_place), run.graph.in_place
    assert "copy_" not in _copies_of_the_whole(function)


def _copies_of_the_whole(function: Callable[..., Any]) -> list[str]:
    """Names of nodes that write or make a tensor as large as the pool, apart from the sum that a test returns."""
    captured = capture(function, values())
    finalise_eager(captured.module, captured.inputs)
    pools = [n for n in captured.module.graph.nodes if n.op == "placeholder" and n.meta["val"].shape == (4, 3)]
    return [n.name for p in pools for n in p.users if n.target is torch.ops.aten.copy_.default and n.args[0] is p]


def late_reader(x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    old = p.clone()
    new = p.index_put((i,), x)
    late = p.exp()
    p.copy_(new)
    return late + old


def late_alias(x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    part = p[1:]
    new = p.index_put((i,), x)
    late = part.exp()
    p.copy_(new)
    return late


def other_dtype(x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    bits = p.view(torch.int32) + 1
    p[i] = x
    return bits


def returned(x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    new = p.index_put((i,), x)
    p.copy_(new)
    return new


def shifted_onto_itself(x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    p.copy_(torch.slice_scatter(p, p[0:2], 0, 1, 3))
    return x + 1


def part_of_the_old_value(x: Tensor, p: Tensor, i: Tensor) -> Tensor:
    new = p.index_put((i,), x)
    part = p[:, :2].index_put((i,), x[:, :2] * 3)
    p.copy_(torch.slice_scatter(new, part, 1, 0, 2))
    return x + 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (late_reader, "exp reads the old value of"),
        (late_alias, "exp reads the old value of"),
        (other_dtype, "views the same memory as torch.int32"),
        (returned, "is returned, and would share storage"),
        (part_of_the_old_value, "index_put_1 reads the old value of"),
        (shifted_onto_itself, "another argument, is in the same storage"),
    ],
)
def test_what_somebody_could_notice_is_copied(function: Callable[..., Any], reason: str) -> None:
    run = compile_and_run(function, values(), "eager")
    run.assert_equal()
    assert any(reason in r.reason for r in run.graph.in_place), run.graph.in_place
    if function is returned:
        assert run.outputs.data_ptr() != run.inputs[1].data_ptr()


def test_a_symbolic_number_of_rows() -> None:
    def model(x: Tensor, p: Tensor, i: Tensor) -> Tensor:
        old = p[i]
        p[:-1, 1:][i] = x
        return old

    inputs = torch.ones(2, 6), torch.zeros(9, 7), torch.tensor([7, 0])
    run = compile_and_run(model, inputs, "eager", dynamic=True)
    run.assert_equal()
    assert all(r.done for r in run.graph.in_place), run.graph.in_place
    assert run.added_guards == []
    x, p, i = torch.ones(3, 5), torch.zeros(11, 6), torch.tensor([8, 0, 4])
    assert torch.equal(run.function(x, p, i), torch.zeros(3, 6))
    assert torch.equal(p.sum(1), torch.tensor([5.0, 0, 0, 0, 5, 0, 0, 0, 5, 0, 0]))
    assert len(run.graphs) == 1


# --------------------------------------------------------------------------------------------- random programs

WRITES = ("put", "row", "rows", "part", "fill", "scale", "window", "copy")
STEPS = st.lists(
    st.tuples(st.sampled_from((*WRITES, "read", "read part", "keep")), st.integers(0, 3), st.integers(0, 2)),
    min_size=1, max_size=6,
)  # fmt: skip


def _apply(steps: list[tuple[str, int, int]], x: Tensor, p: Tensor) -> list[Tensor]:
    results, views = [], [p]
    for kind, row, column in steps:
        if kind == "put":
            views[-1][torch.tensor([row, column])] = x[:2, : views[-1].shape[1]]
        elif kind == "row":
            p[row] = x[column]
        elif kind == "rows":
            p[1:3] = x[1:3] + p[0]
        elif kind == "part":
            views.append(p[:, : column + 1])
        elif kind == "fill":
            p[row, column:] = 3.0
        elif kind == "scale":
            p.mul_(0.5)
        elif kind == "window":
            p[:, :-1] = p[:, 1:].clone()
        elif kind == "copy":
            p.t()[column] = p[:, 0]
        elif kind == "read":
            results.append(p * 2)
        elif kind == "read part":
            results.append(views[-1].sum(1))
        else:
            results.append(p[row].clone())
    return [*results, x + 1]


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_any_sequence_of_writes_and_reads_gives_what_eager_gives(steps: list[tuple[str, int, int]]) -> None:
    run = compile_and_run(
        lambda x, p: _apply(steps, x, p), (torch.randn(4, 3), torch.arange(12.0).view(4, 3)), "eager", dynamic=False
    )
    run.assert_equal()
