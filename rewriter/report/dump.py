"""What is written after each pass: the graph as text and picture into the run folder, and into PyTorch's trace.

    dumper = Dumper(folder, config.dump, captured.module)
    run_pipeline(..., after_pass=dumper)        ->   graphs/00-captured.txt, graphs/01-canonicalise.txt, ...

`tlparse` shows the trace (`TORCH_TRACE=folder`); an artifact costs nothing while no trace is being written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch.fx import GraphModule

from k3rewrite._torch_private import trace_structured_text
from k3rewrite.report.dump_svg import graph_svg
from k3rewrite.report.dump_text import graph_text
from k3rewrite.report.run_folder import RunFolder
from k3rewrite.report.schema import PassReport, RunReport
from k3rewrite.report.table import human_bytes

CAPTURED = "captured"


class DumpSettings(Protocol):
    """What is to be written: the `dump` section of a pipeline. `passes` is "all" or a list of names."""

    @property
    def formats(self) -> Sequence[str]: ...

    @property
    def passes(self) -> str | Sequence[str]: ...

    def wants(self, pass_name: str) -> bool: ...


class Dumper:
    """Called after each pass with its index from 0, the graph and its report; marks what is new since the call before.

    `folder` is None where a run leaves nothing on disk. `dump` says which formats are written after which passes; the
    graph before the first pass is written if all passes are. A node is new if its name or its target was not there.
    """

    def __init__(self, folder: RunFolder | None, dump: DumpSettings, module: GraphModule) -> None:
        self._folder, self._dump = folder, dump
        self._before = _targets(module)
        if dump.passes == "all":
            self._write(0, CAPTURED, f"{len(module.graph.nodes)} nodes", module, None)

    def __call__(self, index: int, module: GraphModule, entry: PassReport) -> None:
        after = _targets(module)
        new = {name for name, target in after.items() if self._before.get(name, _ABSENT) is not target}
        self._before = after
        self._write(index + 1, entry.name, _subtitle(entry), module, new)

    def _write(self, number: int, name: str, subtitle: str, module: GraphModule, new: set[str] | None) -> None:
        title = f"{number:02d} {name}"

        def text() -> str:
            return graph_text(module, title=title, new=new or frozenset())

        trace_structured_text(f"k3rewrite_{number:02d}_{name}", text)
        if self._folder is None or (name != CAPTURED and not self._dump.wants(name)):
            return
        if "txt" in self._dump.formats:
            self._folder.write_graph(number, name, "txt", text())
        if "svg" in self._dump.formats:
            self._folder.write_graph(number, name, "svg", graph_svg(module, title=title, subtitle=subtitle, new=new))


_ABSENT = object()


def _targets(module: GraphModule) -> Mapping[str, Any]:
    return {node.name: node.target for node in module.graph.nodes}


def trace_report(report: RunReport) -> None:
    """`report.json` as a trace artifact."""
    trace_structured_text("k3rewrite_report", report.to_json)


def _subtitle(entry: PassReport) -> str:
    nodes = f"{entry.nodes_before} -> {entry.nodes_after} nodes"
    launches = f"{entry.launches_before} -> {entry.launches_after} launches"
    moved = f"{human_bytes(entry.bytes_before)} -> {human_bytes(entry.bytes_after)}"
    return f"{entry.matched} of {entry.candidates} sites,  {nodes},  {launches},  {moved}"
