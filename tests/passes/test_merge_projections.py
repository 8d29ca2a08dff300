"""merge_projections: what becomes one GEMM in Kimi K3 and in models of others, its limits, and what each reader gets.

Examples and counterexamples of the rule itself run in test_rules.py and test_dynamic_sizes.py, writes to weights in
tests/finalise/test_prologue.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_graphs import Hand, aten, rewritten
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import k3rewrite.kernels  # noqa: F401  registers the ops
from k3rewrite.backend import Backend
from k3rewrite.capture import capture
from k3rewrite.errors import ConfigError
from k3rewrite.graph.weights import KEY, Weight
from k3rewrite.kernels import KERNELS, OPS
from k3rewrite.models.kimi_k3 import KimiK3Config, build_kimi_k3
from k3rewrite.passes import PASSES
from k3rewrite.passes.merge_projections import Limits, MergeProjections, MergeProjectionsPass
from k3rewrite.passes.projection_examples import WIDTH, Layers, conv_and_gates, inputs, total
from k3rewrite.pipeline.config import load_pipeline
from k3rewrite.pipeline.pass_base import PassContext
from k3rewrite.pipeline.runner import build_passes, run_pipeline
from k3rewrite.report.schema import PassReport
from k3rewrite.targets import load_target

KINDS = KimiK3Config.tiny(num_hidden_layers=2, kda_layers=(1,), full_attn_layers=(2,))
"""a group of projections of each kind: KDA, a dense MLP, MLA, experts"""
PACK, MM = torch.ops.k3.pack_rows.default, aten.mm.default


def merged(model: Callable[..., Any], arguments: tuple[Any, ...], **options: Any) -> tuple[GraphModule, PassReport]:
    """The graph of a model after the passes up to merge_projections, and the report of that."""
    config = {"version": 1, "extends": "default", "passes": [{"merge_projections": options}, {"select": "off"}]}
    config["passes"].append({"reuse_storage": "off"})  # type: ignore[union-attr]
    captured, reports = capture(model, arguments), list[PassReport]()
    passes = build_passes(load_pipeline(config, known_passes=PASSES), PASSES)
    run_pipeline(captured.module, passes, PassContext(load_target("mi355x"), OPS, KERNELS), {}, reports)
    return captured.module, reports[-1]


def kinds(report: PassReport) -> Mapping[str, int]:
    """Sites by the last part of the module path that made the first projection."""
    return Counter(site.module.rsplit(".", 2)[-2] for site in report.sites)


def reasons(report: PassReport) -> list[str]:
    return [miss.reason for miss in (*report.missed, *report.refused)]


def stacks(module: GraphModule) -> list[Node]:
    return list(module.graph.find_nodes(op="call_function", target=PACK))


# ------------------------------------------------------------------------------------------------ Kimi K3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_decode_step_of_kimi_k3(dtype: torch.dtype) -> None:
    """One group for each attention and each feed-forward; a router that computes in a wider dtype stays by itself."""
    config = KimiK3Config.tiny().with_layers(4)
    model, arguments, _ = build_kimi_k3(config, phase="decode", batch=4, dtype=dtype)
    module, report = merged(model, arguments)
    counts = config.counts()
    assert report.matched == 2 * counts["n_layers"] == len(stacks(module))
    assert kinds(report) == {
        "self_attn": counts["n_layers"], "mlp": counts["n_dense_layers"], "block_sparse_moe": counts["n_moe_layers"],
    }  # fmt: skip
    moe = next(site for site in report.sites if "block_sparse_moe" in site.module)
    if dtype is torch.bfloat16:
        assert moe.replaced_by.startswith("3 projections") and len(report.missed) == counts["n_moe_layers"]
        assert all("its weight is computed in the graph" in reason for reason in reasons(report))
    else:
        assert moe.replaced_by.startswith("4 projections") and report.missed == []
    assert report.launches_after < report.launches_before


def test_rows_of_kimi_k3_at_eight_ranks() -> None:
    """6284 rows, padded to 6288: the narrowest projection at the end, each other at a multiple of 16 bytes."""
    weights = {"q": 1536, "k": 1536, "v": 1536, "f_a": 128, "b": 12, "g": 1536}
    hand = Hand()
    x = hand.input("x", torch.randn(4, 32).bfloat16())
    stored = [weight(hand, name, torch.zeros(rows, 32).bfloat16()) for name, rows in weights.items()]
    results = [hand.call(MM, x, hand.call(aten.t.default, each)) for each in stored]
    module = hand.returns(*(hand.call(aten.sum.default, result) for result in results))
    assert rewritten(MergeProjections(), module).matched == 1
    (stack,) = stacks(module)
    assert [each.name for each in stack.args[0]] == ["q", "k", "v", "g", "f_a", "b"]  # type: ignore[union-attr]
    assert stack.args[1:] == ([0, 1536, 3072, 4608, 6144, 6272], 6288)


def test_a_whole_step_of_kimi_k3_is_as_near_to_fp64_as_eager() -> None:
    model, arguments, _ = build_kimi_k3(KINDS, phase="decode", batch=4)
    backend = Backend(
        {"pipeline": "kimi-k3-decode", "names": KINDS.counts(), "target": "cpu", "verify": "end-to-end",
         "finalise": "eager"}
    )  # fmt: skip
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*arguments)
    (report,) = backend.reports
    assert report.end_to_end is not None and report.end_to_end.passed
    assert next(p for p in report.passes if p.name == "merge_projections").matched == 2 * KINDS.num_hidden_layers


def test_every_site_of_kimi_k3_against_what_it_replaces() -> None:
    model, arguments, _ = build_kimi_k3(KINDS, phase="decode", batch=3)
    backend = Backend({"target": "cpu", "verify": "regions", "finalise": "eager", "pipeline": "base"})
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*arguments)
    sites = next(p for p in backend.reports[0].passes if p.name == "merge_projections").sites
    assert len(sites) == 4 and all(site.verified and site.policy == "reassociates" for site in sites)


def test_another_batch_is_one_more_graph_on_the_same_stacks() -> None:
    backend = Backend({"finalise": "eager", "pipeline": "base"})
    model, _, _ = build_kimi_k3(KINDS, phase="decode", batch=2, dtype=torch.float32)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    places = []
    for batch in (4, 6, 7):
        _, (step, state), _ = build_kimi_k3(KINDS, phase="decode", batch=batch, dtype=torch.float32)
        _, (_, own), _ = build_kimi_k3(KINDS, phase="decode", batch=batch, dtype=torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(compiled(step, state), model(step, own), rtol=1e-4, atol=1e-4)
        places.append([parameter.data_ptr() for parameter in model.parameters()])
    assert places[0] == places[1] == places[2]
    reports = [next(p for p in r.passes if p.name == "merge_projections") for r in backend.reports]
    assert [report.matched for report in reports] == [4, 4], "the second one has a symbolic batch"
    assert "move into a stack" in reports[0].sites[0].replaced_by
    assert "lie in a stack" in reports[1].sites[0].replaced_by


# ------------------------------------------------------------------------------------------------ models of others


def test_llama_as_transformers_has_it() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 128, (2, 5))
    backend = Backend({"target": "cpu", "finalise": "eager", "verify": "all", "pipeline": "base"})
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        got = torch.compile(model, backend=backend, fullgraph=True)(tokens, use_cache=False).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    report = next(p for p in backend.reports[0].passes if p.name == "merge_projections")
    assert [site.replaced_by.split(" in ")[0] for site in report.sites] == ["3 projections", "2 projections"] * 2
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.untyped_storage().nbytes() == 64 * (64 + 32 + 32) * 4


# ------------------------------------------------------------------------------------------------ limits


def test_limits_bound_what_is_merged() -> None:
    layers = Layers(total, 16, 8, 3)
    assert "27 rows, and 'max_rows' is 26" in reasons(merged(layers, inputs(), max_rows=26)[1])
    assert "5 rows of input, and 'max_tokens' is 4" in reasons(merged(layers, inputs(), max_tokens=4)[1])
    assert "3 projections of one value, and 'min_group' is 4" in reasons(merged(layers, inputs(), min_group=4)[1])
    module, report = merged(layers, inputs(), multiple=64)
    assert stacks(module)[0].args[2] == 64
    assert report.sites[0].replaced_by == (
        "3 projections in one of 64 rows (37 of them padding); the weights move into a stack of 8192 bytes, 4736 more "
        "than their own"
    )


@pytest.mark.parametrize(("option", "value"), [("min_group", 1), ("max_rows", 0), ("max_tokens", 0), ("multiple", 0)])
def test_limits_that_mean_nothing_are_errors(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{option} is {value}"):
        MergeProjectionsPass(**{option: value})


def test_a_group_that_is_declined_is_found_all_the_same() -> None:
    """What a pipeline expects holds for large batches, and while somebody holds the weights."""
    layers = Layers(total, 16, 8)
    assert merged(layers, (torch.randn(300, WIDTH),))[1].declined == 1
    held = layers.state_dict()
    report = merged(layers, inputs())[1]
    assert (report.matched, report.declined) == (0, 1)
    assert reasons(report) == ["a weight cannot move into a stack: 1 more tensor lives in its memory"]
    del held
    assert merged(layers, inputs())[1].matched == 1


def test_a_weight_that_is_held_stays_and_the_others_are_merged() -> None:
    layers = Layers(total, 16, 8, 8)
    held = layers.weights[1].data
    _, report = merged(layers, inputs())
    assert [site.replaced_by[:13] for site in report.sites] == ["2 projections"] and held is not None
    assert reasons(report) == ["a weight cannot move into a stack: 1 more tensor lives in its memory"]


def test_weights_that_lie_in_one_tensor_in_order_are_a_stack_already() -> None:
    """Somebody holds the whole of it, and nothing moves: both see every write."""
    layers, whole = Layers(total, 16, 16), torch.randn(32, WIDTH)
    for in_order in (False, True):
        parts = whole.chunk(2) if in_order else whole.chunk(2)[::-1]
        for part, each in zip(parts, layers.weights, strict=True):
            each.data = part
        report = merged(layers, inputs())[1]
        assert (report.matched, report.declined) == ((1, 0) if in_order else (0, 1))
    assert "the weights lie in a stack" in report.sites[0].replaced_by


# ------------------------------------------------------------------------------------------------ readers


def test_results_are_views_and_nothing_is_copied() -> None:
    """q, k and v, which the model concatenates, are neighbours in the stack: they are there already."""
    module, report = merged(Layers(conv_and_gates, 32, 32, 32, 8, 3, 32), inputs())
    assert report.matched == 1
    called = Counter(node.target for node in module.graph.nodes if node.op == "call_function")
    assert called[MM] == 1 and called[aten.cat.default] == called[aten.clone.default] == 0
    slices = [node for node in module.graph.nodes if node.target is aten.slice.Tensor]
    first = min(slices, key=lambda node: node.args[2])
    assert first.args[1:] == (1, 0, 96) and first.meta["val"].stride() == (144, 1)
    assert [node.meta["val"].stride() for node in first.users] == [(144, 32, 16, 1)]


def test_one_that_cannot_be_a_view_stays_and_the_others_are_merged() -> None:
    def read(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a.sum(-1) + b.sum(-1) + c.view(-1)[: x.shape[0]]

    module, report = merged(Layers(read, 16, 8, 8), inputs())
    assert report.matched == 1 and [site.replaced_by[:13] for site in report.sites] == ["2 projections"]
    (reason,) = reasons(report)
    assert reason.startswith("its rows would lie apart: view") and "does not take it" in reason
    assert sum(node.target is MM for node in module.graph.nodes) == 2


def test_an_op_of_others_may_need_neighbours() -> None:
    library = torch.library.Library("test_merge", "DEF")
    try:
        library.define("rows(Tensor x) -> Tensor")
        library.impl("rows", lambda x: x.sum(-1), "CompositeExplicitAutograd")
        torch.library.register_fake("test_merge::rows", lambda x: x.new_empty(x.shape[:1]), lib=library)

        def read(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
            y: Tensor = torch.ops.test_merge.rows(a) + b.sum(-1)
            return y

        _, report = merged(Layers(read, 8, 8), inputs())
        assert report.matched == 0 and any("may need a contiguous tensor" in reason for reason in reasons(report))
    finally:
        library._destroy()


def test_a_kernel_is_not_lost_to_a_layout() -> None:
    """A kernel that takes contiguous rows only keeps them."""

    class Packed:
        op, name = "l2_norm", "packed"

        def accepts(self, arguments: Mapping[str, Any], target: Any) -> str | None:
            return None if arguments["x"].is_contiguous() else "rows lie apart"

        def cost_us(self, arguments: Mapping[str, Any], target: Any) -> float:
            return 1.0

    def read(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        unit: Tensor = torch.ops.k3.l2_norm(a, 1e-6, True, torch.float32, torch.float32)
        return unit.sum(-1) + b.sum(-1) + c.sum(-1)

    context = PassContext(load_target("mi355x"), OPS, ())
    for kernels, count in (((), 3), ((Packed(),), 2)):
        module = capture(Layers(read, 8, 8, 8), inputs()).module
        report = PassReport("merge_projections")
        MergeProjectionsPass().run(module, replace(context, kernels=kernels), report)  # type: ignore[arg-type]
        assert [site.replaced_by[:13] for site in report.sites] == [f"{count} projections"]
        assert any("would lose a kernel: packed: rows lie apart" in r for r in reasons(report)) is (count == 2)


def test_an_mlp_that_a_kernel_takes_stays_whole() -> None:
    class Whole:
        op, name = "mlp", "whole"

        def accepts(self, arguments: Mapping[str, Any], target: Any) -> str | None:
            return None

        def cost_us(self, arguments: Mapping[str, Any], target: Any) -> float:
            return 1.0

    from k3rewrite.passes.projection_examples import Gated

    module = capture(Gated(), inputs()).module
    report = PassReport("merge_projections")
    MergeProjectionsPass().run(module, PassContext(load_target("mi355x"), OPS, (Whole(),)), report)  # type: ignore[arg-type]
    assert report.matched == 0
    assert sorted(reasons(report)) == [
        "a kernel takes the MLP as a whole", "no other projection of its input can be merged with it",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ writes


def weight(hand: Hand, name: str, value: Tensor) -> Node:
    """An input that counts as a parameter, as capture notes it."""
    node = hand.input(name, value)
    node.meta[KEY] = Weight(0, 0, 0, None)
    return node


@pytest.mark.parametrize("what", ["input", "weight"])
def test_a_write_in_between_keeps_them_apart(what: str) -> None:
    hand = Hand()
    x = hand.input("x", torch.randn(3, 8))
    stored = [weight(hand, name, torch.randn(4, 8)) for name in "ab"]
    a = hand.call(MM, x, hand.call(aten.t.default, stored[0]))
    hand.call(aten.add_.Tensor, x if what == "input" else stored[1], 1)
    b = hand.call(MM, x, hand.call(aten.t.default, stored[1]))
    module = hand.returns(hand.call(aten.sum.default, a), hand.call(aten.sum.default, b))
    before = hand.run(module)[0]
    report = rewritten(MergeProjections(Limits()), module)
    assert report.matched == 0
    assert any("writes what" in reason for reason in reasons(report))
    assert all(map(torch.equal, hand.run(module)[0], before))


def test_a_weight_that_the_graph_writes_is_no_weight() -> None:
    class Learning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.randn(8, WIDTH))
            self.register_buffer("b", torch.randn(8, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.a).sum(-1) + F.linear(x, self.b).sum(-1)
            self.a.mul_(0.5)
            return y

    _, report = merged(Learning(), inputs())
    assert report.matched == 0
    assert any("no parameter or buffer that is only read" in reason for reason in reasons(report))
