"""Routed experts in five spellings times the routers: each is lifted, with the roundings that it has; each with one
thing wrong is not, for the right reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_spellings import (
    ACTIVATIONS,
    INVERSES,
    OFFSETS,
    SPELLINGS,
    WIDTH,
    E,
    K,
    N,
    example_inputs,
    gathered,
    grouped,
    masked,
    silu,
    stacked,
)
from small_graphs import reasons, rewritten, targets
from spelling_checks import assert_lifted, graph_of, random_tensors
from torch import Tensor

from k3rewrite import _torch_private as private
from k3rewrite.capture import capture
from k3rewrite.passes.lift_moe import LiftMoe
from k3rewrite.passes.lift_route import LiftRoute

LEAVES = ("experts", "slice", "permute", "view", "transpose", "t", "mm")
ROUTERS: dict[str, Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]] = {}


def router(name: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        ROUTERS[name] = function
        return function

    return register


@router("softmax, top-k")
def _softmax_first(logits: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(-1).topk(k, dim=-1)
    return weights, ids


@router("softmax, top-k, renormalised")
def _renormalised(logits: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(-1).topk(k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), ids


@router("top-k, softmax")
def _softmax_last(logits: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    weights, ids = logits.topk(k, dim=-1)
    return weights.softmax(-1), ids


@router("sigmoid with a bias, scaled")
def _sigmoid(logits: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    ids = (scores + bias).topk(k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


@st.composite
def mixtures(draw: Any, name: str, router: str) -> Any:
    looped = "loop" in name
    dtype = torch.float32 if looped else draw(st.sampled_from([torch.float32, torch.bfloat16]))
    narrow_weights = dtype is torch.bfloat16 and draw(st.booleans())
    act = ACTIVATIONS[draw(st.sampled_from(list(ACTIVATIONS)))]
    extra: dict[str, Any] = {}
    if name == "sorted, grouped":
        extra["offsets"] = OFFSETS[draw(st.sampled_from(list(OFFSETS)))]
        extra["inverse"] = INVERSES[draw(st.sampled_from(list(INVERSES)))]
        extra["sorted_weights"] = draw(st.booleans())
        extra["added"] = not narrow_weights and draw(st.booleans())
    chosen, top = ROUTERS[router], draw(st.integers(1, 3))

    def function(x: Tensor, gate: Tensor, bias: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        weights, ids = chosen(F.linear(x.float(), gate), bias, top)
        weights = weights.to(dtype) if narrow_weights else weights
        return SPELLINGS[name](x, ids, weights, w13, w2, act, **extra)

    return function, dtype, draw(st.sampled_from([1, 2, 5]))


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("name", SPELLINGS)
@given(data=st.data(), seed=st.integers(0, 99))
@settings(max_examples=3, deadline=None, derandomize=True)
def test_every_spelling_with_every_router_is_lifted(name: str, router: str, data: st.DataObject, seed: int) -> None:
    function, dtype, tokens = data.draw(mixtures(name, router))
    shapes = [(tokens, K), (E, K), (E,), (E, 2 * WIDTH, K), (E, N, WIDTH)]
    inputs = random_tensors(shapes, [dtype, torch.float32, torch.float32, dtype, dtype], seed)
    inputs = (*inputs[:3], inputs[3] * 0.3, inputs[4] * 0.3)
    assert_lifted(function, inputs, [LiftRoute(), LiftMoe()], leaves=LEAVES)


def _lifted(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Any:
    module = assert_lifted(function, inputs, [LiftMoe()], leaves=LEAVES)
    (node,) = [n for n in module.graph.nodes if "k3.experts" in str(n.target)]
    return module, node


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("kind", ["all one expert", "an id twice in a row", "neighbours", "last expert"])
def test_uneven_ids_give_the_same_result(name: str, kind: str) -> None:
    x, ids, weights, w13, w2 = example_inputs()
    ids = {
        "all one expert": torch.full_like(ids, 1),
        "an id twice in a row": ids[:, :1].repeat(1, 2),
        "neighbours": torch.arange(10).view(5, 2) % E,
        "last expert": torch.tensor([[E - 1, 0]] * 5),
    }[kind]
    spelling = SPELLINGS[name]
    module, _ = _lifted(lambda *args: spelling(*args, silu), (x, ids, weights, w13, w2))
    (got,) = module(x, ids, weights, w13, w2)
    torch.testing.assert_close(got, spelling(x, ids, weights, w13, w2, silu), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_step_without_a_token(name: str) -> None:
    inputs = example_inputs(tokens=0)
    spelling = SPELLINGS[name]
    module, _ = _lifted(lambda *args: spelling(*args, silu), inputs)
    (got,) = module(*inputs)
    assert got.shape == (0, N)


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_count_and_to_go_back(offsets: str, inverse: str, dtype: torch.dtype) -> None:
    def function(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return grouped(x, ids, weights, w13, w2, silu, offsets=OFFSETS[offsets], inverse=INVERSES[inverse])

    module, node = _lifted(function, example_inputs(dtype))
    assert list(node.args[1:3]) == module.graph.find_nodes(op="placeholder")[1:3], "ids and weights as they came"
    assert not {"sort", "argsort", "cumsum", "scatter_add"} & set(targets(module))


@pytest.mark.parametrize("spelling", [grouped, gathered, stacked, masked])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_tokens_may_be_a_symbol(spelling: Any, dtype: torch.dtype) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            _, _, _, w13, w2 = example_inputs(dtype)
            self.w13, self.w2 = (torch.nn.Parameter(w, requires_grad=False) for w in (w13, w2))

        def forward(self, x: Tensor, logits: Tensor) -> Tensor:
            weights, ids = logits.softmax(-1).topk(2)
            return spelling(x, ids, weights, self.w13, self.w2, silu)

    captured = capture(Model(), (torch.randn(5, K, dtype=dtype), torch.randn(5, E)), dynamic=True)
    mode = private.graph_fake_mode(captured.module.graph)
    guards = private.guard_count(mode)
    report = rewritten(LiftMoe(), captured.module)
    assert report.matched == 1, reasons(report)
    assert not private.guard_texts(mode, guards), "nothing is assumed about the number of tokens"


def test_a_window_of_local_experts_leaves_out_the_others() -> None:
    """Ids of other ranks, -1 among them, are sent to expert 0 with weight zero."""

    def function(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        local = ids - 2
        inside = (local >= 0) & (local < E)
        return gathered(x, torch.where(inside, local, 0), weights * inside, w13, w2, silu)

    x, ids, weights, w13, w2 = example_inputs()
    ids = torch.tensor([[2, 3], [-1, 5], [-1, -1], [6, 9], [4, 2]])
    inputs = (x, ids, weights, w13, w2)
    masks = ("sub", "ge", "lt", "bitwise_and", "where", "mul", "scalar_tensor", "full")
    module = assert_lifted(function, inputs, [LiftMoe()], leaves=(*LEAVES, *masks))
    (got,) = module(*inputs)
    torch.testing.assert_close(got, function(x, ids, weights, w13, w2), rtol=1e-5, atol=1e-5)
    assert not got[2:4].any()


# ------------------------------------------------------------------ rounding points

B, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("act", "weights", "expected"),
    [
        # product, activation, hidden, route, combination, result
        ("SiLU", B, (B, B, B, B, B, B)),
        ("SiLU", F32, (B, B, B, B, F32, B)),
        ("SiTU", F32, (B, F32, B, B, F32, B)),
        ("SiLU in fp32", B, (B, F32, B, B, B, B)),
    ],
)
def test_rounding_points_are_read_off_the_casts(act: str, weights: torch.dtype, expected: tuple[Any, ...]) -> None:
    inputs = example_inputs(B)
    inputs = (*inputs[:2], inputs[2].to(weights), *inputs[3:])
    _, node = _lifted(lambda *args: gathered(*args, ACTIVATIONS[act]), inputs)
    assert node.args[-6:] == expected


def test_products_in_fp32_of_narrow_weights_are_no_rounding() -> None:
    def function(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return gathered(x.float(), ids, weights, w13.float(), w2.float(), silu).to(x.dtype)

    _, node = _lifted(function, example_inputs(B))
    assert node.args[-6:] == (F32, F32, F32, F32, F32, B)
    assert node.args[0].meta["val"].dtype is B and node.args[3].meta["val"].dtype is B


def test_sums_in_bf16_at_an_index_change_a_rounding() -> None:
    def function(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return grouped(x, ids, weights.to(x.dtype), w13, w2, silu, added=True)

    module = graph_of(function, example_inputs(B))
    (reason,) = reasons(rewritten(LiftMoe(), module))
    assert "allow_changes_rounding" in reason
    assert rewritten(LiftMoe(), graph_of(function, example_inputs(B)), allow=True).matched == 1


def test_gate_and_up_may_be_apart_interleaved_or_stored_the_other_way_round() -> None:
    x, ids, weights, w13, w2 = example_inputs()

    def apart(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
        rows = x.repeat_interleave(2, 0).unsqueeze(2)
        flat = ids.flatten()
        hidden = F.silu(torch.bmm(w1[flat], rows)) * torch.bmm(w3[flat], rows)
        return (torch.bmm(w2[flat], hidden).view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)

    def interleaved(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return gathered(x, ids, weights, w13, w2, lambda both: F.silu(both[..., ::2]) * both[..., 1::2])

    def transposed(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        hidden = silu(torch.bmm(x.repeat_interleave(2, 0).unsqueeze(1), w13[ids.flatten()]))
        return (torch.bmm(hidden, w2[ids.flatten()]).view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)

    for function, inputs, views in (
        (apart, (x, ids, weights, w13[:, :WIDTH].contiguous(), w13[:, WIDTH:].contiguous(), w2), []),
        (interleaved, (x, ids, weights, w13, w2), ["slice", "slice"]),
        (
            transposed,
            (x, ids, weights, w13.mT.contiguous(), w2.mT.contiguous()),
            ["slice", "permute", "slice", "permute", "permute"],
        ),
    ):
        module, _ = _lifted(function, inputs)
        assert targets(module)[:-1] == views, "the stored weights, seen as the op wants them"
        torch.testing.assert_close(module(*inputs)[0], function(*inputs), rtol=1e-5, atol=1e-5)


def test_counts_that_the_model_returns_as_well_are_kept() -> None:
    def function(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        flat = ids.flatten()
        counts = flat.new_zeros(E).scatter_add(0, flat, torch.ones_like(flat))
        return grouped(x, ids, weights, w13, w2, silu, offsets=lambda _: counts.cumsum(0).int()), counts

    leaves = (*LEAVES, "scatter_add", "new_zeros", "ones_like")
    assert_lifted(function, example_inputs(B), [LiftMoe()], leaves=leaves)
