"""Canonicalisation changes no bit: chains of casts in every dtype, copies, equal views, results, writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import capture_with_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import Hand, aten, reasons, targets, traced
from torch import Tensor
from torch.fx import GraphModule

from k3rewrite.graph.purity import eliminate_dead_code
from k3rewrite.passes.canonicalise import CanonicalisePass, merge_equal
from k3rewrite.pipeline.pass_base import PassContext
from k3rewrite.report.schema import PassReport
from k3rewrite.targets import load_target

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
)  # fmt: skip
TELLING = (0, 1, 2, 3, 7, 100, 127, 255, 256, 257, 2049, 65504, 16777217, 2147483647, -1, -100, -128, 0.1, 1e-5, 3e38)


def canonicalised(module: GraphModule) -> PassReport:
    report = PassReport("canonicalise")
    CanonicalisePass().run(module, PassContext(load_target("cpu"), {}, ()), report)
    eliminate_dead_code(module.graph)
    module.graph.lint()
    module.recompile()
    assert report.candidates == report.matched + len(report.missed) + len(report.refused)
    return report


def _start(dtype: torch.dtype) -> Tensor:
    """Values that the dtype holds and others may not."""
    if dtype == torch.bool:
        return torch.tensor([True, False])
    if dtype.is_floating_point or dtype.is_complex:
        return torch.tensor(TELLING, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    return torch.tensor([int(v) for v in TELLING if info.min <= v <= info.max], dtype=dtype)


@given(start=st.sampled_from(DTYPES), chain=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_chain_of_casts_gives_the_same_bits(start: torch.dtype, chain: list[torch.dtype]) -> None:
    """Integers do not survive a float that promotion calls wider: 16777217 becomes 16777216."""

    def function(x: Tensor) -> Tensor:
        for dtype in chain:
            x = x.to(dtype)
        return x.clone()

    x = _start(start)
    module = traced(function, [x])
    plain = module(x)[0]
    before = len(targets(module))
    report = canonicalised(module)
    assert len(targets(module)) <= before - report.matched
    got = module(x)[0]
    assert got.dtype == plain.dtype
    assert torch.equal(_numbers(got), _numbers(plain))


def _numbers(value: Tensor) -> Tensor:
    wide = torch.view_as_real(value.to(torch.complex128)) if value.is_complex() else value.double()
    return wide.nan_to_num(7e77)


@pytest.mark.parametrize(
    ("chain", "left"),
    [
        ((torch.float32, torch.bfloat16), 0),
        ((torch.float32, torch.float64), 1),
        ((torch.float32, torch.float16), 1),
        ((torch.float64, torch.float32, torch.bfloat16), 0),
    ],
)
def test_what_loses_nothing_is_folded(chain: tuple[torch.dtype, ...], left: int) -> None:
    def function(x: Tensor) -> Tensor:
        for dtype in chain:
            x = x.to(dtype)
        return x * 2

    module = traced(function, [torch.randn(3).bfloat16()])
    canonicalised(module)
    assert targets(module).count("_to_copy") == left


def test_a_cast_that_is_returned_stays_a_tensor_of_its_own() -> None:
    """Kinds 65 and 78: x.float().bfloat16() would be x itself."""
    module = traced(lambda x: x.float().bfloat16(), [torch.randn(3).bfloat16()])
    report = canonicalised(module)
    assert report.matched == 0 and "is returned and would share storage" in reasons(report)[0]


@pytest.mark.parametrize("view", [False, True])
def test_two_equal_casts_that_are_returned_stay_two_tensors(view: bool) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x.float().view(-1), x.float().view(-1)) if view else (x.float(), x.float())

    x = torch.randn(2, 3).bfloat16()
    module = traced(function, [x])
    report = canonicalised(module)
    assert reasons(report) == ["both are returned: they must stay two tensors"]
    first, second = module(x)
    first += 1
    assert torch.equal(second.view(2, 3), x.float())


def test_equal_casts_and_views_of_which_one_is_returned_become_one() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.float(), x.float().view(-1).sin() + x.float().view(-1)

    module = traced(function, [torch.randn(2, 3).bfloat16()])
    report = canonicalised(module)
    assert report.matched == 3
    assert sorted(targets(module)) == ["_to_copy", "add", "sin", "view"]


def test_equal_is_equal_in_type_too() -> None:
    """Kind 73: constants 1, 1.0 and True in otherwise equal calls."""
    hand = Hand()
    x = hand.input("x", torch.randn(2, 3))
    first = hand.call(aten.slice.Tensor, x, 0, 0, 1)
    second = hand.call(aten.slice.Tensor, x, 0, False, 1)
    third = hand.call(aten.slice.Tensor, x, 0, 0, 1)
    module = hand.returns(*(hand.call(aten.neg.default, n) for n in (first, second, third)))
    report = canonicalised(module)
    assert report.matched == 1 and targets(module).count("slice") == 2


@pytest.mark.parametrize("written", ["in between", "before", "after", "one of the two"])
def test_equal_casts_with_a_write_somewhere(written: str) -> None:
    hand = Hand()
    x = hand.input("x", torch.randn(3).bfloat16())
    if written == "before":
        hand.call(aten.add_.Tensor, x, 1)
    first = hand.call(aten._to_copy.default, x, dtype=torch.float32)
    if written == "in between":
        hand.call(aten.add_.Tensor, x, 1)
    second = hand.call(aten._to_copy.default, x, dtype=torch.float32)
    if written == "one of the two":
        hand.call(aten.add_.Tensor, first, 1)
    results = [hand.call(aten.neg.default, n) for n in (first, second)]
    if written == "after":
        hand.call(aten.add_.Tensor, x, 1)
    module = hand.returns(*results)
    before = hand.run(module)
    report = PassReport("canonicalise")
    merge_equal(module.graph, report)
    module.recompile()
    assert report.matched == (1 if written in ("before", "after") else 0)
    after = hand.run(module)
    assert all(torch.equal(a, b) for a, b in zip((*before[0], *before[1]), (*after[0], *after[1]), strict=True))


def test_two_factories_that_are_written_later_stay_two() -> None:
    """Kind 74, for what is merged here: equal casts of which each is written are two buffers."""
    hand = Hand()
    x = hand.input("x", torch.zeros(3).bfloat16())
    a, b = (hand.call(aten._to_copy.default, x, dtype=torch.float32) for _ in range(2))
    hand.call(aten.fill_.Scalar, a, 1)
    module = hand.returns(hand.call(aten.neg.default, b), hand.call(aten.neg.default, a))
    canonicalised(module)
    (b_got, a_got), _ = hand.run(module)
    assert not b_got.any() and bool((a_got == -1).all())


def _exchange(a: Tensor, b: Tensor) -> Tensor:
    kept = torch.empty_like(a)
    kept.copy_(a)
    a.copy_(b)
    b.copy_(kept)
    return a - b


def _shifted(a: Tensor, b: Tensor) -> Tensor:
    a[1:] = a[:-1].clone()
    b[:] = a
    return b * 2


def _slots(a: Tensor, b: Tensor) -> Tensor:
    bank = a.unsqueeze(1).repeat(1, 3, 1)
    bank[:, 1] = b
    bank[:, 2] = bank[:, 0]
    a.copy_(bank[:, 1])
    return bank


def _cast_on_the_way(a: Tensor, b: Tensor) -> Tensor:
    a.copy_(b.double())
    return a + 1


def _broadcast(a: Tensor, b: Tensor) -> Tensor:
    a.copy_(b[:1])
    return a + 1


def _transposed(a: Tensor, b: Tensor) -> Tensor:
    a.copy_(b.t())
    b.copy_(a)
    return a + b.t()


@pytest.mark.parametrize("function", [_exchange, _shifted, _slots, _cast_on_the_way, _broadcast, _transposed])
def test_copies_between_inputs_give_what_eager_gives(function: Any) -> None:
    inputs = [torch.randn(4, 4), torch.randn(4, 4)]
    eager_inputs = [v.clone() for v in inputs]
    expected = function(*eager_inputs)
    captured, real = capture_with_inputs(function, [v.clone() for v in inputs])
    module = captured.module
    canonicalised(module)
    order = [next(i for i, v in enumerate(inputs) if torch.equal(v, r)) for r in real]
    values = [v.clone() for v in real]
    (got,) = module(*values)
    assert torch.equal(got, expected) and got.stride() == expected.stride()
    assert all(torch.equal(v, eager_inputs[i]) for v, i in zip(values, order, strict=True))


def test_a_copy_whose_source_is_written_first_is_kept() -> None:
    captured, _ = capture_with_inputs(_exchange, [torch.randn(4), torch.randn(4)])
    report = canonicalised(captured.module)
    assert any("writes while the result is read" in reason for reason in reasons(report))


def test_a_second_run_finds_nothing_more() -> None:
    def function(x: Tensor) -> Tensor:
        return x.float().double().float().bfloat16() * 2 + x.float().view(-1, 1).view(3, 2).to(torch.bfloat16).view(
            2, 3
        )

    module = traced(function, [torch.randn(2, 3).bfloat16()])
    canonicalised(module)
    text = module.graph.python_code("self").src
    assert canonicalised(module).matched == 0
    assert module.graph.python_code("self").src == text
