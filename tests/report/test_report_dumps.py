"""Dumps of graphs: what a line says, how layers fold, that the picture is well-formed and marks what a pass made."""

from __future__ import annotations

import operator
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule, Node

from k3rewrite.pipeline.settings import Dump
from k3rewrite.report import dump as dump_module
from k3rewrite.report.dump import Dumper
from k3rewrite.report.dump_svg import MAX_LINES, graph_svg
from k3rewrite.report.dump_text import describe_value, graph_text
from k3rewrite.report.fold import Block, Repeat, Segment, blocks_of, count_boxes, fold
from k3rewrite.report.run_folder import RunFolder
from k3rewrite.report.schema import PassReport

aten = torch.ops.aten


class Builder:
    """A graph made node by node, with the metadata that capture gives."""

    def __init__(self) -> None:
        self.graph = Graph()

    def place(self, node: Node, path: str, line: int) -> Node:
        node.meta["val"] = torch.empty(2, 3)
        node.meta["stack_trace"] = f'  File "net.py", line {line}, in forward\n    x\n'
        if path:
            node.meta["nn_module_stack"] = {"k": (f"L['self'].{path}", "Module")}
        return node

    def input(self) -> Node:
        return self.place(self.graph.placeholder("x"), "", 1)

    def call(self, target: object, args: tuple[object, ...], path: str = "", line: int = 1) -> Node:
        return self.place(self.graph.call_function(target, args), path, line)  # type: ignore[arg-type]

    def done(self, result: object) -> GraphModule:
        self.graph.output(result)
        return GraphModule(torch.nn.Module(), self.graph)


def decoder(layers: int, period: int = 4) -> GraphModule:
    """`layers` layers, every `period`-th with another attention; each begins with an rsqrt."""
    b = Builder()
    x = b.input()
    for i in range(layers):
        h = b.call(aten.rsqrt.default, (x,), f"layers.{i}.norm", 10)
        target = aten.tanh.default if i % period == period - 1 else aten.sigmoid.default
        h = b.call(target, (h,), f"layers.{i}.attn", 20)
        h = b.call(aten.mul.Tensor, (h, h), f"layers.{i}.attn.out", 21)
        x = b.call(aten.add.Tensor, (x, h), f"layers.{i}", 30)
    return b.done((b.call(aten.relu.default, (x,), "norm", 40),))


def test_text_of_a_node() -> None:
    b = Builder()
    x = b.input()
    y = b.call(aten.sum.dim_IntList, (x, [1], True), "layers.3.mlp", 12)
    y.kwargs = {"dtype": torch.bfloat16}
    y.meta["val"] = torch.empty(4, 2, dtype=torch.bfloat16).t()
    lines = graph_text(b.done((y, None)), title="03 lift", new={y.name}).splitlines()
    assert lines[:4] == ["# 03 lift", "# 3 nodes on cpu", "", "# <placeholder>"]
    assert lines[4].split() == ["x", "f32[2,", "3][3,", "1]", "input"]
    assert lines[6] == "# layers.3.mlp"
    call = "aten.sum.dim_IntList(x, [1], True, dtype = bf16)"
    assert lines[7].split("  ")[0] == "+ sum_dim_int_list" and "bf16[2, 4][1, 2]" in lines[7] and call in lines[7]
    assert lines[7].endswith("# net.py:12 in forward")
    assert "return (sum_dim_int_list, None)" in lines[10]


def norms(module: GraphModule) -> set[str]:
    return {node.name for node in module.graph.nodes if node.target is aten.rsqrt.default}


def test_text_marks_only_new_nodes() -> None:
    module = decoder(2)
    marked = [line.split()[1] for line in graph_text(module, new=norms(module)).splitlines() if line.startswith("+ ")]
    assert marked == ["rsqrt_default", "rsqrt_default_1"]
    assert not any(line.startswith("+ ") for line in graph_text(module).splitlines())


def test_text_has_every_node_once_in_order() -> None:
    module = decoder(5)
    names = [line.split()[0] for line in graph_text(module).splitlines() if line.startswith("  ")]
    assert names == [node.name for node in module.graph.nodes]


def test_text_names_devices_where_they_differ() -> None:
    b = Builder()
    x = b.input()
    y = b.call(aten.relu.default, (x,))
    y.meta["val"] = torch.empty(2, device="meta")
    text = graph_text(b.done(y))
    assert "on cpu, meta" in text and "f32[2][1]@meta" in text and "f32[2, 3][3, 1]@cpu" in text


def test_text_of_a_nested_graph() -> None:
    inner = Builder()
    x = inner.input()
    body = inner.done(inner.call(aten.relu.default, (x,), "layers.0"))
    root = torch.nn.Module()
    root.body = body
    graph = Graph()
    graph.get_attr("body")
    graph.output(None)
    text = graph_text(GraphModule(root, graph))
    assert "# graph body (3 nodes)" in text and "aten.relu.default(x)" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (3, "int"),
        (torch.empty(0, 2, dtype=torch.int64), "i64[0, 2][2, 1]"),
        ((torch.empty(1), None), "(f32[1][1], )"),
        (torch.empty(2, dtype=torch.float8_e4m3fn), "float8_e4m3fn[2][1]"),
    ],
)
def test_values(value: object, text: str) -> None:
    assert describe_value(value) == text


def test_layers_become_blocks_with_forward_edges() -> None:
    blocks = blocks_of(decoder(2).graph)
    assert [block.title for block in blocks] == ["layers.0", "layers.1", "norm"]
    assert [segment.path for segment in blocks[0].segments] == ["norm", "attn", ""]
    assert blocks[0].edges == {(0, 1), (1, 2)}
    attn = blocks[0].segments[1]
    assert [(line.op, line.count) for line in attn.lines.values()] == [("aten.sigmoid", 1), ("aten.mul.Tensor", 1)]
    assert next(iter(attn.lines.values())).examples == ["sigmoid_default, net.py:20 in forward"]


def test_93_layers_fold_into_few_boxes() -> None:
    folded = fold(blocks_of(decoder(93).graph))
    repeat = folded[0]
    assert (
        isinstance(repeat, Repeat) and repeat.count == 23 and (repeat.first, repeat.last) == ("layers.0", "layers.91")
    )
    assert isinstance(repeat.items[0], Repeat) and repeat.items[0].count == 3
    assert count_boxes(folded) == 4


def test_a_layer_that_the_pass_changed_is_not_folded_with_others() -> None:
    module = decoder(8, period=100)
    titles = [
        item.title if isinstance(item, Block) else item.count
        for item in fold(blocks_of(module.graph, {"rsqrt_default_4"}))
    ]
    assert titles == [4, "layers.4", 3, "norm"]


def unfold(items: Sequence[Block | Repeat]) -> list[str]:
    """Ops in execution order, one for each block."""
    out: list[str] = []
    for item in items:
        out += unfold(item.items) * item.count if isinstance(item, Repeat) else [item.segments[0].path]
    return out


@given(
    st.lists(st.sampled_from("abc"), max_size=40)
    | st.lists(st.sampled_from("ab"), max_size=6).map(lambda part: part * 5)
)
def test_folding_loses_nothing(kinds: list[str]) -> None:
    blocks = [Block(f"layers.{i}", [Segment(kind)]) for i, kind in enumerate(kinds)]
    assert unfold(fold(blocks)) == kinds


def test_svg_is_well_formed_and_marks_what_the_pass_made() -> None:
    module = decoder(93)
    svg = graph_svg(module, title="03 lift", subtitle="93 of 93 sites", new=norms(module))
    root = ElementTree.fromstring(svg)
    texts = ["".join(t for t in element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "+ 93 nodes made by this pass" in texts and "93 of 93 sites" in texts
    assert any(text.startswith("23 \u00d7") for text in texts)
    assert len(svg) < 40_000
    assert svg == graph_svg(decoder(93), title="03 lift", subtitle="93 of 93 sites", new=norms(module))


def test_svg_escapes_text() -> None:
    b = Builder()
    x = b.input()
    y = b.call(aten.relu.default, (x,), "a<b>&\"c'", 1)
    y.meta["stack_trace"] = '  File "<eval>&.py", line 3, in <lambda>\n'
    svg = graph_svg(b.done(y), title="<script>alert(1)</script>\x00\x1b", subtitle="]]>")
    root = ElementTree.fromstring(svg)
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    assert "<script>alert(1)</script>\ufffd\ufffd" in [element.text for element in root.iter()]


def test_svg_of_an_empty_graph() -> None:
    b = Builder()
    ElementTree.fromstring(graph_svg(b.done(b.input()), title="empty"))


def test_svg_never_hides_what_the_pass_made() -> None:
    b = Builder()
    x = b.input()
    words = "sin cos tan asin acos atan sinh cosh tanh exp exp2 expm1 log log2 log10 log1p abs ceil floor round sqrt"
    names = words.split()
    for name in names:
        x = b.call(getattr(aten, name).default, (x,), "mlp")
    x = b.call(operator.neg, (x,), "mlp")
    svg = graph_svg(b.done(x), title="t", new={x.name})
    assert "+ neg" in svg and f"and {len(names) + 1 - (MAX_LINES - 1)} more" in svg


def rectangles(svg: str, kind: str) -> list[tuple[float, float, float, float]]:
    root = ElementTree.fromstring(svg)
    found = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("class") in kind.split()]
    return [tuple(float(e.get(key, "0")) for key in ("x", "y", "width", "height")) for e in found]  # type: ignore[misc]


def test_svg_boxes_do_not_overlap_and_lie_in_the_picture() -> None:
    module = decoder(13)
    svg = graph_svg(module, title="t", new=norms(module))
    root = ElementTree.fromstring(svg)
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    boxes = rectangles(svg, "segment changed")
    for i, (x, y, w, h) in enumerate(boxes):
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height
        for ox, oy, ow, oh in boxes[i + 1 :]:
            assert x + w <= ox or ox + ow <= x or y + h <= oy or oy + oh <= y


def test_dumper_writes_what_the_pipeline_asks_for(tmp_path: Path) -> None:
    def names(dump: Dump) -> list[str]:
        folder = RunFolder.create(tmp_path)
        dumper = Dumper(folder, dump, decoder(2))
        for index, name in enumerate(["one", "two"]):
            dumper(index, decoder(2), PassReport(name))
        return sorted(path.name for path in folder.path.rglob("graphs/*"))

    assert names(Dump(formats=("txt",))) == ["00-captured.txt", "01-one.txt", "02-two.txt"]
    assert names(Dump(passes=("two",))) == ["02-two.svg", "02-two.txt"]
    assert names(Dump(formats=())) == []
    Dumper(None, Dump(), decoder(2))(0, decoder(2), PassReport("one"))


def test_dumper_marks_new_nodes_and_changed_targets(tmp_path: Path) -> None:
    folder, module = RunFolder.create(tmp_path), decoder(2)
    dumper = Dumper(folder, Dump(formats=("txt",)), module)
    first, second = (node for node in module.graph.nodes if node.target is aten.rsqrt.default)
    first.target = aten.sqrt.default
    with module.graph.inserting_after(second):
        made = module.graph.call_function(aten.neg.default, (second,))
    dumper(0, module, PassReport("lift", matched=2, candidates=3))
    dumper(1, module, PassReport("nothing"))

    def marked(name: str) -> list[str]:
        lines = (folder.path / "graphs" / name).read_text().splitlines()
        return [line.split()[1] for line in lines if line.startswith("+ ")]

    assert marked("00-captured.txt") == marked("02-nothing.txt") == []
    assert marked("01-lift.txt") == [first.name, made.name]


def test_dumps_go_into_the_structured_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr(dump_module, "trace_structured_text", lambda name, text: seen.update({name: text()}))
    Dumper(None, Dump(formats=()), decoder(1))(2, decoder(1), PassReport("lift"))
    assert list(seen) == ["k3rewrite_00_captured", "k3rewrite_03_lift"]
    assert seen["k3rewrite_03_lift"].startswith("# 03 lift")
