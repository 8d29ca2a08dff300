"""The gated delta rule: chunked against recurrent, on gates and keys that break unstable forms."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_cases import random_model
from torch import Tensor
from torch.nn import functional as F

from k3rewrite.models.kimi_k3 import KimiK3Config
from k3rewrite.models.kimi_k3.delta_chunk import _scores, delta_chunk, unit_lower_inverse
from k3rewrite.models.kimi_k3.delta_rule import delta_step
from k3rewrite.models.kimi_k3.norms import l2_norm


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for t in range(q.shape[1]):
        out, state = delta_step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
        outputs.append(out)
    return torch.stack(outputs, 1), state


def draw(length: int, seed: int, *, heads: int = 2, size: int = 8, batch: int = 1) -> list[Tensor]:
    """q, k, v, g, beta, state in fp64; gates cover (-5, 0), many of them at either end."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shape = (batch, length, heads, size)
    gate = -5 * torch.sigmoid(6 * normal(*shape))
    state = normal(batch, heads, size, size)
    return [
        l2_norm(normal(*shape)) * size**-0.5,
        l2_norm(normal(*shape) + normal(batch, 1, heads, size)),
        normal(*shape),
        gate,
        torch.sigmoid(normal(*shape[:3])),
        state,
    ]


@settings(max_examples=25, deadline=None)
@given(length=st.integers(1, 140), seed=st.integers(0, 1000), sizes=st.sampled_from([(64, 16), (16, 4), (8, 8)]))
def test_chunks_equal_the_recurrence(length: int, seed: int, sizes: tuple[int, int]) -> None:
    inputs = draw(length, seed)
    got = delta_chunk(*inputs, chunk=sizes[0], block=sizes[1])
    for a, b in zip(got, recurrent(*inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_one_step_by_hand() -> None:
    """Scalars: S = 2, decay 1/2, k = 1, v = 3, beta = 1/2, q = 1: the prediction uses the decayed state."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    state = torch.full((1, 1, 1, 1), 2.0, dtype=torch.float64)
    out, new = delta_step(one, one, one * 3, one * math.log(0.5), one[..., 0] * 0.5, state)
    assert out.item() == new.item() == pytest.approx(1 + 0.5 * (3 - 1))


def test_decay_is_natural() -> None:
    """Fault 4: g = -1 keeps 0.3679 of the state, not 0.5."""
    inputs = draw(1, 0)
    inputs[3] = torch.full_like(inputs[3], -1.0)
    inputs[4] = torch.zeros_like(inputs[4])
    for _, state in (recurrent(*inputs), delta_chunk(*inputs, chunk=64, block=16)):
        torch.testing.assert_close(state, inputs[5] * math.exp(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_of_near_parallel_keys(dtype: torch.dtype) -> None:
    """Fault 5: 64 keys of one direction plus 2 % noise, beta .95, no decay. Repeated squaring loses all digits."""
    torch.manual_seed(0)
    keys = F.normalize(torch.randn(1, 128) + 0.02 * torch.randn(64, 128), dim=-1).double()
    lower = (0.95 * keys @ keys.T).tril(-1)
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + lower)
    got = unit_lower_inverse(lower.to(dtype), 16)
    assert exact.abs().max() == 1.0
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=1e-6 if dtype is torch.float32 else 1e-13)
    torch.testing.assert_close(got.tril(-1) + torch.eye(64, dtype=dtype), got, rtol=0, atol=0)


@pytest.mark.parametrize(("chunk", "block"), [(64, 16), (64, 64), (16, 4), (4, 4)])
def test_inverse_for_any_blocking(chunk: int, block: int) -> None:
    torch.manual_seed(0)
    lower = torch.randn(2, 3, chunk, chunk, dtype=torch.float64).tril(-1) * 0.3
    product = unit_lower_inverse(lower, block) @ (torch.eye(chunk, dtype=torch.float64) + lower)
    torch.testing.assert_close(product, torch.eye(chunk, dtype=torch.float64).expand_as(product), rtol=0, atol=1e-9)


def test_chunks_with_near_parallel_keys_in_fp32() -> None:
    inputs = draw(128, 0, size=32)
    base = torch.randn(1, 1, 2, 32, dtype=torch.float64)
    inputs[1] = F.normalize(base + 0.02 * torch.randn(1, 128, 2, 32, dtype=torch.float64), dim=-1)
    inputs[3], inputs[4] = torch.zeros_like(inputs[3]), torch.full_like(inputs[4], 0.95)
    exact, _ = recurrent(*inputs)
    got, _ = delta_chunk(*(x.float() for x in inputs), chunk=64, block=16)
    assert (got.double() - exact).abs().max() < 1e-4 * exact.abs().max()


@pytest.mark.parametrize("length", [16, 64, 100])
def test_gates_at_the_lower_bound_stay_finite(length: int) -> None:
    """Fault 14: gates of -5 throughout, q = k = 1: exp(75) between the ends of a block, products below 1."""
    inputs = [x.float() for x in draw(length, 0)]
    inputs[0], inputs[1] = torch.ones_like(inputs[0]), torch.ones_like(inputs[1])
    inputs[3] = torch.full_like(inputs[3], -5.0)
    got = delta_chunk(*inputs, chunk=64, block=16)
    exact = recurrent(*(x.double() for x in inputs))
    for a, b in zip(got, exact, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("edited", [1, 15, 16, 17, 40, 63, 64, 90])
def test_later_gates_do_not_change_earlier_outputs(edited: int) -> None:
    """Prefix invariance, bit for bit in fp32: no exponent is rebased at a row that depends on later tokens."""
    inputs = [x.float() for x in draw(96, 3)]
    before, _ = delta_chunk(*inputs, chunk=64, block=16)
    inputs[3] = inputs[3].clone()
    inputs[3][:, edited:] = -4.9 - inputs[3][:, edited:] * 0.5
    after, _ = delta_chunk(*inputs, chunk=64, block=16)
    assert torch.equal(before[:, :edited], after[:, :edited]) and not torch.equal(before, after)


def test_tokens_without_gate_and_beta_leave_the_state() -> None:
    inputs = draw(20, 0)
    inputs[3], inputs[4] = torch.zeros_like(inputs[3]), torch.zeros_like(inputs[4])
    _, state = delta_chunk(*inputs, chunk=64, block=16)
    torch.testing.assert_close(state, inputs[5], rtol=0, atol=1e-13)


def test_the_gate_covers_its_range_and_uses_the_first_heads() -> None:
    """g = -5 σ(exp(A_log[h]) (f + dt_bias)) in (-5, 0), per head and channel; entries past num_heads change nothing."""
    model = random_model(KimiK3Config.tiny().with_layers(1))
    attention = model.model.layers[0].self_attn
    x = torch.randn(64, 96, dtype=torch.float64)
    convolved = torch.randn(64, 3 * 192, dtype=torch.float64)
    heads = attention._heads(x, convolved)
    f = (x @ attention.f_a_proj.weight.T @ attention.f_b_proj.weight.T + attention.dt_bias).view(64, 12, 16)
    for h in (0, 11):
        expected = -5 * torch.sigmoid(attention.A_log[h].exp() * f[:, h])
        torch.testing.assert_close(heads.g[:, h], expected)
    assert heads.g.min() < -4.9 and heads.g.max() > -0.1
    assert attention.A_log.shape == (16,) and not attention.A_log[12:].any()
    attention.A_log[12:] = float("nan")
    assert torch.equal(attention._heads(x, convolved).g, heads.g)


def test_l2_norm_adds_eps_to_the_sum() -> None:
    x = torch.full((1, 4), 1e-3, dtype=torch.float64)
    torch.testing.assert_close(l2_norm(x), x / math.sqrt(4e-6 + 1e-6))
    assert l2_norm(torch.ones(2, 4, dtype=torch.bfloat16)).dtype is torch.float32


def test_scores_are_finite_everywhere() -> None:
    """Also in the columns behind a block, which are cut off later: exp(63 * 5) is no number to multiply with."""
    q, k, _, g, _, _ = (x.float() for x in draw(64, 0))
    total = torch.full_like(g, -5.0).cumsum(1).transpose(1, 2)
    for scores in _scores(q.transpose(1, 2), k.transpose(1, 2), total, 16):
        assert scores.shape == (1, 2, 64, 64) and torch.isfinite(scores).all()
