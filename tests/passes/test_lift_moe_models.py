"""Mixtures of whole models: Kimi K3 in each form and storage, and unmodified transformers models, one decode step each.

Every mixture is found, and the step gives what eager gives.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_graphs import reasons, rewritten

from k3rewrite._torch_private import FakeTensorMode
from k3rewrite.backend import Backend
from k3rewrite.capture import capture
from k3rewrite.checks.regions import region_check
from k3rewrite.models.kimi_k3 import KimiK3Config, build_kimi_k3
from k3rewrite.passes.lift_moe import LiftMoe
from k3rewrite.report.schema import PassReport

transformers = pytest.importorskip("transformers", "5.17")
LIFT_ALL = {"version": 1, "extends": "default", "passes": [{"lift_moe": {"leave_without_kernel": False}}]}


def _backend(target: str = "cpu", pipeline: Any = LIFT_ALL, **options: Any) -> Backend:
    return Backend({"finalise": "eager", "target": target, "pipeline": pipeline, **options})


def _report(backend: Backend, name: str) -> PassReport:
    (run,) = backend.reports
    return next(entry for entry in run.passes if entry.name == name)


# ------------------------------------------------------------------ Kimi K3


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("storage", ["bf16", "mxfp4"])
@pytest.mark.parametrize("form", ["grouped", "gather"])
def test_every_mixture_of_kimi_k3_is_found_and_verified(form: str, storage: str, batch: int) -> None:
    config = dataclasses.replace(KimiK3Config.tiny(), experts=storage, moe_form=form).with_layers(2)
    model, args, kwargs = build_kimi_k3(config, phase="decode", batch=batch)
    captured = capture(model, args, kwargs)
    with torch.no_grad():
        report = rewritten(LiftMoe(), captured.module, verify=region_check())
    assert (report.candidates, report.matched) == (config.counts()["n_moe_layers"],) * 2, reasons(report)
    formats = {n.args[9] for n in captured.module.graph.nodes if "k3.experts" in str(n.target)}
    assert formats == {"mxfp4" if storage == "mxfp4" else "dense"}


@pytest.mark.parametrize("form", ["grouped", "gather"])
def test_a_decode_step_of_kimi_k3_in_fp32_is_that_of_eager(form: str) -> None:
    config = dataclasses.replace(KimiK3Config.tiny(), experts="bf16", moe_form=form).with_layers(4)
    model, args, _ = build_kimi_k3(config, phase="decode", batch=3, dtype=torch.float32)
    backend = _backend()
    with torch.no_grad():
        expected = model(*copy.deepcopy(args))
        got = torch.compile(model, backend=backend, fullgraph=True)(*copy.deepcopy(args))
    assert _report(backend, "lift_moe").matched == config.counts()["n_moe_layers"]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("storage", ["bf16", "mxfp4"])
@pytest.mark.parametrize("form", ["grouped", "gather"])
def test_kimi_k3_in_its_full_width_is_found_on_fake_tensors(form: str, storage: str) -> None:
    config = dataclasses.replace(KimiK3Config(), experts=storage, moe_form=form).with_layers(2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, args, kwargs = build_kimi_k3(config, phase="decode", batch=4)
        captured = capture(model, args, kwargs)
        report = rewritten(LiftMoe(), captured.module)
    assert (report.candidates, report.matched) == (config.counts()["n_moe_layers"],) * 2, reasons(report)


@pytest.mark.parametrize("form", ["grouped", "gather"])
def test_packed_experts_are_lifted_on_the_way_through_the_backend(form: str) -> None:
    config = dataclasses.replace(KimiK3Config.tiny(), experts="mxfp4", moe_form=form).with_layers(2)
    model, args, _ = build_kimi_k3(config, phase="decode", batch=2)
    backend = _backend(verify="end-to-end")
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*args)
    assert _report(backend, "lift_moe").matched == config.counts()["n_moe_layers"]
    (run,) = backend.reports
    assert run.end_to_end is not None and run.end_to_end.passed


def _spoiled(model: Any, table: str) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith(table):
            buffer.data[3] = 0.25


@pytest.mark.parametrize("table", ["experts.pairs", "experts.scales"])
def test_tables_of_another_format_are_not_taken_for_mxfp4(table: str) -> None:
    config = dataclasses.replace(KimiK3Config.tiny(), experts="mxfp4", moe_form="gather").with_layers(2)
    model, args, kwargs = build_kimi_k3(config, phase="decode", batch=2)
    _spoiled(model, table)
    captured = capture(model, args, kwargs)
    report = rewritten(LiftMoe(), captured.module)
    assert report.matched == 0
    assert all("does not hold" in reason for reason in reasons(report)), reasons(report)


def test_without_a_kernel_the_mixture_is_left_to_its_spelling() -> None:
    config = KimiK3Config.tiny().with_layers(3)
    model, args, _ = build_kimi_k3(config, phase="decode", batch=2)
    backend = _backend(pipeline="default")
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*args)
    report = _report(backend, "lift_moe")
    assert (report.matched, len(report.refused)) == (0, config.counts()["n_moe_layers"]) and not report.missed
    assert report.declined == len(report.refused)
    assert {miss.reason for miss in report.refused} == {
        "no kernel takes k3::experts here (target cpu runs the reference); 'leave_without_kernel: false' lifts it all "
        "the same"
    }


def test_a_wrong_lift_is_an_error_that_saves_both_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3rewrite.errors import VerificationError
    from k3rewrite.passes import lift_moe

    def exchanged(node: torch.fx.Node, rows: Any, columns: Any, builder: Any) -> torch.fx.Node:
        value = node.meta["val"]
        return node if value.dtype.is_floating_point else builder.call(torch.ops.aten.flip.default, node, [0])

    monkeypatch.setattr(lift_moe, "_as_rows", exchanged)
    config = KimiK3Config.tiny().with_layers(2)
    model, args, kwargs = build_kimi_k3(config, phase="decode", batch=3)
    captured = capture(model, args, kwargs)
    with pytest.raises(VerificationError, match="rule moe"), torch.no_grad():
        rewritten(LiftMoe(), captured.module, verify=region_check(tmp_path))
    (saved,) = tmp_path.glob("moe-*.pt")
    assert {"inputs", "old", "new", "exact"} <= set(torch.load(saved, weights_only=False))


# ------------------------------------------------------------------ transformers

COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "num_experts_per_tok": 2,
}  # fmt: skip
MOE: dict[str, Any] = {**COMMON, "intermediate_size": 48, "moe_intermediate_size": 24}
LATENT: dict[str, Any] = {
    **MOE, "num_key_value_heads": 4, "n_shared_experts": 1, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "qk_nope_head_dim": 8,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {**LATENT, "n_routed_experts": 8, "first_k_dense_replace": 1, "q_lora_rank": 16}
LINEAR = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip


def _kimi_linear() -> Any:
    module = pytest.importorskip("transformers.models.kimi_linear")
    return module.KimiLinearConfig(
        **LATENT, num_local_experts=8, linear_head_dim=8, linear_num_heads=4, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, layer_types=["full_attention", "linear_attention"], mlp_layer_types=["dense", "sparse"],
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], Any], int, int]] = {
    # configuration, mixtures, routers that are lifted
    "Qwen3-MoE": (lambda: transformers.Qwen3MoeConfig(**MOE, num_experts=6, norm_topk_prob=True, head_dim=8), 2, 2),
    "Qwen3-MoE, not renormalised": (
        lambda: transformers.Qwen3MoeConfig(**MOE, num_experts=6, norm_topk_prob=False, head_dim=8), 2, 2,
    ),
    "Mixtral": (lambda: transformers.MixtralConfig(**COMMON, intermediate_size=24, num_local_experts=6), 2, 2),
    "DeepSeek-V3, one group": (lambda: transformers.DeepseekV3Config(**DEEPSEEK, n_group=1, topk_group=1), 1, 1),
    "DeepSeek-V3, four groups": (lambda: transformers.DeepseekV3Config(**DEEPSEEK, n_group=4, topk_group=2), 1, 0),
    "Kimi-Linear": (_kimi_linear, 1, 1),
    "Qwen3-Next": (
        lambda: transformers.Qwen3NextConfig(
            **MOE, **LINEAR, num_experts=6, shared_expert_intermediate_size=24, head_dim=8,
            layer_types=["linear_attention", "full_attention"],
        ), 2, 2,
    ),
}  # fmt: skip


def _model(make: Callable[[], Any], implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = make()
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.set_experts_implementation(implementation)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", MODELS)
def test_an_unmodified_model_of_transformers_is_lifted(name: str, implementation: str) -> None:
    make, mixtures, routers = MODELS[name]
    model = _model(make, implementation)
    ids = torch.randint(0, 60, (2, 1), generator=torch.Generator().manual_seed(0))
    backend = _backend()
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model(ids).logits
        got = torch.compile(model, backend=backend)(ids).logits
    lifted, routed = _report(backend, "lift_moe"), _report(backend, "lift_route")
    assert (lifted.candidates, lifted.matched) == (mixtures, mixtures), reasons(lifted)
    assert routed.matched == routers
    if not routers:
        assert all("limited to groups" in reason for reason in reasons(routed))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", ["Qwen3-MoE", "Mixtral"])
def test_in_bf16_and_with_several_tokens_too(name: str, implementation: str) -> None:
    make, mixtures, _ = MODELS[name]
    model = _model(make, implementation, torch.bfloat16)
    ids = torch.randint(0, 60, (2, 5), generator=torch.Generator().manual_seed(0))
    backend = _backend(verify="regions")
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend)(ids)
    lifted = _report(backend, "lift_moe")
    assert (lifted.candidates, lifted.matched) == (mixtures, mixtures), reasons(lifted)
    assert all(site.verified for site in lifted.sites)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-Next"])
def test_several_rows_of_several_tokens_and_then_more_rows(name: str, implementation: str) -> None:
    """A static graph, then one with a symbolic number of rows; tokens lie in two dimensions in both."""
    make, mixtures, _ = MODELS[name]
    model = _model(make, implementation)
    backend = _backend()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for rows in (2, 3):
            ids = torch.randint(0, 60, (rows, 7), generator=torch.Generator().manual_seed(rows))
            torch.testing.assert_close(
                compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-5
            )
    assert len(backend.reports) == 2
    for run in backend.reports:
        lifted = next(entry for entry in run.passes if entry.name == "lift_moe")
        assert (lifted.candidates, lifted.matched) == (mixtures, mixtures), reasons(lifted)
