"""Latent attention: absorbed against expanded, what is cached, and what is never read."""

import pytest
import torch
from k3_cases import decode, empty_state, prefill, random_model, random_tokens, verify

from k3rewrite.models.kimi_k3 import DecodeInputs, KimiK3Config, PrefillInputs, VerifyInputs
from k3rewrite.models.kimi_k3.inputs import prepare
from k3rewrite.models.kimi_k3.mla import MultiHeadLatentAttention

CONTEXT = 12


def attention(form: str, dtype: torch.dtype = torch.float64) -> MultiHeadLatentAttention:
    model = random_model(KimiK3Config.tiny(mla_decode=form).with_layers(4), dtype)
    layer = model.model.layers[3].self_attn
    assert isinstance(layer, MultiHeadLatentAttention)
    return layer


def cache(dtype: torch.dtype = torch.float64, slots: int = 9) -> torch.Tensor:
    return torch.randn(slots, CONTEXT, 40, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_absorbed_equals_expanded(dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 96).to(dtype)
    table = torch.tensor([[2, 1, 4, 3], [5, 8, 7, 6]])
    inputs = VerifyInputs(torch.zeros(2, 4, dtype=torch.long), table, torch.tensor([1, 3]), torch.tensor([5, 8]))
    plan = prepare(inputs, max_context=CONTEXT, history=3).plan
    got = [attention(form, dtype)(x, plan, cache(dtype)) for form in ("absorbed", "expanded")]
    scale = got[1].double().pow(2).mean().sqrt()
    assert got[0].dtype is dtype and (got[0] - got[1]).abs().max() <= bound * scale
    assert not torch.equal(*got)  # two computations, not one


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_only_the_past_is_read(form: str) -> None:
    """Cached positions behind the last query, other slots and the null slot are NaN and never seen."""
    torch.manual_seed(0)
    layer, x = attention(form), torch.randn(2, 96, dtype=torch.float64)
    inputs = DecodeInputs(torch.zeros(2, dtype=torch.long), torch.tensor([3, 1]), torch.tensor([4, 7]))
    plan = prepare(inputs, max_context=CONTEXT, history=3).plan
    expected = layer(x, plan, cache())
    poisoned = cache()
    poisoned[[0, 2, 4]] = poisoned[3, 4:] = poisoned[1, 7:] = float("nan")
    assert torch.equal(layer(x, plan, poisoned), expected)
    assert poisoned[3, 4].isfinite().all() and poisoned[3, 5:].isnan().all()


@pytest.mark.parametrize("phase", ["decode", "verify"])
def test_the_window_sees_its_own_keys(phase: str) -> None:
    """Fault 53: with uniform scores over values 0..4 and a history of 3, two queries give 1.5 and 2.0."""
    layer = attention("absorbed")
    layer.q_b_proj.weight.zero_()  # uniform scores
    layer.g_proj.weight.zero_()  # the gate is 1/2
    layer.kv_a_layernorm.weight.fill_(1.0)
    latent = torch.zeros(3, 5, 40, dtype=torch.float64)
    latent[1, :3, 0] = torch.arange(3.0)
    layer.kv_a_proj_with_mqa.weight.zero_()
    shape, table = ((1, 2), torch.tensor([[1, 2]])) if phase == "verify" else ((1,), torch.tensor([1]))
    tokens = torch.zeros(shape, dtype=torch.long)
    inputs = (
        VerifyInputs(tokens, table, torch.tensor([1]), torch.tensor([3]))
        if phase == "verify"
        else DecodeInputs(tokens, table, torch.tensor([3]))
    )
    plan = prepare(inputs, max_context=5, history=3).plan
    seen = []
    layer.o_proj.register_forward_hook(lambda _m, i, _o: seen.append(i[0]))
    values = torch.arange(3.0, 5.0, dtype=torch.float64)

    def write(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(output)
        output[:, 0] = values[: output.shape[0]]
        return output

    layer.kv_a_proj_with_mqa.register_forward_hook(write)
    layer.kv_a_layernorm.register_forward_hook(lambda _m, i, _o: i[0])
    layer(torch.randn(tokens.numel(), 96, dtype=torch.float64), plan, latent)
    w_uv = layer.kv_b_proj.weight.view(12, 32, 32)[:, 16:, 0].flatten()
    for row, mean in enumerate([1.5, 2.0][: tokens.numel()]):
        torch.testing.assert_close(seen[0][row], mean * w_uv / 2)


def test_the_cache_holds_normed_latent_and_plain_shared_key() -> None:
    layer, x = attention("absorbed"), torch.randn(1, 96, dtype=torch.float64)
    latent = cache()
    plan = prepare(DecodeInputs(*(torch.tensor([i]) for i in (0, 2, 6))), max_context=CONTEXT, history=3).plan
    layer(x, plan, latent)
    raw = x @ layer.kv_a_proj_with_mqa.weight.T
    torch.testing.assert_close(latent[2, 6, 32:], raw[0, 32:])
    normed = raw[0, :32] / (raw[0, :32].square().mean() + 1e-5).sqrt() * layer.kv_a_layernorm.weight
    torch.testing.assert_close(latent[2, 6, :32], normed)
    before = cache()
    before[2, 6] = latent[2, 6]
    assert torch.equal(latent, before)  # nothing else was written


def test_positions_enter_through_causality_alone() -> None:
    """The same tokens at other positions of the same cache give the same logits (no rotary)."""
    model = random_model(KimiK3Config.minimal().with_layers(4))
    tokens = random_tokens(model, 1, 6)
    logits = []
    for context in (6, 50):
        state = empty_state(model, slots=3, max_context=context)
        logits.append(prefill(model, state, tokens, [1]))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-12)


def test_a_longer_pool_changes_nothing() -> None:
    model = random_model(KimiK3Config.minimal())
    tokens = random_tokens(model, 1, 7)
    results = []
    for context in (8, 30):
        state = empty_state(model, slots=5, max_context=context, speculative=3)
        first = prefill(model, state, tokens[:, :3], [1])
        window = verify(model, state, tokens[:, 3:], torch.tensor([[1, 2, 3, 4]]), [1], [3])
        results.append(torch.cat([first, window], dim=1))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_prefill_is_expanded_whatever_decode_is() -> None:
    """Bit-equal for both settings in prefill, not bit-equal in decode."""
    results: dict[str, list[torch.Tensor]] = {"prefill": [], "decode": []}
    for form in ("absorbed", "expanded"):
        model = random_model(KimiK3Config.minimal(mla_decode=form), torch.float32)
        state = empty_state(model, slots=2, max_context=9)
        tokens = random_tokens(model, 1, 9)
        results["prefill"].append(prefill(model, state, tokens[:, :8], [1]))
        results["decode"].append(decode(model, state, tokens[:, 8], [1], [8]))
    assert torch.equal(*results["prefill"]) and not torch.equal(*results["decode"])


def test_a_row_without_tokens_reads_nothing() -> None:
    layer = attention("expanded")
    inputs = PrefillInputs(torch.zeros(2, 3, dtype=torch.long), *(torch.tensor(v) for v in ([1, 2], [0, 4], [3, 0])))
    latent = cache()
    latent[2] = float("nan")
    plan = prepare(inputs, max_context=CONTEXT, history=3).plan
    out = layer(torch.randn(6, 96, dtype=torch.float64), plan, latent)
    assert out.isfinite().all() and latent[2].isnan().all()
