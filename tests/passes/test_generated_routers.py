"""Routers in many spellings: each is lifted; each spelling with one thing wrong is not, or only up to there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from spelling_checks import DTYPES, assert_lifted, assert_not_lifted, random_tensors
from torch import Tensor

from k3rewrite.passes.lift_route import LiftRoute

E = 16
SHAPES = ((5, E), (1, E), (2, 3, E), (E, E), (0, E))
Pair = tuple[Tensor, Tensor]
TOPK: dict[str, Callable[[Tensor, int], Any]] = {
    "method": lambda s, k: s.topk(k),
    "dim": lambda s, k: s.topk(k, dim=-1),
    "dim from the front": lambda s, k: torch.topk(s, k, dim=s.dim() - 1),
    "unsorted": lambda s, k: torch.topk(s, k, dim=-1, sorted=False),
}
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "keepdim": lambda w: w.sum(-1, keepdim=True),
    "dim": lambda w: w.sum(dim=w.dim() - 1, keepdim=True),
    "unsqueeze": lambda w: w.sum(-1).unsqueeze(-1),
    "None": lambda w: w.sum(-1)[..., None],
}
EPS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda t: t,
    "added": lambda t: t + 1e-20,
    "first": lambda t: 1e-6 + t,
}


@st.composite
def routers(draw: Any) -> Any:
    score = draw(st.sampled_from(["sigmoid", "softmax", "softmax in fp32", "late softmax"]))
    biased = score != "late softmax" and draw(st.booleans())
    topk = TOPK[draw(st.sampled_from(list(TOPK)))]
    k = draw(st.integers(1, 5))
    total, shifted = SUMS[draw(st.sampled_from(list(SUMS)))], EPS[draw(st.sampled_from(list(EPS)))]
    renormalise, gathered, in_place = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    scale, scale_first = draw(st.sampled_from([None, 2.5, 2, 2.827])), draw(st.booleans())
    dtype, wide, narrow = DTYPES[draw(st.sampled_from(list(DTYPES)))], draw(st.booleans()), draw(st.booleans())
    bias_first, ids_first = draw(st.booleans()), draw(st.booleans())

    def function(logits: Tensor, bias: Tensor) -> Pair:
        values = logits.float() if wide else logits
        if score == "late softmax":
            weights, ids = topk(values, k)
            weights = weights.softmax(-1)
        else:
            scores = {
                "sigmoid": torch.sigmoid,
                "softmax": lambda v: v.softmax(-1),
                "softmax in fp32": lambda v: F.softmax(v, dim=v.dim() - 1, dtype=torch.float32),
            }[score](values)
            offset = bias.to(scores.dtype)
            chosen = topk((offset + scores if bias_first else scores + offset) if biased else scores, k)
            ids = chosen[1]
            weights = scores.gather(-1, ids) if biased or gathered else chosen[0]
        if renormalise:
            divisor = shifted(total(weights))
            weights = weights.div_(divisor) if in_place else weights / divisor
        if scale is not None:
            weights = scale * weights if scale_first else weights * scale
        weights = weights.to(dtype) if narrow else weights
        return (ids, weights) if ids_first else (weights, ids)  # type: ignore[return-value]

    return function, dtype, draw(st.sampled_from(SHAPES))


@given(case=routers(), seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_spelling_of_a_router_is_lifted(case: Any, seed: int) -> None:
    function, dtype, shape = case
    inputs = random_tensors([shape, (E,)], [dtype, torch.float32], seed)
    assert_lifted(function, inputs, [LiftRoute()], leaves=())


def _kimi(score: Tensor, bias: Tensor) -> Pair:
    ids = (score + bias).topk(4, dim=-1).indices
    return score.gather(-1, ids), ids


NEAR: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "the bias is in the weights": lambda x, b: _normed(*(x.sigmoid() + b).topk(4)),
    "another activation": lambda x, b: _kimi(x.tanh(), b),
    "ids only": lambda x, b: x.topk(4)[1],
    "selected by logits, weighed by scores": lambda x, b: x.sigmoid().gather(-1, x.topk(4)[1]),
    "selected by other scores": lambda x, b: x.sigmoid().gather(-1, ((x + 1).sigmoid() + b).topk(4)[1]),
    "softmax over the tokens": lambda x, b: _kimi(x.softmax(0), b),
    "gathered over the tokens": lambda x, b: x.sigmoid().gather(0, (x.sigmoid() + b).topk(4, -1)[1]),
    "top-k over the tokens": lambda x, b: _normed(*x.sigmoid().topk(4, dim=0)),
    "the smallest": lambda x, b: _normed(*x.sigmoid().topk(4, largest=False)),
    "bias with a factor": lambda x, b: x.sigmoid().gather(-1, torch.add(x.sigmoid(), b, alpha=2).topk(4)[1]),
    "a number as bias": lambda x, b: x.sigmoid().gather(-1, (x.sigmoid() + 1).topk(4)[1]),
    "bias subtracted": lambda x, b: x.sigmoid().gather(-1, (x.sigmoid() - b).topk(4)[1]),
    "a bias for each token": lambda x, b: x.sigmoid().gather(-1, (x.sigmoid() + b[:, None]).topk(4)[1]),
    "scores used elsewhere": lambda x, b: _with_scores(x, b),
    "masked": lambda x, b: x.sigmoid().gather(-1, (x.sigmoid() + b).masked_fill(b > 0, 0.0).topk(4)[1]),
    "shifted by one expert": lambda x, b: x.sigmoid().gather(-1, ((x.sigmoid() + b).topk(4)[1] + 1) % E),
    "weights of another rank": lambda x, b: x.sigmoid().gather(-1, (x.sigmoid() + b).topk(4)[1].flip(-1)),
    "the second result of sort": lambda x, b: x.sigmoid().gather(-1, x.sigmoid().sort(-1)[1].topk(4)[1]),
    "rounded scores": lambda x, b: x.sigmoid().gather(-1, (x.sigmoid().bfloat16().float() + b).topk(4)[1]),
    "softmax of what was scaled": lambda x, b: (x.topk(4)[0] * 2).softmax(-1),
    "softmax over the tokens at the end": lambda x, b: x.topk(4)[0].softmax(0),
}


def _normed(weights: Tensor, ids: Tensor) -> Pair:
    return weights / weights.sum(-1, keepdim=True), ids


def _with_scores(x: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    scores = x.sigmoid()
    return (*_kimi(scores, b), scores.mean())


@pytest.mark.parametrize("how", NEAR)
def test_what_is_nearly_a_router_is_not_lifted(how: str) -> None:
    inputs = random_tensors([(E, E), (E,)], [torch.float32] * 2, 0)
    assert_not_lifted(NEAR[how], inputs, LiftRoute())


PARTLY: dict[str, Callable[[Tensor], Tensor]] = {
    "sums over the tokens": lambda w: w / w.sum(0, keepdim=True),
    "sums of another token": lambda w: w / w.sum(-1, keepdim=True).flip(0),
    "sums along the tokens": lambda w: w / w.sum(-1),
    "the largest": lambda w: w / w.amax(-1, keepdim=True),
    "eps as a bound": lambda w: w / w.sum(-1, keepdim=True).clamp_min(1e-9),
    "scaled before": lambda w: (w * 2.5) / (w * 2.5).sum(-1, keepdim=True),
    "a scale for each token": lambda w: w * w.detach().abs().sum(-1, keepdim=True),
    "sum in another dtype": lambda w: w / w.sum(-1, keepdim=True, dtype=torch.float64),
}


@pytest.mark.parametrize("how", PARTLY)
def test_what_follows_the_selection_otherwise_stays_as_it_is(how: str) -> None:
    def function(logits: Tensor, bias: Tensor) -> Pair:
        weights, ids = _kimi(logits.sigmoid(), bias)
        return PARTLY[how](weights), ids

    inputs = random_tensors([(4, E), (E,)], [torch.float32] * 2, 0)
    leaves = ("div", "sum", "flip", "amax", "clamp_min", "mul", "abs", "detach")
    module = assert_lifted(function, inputs, [LiftRoute()], leaves=leaves)
    (route,) = (n for n in module.graph.nodes if "k3.route" in str(n.target))
    assert route.args[4] is False, "not renormalised by the op"
