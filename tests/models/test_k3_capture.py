"""The decoder as one graph: all phases, eager and compiled alike, no allocation at full size, few nodes a layer."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from k3_cases import random_tokens
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from k3rewrite.models.kimi_k3 import DecodeInputs, KimiK3, KimiK3Config, KimiK3State, build_kimi_k3


def capture(module: KimiK3, args: tuple[Any, ...]) -> tuple[torch.fx.GraphModule, torch.Tensor]:
    """The functional ATen graph (one, or it fails) and what it returns when run as it is."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, keep_inference_input_mutations=True)
    result = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(*args)
    assert len(graphs) == 1
    return graphs[0], result


def nodes_per_layer(graph: torch.fx.GraphModule) -> Counter[int]:
    counts: Counter[int] = Counter()
    for node in graph.graph.nodes:
        paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        layers = [int(found[1]) for path in paths if (found := re.search(r"layers\D+(\d+)", path))]
        if node.op == "call_function" and layers:
            counts[layers[-1]] += 1
    return counts


@pytest.mark.parametrize("phase", ["decode", "verify", "prefill"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"experts": "bf16", "moe_form": "gather", "attn_res_storage": "bank", "mla_decode": "expanded"}],
    ids=["defaults", "other spellings"],
)
def test_one_graph_equals_eager(phase: Any, changes: dict[str, Any]) -> None:
    """Outputs and the state that is left, bit for bit, with a padding row and more than one prefill chunk."""
    kinds = {"num_hidden_layers": 3, "kda_layers": (1, 3), "full_attn_layers": (2,), "attn_res_block_size": 2}
    config = KimiK3Config.minimal(**kinds, **changes)  # KDA, MLA, dense, MoE, a second block
    tokens = 40 if phase == "prefill" else None
    model, (inputs, state), _ = build_kimi_k3(config, phase=phase, batch=3, tokens=tokens, padding_rows=1)
    eager_state = state.clone()
    expected = model(inputs, eager_state)
    graph, got = capture(model, (inputs, state))
    assert torch.equal(got, expected)
    for a, b in zip(state.tensors(), eager_state.tensors(), strict=True):
        assert torch.equal(a, b)
    custom = {str(n.target) for n in graph.graph.nodes if n.op == "call_function"}
    assert all(name.startswith(("aten.", "<built-in")) for name in custom)


def test_static_state_is_updated_over_several_steps() -> None:
    model, (inputs, state), _ = build_kimi_k3(KimiK3Config.minimal().with_layers(4), batch=2)
    eager_state = state.clone()
    state.mark_static()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for step in range(3):
        slots = inputs.slots.flip(0) if step % 2 else inputs.slots
        now = DecodeInputs(random_tokens(model, 2, seed=step), slots, inputs.positions)
        assert torch.equal(compiled(now, state), model(now, eager_state))
    for a, b in zip(state.tensors(), eager_state.tensors(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("phase", "budget"), [("decode", 264), ("verify", 340), ("prefill", 500)])
def test_full_size_layers_capture_without_memory(phase: Any, budget: int) -> None:
    """KDA + dense, KDA + MoE and MLA + MoE of the published model, on fake tensors alone."""
    with FakeTensorMode():
        config = KimiK3Config(num_hidden_layers=3, kda_layers=(1, 2), full_attn_layers=(3,))
        model, args, _ = build_kimi_k3(config, phase=phase, batch=8, context=1024)
        assert all(isinstance(p, FakeTensor) for p in [*model.parameters(), *model.buffers(), *args[1].tensors()])
        graph, logits = capture(model, args)
    assert logits.shape[-1] == 163840
    counts = nodes_per_layer(graph)
    assert sorted(counts) == [0, 1, 2] and max(counts.values()) <= budget


def test_the_published_model_has_its_parameters() -> None:
    """2.7795 T parameters, packed nibbles counted as two: the whole model is built on fake tensors."""
    with FakeTensorMode():
        model = KimiK3(KimiK3Config())
        state = KimiK3State.zeros(model.config, slots=9, max_context=1024)
    parameters = sum(p.numel() for p in model.parameters())
    packed = 2 * sum(b.numel() for name, b in model.named_buffers() if name.endswith("_packed"))
    assert (parameters + packed) / 1e12 == pytest.approx(2.7795, abs=5e-5)
    per_sequence = sum(t[0].numel() * 4 for t in state.recurrent)
    assert len(state.recurrent) == 69 and len(state.latent) == 24 and per_sequence / 1e6 == pytest.approx(434, abs=1)


@pytest.mark.slow
def test_all_93_layers_are_one_graph() -> None:
    with FakeTensorMode():
        model, args, _ = build_kimi_k3(KimiK3Config(), batch=8)
        graph, _ = capture(model, args)
    counts = nodes_per_layer(graph)
    assert sorted(counts) == list(range(93)) and max(counts.values()) <= 264
    targets = Counter(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
    assert targets["aten._softmax.default"] == 186 + 24  # a mix or an attention each
    assert targets["aten.copy_.default"] == 2 * 69 + 24  # every pool once
