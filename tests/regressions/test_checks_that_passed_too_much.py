"""Wrong results that the checks let through: where eager overflows, and with experts that are chosen several times."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import capture_with_inputs
from small_graphs import LineRule, traced
from torch import Tensor

import k3rewrite.kernels  # noqa: F401  registers the ops
from k3rewrite.checks.choices import choice_fault, shortfall
from k3rewrite.checks.end_to_end import EndToEndCheck
from k3rewrite.checks.errors import unsound_share
from k3rewrite.checks.precise import DecisionInterpreter
from k3rewrite.checks.regions import compare, region_check
from k3rewrite.errors import VerificationError
from k3rewrite.patterns import Var, call
from k3rewrite.patterns.rewrite import apply_rule
from k3rewrite.report.schema import EndToEnd, PassReport

INF, NAN = math.inf, math.nan


def _checked(
    function: Callable[..., Any], inputs: list[Tensor], compiled: Callable[..., Any], notes: list[str] | None = None
) -> list[EndToEnd]:
    """The results of the end-to-end check of `compiled`, which gets the inputs; its error is raised."""
    captured, real = capture_with_inputs(function, inputs)
    told: list[EndToEnd] = []
    EndToEndCheck(captured, told.append, notes=[] if notes is None else notes).wrap(lambda values: compiled(*values))(
        real
    )
    return told


# ------------------------------------------------------------------------------------------------ overflow


def _overflows(x: Tensor) -> Tensor:
    return (x * 60000) * 60000 * 1e-9


def test_a_result_that_overflows_in_eager_cannot_be_judged() -> None:
    x = torch.randn(4, 8).half()
    assert not _overflows(x).isfinite().all()
    with pytest.raises(VerificationError, match=r"output 0 cannot be judged: 100% of eager's elements overflow"):
        _checked(_overflows, [x], lambda v: (torch.full_like(v, 7.0),))
    (result,) = _checked(_overflows, [x], lambda v: (_overflows(v),))
    assert result.passed, "what is equal to eager needs no judgement"


def test_a_comparison_without_a_finite_number_is_told() -> None:
    """It passes, as NaN is what the model gives, and the error of 0 must not look like one that was measured."""
    notes: list[str] = []
    (result,) = _checked(lambda v: (v * 2, v + 1), [torch.full((4, 8), NAN)], lambda v: (v * 2, v + 1), notes)
    assert result.passed and result.max_rel_error_vs_fp64 == 0
    assert notes[0].startswith("the end-to-end check had nothing finite to compare in output 0, output 1: ")
    half = torch.tensor([NAN, 1.0])
    for inputs in ([half], [torch.empty(0)], [torch.ones(2)]):
        told: list[str] = []
        assert _checked(lambda v: v * 2, inputs, lambda v: (v * 2,), told)[0].passed and not told


@pytest.mark.parametrize(("bad", "judged"), [(1, True), (10, True), (11, False), (500, False)])
def test_a_hundredth_of_a_result_may_overflow(bad: int, judged: bool) -> None:
    x = torch.ones(1000, dtype=torch.float16)
    x[:bad] = 60000
    compiled = lambda v: ((v * 2).clamp(max=5),)  # noqa: E731
    if judged:
        assert _checked(lambda v: v * 2, [x], compiled)[0].passed
    else:
        with pytest.raises(VerificationError, match="output 0 cannot be judged"):
            _checked(lambda v: v * 2, [x], compiled)


def test_what_counts_as_unsound() -> None:
    exact = torch.tensor([1.0, 1e6, 1e6, 1.0], dtype=torch.float64)
    old = torch.tensor([1.0, INF, INF, NAN])
    assert unsound_share(old, exact, old.clone()) == 0.0
    assert unsound_share(old, exact, torch.tensor([2.0, INF, 1e6, NAN])) == 0.25
    assert unsound_share(old, exact, torch.zeros(4)) == 0.75
    assert unsound_share(torch.empty(0), torch.empty(0), torch.empty(0)) == 0.0
    overflow = torch.tensor([INF])
    assert unsound_share(overflow, overflow.double(), torch.zeros(1)) == 0.0, "exact arithmetic overflows too"


def test_an_output_that_is_none_or_another_number_is_wrong() -> None:
    with pytest.raises(VerificationError, match=r"output 0 is None, eager gives torch.float32 \[2\]"):
        _checked(lambda v: v + 1, [torch.ones(2)], lambda v: (None,))


def test_a_region_that_overflows_at_every_size_is_refused() -> None:
    big = torch.full((4,), INF).half()
    assert "cannot be judged" in (compare("root", big, torch.zeros(4).half(), torch.full((4,), 1e6).double()) or "")
    assert compare("root", big, big.clone(), torch.full((4,), 1e6).double()) is None
    exp, neg, cos = (op.default for op in (torch.ops.aten.exp, torch.ops.aten.neg, torch.ops.aten.cos))
    pattern = call(neg, call(torch.ops.aten.add.Tensor, call(exp, Var("x"), name="anchor"), 1e6))
    rule = LineRule(pattern, lambda match, builder, exposed: {"root": builder.call(cos, match["x"])}, anchors={exp})
    module = traced(lambda x: -(x.exp() + 1e6), [torch.randn(8).half()])
    with pytest.raises(VerificationError, match="verification: output 'root' cannot be judged"):
        apply_rule(rule, module, PassReport("a_pass"), verify=region_check())


# ------------------------------------------------------------------------------------------------ choices


def _mixture(x: Tensor, w: Tensor) -> Tensor:
    values, ids = torch.sigmoid(x).topk(4, -1)
    return w[ids].sum(1) * values.sum(-1, keepdim=True)


def _choosing(pick: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Any]:
    """Right arithmetic behind the choice of `pick`, which is returned as an exposed graph does."""

    def compiled(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(x)
        ids = pick(scores)
        inside = ids.clamp(0, x.shape[-1] - 1)
        return w[inside].sum(1) * scores.gather(-1, inside).sum(-1, keepdim=True), ids

    return compiled


def _with(rank: int, value: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The best four with one of them replaced."""

    def pick(scores: Tensor) -> Tensor:
        ids = scores.topk(5, -1).indices
        best = ids[:, :4].clone()
        best[:, rank] = value(ids)
        return best

    return pick


@pytest.mark.parametrize(
    ("pick", "text"),
    [
        (lambda s: s.topk(1, -1).indices.expand(-1, 4).contiguous(), "one id stands several times in a row"),
        (_with(3, lambda ids: ids[:, 0]), "one id stands several times in a row"),
        (_with(3, lambda ids: ids[:, 3] * 0 + 16), "and there are 16 to choose from"),
        (_with(0, lambda ids: ids[:, 3] * 0 - 1), "ids reach from -1"),
        (lambda s: s.topk(3, -1).indices, r"ids are torch.int64 \[6, 3\], eager's are torch.int64 \[6, 4\]"),
        (lambda s: s.topk(4, -1).indices.int(), "ids are torch.int32"),
        (lambda s: s.topk(4, -1, largest=False).indices, "experts were chosen whose scores lie"),
        (lambda s: s.argsort(-1, descending=True)[:, [0, 1, 2, 9]], "experts were chosen whose scores lie"),
        (lambda s: s.argsort(-1, descending=True)[:, [3, 7, 8, 9]], "experts were chosen whose scores lie"),
    ],
)
def test_what_is_no_choice_of_the_best_is_an_error(pick: Callable[[Tensor], Tensor], text: str) -> None:
    inputs = [torch.randn(6, 16), torch.randn(16, 8)]
    with pytest.raises(VerificationError, match=text):
        _checked(_mixture, inputs, _choosing(pick))


def test_the_best_in_another_order_are_the_best() -> None:
    inputs = [torch.randn(6, 16), torch.randn(16, 8)]
    (result,) = _checked(_mixture, inputs, _choosing(lambda s: s.topk(4, -1).indices.flip(-1)))
    assert result.passed


def test_the_shortfall_is_that_of_the_worst_rank() -> None:
    scores = torch.tensor([[6.0, 5.0, 3.0, 0.0]])
    for ids, lost in (([0, 1], 0), ([1, 0], 0), ([0, 2], 2 / 6), ([1, 2], 2 / 6), ([2, 3], 5 / 6), ([0, 3], 5 / 6)):
        assert shortfall(scores, torch.tensor([ids])) == pytest.approx(lost), ids
        assert shortfall(-scores.t(), torch.tensor([ids]).t(), 0, largest=False) == pytest.approx(lost), ids
    masked = torch.tensor([[1.0, -INF, 0.5, 0.0, NAN]])
    assert shortfall(masked, torch.tensor([[4, 2]])) == pytest.approx(0.5), "a NaN is the largest to top-k"
    assert shortfall(masked, torch.tensor([[4, 1]])) == INF
    assert shortfall(masked, torch.tensor([[0, 2]])) == INF
    assert shortfall(torch.ones(1, 4), torch.tensor([[2, 0]])) == 0.0
    assert shortfall(torch.ones(0, 4), torch.empty(0, 2, dtype=torch.int64)) == 0.0


def test_faults_of_choices() -> None:
    own = torch.tensor([[0, 1], [2, 3]])
    assert choice_fault(own.flip(0), own, -1, 4) is None
    assert choice_fault(torch.tensor([[0, 0], [1, 2]]), own, 0, 4) is None, "twice along the other dimension"
    assert "several times" in (choice_fault(torch.tensor([[0, 1], [0, 2]]), own, 0, 4) or "")
    assert choice_fault(own[:0], own[:0], -1, 4) is None
    assert choice_fault(torch.tensor(0), torch.tensor(0), -1, 1) is None


@pytest.mark.parametrize("score", ["sigmoid", "softmax", "topk_softmax"])
@pytest.mark.parametrize("bias", [None, torch.tensor([0.0, 0.0, 0.0, 5.0])])
def test_a_route_has_a_margin_too(score: str, bias: Tensor | None) -> None:
    rest = (2, score, True, 0.0, 2.0, True, torch.float32, torch.float32)
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    inputs = [logits] if bias is None else [logits, bias]
    module = traced(lambda x, b=None: torch.ops.k3.route(x, b, *rest)[0], inputs)
    best, other = ([[0, 1]], [[0, 2]]) if bias is None else ([[3, 0]], [[3, 1]])
    for ids, right in ((best, True), (other, False)):
        run = DecisionInterpreter(module, wide=True, forced=[torch.tensor(ids)])
        run.run_on(inputs)
        (margin,) = run.routes.margins
        assert (margin == 0.0) is right and not run.routes.faults
    scores = {"sigmoid": logits.sigmoid(), "softmax": logits.softmax(-1), "topk_softmax": logits}[score].double()[0]
    scores = scores if bias is None else scores + bias
    taken, missed = scores[other[0][1]], scores[best[0][1]]
    assert margin == pytest.approx(float((missed - taken) / (scores.max() - scores.min())), rel=1e-5)
    for ids in ([[0, 0]], [[0, 4]], [[-1, 0]]):
        run = DecisionInterpreter(module, wide=True, forced=[torch.tensor(ids)])
        run.run_on(inputs)
        assert not run.routes.margins and run.routes.faults[0].startswith("choice 0 of experts:")
        assert run.routes.ids[0].tolist() == best, "the run goes on with its own choice"
