"""Gated MLPs in many spellings: each is lifted; each spelling with one thing wrong is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import rewritten
from spelling_checks import assert_lifted, assert_not_lifted, graph_of, random_tensors
from torch import Tensor

from k3rewrite.passes.lift_mlp import LiftMlp

D, INNER = 8, 12
Linear = Callable[[Tensor, Tensor], Tensor]
LINEAR: dict[str, Linear] = {
    "F.linear": F.linear,
    "@ t()": lambda x, w: x @ w.t(),
    "@ T": lambda x, w: x @ w.T,
    "@ mT": lambda x, w: x @ w.mT,
    "transpose": lambda x, w: torch.matmul(x, w.transpose(-1, -2)),
    "permute": lambda x, w: x @ w.permute(1, 0),
}
SPLIT: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "chunk": lambda y: y.chunk(2, dim=-1),
    "chunk from the front": lambda y: y.chunk(2, dim=y.dim() - 1),
    "split": lambda y: y.split(INNER, dim=-1),
    "split sizes": lambda y: y.split([INNER, INNER], dim=-1),
    "tensor_split": lambda y: torch.split(y, y.shape[-1] // 2, -1),
}
SHAPES = ((5, D), (2, 3, D), (1, D), (INNER, D), (0, D))


def product(factors: Sequence[Any], seed: int) -> Tensor:
    """The product of tensors and numbers in a random order and association."""
    pool, chance = list(factors), random.Random(seed)
    while len(pool) > 1:
        a, b = (pool.pop(chance.randrange(len(pool))) for _ in range(2))
        pool.append(a * b)
    return pool[0]


def gated(g: Tensor, u: Tensor, how: str, beta: float, linear_beta: float, seed: int) -> Tensor:
    def tanh(value: Tensor, scale: float) -> Tensor:
        return torch.tanh(value / scale if seed % 2 else value * (1 / scale))

    if how == "silu":
        return F.silu(g) * u if seed % 2 else u * F.silu(g)
    if how == "product":
        return product([g, torch.sigmoid(g), u], seed)
    if how == "situ":
        return product([beta, tanh(g, beta), torch.sigmoid(g), linear_beta, tanh(u, linear_beta)], seed)
    return product([beta, tanh(g, beta), torch.sigmoid(g), u], seed)


@st.composite
def mlps(draw: Any) -> Any:
    linear = [LINEAR[draw(st.sampled_from(list(LINEAR)))] for _ in range(3)]
    stacked = draw(st.sampled_from([None, *SPLIT]))
    how = draw(st.sampled_from(["silu", "product", "situ", "plain up"]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    wide = draw(st.sampled_from(["halves", "before the split"])) if dtype != torch.float32 else "nothing"
    if how == "silu" and draw(st.booleans()):
        wide = "nothing"
    beta, linear_beta = draw(st.sampled_from([4.0, 1.5, 3])), draw(st.sampled_from([25.0, 2, 0.75]))
    seed = draw(st.integers(0, 9999))

    def function(x: Tensor, first: Tensor, second: Tensor, down: Tensor) -> Tensor:
        if stacked is None:
            g, u = linear[0](x, first), linear[1](x, second)
        else:
            both = linear[0](x, first)
            g, u = SPLIT[stacked](both.float() if wide == "before the split" else both)
        if wide != "nothing":
            g, u = g.float(), u.float()
        return linear[2](gated(g, u, how, beta, linear_beta, seed).to(x.dtype), down)

    first = (2 * INNER, D) if stacked else (INNER, D)
    return function, dtype, [draw(st.sampled_from(SHAPES)), first, (INNER, D), (D, INNER)]


@given(case=mlps(), seed=st.integers(0, 99))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_every_spelling_of_a_gated_mlp_is_lifted(case: Any, seed: int) -> None:
    function, dtype, shapes = case
    inputs = tuple(t * 0.5 for t in random_tensors(shapes, [dtype] * 4, seed))
    assert_lifted(function, inputs, [LiftMlp()], leaves=("view", "_unsafe_view", "slice"))


@pytest.mark.parametrize(("how", "allowed"), [("silu", True), ("product", False), ("situ", False), ("plain up", False)])
def test_in_a_narrow_dtype_only_silu_itself_keeps_its_roundings(how: str, allowed: bool) -> None:
    def function(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(gated(F.linear(x, gate), F.linear(x, up), how, 4.0, 25.0, 1), down)

    inputs = random_tensors([(5, D), (INNER, D), (INNER, D), (D, INNER)], [torch.bfloat16] * 4, 0)
    if allowed:
        assert_lifted(function, inputs, [LiftMlp()], leaves=())
        return
    (reason,) = assert_not_lifted(function, inputs, LiftMlp())
    assert "changes a rounding" in reason
    assert rewritten(LiftMlp(), graph_of(function, inputs), allow=True).matched == 1


Case = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def _situ(g: Tensor, u: Tensor) -> Tensor:
    return 4 * torch.tanh(g / 4) * torch.sigmoid(g) * (25 * torch.tanh(u / 25))


def _two(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, a), F.linear(x, b)


# every matrix is square here, so that shapes betray nothing
NEAR: dict[str, Case] = {
    "gate and up of different inputs": lambda x, a, b, c: F.linear(F.silu(F.linear(x, a)) * F.linear(x + 1, b), c),
    "no gate in the product": lambda x, a, b, c: F.linear(torch.sigmoid(F.linear(x, a)) * F.linear(x, b), c),
    "added": lambda x, a, b, c: F.linear(F.silu(F.linear(x, a)) + F.linear(x, b), c),
    "no up": lambda x, a, b, c: F.linear(F.silu(F.linear(x, a)), c),
    "two activations": lambda x, a, b, c: F.linear(F.silu(F.linear(x, a)) * F.silu(F.linear(x, b)), c),
    "shifted activation": lambda x, a, b, c: F.linear((F.silu(F.linear(x, a)) + 1) * F.linear(x, b), c),
    "shifted up": lambda x, a, b, c: F.linear(F.silu(F.linear(x, a)) * (F.linear(x, b) + 1), c),
    "doubled": lambda x, a, b, c: F.linear(2 * F.silu(F.linear(x, a)) * F.linear(x, b), c),
    "a product doubled": lambda x, a, b, c: F.linear(
        2 * F.linear(x, a) * torch.sigmoid(F.linear(x, a)) * F.linear(x, b), c
    ),
    "sigmoid of up": lambda x, a, b, c: F.linear(F.linear(x, a) * torch.sigmoid(F.linear(x, b)) * F.linear(x, b), c),
    "bias": lambda x, a, b, c: F.linear(F.silu(F.linear(x, a, a[0])) * F.linear(x, b), c),
    "bias at the end": lambda x, a, b, c: F.linear(F.silu(F.linear(x, a)) * F.linear(x, b), c, c[0]),
    "wrong constant": lambda x, a, b, c: F.linear(1.25 * _situ(*_two(x, a, b)), c),
    "constants exchanged": lambda x, a, b, c: F.linear(
        25 * torch.tanh(F.linear(x, a) / 4) * torch.sigmoid(F.linear(x, a)) * (5 * torch.tanh(F.linear(x, b) / 25)), c
    ),
    "halves exchanged in the gate": lambda x, a, b, c: F.linear(
        4 * torch.tanh(F.linear(x, b) / 4) * torch.sigmoid(F.linear(x, a)) * (25 * torch.tanh(F.linear(x, b) / 25)), c
    ),
    "tanh of a sum": lambda x, a, b, c: F.linear(
        4 * torch.tanh(F.linear(x, a) + 4) * torch.sigmoid(F.linear(x, a)) * (25 * torch.tanh(F.linear(x, b) / 25)), c
    ),
    "tokens exchanged": lambda x, a, b, c: F.linear((F.silu(F.linear(x, a)) * F.linear(x, b)).t(), c),
    "gate exchanged with tokens": lambda x, a, b, c: F.linear(F.silu(F.linear(x, a).t()) * F.linear(x, b), c),
    "both exchanged with tokens": lambda x, a, b, c: F.linear(F.silu(F.linear(x, a).t()) * F.linear(x, b).t(), c),
    "down projection not transposed": lambda x, a, b, c: (F.silu(F.linear(x, a)) * F.linear(x, b)) @ c,
    "gate projection not transposed": lambda x, a, b, c: F.linear(F.silu(x @ a) * F.linear(x, b), c),
    "none transposed": lambda x, a, b, c: (F.silu(x @ a) * (x @ b)) @ c,
    "a permutation that does nothing": lambda x, a, b, c: F.linear(F.silu(x @ a.permute(0, 1)) * F.linear(x, b), c),
    "a transposition that does nothing": lambda x, a, b, c: F.linear(F.silu(x @ a.transpose(1, 1)) * F.linear(x, b), c),
    "half of the width": lambda x, a, b, c: F.linear(
        F.silu(F.linear(x, a)[:, :4]) * F.linear(x, b)[:, :4], c[:, :4].contiguous()
    ),
    "rows flipped": lambda x, a, b, c: F.linear(F.silu(F.linear(x, a)).flip(0) * F.linear(x, b), c),
    "an outer product": lambda x, a, b, c: F.linear(
        (F.silu(F.linear(x, a)).unsqueeze(1) * F.linear(x, b).unsqueeze(0)).reshape(8, 64), c.repeat(1, 8)
    ),
    "rounded in the middle": lambda x, a, b, c: F.linear(
        (F.silu(F.linear(x, a)).bfloat16().float()) * F.linear(x, b), c
    ),
    "rounded at the end": lambda x, a, b, c: F.linear(
        (F.silu(F.linear(x, a)) * F.linear(x, b)).bfloat16(), c.bfloat16()
    ),
    "rounded up": lambda x, a, b, c: F.linear(F.silu(F.linear(x, a)) * F.linear(x, b).bfloat16().float(), c),
    "halves of one half": lambda x, a, b, c: F.linear(F.silu(F.linear(x, a)[:, :4]) * F.linear(x, a)[:, 4:], c[:, :4]),
    "gate returned": lambda x, a, b, c: _with_gate(x, a, b, c),
    "activation returned": lambda x, a, b, c: _with_activation(x, a, b, c),
}
STACKED: dict[str, Case] = {
    "unequal": lambda x, a, b, c: _stacked(F.linear(x, a).split([6, 10], -1), c, 6),
    "over the tokens": lambda x, a, b, c: _stacked(F.linear(x, a).chunk(2, 0), c, 16),
    "thirds": lambda x, a, b, c: _stacked(F.linear(x, b).chunk(3, -1)[:2], c, 8),
    "exchanged": lambda x, a, b, c: _stacked(F.linear(x, a).chunk(2, -1)[::-1], c, 8),
    "one half twice": lambda x, a, b, c: _stacked((F.linear(x, a).chunk(2, -1)[0],) * 2, c, 8),
    "interleaved": lambda x, a, b, c: _stacked(F.linear(x, a).view(8, 8, 2).unbind(-1), c, 8),
    "rounded before the split": lambda x, a, b, c: _stacked(
        [h.float() for h in F.linear(x, a).bfloat16().chunk(2, -1)], c, 8
    ),
}  # fmt: skip


def _stacked(halves: Sequence[Tensor], down: Tensor, width: int) -> Tensor:
    g, u = halves
    return F.linear(F.silu(g) * u[:, : g.shape[1]], down[:, : g.shape[1]].contiguous())


def _with_gate(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    g = F.linear(x, a)
    return F.linear(F.silu(g) * F.linear(x, b), c), g


def _with_activation(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    activated = F.silu(F.linear(x, a)) * F.linear(x, b)
    return F.linear(activated, c), activated


@pytest.mark.parametrize("how", NEAR)
def test_what_is_nearly_a_gated_mlp_is_not_lifted(how: str) -> None:
    inputs = random_tensors([(8, 8)] * 4, [torch.float32] * 4, 0)
    assert_not_lifted(NEAR[how], inputs, LiftMlp())


@pytest.mark.parametrize("how", STACKED)
def test_a_stacked_projection_is_cut_into_its_halves_or_not_at_all(how: str) -> None:
    inputs = random_tensors([(8, 8), (16, 8), (24, 8), (8, 16)], [torch.float32] * 4, 0)
    assert_not_lifted(STACKED[how], inputs, LiftMlp())
