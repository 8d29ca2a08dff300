"""Routing, the experts in their spellings and storages, SiTU, and the tail of a MoE layer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_cases import random_model, relative_error
from torch import Tensor

from k3rewrite.models.kimi_k3 import KimiK3Config
from k3rewrite.models.kimi_k3.activation import situ
from k3rewrite.models.kimi_k3.grouped_mm import grouped_mm
from k3rewrite.models.kimi_k3.moe import LatentMoE
from k3rewrite.models.kimi_k3.router import Router


def layer(dtype: torch.dtype = torch.float64, seed: int = 0, **changes: object) -> LatentMoE:
    return random_model(KimiK3Config.tiny(**changes).with_layers(2), dtype, seed).model.layers[1].block_sparse_moe


def router(logits: Tensor, bias: list[float], *, top_k: int, **changes: object) -> tuple[Tensor, Tensor]:
    """(weights, ids) of a router whose logits `[T, E]` and bias are given."""
    experts = logits.shape[1]
    config = KimiK3Config.tiny(num_experts=experts, num_experts_per_token=top_k, hidden_size=experts, **changes)
    gate = Router(config, dtype=logits.dtype)
    gate.weight.copy_(torch.eye(experts))
    gate.e_score_correction_bias.copy_(torch.tensor(bias))
    weights, ids = gate(logits)
    order = ids.argsort(dim=1)
    return weights.gather(1, order), ids.gather(1, order)


def test_bias_selects_and_scores_weigh() -> None:
    """Fault 29: logits [0, 2, -1], bias [1, 0, .5], two of three: weights .362 and .638, not the biased ones."""
    weights, ids = router(torch.tensor([[0.0, 2.0, -1.0]]), [1.0, 0.0, 0.5], top_k=2)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.362, 0.638]]), rtol=0, atol=5e-4)
    _, ids = router(torch.tensor([[0.0, 2.0, -1.0]]), [1.0, -1.0, 0.9], top_k=2)
    assert ids.tolist() == [[0, 2]]


def test_biased_scores_below_minus_one_are_selected() -> None:
    """Fault 22: all biased scores are below -1 and the third is the largest."""
    _, ids = router(torch.full((1, 4), -2.2), [-5.0, -5.0, -4.0, -5.0], top_k=1)
    assert ids.tolist() == [[2]]


@pytest.mark.parametrize(("logit", "total"), [(-120.0, None), (-50.0, 0.0716)])
def test_tiny_scores_follow_the_formula(logit: float, total: float | None) -> None:
    """Faults 27, 28: finite at -120; at -50 the 1e-20 in the denominator is seen."""
    weights, _ = router(torch.full((1, 8), logit), [0.0] * 8, top_k=4)
    assert torch.isfinite(weights).all()
    if total is not None:
        assert weights.sum().item() == pytest.approx(4 * 1.93e-22 / (4 * 1.93e-22 + 1e-20), rel=1e-2)
        assert weights.sum().item() == pytest.approx(total, abs=2e-4)


@pytest.mark.parametrize("renormalise", [True, False])
def test_the_scale_is_applied_once_in_both_branches(renormalise: bool) -> None:
    """Fault 30."""
    plain, scaled = (
        router(
            torch.tensor([[0.3, 1.0, -1.0]]),
            [0.0] * 3,
            top_k=2,
            moe_renormalize=renormalise,
            routed_scaling_factor=factor,
        )[0]
        for factor in (1.0, 2.5)
    )
    torch.testing.assert_close(scaled, plain * 2.5)
    assert plain.sum().item() == pytest.approx(1.0) or not renormalise


@settings(max_examples=20, deadline=None)
@given(levels=st.lists(st.sampled_from([-1.0, 0.0, 0.5]), min_size=16, max_size=16), top_k=st.integers(1, 8))
def test_ties_give_a_valid_selection(levels: list[float], top_k: int) -> None:
    """Which of equal experts is taken is torch's choice; that they are distinct, in range and the best is not."""
    weights, ids = router(torch.tensor([levels]), [0.0] * 16, top_k=top_k)
    chosen = ids[0].tolist()
    assert len(set(chosen)) == top_k and all(0 <= i < 16 for i in chosen)
    assert sorted((levels[i] for i in chosen), reverse=True) == sorted(levels, reverse=True)[:top_k]
    score = torch.tensor([levels[i] for i in chosen]).sigmoid()
    torch.testing.assert_close(weights[0], score / score.sum())


def test_high_expert_ids_are_reached() -> None:
    """Fault 24: 896 experts, logit 5 at 700."""
    logits = torch.zeros(1, 896)
    logits[0, 700] = 5.0
    _, ids = router(logits, [0.0] * 896, top_k=1)
    assert ids.tolist() == [[700]]


def test_scores_are_fp32_from_bf16_operands() -> None:
    """A bf16 result would tie these two experts."""
    config = KimiK3Config.tiny(num_experts=2, num_experts_per_token=1, hidden_size=2)
    gate = Router(config, dtype=torch.bfloat16)
    gate.weight.copy_(torch.tensor([[1.0, 2.0**-9], [1.0, 0.0]]))
    gate.e_score_correction_bias.zero_()
    weights, ids = gate(torch.ones(1, 2, dtype=torch.bfloat16))
    assert ids.tolist() == [[0]] and weights.dtype is torch.float32


def test_the_correction_bias_changes_selections() -> None:
    """The random bias is wide enough to matter, or no test could see it."""
    gate = layer().gate
    x = torch.randn(64, 96, dtype=torch.float64)
    _, biased = gate(x)
    gate.e_score_correction_bias.zero_()
    _, plain = gate(x)
    assert 0.1 < (biased.sort(-1)[0] != plain.sort(-1)[0]).any(-1).double().mean() < 1


def test_situ_by_hand() -> None:
    """Fault 42: [4.83, 98.4], where SiLU would give [5.72, 1800]; halves are not interchangeable; no clip without λ."""
    gate, up = torch.tensor([3.0, 30.0]), torch.tensor([2.0, 60.0])
    torch.testing.assert_close(situ(gate, up, 4.0, 25.0), torch.tensor([4.83, 98.4]), rtol=2e-3, atol=0)
    assert not torch.allclose(situ(gate, up, 4.0, 25.0), situ(up, gate, 4.0, 25.0))
    clipped = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate)
    torch.testing.assert_close(situ(gate, up, 4.0, None), clipped * up)


def test_situ_rounds_once() -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(4096) * 6).bfloat16(), (torch.randn(4096) * 30).bfloat16()
    exact = situ(gate.double(), up.double(), 4.0, 25.0)
    got = situ(gate, up, 4.0, 25.0)
    assert got.dtype is torch.bfloat16
    assert ((got.double() - exact).abs() / exact.abs().clamp_min(1e-30)).max() <= 2**-8


@settings(max_examples=20, deadline=None)
@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_grouped_mm_in_all_dtypes(counts: list[int], seed: int) -> None:
    """Empty groups anywhere, also all of them; fp64 takes its own way to the same values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), 16, generator=generator, dtype=torch.float64)
    weights = torch.randn(len(counts), 24, 16, generator=generator, dtype=torch.float64)
    offsets = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    blocks = zip(x.split(counts), weights, strict=True)
    expected = torch.cat([rows @ matrix.T for rows, matrix in blocks])
    torch.testing.assert_close(grouped_mm(x, weights, offsets), expected)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        got = grouped_mm(x.to(dtype), weights.to(dtype), offsets)
        assert got.dtype is dtype and got.shape == expected.shape
        assert sum(counts) == 0 or relative_error(got, expected) < bound


@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(0, 9),
    experts=st.sampled_from(["bf16", "mxfp4"]),
    skew=st.sampled_from(["any", "one expert first", "same for all"]),
    seed=st.integers(0, 99),
)
def test_grouped_equals_gather_equals_a_loop(tokens: int, experts: str, skew: str, seed: int) -> None:
    """9 tokens x 4 routes pass the 16 experts, 1 to 3 stay below: both bounds on the experts that are unpacked."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(tokens, 64, generator=generator, dtype=torch.float64)
    weights = torch.rand(tokens, 4, generator=generator, dtype=torch.float64)
    ids = torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(tokens)] or [torch.zeros(4).long()])
    ids = ids[:tokens]
    if skew == "one expert first" and tokens:
        ids[:, 0] = 15
        ids[:, 1] = 15  # twice in one row is legal, and both are added
    elif skew == "same for all":
        ids = ids[:1].expand(tokens, 4)
    grouped, gather = (layer(experts=experts, moe_form=form).experts for form in ("grouped", "gather"))
    got = grouped(z, weights, ids)
    torch.testing.assert_close(gather(z, weights, ids), got, rtol=1e-12, atol=1e-12)
    w13, w2 = grouped.take(torch.arange(16))
    for token in range(tokens):
        expected = torch.zeros(64, dtype=torch.float64)
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = (w13[expert] @ z[token]).chunk(2)
            expected += weight * (w2[expert] @ situ(gate, up, 4.0, 25.0))
        torch.testing.assert_close(got[token], expected, rtol=1e-10, atol=1e-10)
    assert got.shape == (tokens, 64)


@pytest.mark.parametrize("experts", ["bf16", "mxfp4"])
def test_bf16_spellings_agree_with_fp64(experts: str) -> None:
    torch.manual_seed(0)
    z, weights = torch.randn(12, 64).bfloat16(), torch.rand(12, 4)
    ids = torch.stack([torch.randperm(16)[:4] for _ in range(12)])
    exact = layer(torch.bfloat16, experts=experts).experts.double()(z.double(), weights.double(), ids)
    errors = []
    for form in ("grouped", "gather"):
        got = layer(torch.bfloat16, experts=experts, moe_form=form).experts(z, weights, ids)
        assert got.dtype is torch.bfloat16
        errors.append(relative_error(got, exact))
    assert max(errors) < 0.01


def test_route_outputs_are_rounded_before_the_weighted_sum() -> None:
    """Each expert's output leaves in bf16; weights and sum are fp32 and rounded once."""
    torch.manual_seed(0)
    moe = layer(torch.bfloat16, experts="bf16")
    z, weights, ids = torch.randn(3, 64).bfloat16(), torch.rand(3, 4), torch.arange(12).view(3, 4)
    routed = moe.experts._gather(z, ids).view(3, 4, 64)
    assert routed.dtype is torch.bfloat16
    expected = (routed.float() * weights.unsqueeze(2)).sum(1).bfloat16()
    assert torch.equal(moe.experts(z, weights, ids), expected)


def test_the_tail_norms_the_combined_latent() -> None:
    """out = W_up RMS(y) + shared(x): the norm is on the sum over experts, the shared expert is not weighted."""
    moe, x = layer(), torch.randn(5, 96, dtype=torch.float64)
    weights, ids = moe.gate(x)
    latent = moe.experts(x @ moe.routed_expert_down_proj.weight.T, weights, ids)
    normed = latent / (latent.square().mean(-1, keepdim=True) + 1e-5).sqrt() * moe.routed_expert_norm.weight
    expected = normed @ moe.routed_expert_up_proj.weight.T + moe.shared_experts(x)
    torch.testing.assert_close(moe(x), expected)
    assert moe.shared_experts.gate_proj.weight.shape == (2 * 128, 96)


def test_no_token_at_all() -> None:
    """Fault 32: an empty batch runs through the layer."""
    assert layer()(torch.empty(0, 96, dtype=torch.float64)).shape == (0, 96)
