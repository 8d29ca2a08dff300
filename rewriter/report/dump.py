"""What is written after a pass: the graph as text and picture into the run folder, and into PyTorch's structured trace.

`tlparse` shows the trace (`TORCH_TRACE=folder`); an artifact costs nothing while no trace is being written.
"""

from __future__ import annotations

from torch.fx import GraphModule

from k3rewrite._torch_private import trace_structured_text
from k3rewrite.pipeline.settings import Dump
from k3rewrite.report.dump_svg import graph_svg
from k3rewrite.report.dump_text import graph_text
from k3rewrite.report.run_folder import RunFolder
from k3rewrite.report.schema import PassReport, RunReport
from k3rewrite.report.table import human_bytes


def dump_pass(folder: RunFolder | None, dump: Dump, index: int, module: GraphModule, entry: PassReport) -> None:
    """Write `graphs/NN-<pass>.<format>` as the pipeline's `dump` asks, and the text as a trace artifact.

    `folder` is None where a run leaves nothing on disk. `index` is the place of the pass in the pipeline, from 1; 0 is
    the captured graph. A pass that was skipped writes nothing.
    """
    if entry.skipped:
        return
    title = f"{index:02d} {entry.name}"

    def text() -> str:
        return graph_text(module, title=title, made_by=entry.name)

    trace_structured_text(f"k3rewrite_{index:02d}_{entry.name}", text)
    if folder is None or not dump.wants(entry.name):
        return
    if "txt" in dump.formats:
        folder.write_graph(index, entry.name, "txt", text())
    if "svg" in dump.formats:
        picture = graph_svg(module, title=title, subtitle=_subtitle(entry), made_by=entry.name)
        folder.write_graph(index, entry.name, "svg", picture)


def trace_report(report: RunReport) -> None:
    """`report.json` as a trace artifact."""
    trace_structured_text("k3rewrite_report", report.to_json)


def _subtitle(entry: PassReport) -> str:
    nodes = f"{entry.nodes_before} -> {entry.nodes_after} nodes"
    launches = f"{entry.launches_before} -> {entry.launches_after} launches"
    moved = f"{human_bytes(entry.bytes_before)} -> {human_bytes(entry.bytes_after)}"
    return f"{entry.matched} of {entry.candidates} sites,  {nodes},  {launches},  {moved}"
