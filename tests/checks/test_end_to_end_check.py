"""The end-to-end check with compiled callables made by hand: right ones pass, each kind of wrong one is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import capture_with_inputs
from small_graphs import traced
from torch import Tensor

import k3rewrite.kernels  # noqa: F401  registers the ops
from k3rewrite.capture import Captured
from k3rewrite.checks.end_to_end import EndToEndCheck
from k3rewrite.checks.precise import DecisionInterpreter
from k3rewrite.errors import VerificationError
from k3rewrite.report.schema import EndToEnd

Compiled = Callable[[list[Any]], Any]


class Checked:
    """A captured function with its check around `compiled`, which gets the inputs and eager's outputs."""

    def __init__(self, function: Callable[..., Any], inputs: list[Tensor], compiled: Callable[..., Any]) -> None:
        self.captured, self.inputs = capture_with_inputs(function, [v.clone() for v in inputs])
        self.told: list[EndToEnd] = []
        self.calls = 0

        def run(values: list[Any]) -> Any:
            self.calls += 1
            given = list(values)
            values.clear()
            return compiled(self.captured, given)

        self.check = EndToEndCheck(self.captured, self.told.append)
        self.function = self.check.wrap(run)

    def __call__(self) -> Any:
        return self.function([v.clone() if isinstance(v, Tensor) else v for v in self.inputs])

    def fails(self) -> str:
        with pytest.raises(VerificationError) as caught:
            self()
        assert caught.value.exit_code == 1 and "remedy" in str(caught.value)
        assert [r.passed for r in self.told] == [False]
        return str(caught.value)


def _eager(captured: Captured, inputs: list[Any]) -> tuple[Any, ...]:
    return DecisionInterpreter(captured.module, wide=False).run_on(inputs)


def _network(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.tanh(x @ w)
    return hidden, hidden.argmax(-1)


def _inputs(dtype: torch.dtype = torch.float32, rows: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, 8, generator=generator).to(dtype), torch.randn(8, 16, generator=generator).to(dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_right_one_passes_and_is_checked_once(dtype: torch.dtype) -> None:
    checked = Checked(_network, _inputs(dtype), _eager)
    first = checked()
    assert [r.passed for r in checked.told] == [True] and checked.check.result is checked.told[0]
    assert checked.told[0].max_rel_error_vs_fp64 == checked.told[0].eager_rel_error_vs_fp64
    second = checked()
    assert len(checked.told) == 1 and checked.calls == 2
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _off(index: int, change: Callable[[Any], Any]) -> Callable[..., Any]:
    def compiled(captured: Captured, inputs: list[Any]) -> tuple[Any, ...]:
        outputs = list(_eager(captured, inputs))
        outputs[index] = change(outputs[index])
        return tuple(outputs)

    return compiled


def _nan_in_one_place(value: Tensor) -> Tensor:
    value = value.clone()
    value.view(-1)[3] = torch.nan
    return value


def _one_element(value: Tensor) -> Tensor:
    value = value.clone()
    value.view(-1)[3] += 1
    return value


@pytest.mark.parametrize(
    ("index", "change", "text"),
    [
        (0, lambda v: v * 1.001, "output 0 has error 1.00e-03"),
        (0, lambda v: v.bfloat16(), "output 0 is torch.bfloat16 [5, 16], eager gives torch.float32 [5, 16]"),
        (0, lambda v: v[:, :8], "output 0 is torch.float32 [5, 8], eager gives torch.float32 [5, 16]"),
        (0, _nan_in_one_place, "output 0 has error inf"),
        (0, _one_element, "output 0 has error"),
        (0, torch.zeros_like, "output 0 has error 1.00e+00"),
        (1, lambda v: v + 1, "output 1 (integers) differs from eager"),
        (1, lambda v: v.int(), "output 1 is torch.int32"),
    ],
)
def test_a_wrong_one_fails_and_says_where(index: int, change: Callable[[Any], Any], text: str) -> None:
    assert text in Checked(_network, _inputs(), _off(index, change)).fails()


def test_one_wrong_element_of_many_is_seen() -> None:
    function = lambda x, w: x * 2  # noqa: E731
    inputs = [torch.randn(1000, 1000), torch.randn(2)]
    assert "worst element" in Checked(function, inputs, _off(0, _one_element)).fails()


def test_a_wrong_one_stays_refused() -> None:
    """Its later calls must not hand out results that were found wrong."""
    checked = Checked(_network, _inputs(), _off(0, lambda v: v * 2))
    checked.fails()
    with pytest.raises(VerificationError, match="output 0 has error"):
        checked()
    assert checked.calls == 1


def _with_state(x: Tensor, pool: Tensor, other: Tensor) -> Tensor:
    pool[1:3].mul_(0.5).add_(x[:2])
    other.add_(1)
    return x + pool[1]


def test_updated_inputs_are_checked_too() -> None:
    inputs = [torch.randn(4, 8), torch.randn(6, 8), torch.randn(3)]
    assert Checked(_with_state, inputs, _eager)() is not None

    def forgets(captured: Captured, values: list[Any]) -> Any:
        return _eager(captured, [v.clone() for v in values])

    text = Checked(_with_state, inputs, forgets).fails()
    assert "updated input" in text

    def writes_too_much(captured: Captured, values: list[Any]) -> Any:
        outputs = _eager(captured, values)
        next(v for v in values if v.shape == (6, 8))[5] += 1
        return outputs

    assert "updated input" in Checked(_with_state, inputs, writes_too_much).fails()


def test_the_inputs_given_are_those_that_are_updated() -> None:
    inputs = [torch.randn(4, 8), torch.randn(6, 8), torch.randn(3)]
    checked = Checked(_with_state, inputs, _eager)
    values = [v.clone() for v in checked.inputs]
    checked.function(list(values))
    expected = [v.clone() for v in checked.inputs]
    _eager(checked.captured, expected)
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


# ------------------------------------------------------------------------------------------------ expert choices


def _routed(logits: Tensor, experts: Tensor) -> Tensor:
    """Each token takes the row of its best expert: another choice is another result in every digit."""
    weights, ids = logits.topk(1, dim=-1)
    return experts[ids[:, 0]] * weights


def _choosing(pick: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Runs the model with choices of its own and returns them behind the outputs, as an exposed graph does."""

    def compiled(captured: Captured, inputs: list[Any]) -> tuple[Any, ...]:
        logits = next(v for v in inputs if v.shape[-1] == 4)
        experts = next(v for v in inputs if v.shape[-1] != 4)
        ids = pick(logits)
        return experts[ids[:, 0]] * logits.gather(-1, ids), ids

    return compiled


def _near_tie(gap: float) -> list[Tensor]:
    logits = torch.tensor([[1.0, 1.0 - gap, -1.0, 0.0], [0.3, 0.1, 0.9, -1.0]])
    return [logits, torch.randn(4, 6, generator=torch.Generator().manual_seed(1))]


SECOND = lambda logits: logits.topk(2)[1][:, 1:]  # noqa: E731
BEST = lambda logits: logits.topk(1)[1]  # noqa: E731


def _second_of_first(logits: Tensor) -> Tensor:
    ids = BEST(logits)
    ids[0] = SECOND(logits)[0]
    return ids


def test_a_choice_that_flips_between_two_equal_experts_is_no_error() -> None:
    outputs = Checked(_routed, _near_tie(1e-7), _choosing(_second_of_first))()
    assert len(outputs) == 1, "the exposed choices are dropped"
    assert Checked(_routed, _near_tie(1e-7), _choosing(BEST))() is not None


@pytest.mark.parametrize("pick", [SECOND, _second_of_first, lambda logits: BEST(logits) * 0 + 2])
def test_a_choice_that_is_worse_by_much_is_one(pick: Callable[[Tensor], Tensor]) -> None:
    text = Checked(_routed, _near_tie(0.5), _choosing(pick)).fails()
    assert "experts were chosen whose scores lie" in text and "eager's choices lie 0.000 below at most" in text


def test_wrong_arithmetic_behind_a_right_choice_is_an_error() -> None:
    def compiled(captured: Captured, inputs: list[Any]) -> tuple[Any, ...]:
        outputs, ids = _choosing(BEST)(captured, inputs)
        return outputs * 1.01, ids

    assert "output 0 has error" in Checked(_routed, _near_tie(0.5), compiled).fails()


def test_choices_of_routers_and_of_top_k_are_exposed_in_graph_order() -> None:
    def function(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = torch.ops.k3.route(logits, None, 2, "sigmoid", True, 0.0, 1.0, True, *[torch.float32] * 2)[0]
        more = torch.ops.k3.route(logits + 1, None, 2, "softmax", True, 0.0, 1.0, True, *[torch.float32] * 2)
        return weights, logits.topk(1)[0], more[1]

    logits = torch.randn(5, 8)
    module = traced(function, [logits])
    EndToEndCheck(Captured(module, (), ()), lambda result: None).expose_choices(module)
    module.graph.lint()
    outputs = module(logits)
    assert len(outputs) == 6
    assert torch.equal(outputs[3], logits.topk(2)[1])
    assert torch.equal(outputs[4], (logits + 1).topk(2)[1])
    assert torch.equal(outputs[5], logits.topk(1)[1])
