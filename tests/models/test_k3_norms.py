"""Where the norms and gates round: bit for bit in bf16, against the same steps written out."""

import torch
from torch import nn

from k3rewrite.models.kimi_k3.norms import GatedRMSNorm, RMSNorm


def test_rms_norm_rounds_before_the_weight() -> None:
    torch.manual_seed(0)
    x, norm = (torch.randn(64, 256) * 3).bfloat16(), RMSNorm(256, 1e-5, dtype=torch.bfloat16)
    norm.weight.normal_(1, 0.1)
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(norm(x), (scaled.bfloat16().float() * norm.weight.float()).bfloat16())
    assert not torch.equal(norm(x), (scaled * norm.weight.float()).bfloat16())


def test_rms_norm_is_the_equation() -> None:
    x, norm = torch.randn(3, 5, 32, dtype=torch.float64), RMSNorm(32, 1e-5, dtype=torch.float64)
    nn.init.normal_(norm.weight)
    expected = torch.nn.functional.rms_norm(x, (32,), norm.weight, 1e-5)
    torch.testing.assert_close(norm(x), expected, rtol=1e-13, atol=1e-13)


def test_gated_norm_rounds_once_at_the_end() -> None:
    """fp32 weight, weight before the sigmoid of the gate, one rounding."""
    torch.manual_seed(0)
    x, gate = torch.randn(64, 4, 32).bfloat16(), torch.randn(64, 4, 32).bfloat16()
    norm = GatedRMSNorm(32, 1e-5, dtype=torch.bfloat16)
    norm.weight.normal_(1, 0.1)
    assert norm.weight.dtype is torch.float32
    x64 = x.double()
    exact = x64 * torch.rsqrt(x64.pow(2).mean(-1, keepdim=True) + 1e-5) * norm.weight.double() * gate.double().sigmoid()
    got = norm(x, gate)
    assert got.dtype is torch.bfloat16
    # a second rounding would turn about a quarter of the results
    assert (got != exact.bfloat16()).float().mean() < 0.002
