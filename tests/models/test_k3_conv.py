"""The short convolution and its window, against torch's own convolution."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from k3rewrite.models.kimi_k3 import DecodeInputs, PrefillInputs, VerifyInputs
from k3rewrite.models.kimi_k3.inputs import prepare
from k3rewrite.models.kimi_k3.short_conv import conv_decode, conv_prefill, conv_verify

CHANNELS = 5


def reference(x: Tensor, weight: Tensor) -> Tensor:
    """SiLU of the causal depthwise convolution of `[L, C]`, zero history."""
    padded = F.pad(x.T.unsqueeze(0), (3, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), groups=CHANNELS))[0].T


def plan(inputs: DecodeInputs | VerifyInputs | PrefillInputs) -> object:
    return prepare(inputs, max_context=64, history=3).plan


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 9), steps=st.integers(1, 5), depth=st.integers(3, 7), seed=st.integers(0, 99))
def test_prefill_then_decode_is_one_convolution(length: int, steps: int, depth: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length + steps, CHANNELS, generator=generator, dtype=torch.float64)
    weight = torch.randn(CHANNELS, 4, generator=generator, dtype=torch.float64)
    pool = torch.full((3, depth, CHANNELS), 7.0, dtype=torch.float64)
    untouched = pool.clone()
    start = PrefillInputs(zeros(1, length), torch.tensor([2]), torch.tensor([0]), torch.tensor([length]))
    got = [conv_prefill(x[None, :length], weight, pool, plan(start))[0]]  # type: ignore[arg-type]
    for i in range(length, length + steps):
        step = DecodeInputs(zeros(1), torch.tensor([2]), torch.tensor([i]))
        got.append(conv_decode(x[i : i + 1], weight, pool, plan(step)))  # type: ignore[arg-type]
    torch.testing.assert_close(torch.cat(got), reference(x, weight), rtol=0, atol=1e-12)
    history = torch.cat([torch.zeros(3, CHANNELS, dtype=torch.float64), x])[-3:]
    assert torch.equal(pool[2, :3], history)
    assert torch.equal(pool[2, 3:], untouched[2, 3:]) and torch.equal(pool[:2], untouched[:2])


@settings(max_examples=20, deadline=None)
@given(accepts=st.lists(st.integers(1, 4), min_size=1, max_size=5), spare=st.integers(0, 2), seed=st.integers(0, 99))
def test_verify_windows_follow_the_accepted_tokens(accepts: list[int], spare: int, seed: int) -> None:
    """Rejected inputs are in the buffer and never in the history; spare columns of a deeper pool stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(accepts)
    truth = torch.randn(total, CHANNELS, generator=generator, dtype=torch.float64)
    weight = torch.randn(CHANNELS, 4, generator=generator, dtype=torch.float64)
    pool = torch.zeros(6, 6 + spare, CHANNELS, dtype=torch.float64)
    pool[4, 6:] = 7.0
    table = torch.tensor([[4, 1, 2, 3]])
    expected, previous, at = reference(truth, weight), 1, 0
    for accept in accepts:
        x = torch.randn(1, 4, CHANNELS, generator=generator, dtype=torch.float64)
        x[0, :accept] = truth[at : at + accept]
        inputs = VerifyInputs(zeros(1, 4), table, torch.tensor([previous]), torch.tensor([at]))
        got = conv_verify(x, weight, pool, plan(inputs))  # type: ignore[arg-type]
        torch.testing.assert_close(got[0, :accept], expected[at : at + accept], rtol=0, atol=1e-12)
        previous, at = accept, at + accept
    assert torch.all(pool[4, 6:] == 7.0) and not pool[[0, 1, 2, 3, 5]].any()


def test_the_buffer_slides_by_one_from_the_read_offset() -> None:
    """buf <- (buf[a : a + 2], the N inputs) with a = accepted: columns 1..6 and a = 3 leave (4, 5, inputs)."""
    pool = torch.zeros(2, 6, 1, dtype=torch.float64)
    pool[1, :, 0] = torch.arange(1.0, 7.0)
    inputs = VerifyInputs(zeros(1, 4), torch.tensor([[1, 1, 1, 1]]), torch.tensor([3]), torch.tensor([0]))
    x = torch.tensor([[[10.0], [20.0], [30.0], [40.0]]], dtype=torch.float64)
    conv_verify(x, torch.ones(1, 4, dtype=torch.float64), pool, plan(inputs))  # type: ignore[arg-type]
    assert pool[1, :, 0].tolist() == [4, 5, 10, 20, 30, 40]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_fp32_and_rounded_after_the_silu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 50, CHANNELS).to(dtype), torch.randn(CHANNELS, 4)
    pool = torch.zeros(2, 3, CHANNELS, dtype=dtype)
    inputs = PrefillInputs(zeros(1, 50), torch.tensor([1]), torch.tensor([0]), torch.tensor([50]))
    got = conv_prefill(x, weight, pool, plan(inputs))[0]  # type: ignore[arg-type]
    exact = reference(x[0].double(), weight.double())
    assert got.dtype is dtype
    assert (got.double() - exact).abs().max() <= exact.abs().max() * (2**-8 if dtype is torch.bfloat16 else 1e-6)
