"""Kimi K3 through torch.compile(backend="k3rewrite") equals eager, in all phases, over several steps, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from k3rewrite.backend import Backend
from k3rewrite.capture import run_captured
from k3rewrite.models.kimi_k3 import KimiK3Config, build_kimi_k3

CONFIG = KimiK3Config.minimal(num_hidden_layers=3, kda_layers=(1, 3), full_attn_layers=(2,), attn_res_block_size=2)
"""KDA with a dense MLP, MLA and KDA with experts, blocks written at layers 0 and 2"""
NAMES = CONFIG.counts()
SLOW = (pytest.mark.slow, pytest.mark.timeout(900))
FP32_TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}


def _options(phase: str, finalise: str, target: str = "mi355x") -> dict[str, Any]:
    return {"pipeline": f"kimi-k3-{phase}", "finalise": finalise, "target": target, "names": NAMES}


def _assert_states_equal(a: Any, b: Any) -> None:
    for left, right in zip(tree_leaves(a), tree_leaves(b), strict=True):
        torch.testing.assert_close(left, right, equal_nan=True, **FP32_TOLERANCE)


@pytest.mark.parametrize("finalise", [pytest.param("inductor", marks=SLOW), "eager"])
def test_decode_steps_with_shuffled_slots_and_padding(finalise: str) -> None:
    config = CONFIG
    model, (inputs, state), _ = build_kimi_k3(config, batch=4, context=6, dtype=torch.float32, seed=1, padding_rows=1)
    twin = state.clone()
    backend = Backend(_options("decode", finalise))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    untouched = 0
    with torch.no_grad():
        for _ in range(3):
            order = torch.randperm(4, generator=generator)
            tokens = torch.randint(0, config.vocab_size, (4,), generator=generator)
            now = type(inputs)(tokens, inputs.slots[order], inputs.positions[order])
            got, want = compiled(now, twin), model(now, state)
            torch.testing.assert_close(got, want, **FP32_TOLERANCE)
            untouched += int((now.slots == 0).sum())
    assert untouched == 3, "the padding row was in every batch"
    _assert_states_equal(twin, state)
    assert len(backend.reports) == 1, "one graph serves all steps"
    fused = {p.name: p.matched for p in backend.reports[0].passes}
    assert fused["fuse_attn_res_norm"] == 2 * config.num_hidden_layers
    assert fused["fuse_kda_decode"] == NAMES["n_kda_layers"]


@pytest.mark.parametrize("finalise", [pytest.param("inductor", marks=SLOW), "eager"])
def test_verify_steps_with_shuffled_slots_and_accepted_counts(finalise: str) -> None:
    model, (inputs, state), _ = build_kimi_k3(
        CONFIG, phase="verify", batch=4, tokens=3, dtype=torch.float32, seed=2, padding_rows=1
    )
    generator = torch.Generator().manual_seed(3)
    steps = []
    for _ in range(3):
        order = torch.randperm(4, generator=generator)
        tokens = torch.randint(0, CONFIG.vocab_size, (4, 3), generator=generator)
        accepted = torch.randint(1, 4, (4,), generator=generator)
        steps.append(type(inputs)(tokens, inputs.slots[order], accepted, inputs.positions[order]))
    matched = _run_steps(model, state, steps, "verify", finalise)
    assert matched["fuse_attn_res_norm"] == 2 * CONFIG.num_hidden_layers
    assert (matched["lift_kda_step"], matched["fuse_kda_decode"]) == (3 * NAMES["n_kda_layers"], 0)
    assert matched["fuse_kda_verify"] == NAMES["n_kda_layers"]
    assert matched["lift_route"] == NAMES["n_moe_layers"]


@pytest.mark.parametrize("finalise", [pytest.param("inductor", marks=SLOW), "eager"])
def test_prefill_in_pieces_of_several_lengths(finalise: str) -> None:
    model, (inputs, state), _ = build_kimi_k3(
        CONFIG, phase="prefill", batch=3, tokens=40, dtype=torch.float32, seed=2, padding_rows=1
    )
    positions, steps = inputs.start_positions, []
    for lengths in (torch.tensor([20, 7, 0]), torch.tensor([9, 20, 0])):
        columns = positions.unsqueeze(1) + torch.arange(20)
        steps.append(type(inputs)(inputs.tokens.gather(1, columns), inputs.slots, positions, lengths))
        positions = positions + lengths
    matched = _run_steps(model, state, steps, "prefill", finalise)
    assert matched["fuse_attn_res_norm"] == 2 * CONFIG.num_hidden_layers
    assert matched["lift_route"] == NAMES["n_moe_layers"]


def _run_steps(model: Any, state: Any, steps: list[Any], phase: str, finalise: str) -> dict[str, int]:
    """Results of every step and the states after all of them equal eager's; one graph serves all steps. Sites that were
    rewritten in it, by pass."""
    twin = state.clone()
    backend = Backend(_options(phase, finalise))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for step in steps:
            torch.testing.assert_close(compiled(step, twin), model(step, state), **FP32_TOLERANCE)
    _assert_states_equal(twin, state)
    (report,) = backend.reports
    return {entry.name: entry.matched for entry in report.passes}


@pytest.mark.parametrize("phase", ["decode", pytest.param("verify", marks=pytest.mark.slow)])
@pytest.mark.parametrize("finalise", [pytest.param("inductor", marks=SLOW), "eager"])
def test_bf16_is_as_near_to_fp64_as_eager(phase: str, finalise: str) -> None:
    """Sites are checked on the graph, before it is finalised: once for both finalisers."""
    model, args, kwargs = build_kimi_k3(CONFIG, phase=phase, batch=3, dtype=torch.bfloat16, seed=0)
    backend = Backend({**_options(phase, finalise), "verify": "all" if finalise == "eager" else "end-to-end"})
    run_captured(model, backend, args, kwargs)
    result = backend.reports[0].end_to_end
    assert result is not None and result.passed
    assert not [m for p in backend.reports[0].passes for m in p.missed if "verification" in m.reason]


@pytest.mark.parametrize("storage", ["list", "bank"])
def test_blocks_in_a_list_and_in_a_bank(storage: str) -> None:
    config = replace(CONFIG, attn_res_storage=storage)
    model, (inputs, state), _ = build_kimi_k3(config, batch=2, dtype=torch.float32, seed=4)
    twin = state.clone()
    backend = Backend(_options("decode", "eager"))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(inputs, twin), model(inputs, state), **FP32_TOLERANCE)
    matched = {p.name: p.matched for p in backend.reports[0].passes}
    assert matched["fuse_attn_res_norm"] == 2 * config.num_hidden_layers
    # block 0 is the embedding, stored before any mix; the others are written by a fused mix
    assert matched["fuse_block_write"] == (config.num_blocks - 1 if storage == "bank" else 0)


@pytest.mark.parametrize("roundings", ["model", "fewest"])
def test_roundings_of_the_mix(roundings: str) -> None:
    """On one layer, with nothing else rewritten: the model's roundings are bit-equal to eager, the fewest are not."""
    model, (inputs, state), _ = build_kimi_k3(KimiK3Config.tiny().with_layers(1), batch=8, dtype=torch.bfloat16, seed=1)
    fuse = {"roundings": roundings, "allow_changes_rounding": roundings == "fewest"}
    pipeline = {"version": 1, "passes": ["lift_rms_norm", "lift_attn_res", {"fuse_attn_res_norm": fuse}]}
    twin = state.clone()
    backend = Backend({"pipeline": pipeline, "target": "cpu", "finalise": "eager"})
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        got, want = compiled(inputs, twin), model(inputs, state)
    entry = next(p for p in backend.reports[0].passes if p.name == "fuse_attn_res_norm")
    assert {s.policy for s in entry.sites} == {"reassociates" if roundings == "model" else "changes_rounding"}
    assert torch.equal(got, want) is (roundings == "model")
