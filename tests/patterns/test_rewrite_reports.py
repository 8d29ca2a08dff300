"""Rules that fail, change roundings or overlap, and where the new nodes say that they come from."""

from __future__ import annotations

import pytest
import torch
from sine_rules import ANCHOR, CAST, COS, EXP, NEG, SIN, Built, cos_of_sin, unchanged
from small_graphs import Hand, LineRule, aten, rewritten, targets

from k3rewrite.errors import UnsupportedError, VerificationError
from k3rewrite.graph.provenance import ORIGIN_KEY
from k3rewrite.patterns import Builder, Cast, Match, Policy, Refusal, Var, call

# ------------------------------------------------------------------------------------------------ rules that fail


def test_a_replacement_that_does_not_take_its_arguments_is_a_miss() -> None:
    hand = Hand()
    module = hand.returns(hand.call(COS, hand.call(SIN, hand.input("x", torch.randn(3)))))

    def build(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        builder.call(NEG, match["x"])
        raise UnsupportedError("5 sources are too many", place="k3::some_op", remedy="none")

    assert unchanged(module, cos_of_sin(build)) == [
        "the replacement does not take these arguments: 5 sources are too many"
    ]


def test_a_rule_that_is_wrong_ends_the_run_and_leaves_the_graph() -> None:
    """Kind 93: nothing half-written, whatever happens."""
    hand = Hand()
    module = hand.returns(hand.call(COS, hand.call(SIN, hand.input("x", torch.randn(3)))))
    before = str(module.graph)

    def build(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        return {"root": builder.call(aten.mm.default, builder.call(NEG, match["x"]), match["x"])}

    with pytest.raises(RuntimeError):
        rewritten(cos_of_sin(build), module)
    assert str(module.graph) == before


def test_a_refusal_of_the_last_condition_leaves_the_graph() -> None:
    hand = Hand()
    module = hand.returns(hand.call(COS, hand.call(SIN, hand.input("x", torch.randn(3)))))
    before = module.graph.python_code("self").src
    with pytest.raises(VerificationError, match="rule line_rule: not today"):
        rewritten(cos_of_sin(), module, verify=lambda rewrite: Refusal("not today"))
    assert module.graph.python_code("self").src == before
    assert unchanged(module, cos_of_sin(check=lambda match: Refusal("no", match["anchor"]))) == ["no"]


def test_a_replacement_that_reads_what_it_replaces_is_refused() -> None:
    hand = Hand()
    sine = hand.call(SIN, hand.input("x", torch.randn(3)))
    module = hand.returns(hand.call(aten.mul.Tensor, sine, hand.call(COS, sine)))

    def build(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        return {"root": builder.call(aten.mul.Tensor, builder.call(SIN, match["x"]), match["gate"])}

    (reason,) = unchanged(module, cos_of_sin(build, call("mul", ANCHOR, call(COS, Var("gate")))))
    assert "the replacement reads sin" in reason and "which it replaces" in reason


def test_the_next_reading_is_tried_when_a_rule_refuses_one() -> None:
    hand = Hand()
    narrow = hand.call(CAST, hand.input("x", torch.randn(3)), dtype=torch.bfloat16)
    module = hand.returns(hand.call(COS, hand.call(SIN, narrow)))

    def no_narrowing(match: Match) -> Refusal | None:
        return Refusal("narrowed") if match.value("x").dtype != match["d"] else None

    rule = cos_of_sin(pattern=call(COS, call(SIN, Cast(Var("x"), "d"), name="anchor")), check=no_narrowing)
    assert rewritten(rule, module).matched == 1
    assert targets(module) == ["_to_copy", "neg", "exp"]


# ------------------------------------------------------------------------------------------------ policy, claims


@pytest.mark.parametrize("allow", [False, True])
def test_a_change_of_rounding_must_be_switched_on(allow: bool) -> None:
    hand = Hand()
    module = hand.returns(hand.call(COS, hand.call(SIN, hand.input("x", torch.randn(3)))))
    rule = cos_of_sin(policy=Policy.CHANGES_ROUNDING)
    if allow:
        report = rewritten(rule, module, allow=True)
        assert [s.policy for s in report.sites] == ["changes_rounding"]
    else:
        (reason,) = unchanged(module, rule)
        assert "switch it on with 'allow_changes_rounding: true'" in reason


def test_sites_that_overlap_are_counted_and_told() -> None:
    hand = Hand()
    a, b = (hand.call(SIN, hand.input(n, torch.randn(3)), line=i) for i, n in enumerate("xy", 1))
    module = hand.returns(hand.call(aten.add.Tensor, a, b))

    def build(match: Match, builder: Builder, exposed: frozenset[str]) -> Built:
        return {"root": builder.call(aten.sub.Tensor, match["x"], match["y"])}

    report = rewritten(cos_of_sin(build, call("add", ANCHOR, call(SIN, Var("y")))), module)
    assert (report.candidates, report.matched) == (2, 1)
    (claimed,) = report.refused
    assert (claimed.reason, claimed.source) == ("already part of the site at sin_default", "net.py:2 in forward")


def test_every_candidate_is_counted_and_in_graph_order() -> None:
    hand = Hand()
    sines = [hand.call(SIN, hand.input(f"x{i}", torch.randn(3))) for i in range(4)]
    results = [hand.call(COS if i != 1 else NEG, s) for i, s in enumerate(sines)]
    module = hand.returns(*results)
    report = rewritten(cos_of_sin(), module)
    assert (report.candidates, report.matched, len(report.missed)) == (4, 3, 1)
    assert [s.site for s in report.sites] == ["sin_default", "sin_default_2", "sin_default_3"]


# ------------------------------------------------------------------------------------------------ provenance


def test_new_nodes_say_where_they_come_from() -> None:
    hand = Hand()
    sine = hand.call(SIN, hand.input("x", torch.randn(3)), line=11)
    cosine = hand.call(COS, sine, line=12)
    for node in (sine, cosine):
        node.meta["nn_module_stack"] = {"1": ("L['self'].layers.3.mlp", object)}
        node.meta["from_node"] = [node.name]
    module = hand.returns(cosine)
    old = cosine.meta["val"]
    rewritten(cos_of_sin(name="a_rule"), module)
    made = [n for n in module.graph.nodes if n.op == "call_function"]
    for node in made:
        assert "line 12" in node.meta["stack_trace"], "the line that produced the result"
        assert node.meta["nn_module_stack"] == {"1": ("L['self'].layers.3.mlp", object)}
        assert node.meta["from_node"] == ["sin_default", "cos_default"]
        assert node.meta[ORIGIN_KEY] == (
            "sin_default @ net.py:11 in forward",
            "cos_default @ net.py:12 in forward",
        )
        assert node.meta["k3_made_by"] == "a_rule"
    assert made[-1].meta["val"] is not old and len({id(n.meta["val"]) for n in made}) == len(made)


def test_origins_survive_a_second_rewrite() -> None:
    hand = Hand()
    module = hand.returns(hand.call(COS, hand.call(SIN, hand.input("x", torch.randn(3)), line=1), line=2))
    rewritten(cos_of_sin(), module)
    second = LineRule(
        call(EXP, call(NEG, Var("x"), name="anchor")),
        lambda match, builder, exposed: {"root": builder.call(aten.tanh.default, match["x"])},
        anchors=[NEG],
    )
    rewritten(second, module)
    (node,) = (n for n in module.graph.nodes if n.op == "call_function")
    assert [entry.split(" @ ")[1] for entry in node.meta[ORIGIN_KEY]] == ["net.py:1 in forward", "net.py:2 in forward"]
