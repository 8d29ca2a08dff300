"""What is nearly a mixture of experts: each is left alone, for the right reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from moe_spellings import INVERSES, OFFSETS, WIDTH, E, N, example_inputs, grouped, silu
from small_graphs import reasons, rewritten, targets
from spelling_checks import assert_lifted, assert_not_lifted
from torch import Tensor

from k3rewrite.capture import capture
from k3rewrite.passes.lift_moe import LiftMoe


def _routes(x: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    hidden = act(torch.bmm(w13[ids.flatten()], x.repeat_interleave(ids.shape[1], 0).unsqueeze(2)).squeeze(2))
    return torch.bmm(w2[ids.flatten()], hidden.unsqueeze(2)).squeeze(2)


def _summed(routes: Tensor, weights: Tensor) -> Tensor:
    return (routes.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


def _unit(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, ids, w, w13, w2: _summed(_routes(x, ids, w13, w2, lambda b: function(*b.chunk(2, -1))), w)


def _sorted_with(offsets: Any = OFFSETS["scatter_add"], inverse: Any = INVERSES["argsort"]) -> Callable[..., Tensor]:
    return lambda x, ids, w, w13, w2: grouped(x, ids, w, w13, w2, silu, offsets=offsets, inverse=inverse)


def _loop_with_bias(x: Tensor, ids: Tensor, w: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], N)
    for e in range(E):
        routes = F.linear(silu(F.linear(x, w13[e])), w2[e])
        out = out + (routes + 1 if e == 2 else routes) * (w * (ids == e)).sum(-1, keepdim=True)
    return out


def _loop_over(numbers: list[int], shares: list[int] | None = None) -> Callable[..., Tensor]:
    def function(x: Tensor, ids: Tensor, w: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], N)
        for e, s in zip(numbers, shares or numbers, strict=True):
            out = out + F.linear(silu(F.linear(x, w13[e])), w2[e]) * (w * (ids == s)).sum(-1, keepdim=True)
        return out

    return function


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a bias of the down projection": (
        lambda x, ids, w, w13, w2: _summed(_routes(x, ids, w13, w2, silu) + w13[0, 0, :N], w), "have a bias",
    ),
    "a bias of gate and up": (
        lambda x, ids, w, w13, w2: _summed(_routes(x, ids, w13, w2, lambda b: silu(b + x[0, 0])), w), "have a bias",
    ),
    "a bias of each expert": (
        lambda x, ids, w, w13, w2: _summed(_routes(x, ids, w13, w2, silu) + w2[:, :, 0][ids.flatten()], w),
        "have a bias",
    ),
    "a bias of one expert": (_loop_with_bias, "bias"),
    "weights before the down projection": (
        lambda x, ids, w, w13, w2: _routes(x, ids, w13, w2, lambda b: silu(b) * w.reshape(-1, 1)).view(5, 2, N).sum(1),
        "before the down projection",
    ),
    "weights on the input": (
        lambda x, ids, w, w13, w2: _summed(
            torch.bmm(w2[ids.flatten()], silu(torch.bmm(
                w13[ids.flatten()], (x.repeat_interleave(2, 0) * w.reshape(-1, 1)).unsqueeze(2)
            ).squeeze(2)).unsqueeze(2)).squeeze(2), w,
        ), "not rows of a tensor, one for each token",
    ),
    "the activation is returned": (
        lambda x, ids, w, w13, w2: _seen(x, ids, w, w13, w2), "also used by",
    ),
    "GELU": (_unit(lambda g, u: F.gelu(g) * u), "gelu"),
    "ReLU": (_unit(lambda g, u: F.relu(g) * u), "relu"),
    "a clamped gate": (_unit(lambda g, u: F.silu(g.clamp(max=7.0)) * u), "clamped"),
    "a clamped up half": (_unit(lambda g, u: F.silu(g) * u.clamp(-7.0, 7.0)), "clamped"),
    "a shifted up half": (_unit(lambda g, u: g * torch.sigmoid(g * 1.702) * (u + 1)), "SiLU"),
    "no gate": (
        lambda x, ids, w, w13, w2: _summed(_routes(x, ids, w13[:, :WIDTH], w2, F.silu), w), "SiLU",
    ),
    "a wrong constant": (
        _unit(lambda g, u: 5 * torch.tanh(g / 4) * torch.sigmoid(g) * (25 * torch.tanh(u / 25))), "beta * linear_beta",
    ),
    "not the inverse order": (_sorted_with(inverse=lambda order: order), "not the inverse of the permutation"),
    "the order of other ids": (
        _sorted_with(inverse=lambda order: order.flip(0).argsort()), "inverse of the permutation|order of the tokens",
    ),
    "offsets of other ids": (_sorted_with(offsets=lambda flat: OFFSETS["scatter_add"](E - 1 - flat)), "other ids"),
    "counts that are not summed up": (
        _sorted_with(offsets=lambda flat: OFFSETS["scatter_add"](flat).diff(prepend=flat[:1].int()).int()), "offsets",
    ),
    "an expert left out of a loop": (_loop_over([0, 1, 3]), "neighbours"),
    "an expert twice in a loop": (_loop_over([0, 1, 1, 2]), "neighbours"),
    "an expert with the share of another": (_loop_over([0, 1, 2, 3], [1, 0, 2, 3]), "share of another"),
    "no weights": (
        lambda x, ids, w, w13, w2: _routes(x, ids, w13, w2, silu).view(5, 2, N).sum(1), "not an output times",
    ),
    "scattered weights of ids that may be equal": (
        lambda x, ids, w, w13, w2: (
            (silu(x @ w13.transpose(1, 2)) @ w2.mT) * torch.zeros(5, E).scatter(1, ids, w).t().unsqueeze(-1)
        ).sum(0), "replaces another",
    ),
}  # fmt: skip


def _seen(x: Tensor, ids: Tensor, w: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    hidden = silu(torch.bmm(w13[ids.flatten()], x.repeat_interleave(2, 0).unsqueeze(2)).squeeze(2))
    return _summed(torch.bmm(w2[ids.flatten()], hidden.unsqueeze(2)).squeeze(2), w), hidden.amax(-1)


@pytest.mark.parametrize("how", REFUSED)
def test_what_is_nearly_a_mixture_is_left_alone_for_the_right_reason(how: str) -> None:
    function, expected = REFUSED[how]
    dtype = torch.bfloat16 if any(word in how for word in ("order", "offsets", "counts")) else torch.float32
    found = assert_not_lifted(function, example_inputs(dtype), LiftMoe())
    assert any(part in reason for reason in found for part in expected.split("|")), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_whose_length_depends_on_the_data_are_no_offsets(dtype: torch.dtype) -> None:
    """A bincount is a tensor of unknown length, with minlength too, and that length is checked in the graph."""
    function = _sorted_with(offsets=lambda flat: flat.bincount(minlength=E).cumsum(0).int())
    report = rewritten(LiftMoe(), capture(function, example_inputs(dtype)).module)
    assert (report.candidates, report.matched) == (1, 0)
    assert "count with scatter_add or histc" in reasons(report)[0]


def test_a_loop_over_separate_parameters_is_left_alone_because_they_would_be_copied() -> None:
    def function(x: Tensor, ids: Tensor, w: Tensor, *parameters: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], N)
        for e in range(E):
            first, second = parameters[2 * e : 2 * e + 2]
            out = out + F.linear(silu(F.linear(x, first)), second) * (w * (ids == e)).sum(-1, keepdim=True)
        return out

    x, ids, weights, w13, w2 = example_inputs()
    parameters = [part.clone() for e in range(E) for part in (w13[e], w2[e])]
    found = assert_not_lifted(function, (x, ids, weights, *parameters), LiftMoe())
    assert len(found) == E and all("keep them in one tensor" in reason for reason in found)


def test_a_loop_over_a_window_of_the_experts_is_a_mixture_of_these() -> None:
    module = assert_lifted(_loop_over([1, 2]), example_inputs(), [LiftMoe()], leaves=("experts", "slice"))
    (node,) = [n for n in module.graph.nodes if "k3.experts" in str(n.target)]
    first = [a.name for a in node.target._schema.arguments].index("first")
    assert node.args[first] == 1 and node.args[3].meta["val"].shape[0] == 2
    assert "slice" in targets(module)
