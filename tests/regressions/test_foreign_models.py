"""Unmodified models of transformers, tiny and random: the same logits and tokens, and what is recognised in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from k3rewrite.backend import Backend

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTRAL: dict[str, Any] = {**SIZES, "num_local_experts": 8}
DEEPSEEK: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 4, "head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_shared_experts": 1,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    **SIZES, **MOE, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any], str | None, dict[str, int]]] = {
    # config class, settings, spelling of the experts, sites in one graph
    "llama": ("LlamaConfig", SIZES, None, {"lift_rms_norm": 5, "lift_mlp": 2}),
    "gemma": ("GemmaConfig", SIZES, None, {"lift_rms_norm": 5, "lift_mlp": 0}),  # norms by 1 + weight, a GELU
    "qwen3": ("Qwen3Config", SIZES, None, {"lift_rms_norm": 9, "lift_mlp": 2}),
    "qwen3-moe": ("Qwen3MoeConfig", {**SIZES, **MOE}, "grouped_mm", {"lift_rms_norm": 9, "lift_route": 2}),
    "mixtral": ("MixtralConfig", MIXTRAL, "batched_mm", {"lift_rms_norm": 5, "lift_route": 2}),
    "deepseek-v3": ("DeepseekV3Config", DEEPSEEK, "batched_mm", {"lift_rms_norm": 9, "lift_mlp": 2, "lift_route": 0}),
    "qwen3-next": (
        "Qwen3NextConfig", LINEAR, "batched_mm",
        {"lift_rms_norm": 8, "lift_gated_rms_norm": 1, "lift_l2_norm": 2, "lift_mlp": 2, "lift_route": 2},
    ),
}  # fmt: skip


def _model(name: str) -> torch.nn.Module:
    config, settings, experts, _ = CASES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**settings))
    if experts is not None:
        model.set_experts_implementation(experts)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:  # ones or zeros at first: a lost weight would not show
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 128, shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logits_of_several_shapes(name: str) -> None:
    """One graph for the first shape, one for any other, and one for a single token of a single sequence."""
    model = _model(name)
    torch._dynamo.reset()
    backend = Backend({"finalise": "eager", "verify": "all"})
    compiled = torch.compile(model, backend=backend)
    for shape in ((2, 7), (3, 9), (1, 1), (2, 7)):
        with torch.no_grad():
            expected = model(input_ids=_tokens(*shape), use_cache=False).logits
            logits = compiled(input_ids=_tokens(*shape), use_cache=False).logits
        assert (logits.dtype, logits.stride()) == (expected.dtype, expected.stride())
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert len(backend.reports) == 3
    for report in backend.reports:
        matched = {p.name: p.matched for p in report.passes}
        assert {p: matched[p] for p in CASES[name][3]} == CASES[name][3]
        assert report.end_to_end is not None and report.end_to_end.passed and not report.notes


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "deepseek-v3", "qwen3-next"])
def test_generated_tokens(name: str, cache: str) -> None:
    model, tokens = _model(name), _tokens(2, 5)
    settings = {
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1] * 5]), "max_new_tokens": 6, "do_sample": False,
        "output_logits": True, "return_dict_in_generate": True, "eos_token_id": None, "disable_compile": True,
        "cache_implementation": "static" if cache == "static" else None,
    }  # fmt: skip
    expected = model.generate(tokens, **settings)  # type: ignore[operator]
    torch._dynamo.reset()
    backend = Backend({"finalise": "eager", "verify": "end-to-end"})
    model.forward = torch.compile(model.forward, backend=backend)  # type: ignore[method-assign]
    got = model.generate(tokens, **settings)  # type: ignore[operator]
    assert torch.equal(got.sequences, expected.sequences)
    for a, b in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(backend.reports) == (2 if cache == "static" else 3), "prefill, decode, and decode with a longer cache"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_under_the_error_rule(dtype: torch.dtype) -> None:
    model = _model("qwen3-moe").to(dtype)
    torch._dynamo.reset()
    backend = Backend({"verify": "all"})
    with torch.no_grad():
        torch.compile(model, backend=backend)(input_ids=_tokens(2, 7), use_cache=False)
    (report,) = backend.reports
    assert report.end_to_end is not None and report.end_to_end.passed
