"""A prompt of Kimi Delta Attention: the rules' examples, Kimi K3's prefill, and what is left alone."""

from __future__ import annotations

import pytest
import torch
from rule_checks import check_counterexample, check_example
from small_graphs import reasons, rewritten
from torch.fx import GraphModule, Node

from k3rewrite.capture import capture
from k3rewrite.checks.regions import region_check
from k3rewrite.graph.purity import eliminate_dead_code
from k3rewrite.models.kimi_k3 import KimiK3Config, build_kimi_k3
from k3rewrite.passes import chunk_roles, lift_kda_chunk
from k3rewrite.passes.canonicalise import merge_equal
from k3rewrite.passes.chunk_roles import find_roles
from k3rewrite.passes.fuse_kda_chunk import FuseKdaChunk, FuseKdaChunkPass
from k3rewrite.passes.lift_kda_chunk import LiftKdaChunk, LiftKdaChunkPass
from k3rewrite.passes.lift_l2_norm import LiftL2NormPass
from k3rewrite.patterns import CounterExample, Example, Rule
from k3rewrite.patterns.rewrite import SiteCheck
from k3rewrite.report.schema import PassReport

NORMS = LiftL2NormPass().rules()
RULES = [*LiftKdaChunkPass().rules(), *FuseKdaChunkPass().rules()]


@pytest.mark.parametrize(
    ("rule", "example"), [pytest.param(r, e, id=f"{r.name}: {e.name}") for r in RULES for e in r.examples()]
)
def test_examples(rule: Rule, example: Example) -> None:
    check_example(rule, example)


@pytest.mark.parametrize(
    ("rule", "example"), [pytest.param(r, e, id=f"{r.name}: {e.name}") for r in RULES for e in r.counterexamples()]
)
def test_counterexamples(rule: Rule, example: CounterExample) -> None:
    check_counterexample(rule, example)


@pytest.mark.parametrize(("batch", "layers", "check"), [(1, 4, None), (3, 1, region_check())])
def test_a_prefill_of_kimi_k3(batch: int, layers: int, check: SiteCheck | None) -> None:
    """Every layer lifted at its module boundary, and then with its gates, masks and states; with a check, each run
    against what it replaces."""
    config = KimiK3Config.tiny().with_layers(layers)
    model, (inputs, state), _ = build_kimi_k3(config, phase="prefill", batch=batch)
    captured = capture(model, (inputs, state))
    merge_equal(captured.module.graph, PassReport("canonicalise"))
    layers = config.counts()["n_kda_layers"]
    with torch.no_grad():
        for rule in (*NORMS, LiftKdaChunk(), FuseKdaChunk()):
            report = rewritten(rule, captured.module, verify=check, allow=True)
            eliminate_dead_code(captured.module.graph)
            if rule not in NORMS:
                assert report.matched == layers and not reasons(report), (rule.name, reasons(report))
    (lengths,) = {node.args[10] for node in ops(captured.module, "kda_chunk")}
    for node in ops(captured.module, "kda_chunk"):
        q, pool, slots, out_dtype = (node.args[i] for i in (0, 7, 8, 17))
        assert q.meta["val"].dtype == out_dtype == torch.bfloat16 and pool.op == "placeholder"
        assert slots.target is lengths.target is torch.ops.aten.masked_fill.Scalar
    assert not ops(captured.module, "l2_norm")


def test_regions_that_are_alike_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []
    monkeypatch.setattr(lift_kda_chunk, "find_roles", lambda region: ran.append(region) or find_roles(region))
    model, given, _ = build_kimi_k3(KimiK3Config.tiny().with_layers(4), phase="prefill", batch=1)
    captured = capture(model, given)
    assert rewritten(LiftKdaChunk(), captured.module, allow=True).matched == 3 and len(ran) == 1


def test_what_is_too_large_to_be_run_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_roles, "MOST_ELEMENTS", {"cpu": 64})
    model, given, _ = build_kimi_k3(KimiK3Config.tiny().with_layers(1), phase="prefill", batch=1)
    report = rewritten(LiftKdaChunk(), capture(model, given).module, allow=True)
    assert report.matched == 0 and "too many to find out by running" in reasons(report)[0]


def ops(module: GraphModule, name: str) -> list[Node]:
    return [n for n in module.graph.nodes if str(n.target) == f"k3.{name}.default"]
