"""What the author of a pass reads when it is wrong: every error says what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed._functional_collectives  # registers the collectives
from small_graphs import Hand, aten
from torch import Tensor
from torch.fx import GraphModule, Node

from k3rewrite.capture import capture
from k3rewrite.checks.contract import GraphContract
from k3rewrite.errors import ConfigError, ContractError
from k3rewrite.kernels import KERNELS, OPS
from k3rewrite.patterns import OPERATORS, Builder, CounterExample, Example, Match, Policy, Rule, Var, call
from k3rewrite.pipeline.pass_base import Pass, PassContext, RulePass
from k3rewrite.pipeline.runner import build_passes, run_pipeline
from k3rewrite.pipeline.settings import PassConfig, PipelineConfig
from k3rewrite.report.schema import PassReport
from k3rewrite.targets import load_target


def run(made: type[Pass], module: GraphModule) -> PassReport:
    """The report of one pass over a graph, through the pipeline's own runner."""
    reports: list[PassReport] = []
    passes = build_passes(PipelineConfig(passes=(PassConfig(made.name),)), {made.name: made})
    run_pipeline(module, passes, PassContext(load_target("cpu"), OPS, KERNELS), {}, reports)
    return reports[0]


# ------------------------------------------------------------------------------------------------ operators


@pytest.mark.parametrize("ask", [lambda name: OPERATORS[name], lambda name: call(name, Var("x"))])
def test_an_unknown_operator_is_an_error_with_the_nearest_name(ask: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigError, match="no operator 'rsqrtt'") as caught:
        ask("rsqrtt")
    assert caught.value.remedy is not None and "did you mean 'rsqrt'?" in caught.value.remedy
    with pytest.raises(ConfigError) as caught:
        ask("erf")
    remedy = caught.value.remedy or ""
    assert all(name in remedy for name in OPERATORS) and "call(torch.ops.aten.erf.default" in remedy


def test_operators_are_still_a_mapping() -> None:
    assert "rsqrtt" not in OPERATORS and OPERATORS.get("rsqrtt") is None
    assert OPERATORS["rsqrt"] == {aten.rsqrt.default}
    with pytest.raises(TypeError):
        OPERATORS["erf"] = frozenset({aten.erf.default})  # type: ignore[index]


class FoldErf(Rule):
    """An operator without a name in OPERATORS, by its overload: erf(-x) -> -erf(x)."""

    name = "fold_erf"
    policy = Policy.EXACT
    anchors = frozenset({aten.erf.default})
    pattern = call(aten.erf.default, call("neg", Var("x")), name="anchor")

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        return {"root": builder.call(aten.neg.default, builder.call(aten.erf.default, match["x"]))}

    def examples(self) -> Sequence[Example]:
        return (Example("negated", lambda x: torch.erf(-x), _input),)

    def counterexamples(self) -> Sequence[CounterExample]:
        return (CounterExample("not negated", lambda x: torch.erf(x.sin()), _input, "expected neg"),)


def _input() -> tuple[Tensor]:
    return (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),)


@dataclass(frozen=True)
class FoldErfPass(RulePass):
    """Move a sign out of erf."""

    name: ClassVar[str] = "fold_erf"

    def rules(self) -> tuple[Rule, ...]:
        return (FoldErf(),)


def test_a_call_takes_an_overload() -> None:
    captured = capture(lambda x: torch.erf(-x), _input())
    report = run(FoldErfPass, captured.module)
    assert (report.candidates, report.matched) == (1, 1)
    other = FoldErf().counterexamples()[0]
    report = run(FoldErfPass, capture(other.function, other.inputs()).module)
    assert report.matched == 0 and other.reason in report.missed[0].reason


# ------------------------------------------------------------------------------------------------ the contract

Change = Callable[[GraphModule], None]


def _module() -> GraphModule:
    """-sin(x) returned, cos(x) written into y, and a sum of x over all ranks."""
    hand = Hand()
    x, y = hand.input("x", torch.randn(3, 4)), hand.input("y", torch.randn(3, 4))
    sine, cosine = hand.call(aten.sin.default, x), hand.call(aten.cos.default, x)
    started = hand.call(torch.ops._c10d_functional.all_reduce.default, x, "sum", "tp")
    total = hand.call(torch.ops._c10d_functional.wait_tensor.default, started)
    hand.call(aten.copy_.default, y, cosine)
    return hand.returns(hand.call(aten.neg.default, sine), total)


def _node(module: GraphModule, target: Any) -> Node:
    return next(n for n in module.graph.nodes if n.target is target)


def _out_of_order(module: GraphModule) -> None:
    module.graph.output_node().prepend(_node(module, aten.cos.default))


def _one_output(module: GraphModule) -> None:
    module.graph.output_node().args = ((_node(module, aten.neg.default),),)


def _another_input(module: GraphModule) -> None:
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        module.graph.placeholder("extra").meta["val"] = torch.ones(1)


def _wider_output(module: GraphModule) -> None:
    returned = _node(module, aten.neg.default)
    returned.meta["val"] = returned.meta["val"].double()


def _narrower_input(module: GraphModule) -> None:
    node = next(iter(module.graph.nodes))
    node.meta["val"] = node.meta["val"][0]


def _no_wait(module: GraphModule) -> None:
    wait = _node(module, torch.ops._c10d_functional.wait_tensor.default)
    wait.replace_all_uses_with(wait.args[0])  # type: ignore[arg-type]
    module.graph.erase_node(wait)


def _no_write(module: GraphModule) -> None:
    module.graph.erase_node(_node(module, aten.copy_.default))


def _another_write(module: GraphModule) -> None:
    x = next(iter(module.graph.nodes))
    with module.graph.inserting_before(module.graph.output_node()):
        module.graph.call_function(aten.copy_.default, (x, _node(module, aten.sin.default))).meta["val"] = x.meta["val"]


def _method(module: GraphModule) -> None:
    sine = _node(module, aten.sin.default)
    with module.graph.inserting_after(sine):
        module.graph.call_method("sin", (sine,)).meta["val"] = sine.meta["val"]


def _packet(module: GraphModule) -> None:
    _node(module, aten.neg.default).target = aten.neg


def _packet_on_an_input(module: GraphModule) -> None:
    _node(module, aten.sin.default).target = aten.sin


def _unannounced(module: GraphModule) -> None:
    sine = _node(module, aten.sin.default)
    sine.target, sine.args = torch.ops.k3.l2_norm.default, (sine.args[0], 1e-6, True, torch.float32, torch.float32)


def _no_value(module: GraphModule) -> None:
    del _node(module, aten.sin.default).meta["val"]


@pytest.mark.parametrize(
    ("change", "message", "remedy"),
    [
        (_out_of_order, "not well-formed", "put a node behind all that it reads"),
        (_one_output, "2 outputs became 1", "leave the output node alone"),
        (_another_input, "2 inputs became 3", "leave the placeholders as they are"),
        (_wider_output, "output 0: dtype", "the dtype, shape, device and stride of what it replaces"),
        (_narrower_input, "input 0: shape", "leave the placeholders as they are"),
        (_no_wait, "collectives", "leave every collective and every wait in its place"),
        (_no_write, "input 1 is not written any more", "keep the node that writes it"),
        (_another_write, "input 0 is written", "call a functional overload"),
        (_packet_on_an_input, "input 0 is written", "an op without its overload"),
        (_method, "a call_method node", "builder.call"),
        (_packet, "no operator of this level", "torch.ops.aten.sin.default"),
        (_unannounced, "k3::l2_norm was not announced", "name 'l2_norm' in `provides` of the pass that makes it"),
        (_no_value, "without a value description", "meta['val']"),
    ],
)
def test_every_breach_of_the_contract_has_a_remedy(change: Change, message: str, remedy: str) -> None:
    module = _module()
    contract = GraphContract.of(module)
    contract.check(module, "nothing", frozenset())
    change(module)
    with pytest.raises(ContractError, match=message) as caught:
        contract.check(module, "a_pass", frozenset())
    assert caught.value.remedy is not None and remedy in caught.value.remedy
    assert (caught.value.place or "").startswith("after a_pass")
