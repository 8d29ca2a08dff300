"""Runs in fp64: no rounding of the model is left, decisions can be recorded and forced, inputs stay what they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import Hand, aten, traced
from torch import Tensor

import k3rewrite.kernels  # noqa: F401  registers the ops
from k3rewrite.checks.precise import DecisionInterpreter, grouped_mm, widened
from k3rewrite.kernels.route.op import route

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16


def test_no_rounding_of_the_model_remains() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        hidden = (x @ w).bfloat16().float()
        return torch.softmax(hidden.half(), -1, dtype=FP32).to(BF16) * torch.full((4,), 1 / 3, dtype=BF16)

    inputs = [torch.randn(3, 4), torch.randn(4, 4)]
    module = traced(function, inputs)
    (exact,) = DecisionInterpreter(module, wide=True).run_on(inputs)
    x, w = (v.double() for v in inputs)
    assert exact.dtype == FP64
    torch.testing.assert_close(exact, torch.softmax(x @ w, -1) / 3, rtol=1e-12, atol=0)


def test_inputs_are_not_touched() -> None:
    hand = Hand()
    x, n = hand.input("x", torch.zeros(3)), hand.input("n", torch.zeros(3, dtype=torch.int64))
    hand.call(aten.add_.Tensor, x, 1)
    hand.call(aten.add_.Tensor, n, 1)
    module = hand.returns(hand.call(aten.neg.default, x))
    values = [torch.zeros(3, dtype=FP64), torch.zeros(3, dtype=torch.int64)]
    run = DecisionInterpreter(module, wide=True)
    (got,) = run.run_on(values)
    assert torch.equal(got, -torch.ones(3, dtype=FP64)) and not values[0].any() and not values[1].any()
    assert run.inputs[0].all() and run.inputs[1].all(), "the updates are on its own copies"


@pytest.mark.parametrize(
    "value", [torch.ones(2, dtype=BF16), torch.ones(2, dtype=FP64), torch.ones(2, dtype=torch.uint8)]
)
def test_widened_is_a_copy(value: Tensor) -> None:
    wide = widened(value)
    assert wide.data_ptr() != value.data_ptr()
    assert wide.dtype == (FP64 if value.dtype.is_floating_point else value.dtype)
    assert widened(3) == 3


def test_decisions_are_recorded_and_forced_with_their_margin() -> None:
    module = traced(lambda x: x.topk(2)[0] * 2 + x.topk(1, largest=False)[0], [torch.randn(2, 4)])
    x = torch.tensor([[4.0, 3, 2, 0], [0, 1, 2, 4]])
    free = DecisionInterpreter(module, wide=False)
    free.run_on([x])
    assert [ids.tolist() for ids in free.routes.ids] == [[[0, 1], [3, 2]], [[3], [0]]]
    assert free.routes.margins == []
    same = DecisionInterpreter(module, wide=True, forced=free.routes.ids)
    same.run_on([x])
    assert same.routes.margins == [0.0, 0.0]
    other = DecisionInterpreter(module, wide=True, forced=[torch.tensor([[0, 2], [3, 2]]), torch.tensor([[3], [1]])])
    (got,) = other.run_on([x])
    assert other.routes.margins == [0.25, 0.25], "2 instead of 3, and 1 instead of 0, of a spread of 4"
    assert torch.equal(got, torch.tensor([[8.0, 4], [9, 5]], dtype=FP64))


@given(
    seed=st.integers(0, 999),
    score=st.sampled_from(["sigmoid", "softmax", "topk_softmax"]),
    biased=st.booleans(),
    renormalise=st.booleans(),
    ordered=st.booleans(),
    dtype=st.sampled_from([FP32, BF16]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_forced_routes_weigh_the_given_experts_in_the_given_order(
    seed: int, score: str, biased: bool, renormalise: bool, ordered: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 8, generator=generator).to(dtype)
    bias = torch.randn(8, generator=generator) if biased else None
    ids = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(4)])
    rest = (3, score, renormalise, 1e-20, 2.5, ordered, FP32, FP32)
    inputs = [logits] if bias is None else [logits, bias]
    module = traced(lambda *v: torch.ops.k3.route(v[0], v[1] if biased else None, *rest), inputs)
    weights, chosen = DecisionInterpreter(module, wide=True, forced=[ids]).run_on(inputs)
    assert torch.equal(chosen, ids)
    wide = logits.double()
    scores = {"sigmoid": wide.sigmoid(), "softmax": wide.softmax(-1), "topk_softmax": wide}[score].gather(-1, ids)
    if score == "topk_softmax":
        scores = scores.softmax(-1)
    expected = 2.5 * (scores / (scores.sum(-1, keepdim=True) + 1e-20) if renormalise else scores)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-15)
    free_weights, free_ids = route(logits, bias, *rest)
    again, same = DecisionInterpreter(module, wide=False, forced=[free_ids]).run_on(inputs)
    assert torch.equal(same, free_ids)
    torch.testing.assert_close(again, free_weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("ends", [[0, 0, 0], [5, 5, 5], [2, 3, 5], [0, 4, 4]])
def test_grouped_products_in_fp64(ends: list[int]) -> None:
    a, b = torch.randn(5, 3, dtype=FP64), torch.randn(3, 3, 2, dtype=FP64)
    got = grouped_mm(a, b, torch.tensor(ends, dtype=torch.int32))
    group = [sum(row >= end for end in ends) for row in range(5)]
    expected = torch.stack([a[i] @ b[g] if g < 3 else torch.zeros(2, dtype=FP64) for i, g in enumerate(group)])
    torch.testing.assert_close(got, expected)
