"""Unmodified linear attention of transformers, decode through the backend: every KDA layer is one op on the model's own
cache, over several steps.

Keys by values, lines of channels by columns, caches updated by `copy_`, outputs written into a buffer; a decay without
bound (Kimi-Linear), with one (GLM-5-Next), of each head (Qwen3-Next).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from k3rewrite.backend import Backend
from k3rewrite.report.schema import RunReport

transformers = pytest.importorskip("transformers", "5.17")
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
KIMI = {
    "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 16, "n_routed_experts": 4, "kv_lora_rank": 16,
    "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
QWEN = {
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 32,
    "linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
CASES = {"KimiLinear": KIMI, "Qwen3Next": QWEN}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _backend(**options: Any) -> Backend:
    return Backend({"finalise": "eager", "target": "h200", **options})


def _matched(report: RunReport) -> dict[str, int]:
    return {entry.name: entry.matched for entry in report.passes}


def _states(cache: Any) -> list[Tensor]:
    """Lines and states of the linear layers, in order."""
    layers = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    return [
        value for layer in layers for kind in (layer.conv_states, layer.recurrent_states) for value in kind.values()
    ]


def _model(name: str, dtype: torch.dtype, **changed: Any) -> tuple[nn.Module, Any]:
    config = getattr(transformers, f"{name}Config")(**SIZES, **CASES[name] | changed)
    config._experts_implementation = "batched_mm"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    for parameter in model.parameters():  # of a size at which gates and decays differ from channel to channel
        if parameter.dim() < 2:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype), transformers.DynamicCache(config=config)


@pytest.mark.parametrize("name", CASES)
def test_bf16_is_as_near_to_fp64_as_eager(name: str) -> None:
    """One step: a near tie between experts may fall the other way, so tokens are not followed."""
    model, cache = _model(name, torch.bfloat16)
    ids = torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(1))
    backend = _backend(verify="all")
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache, use_cache=True)
        torch.compile(model, backend=backend, fullgraph=True)(ids[:, 5:], past_key_values=cache, use_cache=True)
    (report,) = backend.reports
    assert report.end_to_end is not None and report.end_to_end.passed
    fused = next(entry for entry in report.passes if entry.name == "fuse_kda_decode")
    assert fused.matched == 2 and all(site.verified for site in fused.sites)


@pytest.mark.parametrize("name", CASES)
def test_every_kda_layer_of_a_whole_decode_step(name: str) -> None:
    model, cache = _model(name, torch.float32)
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    backend = _backend()
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache, use_cache=True)
        other = copy.deepcopy(cache)
        mine, theirs = _states(cache), _states(other)
        assert len(mine) == 4
        places = [value.data_ptr() for value in mine]
        compiled = torch.compile(model, backend=backend, dynamic=False)
        for token in range(5, 9):
            step = {"input_ids": ids[:, token : token + 1], "use_cache": True}
            got = compiled(**step, past_key_values=cache).logits
            expected = model(**step, past_key_values=other).logits
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for report in backend.reports:
        found = _matched(report)
        assert (found["fuse_kda_decode"], found["reuse_storage"]) == (2, 4), "both layers, line and state in place"
    assert [value.data_ptr() for value in _states(cache)] == places
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"linear_num_key_heads": 2}, "found clone"),  # each head of keys is repeated
        ({"linear_value_head_dim": 8}, "8 values and 16 keys a head, and as many of both are taken"),
    ],
    ids=["fewer heads of keys", "narrower values"],
)
def test_what_stays_a_step_and_why(change: dict[str, Any], reason: str) -> None:
    model, cache = _model("Qwen3Next", torch.float32, **change)
    ids = torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(1))
    backend = _backend()
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache, use_cache=True)
        other = copy.deepcopy(cache)
        got = torch.compile(model, backend=backend, fullgraph=True)(ids[:, 5:], past_key_values=cache, use_cache=True)
        expected = model(ids[:, 5:], past_key_values=other, use_cache=True)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=1e-5)
    found = next(entry for entry in backend.reports[0].passes if entry.name == "fuse_kda_decode")
    assert found.matched == 0 and len(found.missed) == 2
    assert all(reason in miss.reason for miss in found.missed), [miss.reason for miss in found.missed]


def test_model_roundings_refuse_what_the_op_rounds_elsewhere() -> None:
    """In bf16 transformers rounds the sum of the taps and beta: `fewest` drops that, `model` has no place for it."""
    model, cache = _model("KimiLinear", torch.bfloat16)
    ids = torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(1))
    options = {"roundings": "model", "allow_changes_rounding": False}
    backend = _backend(pipeline={"version": 1, "extends": "default", "passes": [{"fuse_kda_decode": options}]})
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache, use_cache=True)
        torch.compile(model, backend=backend, fullgraph=True)(ids[:, 5:], past_key_values=cache, use_cache=True)
    found = next(entry for entry in backend.reports[0].passes if entry.name == "fuse_kda_decode")
    assert found.matched == 0
    assert all("conv_sum is torch.bfloat16, which the op computes in" in miss.reason for miss in found.missed)


@pytest.mark.parametrize("wide_taps", [False, True], ids=["", "taps in fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_layer_of_glm5_next(dtype: torch.dtype, wide_taps: bool) -> None:
    modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    config = transformers.models.glm5_next.configuration_glm5_next.Glm5NextTextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
        num_key_value_heads=4, linear_head_dim=16, linear_num_heads=4, mlp_layer_types=["dense", "dense"],
        layer_types=["linear_attention", "indexed_attention"], indexer_types=["full", "full"],
    )  # fmt: skip
    layer = modeling.Glm5NextTextLinearAttention(config, 0).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    layer.to(dtype)
    if wide_taps:
        layer.conv1d.float()
    cache, backend = transformers.DynamicCache(config=config), _backend()
    x = torch.randn(2, 9, 64, generator=generator).to(dtype)
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        layer(x[:, :5], cache=cache)
        other = copy.deepcopy(cache)
        for token in range(5, 9):
            got, expected = (run(x[:, token : token + 1], cache=c) for run, c in ((compiled, cache), (layer, other)))
            torch.testing.assert_close(got, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    found = _matched(backend.reports[0])
    assert (found["fuse_kda_decode"], found["reuse_storage"]) == (1, 2)
    for a, b in zip(_states(cache), _states(other), strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
