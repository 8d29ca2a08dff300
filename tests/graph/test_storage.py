"""Who shares storage with whom, who reads and writes it, how long a collective reads."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the collectives
from finalised import fake_inputs
from torch.fx import Graph, Node

from k3rewrite.graph.storage import END, Root, StorageMap

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def names(roots: frozenset[Root]) -> set[tuple[str, int]]:
    return {(root.node.name, root.result) for root in roots}


def test_views_share_and_results_of_one_call_do_not() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    view = graph.call_function(aten.slice.Tensor, (graph.call_function(aten.view.default, (x, [4])), 0, 0, 2))
    parts = graph.call_function(aten.split.Tensor, (x, 2))
    part = graph.call_function(operator.getitem, (parts, 1))
    topk = graph.call_function(aten.topk.default, (x, 1))
    values, ids = (graph.call_function(operator.getitem, (topk, i)) for i in (0, 1))
    graph.output((view, part, values, ids))
    storage = StorageMap(graph)
    assert names(storage.roots(view)) == names(storage.roots(part)) == {("x", 0)}
    assert names(storage.roots(values)) == {(topk.name, 0)} and names(storage.roots(ids)) == {(topk.name, 1)}
    assert storage.same_storage(view, part) and not storage.same_storage(values, ids)
    assert storage.in_outputs(Root(x, 0)) and storage.in_outputs(Root(topk, 1))
    assert [n.name for n in storage.aliases(Root(x, 0))] == [n.name for n in (x, view.args[0], view, parts, part)]


def test_a_call_without_schema_may_return_its_argument_or_something_new() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    call = graph.call_function(torch.relu, (x,))
    graph.output((call, y))
    storage = StorageMap(graph)
    assert names(storage.roots(call)) == {("x", 0), (call.name, 0)}
    assert not storage.same_storage(call, y)
    assert [w.name for _, w in storage.writes(Root(x, 0))] == [call.name]


def test_writes_and_uses_are_in_order_and_sizes_have_no_storage() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    size = graph.call_function(aten.sym_size.int, (x, 0))
    size.meta["val"] = 3
    view = graph.call_function(aten.view.default, (x, [size]))
    graph.call_function(aten.add_.Tensor, (view, 1))
    graph.call_function(aten.copy_.default, (x, view))
    graph.output(x)
    storage = StorageMap(graph)
    root = Root(x, 0)
    assert storage.roots(size) == frozenset()
    assert [w.target for _, w in storage.writes(root)] == [aten.add_.Tensor, aten.copy_.default]
    assert [u.node.op == "output" or u.node.target for u in storage.uses(root)] == [
        aten.sym_size.int, aten.view.default, aten.add_.Tensor, aten.copy_.default, True,
    ]  # fmt: skip


def test_a_collective_reads_its_input_until_it_was_waited_for() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    reduced = graph.call_function(c10d.all_gather_into_tensor.default, (x, 2, "0"))
    graph.call_function(aten.sin.default, (x,))
    waited = graph.call_function(c10d.wait_tensor.default, (reduced,))
    lost = graph.call_function(c10d.all_reduce.default, (x, "sum", "0"))
    graph.output(waited)
    storage = StorageMap(graph)
    until = {use.node: use.until for use in storage.uses(Root(x, 0))}
    assert until[reduced] == storage.position[waited]
    assert until[lost] == END


def _placeholders(*values: Any) -> tuple[Graph, list[Node]]:
    graph = Graph()
    nodes = []
    for i, value in enumerate(values):
        nodes.append(graph.placeholder(f"p{i}"))
        nodes[-1].meta["val"] = value
    return graph, nodes


def test_inputs_that_overlap_name_the_same_storages_and_disjoint_parts_do_not() -> None:
    (pool,) = fake_inputs(torch.empty(4, 6))
    with pool.fake_mode:
        graph, (whole, low, high, wide) = _placeholders(pool, pool[:2], pool[2:], pool[1:4])
    graph.call_function(aten.add_.Tensor, (low, 1))
    graph.output((whole,))
    storage = StorageMap(graph)
    assert storage.same_storage(whole, low) and storage.same_storage(low, wide)
    assert names(storage.roots(low)) == names(storage.roots(high))  # both overlap the whole
    assert [w.target for _, w in storage.writes(Root(whole, 0))] == [aten.add_.Tensor]

    with pool.fake_mode:
        graph, (low, high, other) = _placeholders(pool[:2], pool[2:], torch.empty(3))
    graph.output((low,))
    storage = StorageMap(graph)
    assert not storage.same_storage(low, high) and not storage.same_storage(low, other)
