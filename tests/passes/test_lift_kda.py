"""Short convolution, gated delta rule and their states, in Kimi K3 and in unmodified transformers models.

Each site is run against what it replaces, on random inputs (`region_check`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_graphs import reasons, rewritten
from torch.fx import GraphModule

from k3rewrite._torch_private import FakeTensorMode
from k3rewrite.capture import Captured, capture, lower
from k3rewrite.checks.regions import region_check
from k3rewrite.graph.purity import eliminate_dead_code
from k3rewrite.models.kimi_k3 import KimiK3Config, build_kimi_k3
from k3rewrite.passes.fuse_kda_decode import FuseKdaDecode
from k3rewrite.passes.lift_gated_rms_norm import LiftGatedRmsNormPass
from k3rewrite.passes.lift_kda_step import LiftKdaStep, LiftKdaStepPass
from k3rewrite.passes.lift_l2_norm import LiftL2NormPass
from k3rewrite.passes.lift_rms_norm import LiftRmsNormPass
from k3rewrite.passes.lift_short_conv import LiftShortConvPass
from k3rewrite.passes.lift_state_slots import LiftStateSlots, LiftStateSlotsPass

aten = torch.ops.aten
LIFTS = (LiftShortConvPass, LiftKdaStepPass, LiftStateSlotsPass)
RULES = [rule for made in LIFTS for rule in made().rules()]
NORMS = [rule for made in (LiftRmsNormPass, LiftGatedRmsNormPass, LiftL2NormPass) for rule in made().rules()]


def lifted(module: GraphModule, *, verify: bool = True) -> dict[str, int]:
    """Sites of each rule; nothing is missed or refused."""
    counts = {}
    with torch.no_grad():
        for rule in RULES:
            report = rewritten(rule, module, verify=region_check() if verify else None)
            assert not report.missed and not report.refused, (rule.name, reasons(report), report.refused)
            eliminate_dead_code(module.graph)
            counts[rule.name] = report.matched
    return counts


def ops(module: GraphModule, name: str) -> list[tuple[Any, ...]]:
    return [n.args for n in module.graph.nodes if str(n.target) == f"k3.{name}.default"]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("spare", [0, 3], ids=["", "columns of a verify window"])
def test_a_decode_step_of_kimi_k3(spare: int, batch: int) -> None:
    config = KimiK3Config.tiny().with_layers(2)
    model, (inputs, state), _ = build_kimi_k3(config, phase="decode", batch=batch)
    state = state._replace(conv=tuple(torch.nn.functional.pad(line, (0, 0, 0, spare)) for line in state.conv))
    captured = capture(model, (inputs, state))
    layers = config.counts()["n_kda_layers"]
    assert lifted(captured.module) == {
        "short_conv": layers, "short_conv1d": 0, "kda_step": layers, "state_slots": 2 * layers
    }  # fmt: skip
    (slots,) = {node.args[0] for node in captured.module.graph.find_nodes(op="call_function", target=aten.le.Scalar)}
    for name, at in (("short_conv", 3), ("kda_step", 6)):
        assert all(call[at : at + 2] == (slots, True) for call in ops(captured.module, name)), "slots as they came"
    assert not [n for n in captured.module.graph.nodes if n.target is aten.unfold.default]


@pytest.mark.parametrize("batch", [1, 5])
def test_the_rewritten_step_leaves_the_same_state(batch: int) -> None:
    config = KimiK3Config.tiny().with_layers(2)
    model, args, _ = build_kimi_k3(config, phase="decode", batch=batch, dtype=torch.float32, padding_rows=1)
    expected = copy.deepcopy(args)
    with torch.no_grad():
        outputs = model(*expected)
    modules: list[GraphModule] = []

    def compiler(captured: Captured) -> Callable[..., Any]:
        lifted(captured.module)
        modules.append(captured.module)
        return captured.module

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend=lambda graph, values: lower(graph, values, compiler), fullgraph=True)
        got = compiled(*args)
    assert len(ops(modules[0], "kda_step")) == 2
    torch.testing.assert_close(got, outputs, rtol=1e-5, atol=1e-6)
    for mine, its in zip(args[1].tensors(), expected[1].tensors(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def fused(module: GraphModule, roundings: Any, *, verify: bool = True) -> int:
    """KDA layers that became one op, after the lifts and the norms."""
    check = region_check() if verify else None
    with torch.no_grad():
        for rule in [*NORMS, *RULES]:
            rewritten(rule, module)
            eliminate_dead_code(module.graph)
        report = rewritten(FuseKdaDecode(roundings), module, verify=check, allow=roundings == "fewest")
        assert not report.missed and not report.refused, (reasons(report), report.refused)
        eliminate_dead_code(module.graph)
    return report.matched


@pytest.mark.parametrize("roundings", ["fewest", "model"])
@pytest.mark.parametrize("spare", [0, 3], ids=["", "columns of a verify window"])
def test_every_layer_of_kimi_k3_becomes_one_op(roundings: str, spare: int) -> None:
    config = KimiK3Config.tiny().with_layers(2)
    model, (inputs, state), _ = build_kimi_k3(config, phase="decode", batch=3)
    state = state._replace(conv=tuple(torch.nn.functional.pad(line, (0, 0, 0, spare)) for line in state.conv))
    module = capture(model, (inputs, state)).module
    assert fused(module, roundings) == config.counts()["n_kda_layers"]
    assert not ops(module, "kda_step") and not ops(module, "short_conv") and not ops(module, "l2_norm")
    inner = torch.float32 if roundings == "fewest" else torch.bfloat16
    assert {(call[11], call[13], call[18]) for call in ops(module, "kda_decode")} == {(True, -5.0, inner)}


def test_a_fused_step_with_a_null_row_that_holds_anything() -> None:
    """What a padding row holds goes nowhere: zeros come out, and states stay as they are, bit for bit."""
    config = KimiK3Config.tiny().with_layers(2)
    model, args, _ = build_kimi_k3(config, phase="decode", batch=4, dtype=torch.float32, padding_rows=2)
    args[1].recurrent[0][0] = args[1].conv[0][0] = torch.nan
    expected = copy.deepcopy(args)
    with torch.no_grad():
        outputs = model(*expected)

    def compiler(captured: Captured) -> Callable[..., Any]:
        assert fused(captured.module, "model", verify=False) == 2
        return captured.module

    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend=lambda graph, values: lower(graph, values, compiler), fullgraph=True)
        got = compiled(*args)
    assert bool(got.isfinite().all())
    torch.testing.assert_close(got, outputs, rtol=1e-5, atol=1e-6)
    for mine, its in zip(args[1].tensors(), expected[1].tensors(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_the_full_width_on_fake_tensors() -> None:
    config = KimiK3Config().with_layers(2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, args, kwargs = build_kimi_k3(config, phase="decode", batch=4)
        captured = capture(model, args, kwargs)
        assert fused(captured.module, "fewest", verify=False) == config.counts()["n_kda_layers"]


def test_the_tokens_of_a_verify_window_follow_each_other() -> None:
    """No slots between them: each step starts from what the one before has left."""
    config = KimiK3Config.tiny().with_layers(1)
    model, args, kwargs = build_kimi_k3(config, phase="verify", batch=2, tokens=3)
    module = capture(model, args, kwargs).module
    with torch.no_grad():
        assert rewritten(LiftKdaStep(), module, verify=region_check()).matched == 3
        assert rewritten(LiftStateSlots(), module).matched == 0
    assert [call[6] for call in ops(module, "kda_step")] == [None] * 3


transformers = pytest.importorskip("transformers", "5.17")
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"],
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "KimiLinear": {
        "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 16, "n_routed_experts": 4,
        "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    },
    "Qwen3Next": {
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 32,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_decode_step_of_transformers(name: str) -> None:
    """Keys by values, lines of channels by columns, no slots; a decay of each channel, and of each head."""
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    config._experts_implementation = "batched_mm"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().to(torch.bfloat16)
    ids, cache = torch.randint(3, 64, (2, 5)), transformers.DynamicCache(config=config)
    modules: list[GraphModule] = []

    def compiler(captured: Captured) -> Callable[..., Any]:
        assert lifted(captured.module) == {"short_conv": 0, "short_conv1d": 1, "kda_step": 1, "state_slots": 0}
        modules.append(captured.module)
        return captured.module

    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
        other = copy.deepcopy(cache)
        expected = model(ids[:, :1], past_key_values=other, use_cache=True).logits
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=lambda graph, values: lower(graph, values, compiler), fullgraph=True)
        got = compiled(ids[:, :1], past_key_values=cache, use_cache=True).logits
    (call,) = ops(modules[0], "kda_step")
    g, keys_last = call[3].meta["val"], call[8]
    assert not keys_last and g.shape == ((2, 4, 16) if name == "KimiLinear" else (2, 4, 1))
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    mine, its = cache.layers[0], other.layers[0]
    for own, theirs in ((mine.conv_states, its.conv_states), (mine.recurrent_states, its.recurrent_states)):
        torch.testing.assert_close(own, theirs, rtol=1e-3, atol=1e-3)
