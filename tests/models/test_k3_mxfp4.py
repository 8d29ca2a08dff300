"""MXFP4: every byte, every scale, packing both ways, and the experts that are not hit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_cases import random_model, relative_error

from k3rewrite.errors import UnsupportedError
from k3rewrite.models.kimi_k3 import KimiK3Config
from k3rewrite.models.kimi_k3.mxfp4 import (
    dequantise,
    pack_nibbles,
    pair_table,
    quantise,
    scale_table,
    unpack_nibbles,
)


def e2m1(code: int) -> float:
    """A 4-bit code by the definition of the format: sign, two exponent bits with bias 1, one mantissa bit."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    value = 0.5 * mantissa if exponent == 0 else (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1)
    return -value if code & 8 else value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_byte_is_two_values_low_nibble_first(dtype: torch.dtype) -> None:
    table = pair_table(dtype)
    for byte in range(256):
        assert table[byte].tolist() == [e2m1(byte & 15), e2m1(byte >> 4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_scale_is_a_power_of_two_and_255_is_nan(dtype: torch.dtype) -> None:
    table = scale_table(dtype).double()
    assert table[:255].tolist() == [math.ldexp(1.0, s - 127) for s in range(255)]
    assert math.isnan(table[255])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dequantise_is_exact_for_all_bytes_and_scales(dtype: torch.dtype) -> None:
    """[255 scales, 512 columns]: all 256 bytes under every scale; beyond the dtype's range the value is infinite."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(255, 1)
    scale = torch.arange(255, dtype=torch.uint8).unsqueeze(1).expand(-1, 16)
    got = dequantise(packed, scale, pair_table(dtype), scale_table(dtype))
    row = torch.tensor([e2m1(n) for b in range(256) for n in (b & 15, b >> 4)], dtype=torch.float64)
    exact = row * torch.tensor([math.ldexp(1.0, s - 127) for s in range(255)], dtype=torch.float64).unsqueeze(1)
    assert got.shape == (255, 512) and got.dtype is dtype
    assert torch.equal(got, exact.to(dtype))
    assert torch.isfinite(got[:252]).all()


def test_a_nan_scale_spoils_its_own_group_only() -> None:
    scale = torch.tensor([[127, 255, 127]], dtype=torch.uint8)
    packed = torch.full((1, 48), 0x22, dtype=torch.uint8)
    got = dequantise(packed, scale, pair_table(torch.float32), scale_table(torch.float32))
    assert got[:, 32:64].isnan().all() and torch.all(got[:, :32] == 1) and torch.all(got[:, 64:] == 1)


def test_even_columns_are_low_nibbles_and_groups_are_consecutive() -> None:
    scale = torch.tensor([[127, 128]], dtype=torch.uint8)
    packed = torch.full((1, 32), 0x72, dtype=torch.uint8)  # low 2 = 1.0, high 7 = 6.0
    got = dequantise(packed, scale, pair_table(torch.float32), scale_table(torch.float32))
    assert got[0, :4].tolist() == [1, 6, 1, 6] and got[0, 32:36].tolist() == [2, 12, 2, 12]


@settings(max_examples=30, deadline=None)
@given(codes=st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda c: len(c) % 2 == 0))
def test_nibbles_pack_and_unpack(codes: list[int]) -> None:
    tensor = torch.tensor(codes, dtype=torch.uint8)
    packed = pack_nibbles(tensor)
    assert packed.tolist() == [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    assert torch.equal(unpack_nibbles(packed), tensor)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.integers(0, 254))
def test_quantise_returns_what_mxfp4_holds(seed: int, scale: int) -> None:
    """Any representable matrix comes back with its values; the bytes too when the group uses the top exponent."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (3, 64), generator=generator, dtype=torch.uint8)
    codes[:, ::32] = 7  # the largest value: the shared exponent is then the one of the group
    packed, scales = pack_nibbles(codes), torch.full((3, 2), scale, dtype=torch.uint8)
    tables = pair_table(torch.float64), scale_table(torch.float64)
    values = dequantise(packed, scales, *tables)
    again, again_scales = quantise(values)
    assert torch.equal(again_scales, scales)
    assert torch.equal(again, packed)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_quantise_rounds_to_the_nearest_value_ties_to_even(seed: int) -> None:
    weight = torch.randn(4, 96, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weight[0, :8] = torch.tensor([4.0, 0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 0.0])
    packed, scale = quantise(weight)
    got = dequantise(packed, scale, pair_table(torch.float64), scale_table(torch.float64))
    grid = torch.tensor([e2m1(c) for c in range(16)], dtype=torch.float64)
    step = torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    nearest = ((weight / step).unsqueeze(-1) - grid).abs().amin(-1)
    torch.testing.assert_close((got / step - weight / step).abs(), nearest, rtol=0, atol=1e-12)
    assert scale[0, 0] == 127
    assert got[0, :8].tolist() == [4.0, 0.0, 1.0, -1.0, 2.0, 2.0, -4.0, 0.0]


def test_quantise_zero_and_refusals() -> None:
    packed, scale = quantise(torch.zeros(2, 32))
    assert not packed.any() and torch.all(scale == 127)
    with pytest.raises(UnsupportedError, match="31 columns are no multiple of 32"):
        quantise(torch.zeros(2, 31))
    with pytest.raises(UnsupportedError, match="not finite"):
        quantise(torch.full((1, 32), float("nan")))


def test_one_outlier_costs_its_group_its_precision() -> None:
    """Fault 98: the error of the other 31 values grows about fivefold. A property of the format, to be seen."""
    plain = torch.randn(512, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outlier = plain.clone()
    outlier[:, 0] = 30.0
    tables = pair_table(torch.float64), scale_table(torch.float64)
    errors = [relative_error(dequantise(*quantise(w), *tables)[:, 1:], w[:, 1:]) for w in (plain, outlier)]
    assert errors[0] == pytest.approx(0.110, abs=0.01) and errors[1] == pytest.approx(0.563, abs=0.05)


@pytest.mark.parametrize("form", ["grouped", "gather"])
def test_only_experts_that_are_hit_are_unpacked(form: str) -> None:
    """All scales of the experts without a route are NaN: neither spelling may read them into the result."""
    model = random_model(KimiK3Config.tiny(moe_form=form).with_layers(2))
    experts = model.model.layers[1].block_sparse_moe.experts
    ids = torch.tensor([[3, 9, 0, 15], [9, 3, 8, 15]])
    weights = torch.full((2, 4), 0.25, dtype=torch.float64)
    z = torch.randn(2, 64, dtype=torch.float64)
    expected = experts(z, weights, ids)
    idle = sorted(set(range(16)) - set(ids.flatten().tolist()))
    experts.w13_scale[idle] = experts.w2_scale[idle] = 255
    assert torch.isfinite(expected).all() and torch.equal(experts(z, weights, ids), expected)
