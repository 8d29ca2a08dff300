"""A KDA layer's decode step through the backend: what is left in the graph, where states are written, many steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from k3rewrite.backend import Backend
from k3rewrite.capture import capture
from k3rewrite.graph.effects import is_view
from k3rewrite.kernels import KERNELS, OPS
from k3rewrite.models.kimi_k3 import KimiK3Config, build_kimi_k3
from k3rewrite.passes import PASSES
from k3rewrite.pipeline.config import load_pipeline
from k3rewrite.pipeline.pass_base import PassContext
from k3rewrite.pipeline.runner import build_passes, run_pipeline
from k3rewrite.report.schema import PassReport
from k3rewrite.targets import load_target

aten = torch.ops.aten
CONFIG = KimiK3Config.minimal().with_layers(4)
KDA = CONFIG.counts()["n_kda_layers"]
MODEL_ROUNDINGS: dict[str, Any] = {
    "version": 1,
    "passes": [
        "canonicalise", "lift_rms_norm", "lift_gated_rms_norm", "lift_l2_norm", "lift_short_conv", "lift_kda_step",
        "lift_state_slots", {"fuse_kda_decode": {"roundings": "model", "expect": f"== {KDA}"}}, "select",
        "reuse_storage",
    ],
}  # fmt: skip
"""nothing but the KDA layers is rewritten, with every rounding of the model"""


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _final_graph(target: str, config: KimiK3Config = CONFIG, dtype: torch.dtype = torch.bfloat16) -> GraphModule:
    """A decode step of Kimi K3 behind the whole shipped pipeline."""
    model, args, _ = build_kimi_k3(config, batch=3, dtype=dtype)
    captured, reports = capture(model, args), list[PassReport]()
    passes = build_passes(load_pipeline("kimi-k3-decode", known_passes=PASSES), PASSES)
    goal = load_target(target)
    names = config.counts() | {"target": target}
    run_pipeline(captured.module, passes, PassContext(goal, OPS, KERNELS), names, reports)
    return captured.module


def _source(node: Node) -> Node:
    """What a value is a view of."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


@pytest.mark.parametrize("target", ["h200", "mi355x"])
def test_states_are_written_in_place_and_nothing_is_copied(target: str) -> None:
    """Each pool of a KDA layer has one reader, which writes it. What is convolved, the gate and beta are views of the
    one product of all projections; the taps of q, k and v are a stack that is made once."""
    graph = _final_graph(target).graph
    steps = [n for n in graph.nodes if n.op == "call_function" and "kda_decode" in n.name]
    assert len(steps) == KDA and all(n.target._schema.is_mutable for n in steps)
    for step in steps:
        arguments = {a.name: v for a, v in zip(step.target._schema.arguments, step.args, strict=True)}
        for pool in (arguments["conv_state"], arguments["state"]):
            assert pool.op == "placeholder" and list(pool.users) == [step], "no copy, and no copy back"
        merged = {_source(arguments[name]) for name in ("qkv", "gate", "b")}
        assert len(merged) == 1 and merged.pop().target is aten.mm.default
        assert arguments["qkv"].meta["val"].stride(0) > arguments["qkv"].meta["val"].shape[1], "rows of the product"
        assert _source(arguments["conv_weight"]).target is torch.ops.k3.pack_rows.default
        (used,) = step.users
        assert is_view(used), "the output projection reads what the kernel wrote"
    modules = [n for n in graph.nodes if "self_attn" in str(n.meta.get("nn_module_stack")) and n not in steps]
    mla = {n for n in modules if "kda.py" not in str(n.meta.get("stack_trace"))}
    assert not [n for n in modules if n not in mla and n.target in (aten.cat.default, aten.clone.default)]


def test_many_steps_in_fp32_with_the_roundings_of_the_model() -> None:
    """Slots shuffled, sequences come and go, NaN in slot 0 and in slots of nobody; idle slots to the bit."""
    model, (inputs, state), _ = build_kimi_k3(CONFIG, batch=6, context=6, dtype=torch.float32, seed=5)
    for pools in (state.conv, state.recurrent):
        for pool in pools:
            pool[0] = torch.nan
            pool[6] = torch.nan  # of no row below
    twin = state.clone()
    backend = Backend({"pipeline": MODEL_ROUNDINGS, "target": "h200", "finalise": "eager"})
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for step in range(8):
            slots = (1 + torch.randperm(5, generator=generator))[:4]
            slots[step % 4] = -step % 3 - 2 if step % 2 else 0
            tokens = torch.randint(0, CONFIG.vocab_size, (4,), generator=generator)
            now = type(inputs)(tokens, slots, inputs.positions[:4])
            before = [pool.clone() for pool in (*twin.conv, *twin.recurrent)]
            torch.testing.assert_close(compiled(now, twin), model(now, state), rtol=1e-5, atol=1e-6)
            idle = sorted({0, *range(1, 7)} - set(slots.tolist()))
            for pool, was in zip((*twin.conv, *twin.recurrent), before, strict=True):
                assert torch.equal(pool[idle].view(torch.int32), was[idle].view(torch.int32)), "untouched, to the bit"
    assert len(backend.reports) == 1
    for mine, its in zip((*twin.conv, *twin.recurrent), (*state.conv, *state.recurrent), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert torch.equal(twin.conv[0].nan_to_num(7.0), state.conv[0].nan_to_num(7.0)), "inputs, as they came"


def test_a_batch_whose_size_is_not_known() -> None:
    model, (inputs, state), _ = build_kimi_k3(CONFIG, batch=6, context=6, dtype=torch.float32, seed=5)
    twin = state.clone()
    backend = Backend({"pipeline": MODEL_ROUNDINGS, "target": "h200", "finalise": "eager"})
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for rows in (4, 6, 5):
            now = type(inputs)(*(value[:rows].clone() for value in inputs))
            for value in now:
                torch._dynamo.mark_dynamic(value, 0)
            torch.testing.assert_close(compiled(now, twin), model(now, state), rtol=1e-5, atol=1e-6)
    assert len(backend.reports) == 1, "one graph for all"
    for mine, its in zip(twin.tensors(), state.tensors(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def test_a_verify_window_is_no_decode_step() -> None:
    """Fault A15: asked to fuse the steps of a window of two tokens, the pass finds nothing, and says what it met."""
    model, args, _ = build_kimi_k3(CONFIG, phase="verify", batch=2, tokens=2, dtype=torch.float32)
    pipeline = {
        "version": 1, "extends": "kimi-k3-verify",
        "passes": [
            {"lift_kda_window": False}, {"fuse_kda_verify": False}, {"fuse_kda_decode": {"expect": f"== {KDA}"}},
        ],
    }  # fmt: skip
    backend = Backend({"pipeline": pipeline, "target": "h200", "finalise": "eager", "names": CONFIG.counts()})
    with pytest.raises(Exception, match="pass fuse_kda_decode rewrote 0 of") as caught, torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*args)
    assert f"'== {KDA}'; misses:" in str(caught.value) and "kda_step_default" in str(caught.value)


@pytest.mark.parametrize("tokens", [1, 2])
def test_windows_of_one_and_of_two_tokens_pass_the_shipped_pipeline(tokens: int) -> None:
    model, (inputs, state), _ = build_kimi_k3(CONFIG, phase="verify", batch=2, tokens=tokens, dtype=torch.float32)
    twin = state.clone()
    options = {"pipeline": "kimi-k3-verify", "target": "h200", "finalise": "eager", "names": CONFIG.counts()}
    with torch.no_grad():
        got = torch.compile(model, backend="k3rewrite", options=options, fullgraph=True)(inputs, twin)
        torch.testing.assert_close(got, model(inputs, state), rtol=2e-4, atol=2e-4)
    for mine, its in zip(twin.tensors(), state.tensors(), strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-4, atol=2e-4)
