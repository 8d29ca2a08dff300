"""AttnRes: the mix, its two storages, and where blocks begin and end."""

import math

import pytest
import torch
from k3_cases import decode, empty_state, prefill, random_model, random_tokens

from k3rewrite.models.kimi_k3 import KimiK3Config
from k3rewrite.models.kimi_k3.attn_res import BlockBank, BlockList, DepthMix, depth_mix


def mixer(size: int, dtype: torch.dtype = torch.float64) -> DepthMix:
    mix = DepthMix(size, 1e-5, dtype=dtype)
    mix.norm.weight.normal_(1, 0.1)
    mix.proj.weight.normal_()
    return mix


def test_the_mix_is_the_equation() -> None:
    torch.manual_seed(0)
    sources = torch.randn(3, 4, 32, dtype=torch.float64) * torch.tensor([1.0, 5.0, 0.2, 2.0]).view(1, 4, 1)
    mix = mixer(32)
    got = depth_mix(sources, mix.norm.weight, mix.proj.weight, 1e-5)
    for token in range(3):
        scores = []
        for v in sources[token]:
            rstd = 1 / math.sqrt(float(v.square().mean()) + 1e-5)
            scores.append(sum(float(v[c] * rstd * mix.norm.weight[c] * mix.proj.weight[0, c]) for c in range(32)))
        share = torch.tensor(scores, dtype=torch.float64).softmax(0)
        torch.testing.assert_close(got[token], share @ sources[token], rtol=0, atol=1e-12)


def test_one_source_is_returned_as_it_is() -> None:
    prefix = torch.randn(5, 64).bfloat16()
    assert torch.equal(mixer(64, torch.bfloat16)(BlockList(), prefix), prefix)


def test_the_mixture_is_rounded_before_the_norm() -> None:
    """The vendor's rounding, of two that exist: mix -> bf16 -> RMSNorm in fp32 -> bf16 -> times weight."""
    torch.manual_seed(0)
    mix, sources = mixer(256, torch.bfloat16), torch.randn(64, 9, 256).bfloat16()
    got = depth_mix(sources, mix.norm.weight, mix.proj.weight, 1e-5)
    wide = depth_mix(sources.float(), mix.norm.weight.float(), mix.proj.weight.float(), 1e-5)
    assert got.dtype is torch.bfloat16
    # equal up to the order of fp32 sums, which may turn a rounding here and there
    assert (got != wide.bfloat16()).float().mean() < 0.01 and torch.any(got.float() != wide)


def test_the_prefix_is_the_bf16_sum() -> None:
    """Fault 18: P + delta is computed once and rounded once, bit for bit."""
    torch.manual_seed(0)
    model = random_model(KimiK3Config.minimal().with_layers(2), torch.bfloat16)
    seen: dict[str, torch.Tensor] = {}
    layer = model.model.layers[1]
    layer.self_attention_res.register_forward_hook(lambda _m, i, _o: seen.__setitem__("before", i[1]))
    layer.self_attn.register_forward_hook(lambda _m, _i, o: seen.__setitem__("delta", o))
    layer.mlp_res.register_forward_hook(lambda _m, i, _o: seen.__setitem__("after", i[1]))
    prefill(model, empty_state(model, slots=2, max_context=8), random_tokens(model, 1, 8), [1])
    assert torch.equal(seen["after"], (seen["before"].float() + seen["delta"].float()).bfloat16())


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_list_and_bank_are_the_same(phase: str, dtype: torch.dtype) -> None:
    logits = []
    for storage in ("list", "bank"):
        model = random_model(KimiK3Config.minimal(attn_res_storage=storage), dtype)
        state = empty_state(model, slots=3, max_context=9)
        tokens = random_tokens(model, 2, 9)
        got = prefill(model, state, tokens[:, :8], [1, 2])
        logits.append(decode(model, state, tokens[:, 8], [1, 2], [8, 8]) if phase == "decode" else got)
    assert torch.equal(*logits)


def test_slots_of_the_bank_that_are_not_written_are_not_read() -> None:
    blocks = BlockBank(torch.zeros(2, 8), 4)
    blocks.bank.fill_(float("nan"))
    prefix = torch.ones(2, 8)
    assert torch.equal(blocks.sources(prefix), prefix.unsqueeze(1))
    blocks.append(prefix * 2)
    assert torch.equal(blocks.sources(prefix)[:, :, 0], torch.tensor([[2.0, 1.0], [2.0, 1.0]]))
    assert blocks.bank[:, 1:].isnan().all()


@pytest.mark.parametrize("storage", ["list", "bank"])
@pytest.mark.parametrize("name", ["minimal", "tiny"])
def test_blocks_hold_the_sums_they_should(storage: str, name: str) -> None:
    """Block 0 is the embedding, block j the outputs of its own layers alone; source counts as the spec gives them."""
    config = getattr(KimiK3Config, name)(attn_res_storage=storage)
    model = random_model(config)
    outputs: list[torch.Tensor] = []
    mixes: list[tuple[str, int, torch.Tensor]] = []
    for index, layer in enumerate(model.model.layers):
        feed_forward = layer.block_sparse_moe if layer.is_moe else layer.mlp
        for sublayer in (layer.self_attn, feed_forward):
            sublayer.register_forward_hook(lambda _m, _i, o: outputs.append(o))
        for kind in ("self_attention_res", "mlp_res"):
            getattr(layer, kind).register_forward_hook(
                lambda _m, i, _o, label=f"{kind}{index}": mixes.append((label, len(i[0]) + 1, i[0].sources(i[1])))
            )
    model.model.output_attn_res.register_forward_hook(
        lambda _m, i, _o: mixes.append(("out", len(i[0]) + 1, i[0].sources(i[1])))
    )
    tokens = random_tokens(model, 1, 3)
    prefill(model, empty_state(model, slots=2, max_context=3), tokens, [1])

    layers, size = config.num_hidden_layers, config.attn_res_block_size
    counts = {label: count for label, count, _ in mixes}
    assert len(mixes) == 2 * layers and "self_attention_res0" not in counts  # layer 0 has no mix before attention
    assert all(counts[f"self_attention_res{i}"] == math.ceil(i / size) + 1 for i in range(1, layers))
    assert all(counts[f"mlp_res{i}"] == i // size + 2 for i in range(layers))
    assert counts["out"] == config.num_blocks + 1

    *blocks, prefix = mixes[-1][2].unbind(1)
    sums = [sum(outputs[2 * start : 2 * (start + size)]) for start in range(0, layers, size)]
    assert torch.equal(blocks[0], model.model.embed_tokens(tokens[0]))
    for block, expected in zip([*blocks[1:], prefix], sums, strict=True):
        torch.testing.assert_close(block, expected, rtol=0, atol=1e-10)
