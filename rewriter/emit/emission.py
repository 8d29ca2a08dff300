"""Emit every kernel that a rewritten graph is bound to: compiled ahead of time for its target, with provenance.

    nodes with a binding  ->  distinct (kernel, signature)  ->  kernels/<target>/<name>.{py,hip,s,hsaco,ptx,cubin}
                                                               kernels/<target>/manifest.json

Without a run folder kernels are not written; the report then has one entry for each bound kernel without figures.
Where a kernel ran is filled in when the graph has been called: `Emission.note_runs`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.fx import GraphModule, Node

from k3rewrite.emit import EmittedKernel, Provenance, emit_unit, unit_name, write_manifest
from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.cost import node_value
from k3rewrite.graph.provenance import model_lines
from k3rewrite.ops.binding import KERNEL_KEY, Binding
from k3rewrite.ops.kernel import Unit
from k3rewrite.ops.runs import REFERENCE, Run
from k3rewrite.report.run_folder import RunFolder
from k3rewrite.report.schema import KernelReport
from k3rewrite.targets import Target


@dataclass
class _Use:
    """A kernel, or a unit of it, and the nodes that launch it."""

    binding: Binding
    nodes: list[Node] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        return list(dict.fromkeys(line for node in self.nodes for line in model_lines(node)))

    @property
    def bound(self) -> list[str]:
        """Names of the ops that stand in the graph: the op that was bound, or its in-place variant."""
        return list(dict.fromkeys(str(node.target).removesuffix(".default") for node in self.nodes))


@dataclass
class Emission:
    """The kernels of one graph: their reports in order of first use, and what was written into `folder`."""

    target: Target
    reports: list[KernelReport]
    written: list[EmittedKernel] = field(default_factory=list)
    folder: Path | None = None

    def note_runs(self, runs: Collection[Run]) -> None:
        """Say in the reports, and in the manifest, where each kernel was seen to run.

        A kernel that may be compiled as several units of one language (for a symbolic number of rows) is told apart by
        language only.
        """
        for report in self.reports:
            report.executed = _executed(report, runs, any_language=not self.written)
        if self.folder is not None:
            write_manifest(self.folder, self.target, self.written, {r.name: r.executed for r in self.reports})


def emit_kernels(module: GraphModule, target: Target, folder: RunFolder | None) -> Emission:
    """All kernels of a graph; files and manifest go into the run folder. None of them has run yet."""
    kernels = _kernels(module)
    if folder is None or not kernels:
        return Emission(target, [_report(use, use.binding.name, use.binding.kernel.language) for use in kernels])
    path = folder.path / "kernels" / target.name
    units = _units(kernels, target)
    emitted = [
        emit_unit(unit, target, path, use.binding.op.name,
                  Provenance(use.binding.op.name, use.binding.kernel.name, tuple(use.lines), tuple(use.bound)))
        for unit, use in units
    ]  # fmt: skip
    write_manifest(path, target, emitted)
    reports = [_written(use, made, folder) for (_, use), made in zip(units, emitted, strict=True)]
    return Emission(target, reports, emitted, path)


def _executed(report: KernelReport, runs: Collection[Run], *, any_language: bool) -> str:
    seen = [run for run in runs if run.bound in report.bound]
    devices = {run.device for run in seen if run.by == report.language or (any_language and run.by != REFERENCE)}
    if devices:
        return ", ".join(sorted(devices))
    return REFERENCE if any(run.by == REFERENCE for run in seen) else "no"


def _kernels(module: GraphModule) -> list[_Use]:
    """The bound kernels of a graph, each with all of its nodes."""
    found: dict[str, _Use] = {}
    for node in module.graph.nodes:
        if (binding := node.meta.get(KERNEL_KEY)) is not None:
            found.setdefault(binding.name, _Use(binding)).nodes.append(node)
    return list(found.values())


def _units(kernels: Sequence[_Use], target: Target) -> list[tuple[Unit, _Use]]:
    """What is to be compiled, in order of first use. Several kernels of an op may launch one unit."""
    found: dict[str, tuple[Unit, _Use]] = {}
    for kernel in kernels:
        for node in kernel.nodes:
            arguments = {name: node_value(value) for name, value in bound_arguments(node).items()}
            for unit in kernel.binding.kernel.units(arguments, target):
                name = unit_name(unit, target, kernel.binding.op.name, "")
                found.setdefault(name, (unit, _Use(kernel.binding)))[1].nodes.append(node)
    return list(found.values())


def _report(use: _Use, name: str, language: str) -> KernelReport:
    return KernelReport(
        op=use.binding.op.name,
        target=use.binding.target.name,
        name=name,
        language=language,
        source_hash=use.binding.source_hash,
        provenance=use.lines,
        bound=use.bound,
    )


def _written(use: _Use, made: EmittedKernel, folder: RunFolder) -> KernelReport:
    def relative(path: Path | None) -> str:
        return path.relative_to(folder.path).as_posix() if path is not None else ""

    report = _report(use, made.name, made.language)
    report.source_hash = made.source_hash
    report.source, report.object, report.skipped = relative(made.source), relative(made.object), made.skipped
    if (needs := made.resources) is not None:
        report.registers, report.spills, report.lds_bytes = needs.registers, needs.spills, needs.lds_bytes
        report.occupancy = needs.occupancy.waves_per_simd
    return report
