"""Verify windows of Kimi K3: convolution, steps and their slots become one op a layer, and compute what eager does.

Each site is run against what it replaces, on random inputs and drawn slots (`region_check`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_graphs import reasons, rewritten
from torch.fx import GraphModule

from k3rewrite._torch_private import FakeTensorMode
from k3rewrite.backend import Backend
from k3rewrite.capture import capture
from k3rewrite.checks.regions import region_check
from k3rewrite.graph.purity import eliminate_dead_code
from k3rewrite.models.kimi_k3 import DecodeInputs, KimiK3Config, VerifyInputs, build_kimi_k3, leave_speculation
from k3rewrite.passes.fuse_kda_decode import FuseKdaDecode
from k3rewrite.passes.fuse_kda_verify import FuseKdaVerify
from k3rewrite.passes.lift_conv_verify import LiftConvVerifyPass
from k3rewrite.passes.lift_gated_rms_norm import LiftGatedRmsNormPass
from k3rewrite.passes.lift_kda_step import LiftKdaStepPass
from k3rewrite.passes.lift_kda_window import LiftKdaWindowPass
from k3rewrite.passes.lift_l2_norm import LiftL2NormPass
from k3rewrite.passes.lift_rms_norm import LiftRmsNormPass
from k3rewrite.passes.lift_short_conv import LiftShortConvPass
from k3rewrite.passes.lift_state_slots import LiftStateSlotsPass

LIFTS = (LiftConvVerifyPass, LiftShortConvPass, LiftKdaStepPass, LiftKdaWindowPass, LiftStateSlotsPass)
"""in the order of the pipelines"""
NORMS = [rule for made in (LiftRmsNormPass, LiftGatedRmsNormPass, LiftL2NormPass) for rule in made().rules()]


def lifted(module: GraphModule, *, verify: bool) -> dict[str, int]:
    """Sites of each rule; nothing is missed or refused."""
    counts = {}
    with torch.no_grad():
        for rule in [rule for made in LIFTS for rule in made().rules()]:
            report = rewritten(rule, module, verify=region_check() if verify else None)
            assert not report.missed and not report.refused, (rule.name, reasons(report), report.refused)
            eliminate_dead_code(module.graph)
            counts[rule.name] = report.matched
    return counts


def fused(module: GraphModule, roundings: Any, *, verify: bool = True) -> int:
    with torch.no_grad():
        for rule in NORMS:
            rewritten(rule, module)
        check = region_check() if verify else None
        report = rewritten(FuseKdaVerify(roundings), module, verify=check, allow=roundings == "fewest")
    assert not report.missed and not report.refused, (reasons(report), report.refused)
    eliminate_dead_code(module.graph)
    return report.matched


def calls(module: GraphModule, name: str) -> list[tuple[Any, ...]]:
    return [n.args for n in module.graph.nodes if str(n.target) == f"k3.{name}.default"]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_every_layer_becomes_one_op(tokens: int, batch: int) -> None:
    config = KimiK3Config.tiny().with_layers(2)
    model, (inputs, state), _ = build_kimi_k3(config, phase="verify", batch=batch, tokens=tokens)
    if tokens == 2:  # a line with more columns than a window needs
        state = state._replace(conv=tuple(torch.nn.functional.pad(line, (0, 0, 0, 3)) for line in state.conv))
    module, layers = capture(model, (inputs, state)).module, config.counts()["n_kda_layers"]
    assert lifted(module, verify=True) == {
        "conv_verify": layers, "short_conv": 0, "short_conv1d": 0, "kda_step": tokens * layers, "kda_window": layers,
        "state_slots": 0,
    }  # fmt: skip
    roundings = "model" if batch == 1 else "fewest"
    assert fused(module, roundings) == layers
    left = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.unfold.default not in left and not calls(module, "kda_window") + calls(module, "conv_verify")
    inner = torch.bfloat16 if roundings == "model" else torch.float32
    made = calls(module, "kda_verify")
    assert {(call[13], call[14], call[15], call[20]) for call in made} == {(None, True, -5.0, inner)}
    assert len({call[10:13] for call in made}) == 1, "slots, starts and columns are those of the step, for every layer"


def test_steps_of_a_window_are_no_decode_steps() -> None:
    """Fault A15: a window of two tokens that was left unfused is not taken for two steps of `fuse_kda_decode`."""
    config = KimiK3Config.minimal().with_layers(1)
    model, (inputs, state), _ = build_kimi_k3(config, phase="verify", batch=2, tokens=2)
    module = capture(model, (inputs, state)).module
    steps = [rule for made in (*LIFTS[:3], LiftStateSlotsPass) for rule in made().rules()]
    with torch.no_grad():
        for rule in [*steps, *NORMS]:
            rewritten(rule, module)
            eliminate_dead_code(module.graph)
        report = rewritten(FuseKdaDecode("fewest"), module, allow=True)
    assert (report.candidates, report.matched) == (2, 0) and not report.refused
    assert all("expected result 0 of k3.kda_step, found masked_fill" in reason for reason in reasons(report))


def test_the_full_width_on_fake_tensors() -> None:
    config = KimiK3Config().with_layers(2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, args, kwargs = build_kimi_k3(config, phase="verify", batch=2, tokens=4)
        module = capture(model, args, kwargs).module
        lifted(module, verify=False)
        assert fused(module, "fewest", verify=False) == config.counts()["n_kda_layers"]


@pytest.mark.parametrize("tokens", [1, 4])
def test_many_windows_and_then_plain_steps(tokens: int) -> None:
    """Through the backend, with every acceptance, a row of nobody and NaN in slot 0. What was accepted last, whichever
    column it is, is where a plain step starts from."""
    config = KimiK3Config.minimal().with_layers(2)
    names = config.counts()
    model, (inputs, state), _ = build_kimi_k3(
        config, phase="verify", batch=3, tokens=tokens, context=30, dtype=torch.float64, padding_rows=1
    )
    for pool in (*state.conv, *state.recurrent):
        pool[0] = torch.nan
    twin, generator = state.clone(), torch.Generator().manual_seed(tokens)
    backends = {
        phase: Backend({"pipeline": f"kimi-k3-{phase}", "finalise": "eager", "target": "cpu", "names": names})
        for phase in ("verify", "decode")
    }
    torch._dynamo.reset()
    windows = torch.compile(model, backend=backends["verify"], fullgraph=True)
    positions, accepted = torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64)

    def same(got: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
        for mine, its in zip(twin.tensors(), state.tensors(), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-9, equal_nan=True)

    with torch.no_grad():
        for _ in range(6):
            order = torch.randperm(3, generator=generator)
            drafts = torch.randint(0, config.vocab_size, (3, tokens), generator=generator)
            step = VerifyInputs(drafts, inputs.slots[order], accepted[order], positions[order])
            same(windows(step, twin), model(step, state))
            now = torch.randint(1, tokens + 1, (3,), generator=generator)
            positions, accepted = positions + now, now
        for own in (state, twin):
            leave_speculation(own, inputs.slots, accepted)
        plain = torch.compile(model, backend=backends["decode"], fullgraph=True)
        for _ in range(2):
            new = torch.randint(0, config.vocab_size, (3,), generator=generator)
            step = DecodeInputs(new, inputs.slots[:, 0], positions)
            same(plain(step, twin), model(step, state))
            positions = positions + 1
    for phase, name in (("verify", "fuse_kda_verify"), ("decode", "fuse_kda_decode")):
        (report,) = backends[phase].reports
        matched = {entry.name: entry.matched for entry in report.passes}
        assert matched[name] == names["n_kda_layers"]
        assert matched["fuse_kda_decode"] + matched["fuse_kda_verify"] == names["n_kda_layers"]
