"""What may be deleted, merged or moved; the fault kinds of graph passes that trust node users or `lint()` alone."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives  # registers the collectives
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx import GraphModule, Node

from k3rewrite.errors import ContractError
from k3rewrite.graph.purity import (
    PurityIndex,
    aliases_of,
    delete_objection,
    effect,
    eliminate_dead_code,
    is_view,
    writes,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

_library = torch.library.Library("k3test_purity", "FRAGMENT")
_library.define("fill7(Tensor x, Tensor out) -> Tensor")
_library.impl("fill7", lambda x, out: out.fill_(7).clone(), "CompositeExplicitAutograd")
_library.define("bump(Tensor x) -> Tensor")
_library.impl("bump", lambda x: x.add_(1).clone(), "CompositeExplicitAutograd")
foreign = torch.ops.k3test_purity


class Graph(fx.Graph):
    """A graph whose nodes are called after their ops, as captured ones are."""

    def call_function(self, target: Any, args: tuple[Any, ...] = (), kwargs: Any = None, type_expr: Any = None) -> Node:
        return self.create_node("call_function", target, args, kwargs, getattr(target, "_opname", None), type_expr)


def run(graph: Graph, *inputs: torch.Tensor) -> object:
    graph.lint()
    return GraphModule({}, graph)(*inputs)


def graph_of(build: Callable[[Graph], object]) -> Graph:
    graph = Graph()
    graph.output(build(graph))
    return graph


def node(graph: Graph, name: str) -> Node:
    return next(n for n in graph.nodes if n.name == name)


# --------------------------------------------------------------------------------------------- facts of one node


@pytest.mark.parametrize(
    ("target", "written", "shared", "pure"),
    [
        (aten.add.Tensor, [], [], True),
        (aten.add_.Tensor, ["a"], ["a"], False),
        (aten.copy_.default, ["a"], ["a"], False),
        (aten.view_as.default, [], ["a"], True),
        (aten.rand_like.default, [], [], False),
        (foreign.fill7.default, [], [], False),
    ],
)
def test_facts_are_read_off_the_schema(target: object, written: list[str], shared: list[str], pure: bool) -> None:
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    call = graph.call_function(target, (a,) if target is aten.rand_like.default else (a, b))
    assert [n.name for n in writes(call)] == written
    assert [n.name for n in aliases_of(call)] == shared
    assert (effect(call) is None) is pure


@pytest.mark.parametrize(
    ("target", "args", "view"),
    [
        (aten.slice.Tensor, (0, 0, 1), True),
        (aten.split.Tensor, (2,), True),
        (aten._unsafe_view.default, ([4],), True),  # the schema does not say so
        (aten.unsafe_split.Tensor, (2,), True),  # nor does this one
        (aten.contiguous.default, (), False),  # an alias, but it may read the data
        (aten.clone.default, (), False),
    ],
)
def test_views_are_known(target: object, args: tuple[object, ...], view: bool) -> None:
    graph = Graph()
    call = graph.call_function(target, (graph.placeholder("a"), *args))
    assert is_view(call) is view
    assert [n.name for n in aliases_of(call)] == ([] if target is aten.clone.default else ["a"])


def test_an_argument_written_by_keyword_or_inside_a_list_is_found() -> None:
    graph = Graph()
    a, b, c = (graph.placeholder(n) for n in "abc")
    assert writes(graph.call_function(aten.add.out, (a, b), {"out": c})) == (c,)
    assert writes(graph.call_function(aten._foreach_add_.Scalar, ([a, b], 1))) == (a, b)
    assert writes(graph.call_function(aten.set_.source_Tensor, (a, b))) == (a, b)
    norm = graph.call_function(aten.native_batch_norm.default, (a, None, None, b, c, True, 0.1, 1e-5))
    assert writes(norm) == (b, c)  # torch's schema does not say so


def test_what_has_no_schema_may_do_anything() -> None:
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    for call in (
        graph.call_function(torch.sin, (a,)),
        graph.call_function(torch.ops.higher_order.cond, (a, b)),
        graph.call_method("relu", (a, b)),
        graph.call_module("net", (a, b)),
        graph.call_function(operator.setitem, (a, 0, b)),
    ):
        assert effect(call) == "has no schema"
        assert set(writes(call)) == set(call.all_input_nodes) == set(aliases_of(call))


def test_size_arithmetic_is_pure_and_tensor_arithmetic_by_operator_is_not() -> None:
    graph = Graph()
    a = graph.placeholder("a")
    size = graph.call_function(operator.add, (a, 1))
    size.meta["val"] = 3
    tensors = graph.call_function(operator.add, (a, 1))
    tensors.meta["val"] = torch.ones(2)
    assert effect(size) is None and not writes(size)
    assert effect(tensors) is not None


# --------------------------------------------------------------------------------------------- dead code


def test_an_in_place_call_without_users_stays() -> None:
    """Fault kind 66: x.mul_(0); return x."""

    def build(graph: Graph) -> Node:
        x = graph.placeholder("x")
        graph.call_function(aten.mul_.Tensor, (x, 0))
        return x

    graph = graph_of(build)
    assert eliminate_dead_code(graph) == 0
    assert run(graph, torch.ones(1)) == torch.zeros(1)


def test_an_op_that_writes_without_saying_so_stays() -> None:
    """Fault kind 67: fills a buffer with 7, result unused, schema silent."""

    def build(graph: Graph) -> Node:
        x, out = graph.placeholder("x"), graph.placeholder("out")
        graph.call_function(foreign.fill7.default, (x, out))
        return out

    graph = graph_of(build)
    assert eliminate_dead_code(graph) == 0
    assert torch.equal(run(graph, torch.ones(2), torch.zeros(2)), torch.full((2,), 7.0))


def test_a_state_update_that_is_not_declared_is_not_lost() -> None:
    """Fault kind 83: bump(x) unused; return x * 1.5, with x = 0."""

    def build(graph: Graph) -> Node:
        x = graph.placeholder("x")
        graph.call_function(foreign.bump.default, (x,))
        return graph.call_function(aten.mul.Tensor, (x, 1.5))

    graph = graph_of(build)
    assert eliminate_dead_code(graph) == 0
    assert run(graph, torch.zeros(1)) == 1.5


def test_collectives_and_waits_stay() -> None:
    """Fault kind 94: an unused wait, and an all_reduce whose result is unused."""

    def build(graph: Graph) -> Node:
        x = graph.placeholder("x")
        reduced = graph.call_function(c10d.all_reduce.default, (x, "sum", "0"))
        graph.call_function(c10d.wait_tensor.default, (reduced,))
        return x

    graph = graph_of(build)
    assert eliminate_dead_code(graph) == 0
    assert [n.name for n in graph.nodes] == ["x", "all_reduce", "wait_tensor", "output"]
    assert [n.name for n in aliases_of(node(graph, "wait_tensor"))] == ["all_reduce"]


def test_dead_values_go_and_inputs_stay() -> None:
    def build(graph: Graph) -> Node:
        x = graph.placeholder("x")
        graph.placeholder("unused")
        dead = graph.call_function(aten.sin.default, (x,))
        graph.call_function(aten.cos.default, (dead,))
        graph.call_function(aten.rand.default, ([2],))
        return x

    graph = graph_of(build)
    assert eliminate_dead_code(graph) == 2
    assert [n.name for n in graph.nodes] == ["x", "unused", "rand", "output"]


def test_a_value_with_a_user_outside_of_a_match_is_not_to_be_deleted() -> None:
    """Fault kind 68: b = cos(sin(x)); return b + sin(x)."""

    def build(graph: Graph) -> Node:
        sin = graph.call_function(aten.sin.default, (graph.placeholder("x"),))
        return graph.call_function(aten.add.Tensor, (graph.call_function(aten.cos.default, (sin,)), sin))

    graph = graph_of(build)
    assert delete_objection(node(graph, "sin")) == "is used by cos"


# --------------------------------------------------------------------------------------------- order


def _scaled_then_written(graph: Graph) -> Node:
    s, x = graph.placeholder("s"), graph.placeholder("x")
    scaled = graph.call_function(aten.mul.Tensor, (s, 2))
    graph.call_function(aten.add_.Tensor, (s, 1))
    return graph.call_function(aten.add.Tensor, (x, scaled))


def test_a_node_does_not_move_past_a_write_to_what_it_reads() -> None:
    """Fault kind 99: a = s * 2; s += 1; x + a. Sinking the product passes lint() and gives 4 instead of 2."""
    graph = graph_of(_scaled_then_written)
    index = PurityIndex(graph)
    product, use = node(graph, "mul"), node(graph, "add")
    assert index.region_objection([product], use) == "add_ writes what mul reads in between"
    assert index.written_between(node(graph, "s"), product, use) is node(graph, "add_")
    assert index.written_between(node(graph, "x"), product, use) is None
    if index.region_objection([product], use) is None:
        use.prepend(product)
    assert run(graph, torch.ones(1), torch.zeros(1)) == 2.0


def test_a_node_does_not_move_in_front_of_the_write_that_it_sees() -> None:
    def build(graph: Graph) -> Node:
        s = graph.placeholder("s")
        graph.call_function(aten.add_.Tensor, (s, 1))
        return graph.call_function(aten.mul.Tensor, (s, 2))

    graph = graph_of(build)
    index = PurityIndex(graph)
    assert index.region_objection([node(graph, "mul")], node(graph, "add_")) == "add_ writes what mul reads in between"


def test_a_write_through_a_view_counts_and_a_view_itself_may_move() -> None:
    def build(graph: Graph) -> tuple[Node, Node]:
        s = graph.placeholder("s")
        part = graph.call_function(aten.slice.Tensor, (s, 0, 0, 1))
        other = graph.call_function(aten.slice.Tensor, (s, 0, 1, 2))
        total = graph.call_function(aten.sum.default, (s,))
        graph.call_function(aten.fill_.Scalar, (part, 5))
        return total, other

    graph = graph_of(build)
    index = PurityIndex(graph)
    end = node(graph, "output")
    assert index.region_objection([node(graph, "slice_2")], end) is None
    assert index.region_objection([node(graph, "sum_1")], end) == "fill_ writes what sum_1 reads in between"
    assert index.region_objection([node(graph, "sum_1")], node(graph, "fill_")) is None


def test_a_region_found_before_a_write_was_inserted_is_not_trusted() -> None:
    """Fault kind 69: pass 1 inserts y.copy_(x) between sin and cos, pass 2 fuses sin and cos across it."""

    def build(graph: Graph) -> Node:
        y = graph.placeholder("y")
        graph.placeholder("x")
        sin = graph.call_function(aten.sin.default, (y,))
        return graph.call_function(aten.add.Tensor, (sin, graph.call_function(aten.cos.default, (y,))))

    graph = graph_of(build)
    y, sin, cos = (node(graph, n) for n in ("y", "sin", "cos"))
    before = PurityIndex(graph)
    assert before.region_objection([sin, cos], cos) is None
    with graph.inserting_before(cos):
        write = graph.call_function(aten.copy_.default, (y, node(graph, "x")))
    with pytest.raises(ContractError, match="make a new index"):
        before.region_objection([sin, cos], cos)
    after = PurityIndex(graph)
    assert after.written_between(y, sin, cos) is write
    assert after.region_objection([sin, cos], cos) == "copy_ writes what sin reads in between"


def test_an_index_refuses_after_nodes_were_erased_moved_or_exchanged() -> None:
    def fresh() -> tuple[Graph, PurityIndex]:
        graph = graph_of(_scaled_then_written)
        return graph, PurityIndex(graph)

    graph, index = fresh()
    dead = node(graph, "add_")
    graph.erase_node(dead)
    with pytest.raises(ContractError, match="added or erased"):
        index.region_objection([node(graph, "mul")], node(graph, "add"))

    graph, index = fresh()
    graph.erase_node(node(graph, "add_"))
    with graph.inserting_before(node(graph, "add")):
        graph.call_function(aten.neg.default, (node(graph, "s"),))
    with pytest.raises(ContractError, match="added or erased"):
        index.region_objection([node(graph, "mul")], node(graph, "add"))

    graph, index = fresh()
    node(graph, "mul").prepend(node(graph, "add_"))
    with pytest.raises(ContractError, match="add_ was moved"):
        index.written_between(node(graph, "s"), node(graph, "mul"), node(graph, "add"))


def test_a_write_is_never_moved() -> None:
    graph = graph_of(_scaled_then_written)
    index = PurityIndex(graph)
    assert index.region_objection([node(graph, "add_")], node(graph, "add")) == "add_ writes its argument self"


def test_a_wait_is_never_moved() -> None:
    """Fault kind 94: all_reduce, wait, use."""

    def build(graph: Graph) -> Node:
        x = graph.placeholder("x")
        other = graph.call_function(aten.sin.default, (x,))
        waited = graph.call_function(
            c10d.wait_tensor.default, (graph.call_function(c10d.all_reduce.default, (x, "sum", "0")),)
        )
        return graph.call_function(aten.add.Tensor, (waited, other))

    graph = graph_of(build)
    index = PurityIndex(graph)
    for name in ("all_reduce", "wait_tensor"):
        assert index.region_objection([node(graph, name)], node(graph, "add")) == f"{name} takes part in a collective"


def test_equal_factory_calls_stay_apart_once_one_is_written() -> None:
    """Fault kind 74: a = zeros; b = zeros; a is written; b stays 0."""

    def build(graph: Graph) -> tuple[Node, Node, Node]:
        a, b, c = (graph.call_function(aten.zeros.default, ([2],)) for _ in range(3))
        graph.call_function(aten.fill_.Scalar, (a, 1))
        return a, b, c

    graph = graph_of(build)
    index = PurityIndex(graph)
    assert index.merge_objection(node(graph, "zeros"), node(graph, "zeros_1")) == "zeros is written by fill_"
    assert index.merge_objection(node(graph, "zeros_1"), node(graph, "zeros_2")) is None


def test_equal_reads_on_the_two_sides_of_a_write_stay_apart() -> None:
    def build(graph: Graph) -> tuple[Node, Node]:
        x = graph.placeholder("x")
        first = graph.call_function(aten.sin.default, (x,))
        graph.call_function(aten.add_.Tensor, (x, 1))
        return first, graph.call_function(aten.sin.default, (x,))

    graph = graph_of(build)
    objection = PurityIndex(graph).merge_objection(node(graph, "sin"), node(graph, "sin_1"))
    assert objection == "add_ writes what sin_1 reads in between"


# --------------------------------------------------------------------------------------------- random programs

STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "mul", "neg", "add_", "copy_", "fill_", "slice", "select"]),
              st.integers(0, 5), st.integers(0, 5)),
    min_size=2, max_size=10,
)  # fmt: skip


def _program(steps: list[tuple[str, int, int]]) -> Graph:
    """A straight-line program on two inputs of four elements; steps pick among the values made so far."""
    graph = Graph()
    values = [graph.placeholder("p"), graph.placeholder("q")]
    for kind, i, j in steps:
        a, b = values[i % len(values)], values[j % len(values)]
        if kind == "slice":
            values.append(graph.call_function(aten.slice.Tensor, (a, 0, 0, 2 + j % 3)))
        elif kind == "select":
            values.append(graph.call_function(aten.as_strided.default, (a, [1], [1], 0)))
        elif kind == "neg":
            values.append(graph.call_function(aten.neg.default, (a,)))
        elif kind == "fill_":
            graph.call_function(aten.fill_.Scalar, (a, float(j)))
        elif kind == "copy_":
            graph.call_function(aten.copy_.default, (a, graph.call_function(aten.sum.default, (b,))))
        elif kind == "add_":
            graph.call_function(aten.add_.Tensor, (a, graph.call_function(aten.sum.default, (b,))))
        else:
            target = aten.add.Tensor if kind == "add" else aten.mul.Tensor
            values.append(graph.call_function(target, (graph.call_function(aten.sum.default, (b,)), a)))
    graph.output(tuple(values))
    return graph


def _results(graph: Graph) -> list[torch.Tensor]:
    p, q = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.5, -1.0, 2.0, 7.0])
    return [p, q, *run(graph, p, q)]  # type: ignore[misc]


@settings(max_examples=120, deadline=None)
@given(STEPS, st.data())
def test_a_move_that_is_allowed_changes_nothing(steps: list[tuple[str, int, int]], data: st.DataObject) -> None:
    graph = _program(steps)
    expected = [t.clone() for t in _results(graph)]
    nodes = list(graph.nodes)
    moved, before = data.draw(st.sampled_from(nodes)), data.draw(st.sampled_from(nodes))
    at = nodes.index(before)
    defined = all(nodes.index(argument) < at for argument in moved.all_input_nodes)
    if moved is before or not defined or any(nodes.index(user) < at for user in moved.users if user is not before):
        return
    if PurityIndex(graph).region_objection([moved], before) is not None:
        return
    before.prepend(moved)
    torch.testing.assert_close(_results(graph), expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(0, 3))
def test_dead_code_elimination_changes_nothing(steps: list[tuple[str, int, int]], kept: int) -> None:
    graph = _program(steps)
    output = next(iter(reversed(graph.nodes)))
    output.args = (output.args[0][: kept + 1],)  # type: ignore[index]
    expected = [t.clone() for t in _results(graph)]
    eliminate_dead_code(graph)
    torch.testing.assert_close(_results(graph), expected, rtol=0, atol=0, equal_nan=True)
