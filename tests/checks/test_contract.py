"""The contract after every pass: each way of breaking it is named, with the pass and the user's line."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from graphs import capture_with_inputs
from small_graphs import Hand, aten, traced
from torch import Tensor
from torch.fx import GraphModule, Node

import k3rewrite.kernels  # noqa: F401  registers the ops
from k3rewrite import _torch_private as private
from k3rewrite.checks.contract import GraphContract, check_guards
from k3rewrite.errors import ContractError
from k3rewrite.graph.shapes import metadata_difference, same_size

NONE: frozenset[str] = frozenset()


def broken(module: GraphModule, change: Callable[[GraphModule], Any], announced: frozenset[str] = NONE) -> str:
    """The error's text after `change`."""
    contract = GraphContract.of(module)
    contract.check(module, "nothing", announced)
    change(module)
    with pytest.raises(ContractError) as caught:
        contract.check(module, "a_pass", announced)
    assert "after a_pass" in str(caught.value)
    assert caught.value.exit_code == 1
    return str(caught.value)


def _module() -> GraphModule:
    hand = Hand()
    x = hand.input("x", torch.randn(3, 4))
    return hand.returns(hand.call(aten.sin.default, x, line=3), hand.call(aten.topk.default, x, 2, line=4))


def _first(module: GraphModule) -> Node:
    return next(n for n in module.graph.nodes if n.op == "call_function")


def _replace_first(module: GraphModule, target: Any, *args: Any, **kwargs: Any) -> Node:
    old = _first(module)
    with module.graph.inserting_before(old):
        new = module.graph.call_function(target, args, kwargs)
    value = old.args[0].meta["val"]  # type: ignore[union-attr]
    with value.fake_mode:
        new.meta["val"] = target(value, *args[1:], **kwargs)
    old.replace_all_uses_with(new)
    return new


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "text"),
    [
        (aten._to_copy.default, (), {"dtype": torch.float64}, "output 0: dtype torch.float32 becomes torch.float64"),
        (aten.sum.dim_IntList, ([1],), {}, "output 0: shape [3, 4] becomes [3]"),
        (aten.unsqueeze.default, (0,), {}, "output 0: shape [3, 4] becomes [1, 3, 4]"),
        (aten._to_copy.default, (), {"device": "meta"}, "output 0: device cpu becomes meta"),
    ],
)
def test_results_keep_their_metadata(target: Any, args: Any, kwargs: Any, text: str) -> None:
    module = _module()
    x = next(iter(module.graph.nodes))
    assert text in broken(module, lambda m: _replace_first(m, target, x, *args, **kwargs))


def test_results_keep_their_strides() -> None:
    module = traced(lambda x: x.sin(), [torch.randn(3, 4)])

    def change(module: GraphModule) -> None:
        node = _first(module)
        value = node.meta["val"]
        with value.fake_mode:
            node.meta["val"] = value.t().contiguous().t()

    assert "output 0: stride [4, 1] becomes [1, 3]" in broken(module, change)


def test_results_of_a_call_with_several_keep_theirs() -> None:
    """A list of results is compared one by one, not by being a list."""
    module = _module()

    def change(module: GraphModule) -> None:
        topk = next(n for n in module.graph.nodes if n.target is aten.topk.default)
        values, ids = topk.meta["val"]
        with values.fake_mode:
            topk.meta["val"] = (values, ids.int())

    assert "output 1: result 1: dtype torch.int64 becomes torch.int32" in broken(module, change)


def test_number_of_results_and_inputs() -> None:
    def drop_result(module: GraphModule) -> None:
        output = module.graph.output_node()
        output.args = (output.args[0][:1],)  # type: ignore[index]

    assert "2 outputs became 1" in broken(_module(), drop_result)

    def add_input(module: GraphModule) -> None:
        with module.graph.inserting_before(next(iter(module.graph.nodes))):
            module.graph.placeholder("extra").meta["val"] = torch.ones(1)

    assert "1 inputs became 2" in broken(_module(), add_input)


def test_inputs_keep_their_metadata() -> None:
    def change(module: GraphModule) -> None:
        next(iter(module.graph.nodes)).meta["val"] = torch.ones(3)

    assert "input 0: shape [3, 4] becomes [3]" in broken(_module(), change)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (3, 4, "3 becomes 4"), (3, 3.0, "int becomes float"), (True, 1, "bool becomes int"), (None, 0, "NoneType"),
        (2.5, 2.0, "2.5 becomes 2.0"), ("sum", "max", "'sum' becomes 'max'"), (1, 1, None), (None, None, None),
        (float("nan"), float("nan"), None), ([1, 2], [1], "2 results become 1"), ([1, 2], (1, 2), None),
    ],
)  # fmt: skip
def test_constants_are_compared_by_type_and_value(old: Any, new: Any, text: str | None) -> None:
    """Kind 73: an int where there was a float is another result."""
    found = metadata_difference(old, new)
    assert (found is None) if text is None else (found is not None and text in found)


def test_a_symbolic_size_that_became_a_number_is_one() -> None:
    captured, _ = capture_with_inputs(lambda x: (x + 1, x.shape[0]), [torch.randn(5, 4)], dynamic=True)
    module = captured.module

    output = module.graph.output_node()
    sizes = [i for i, n in enumerate(output.args[0]) if isinstance(n.meta["val"], torch.SymInt)]  # type: ignore[arg-type]
    contract = GraphContract.of(module)
    output.args = (tuple(5 if i in sizes else n for i, n in enumerate(output.args[0])),)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="SymInt becomes int"):
        contract.check(module, "a_pass", NONE)


def _normed(x: Tensor) -> Tensor:
    return torch.ops.k3.rms_norm(x, None, 1e-5, torch.float32, torch.float32, torch.float32)


def test_an_op_of_the_vocabulary_must_be_announced() -> None:
    x = torch.randn(3, 4)
    contract, module = GraphContract.of(traced(lambda x: x + 1, [x])), traced(_normed, [x])
    contract.check(module, "a_pass", frozenset({"rms_norm"}))
    with pytest.raises(
        ContractError, match=r"after a_pass, node rms_norm .*k3::rms_norm was not announced by any pass"
    ):
        contract.check(module, "a_pass", frozenset({"rms_norm_stat"}))


def test_an_op_of_the_vocabulary_that_the_model_calls_need_not_be_announced() -> None:
    contract = GraphContract.of(traced(_normed, [torch.randn(3, 4)]))
    contract.check(traced(lambda x: _normed(_normed(x)), [torch.randn(3, 4)]), "a_pass", NONE)


def test_a_further_assumption_about_a_symbolic_size_is_named() -> None:
    """A size taken as a number, or compared with `==`, makes the graph one for that size."""
    captured, _ = capture_with_inputs(lambda x: x + 1, [torch.randn(5, 4)], dynamic=True)
    graph = captured.module.graph
    mode = private.graph_fake_mode(graph)
    size = next(n.meta["val"] for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)).shape[0]
    before = private.guard_count(mode)
    assert same_size(size, size + 0) and not same_size(size, 5)
    check_guards(graph, before, "a_pass")
    assert size == 5
    with pytest.raises(ContractError, match=r"after a_pass: 1 more assumption about symbolic sizes: Eq\(s\d+, 5\)"):
        check_guards(graph, before, "a_pass")


def test_every_node_has_a_value() -> None:
    for target in (aten.topk.default, operator.getitem):
        module = traced(lambda x: x.topk(2)[0].sin(), [torch.randn(3, 4)])
        node = next(n for n in module.graph.nodes if n.target is target)
        assert "a node without a value description" in broken(module, lambda m, n=node: n.meta.pop("val"))


def test_the_line_of_the_offending_node_is_named() -> None:
    hand = Hand()
    sine = hand.call(aten.sin.default, hand.input("x", torch.randn(3)), line=42)
    module = hand.returns(hand.call(aten.cos.default, sine))
    text = broken(module, lambda m: sine.meta.pop("val"))
    assert "node sin_default (net.py:42 in forward): a node without a value description" in text


@pytest.mark.parametrize("kind", ["call_module", "call_method", "a Python function"])
def test_only_operators_of_the_level(kind: str) -> None:
    def change(module: GraphModule) -> None:
        old = _first(module)
        with module.graph.inserting_after(old):
            if kind == "call_module":
                module.add_module("inner", torch.nn.Identity())
                new = module.graph.call_module("inner", (old,))
            elif kind == "call_method":
                new = module.graph.call_method("sin", (old,))
            else:
                new = module.graph.call_function(torch.sin, (old,))
        new.meta["val"] = old.meta["val"]

    text = broken(_module(), change)
    assert f"a {kind} node in an ATen graph" in text or "is no operator of this level" in text


def test_a_graph_out_of_order_is_not_well_formed() -> None:
    """Kind 89: an input that is defined later."""
    hand = Hand()
    x = hand.input("x", torch.randn(3))
    sine = hand.call(aten.sin.default, x)
    module = hand.returns(hand.call(aten.cos.default, sine))
    assert "the graph is not well-formed" in broken(module, lambda m: m.graph.output_node().prepend(sine))


# ------------------------------------------------------------------------------------------------ collectives

C10D = torch.ops._c10d_functional


def _two_sums(groups: tuple[str, str] = ("tp", "dcp"), ops: tuple[str, str] = ("sum", "sum")) -> GraphModule:
    hand = Hand()
    results = []
    inputs = [hand.input(name, torch.randn(3)) for name in "xy"]
    for value, group, op in zip(inputs, groups, ops, strict=True):
        started = hand.call(C10D.all_reduce.default, value, op, group)
        results.append(hand.call(C10D.wait_tensor.default, started))
    return hand.returns(*results)


def _calls(module: GraphModule) -> list[Node]:
    return [n for n in module.graph.nodes if n.target is C10D.all_reduce.default]


def test_collectives_stay_in_their_order() -> None:
    module = _two_sums(ops=("sum", "max"))
    assert "became" in broken(module, lambda m: _calls(m)[0].prepend(_calls(m)[1]))


def test_the_same_collective_over_another_group_is_another() -> None:
    """Two sums over two groups, exchanged: the names alone do not show it, and ranks would wait for each other."""
    assert "'tp'" in broken(_two_sums(), lambda m: _calls(m)[0].prepend(_calls(m)[1]))


def test_a_collective_or_a_wait_that_is_gone() -> None:
    def drop(module: GraphModule) -> None:
        wait = next(n for n in module.graph.nodes if n.target is C10D.wait_tensor.default)
        wait.replace_all_uses_with(wait.args[0])  # type: ignore[arg-type]
        module.graph.erase_node(wait)

    assert "wait_tensor" in broken(_two_sums(), drop)

    def change_reduction(module: GraphModule) -> None:
        node = _calls(module)[0]
        node.args = (node.args[0], "max", node.args[2])

    assert "'max'" in broken(_two_sums(), change_reduction)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_captured_collectives_survive_dead_code_and_keep_their_order(two_ranks: None) -> None:
    """Kind 94: a sum whose result nobody uses is still one that the other rank waits for."""
    from k3rewrite.graph.purity import eliminate_dead_code

    def function(x: Tensor) -> Tensor:
        collectives.all_reduce(x * 2, "sum", dist.group.WORLD)
        total = collectives.all_reduce(x, "sum", dist.group.WORLD)
        return total + collectives.all_gather_tensor(x, 0, dist.group.WORLD)[: x.shape[0]]

    captured, _ = capture_with_inputs(function, [torch.randn(3)])
    contract = GraphContract.of(captured.module)
    assert [c.split(".")[1] for c in contract.collectives].count("all_reduce") == 2
    eliminate_dead_code(captured.module.graph)
    contract.check(captured.module, "dead code", NONE)
    sums = _calls(captured.module)
    users = [u for n in sums for u in n.users]
    assert all(u.target is C10D.wait_tensor.default for u in users) and len(users) == 2
