"""Emit every kernel that a rewritten graph is bound to: compiled ahead of time for its target, with provenance.

    nodes with a binding  ->  distinct (kernel, signature)  ->  kernels/<target>/<name>.{py,hip,s,hsaco,ptx,cubin}
                                                               kernels/<target>/manifest.json

Without a run folder kernels are not written; the report then has one entry for each bound kernel without figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.fx import GraphModule, Node

from k3rewrite.emit import EmittedKernel, Provenance, emit_unit, unit_name, write_manifest
from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.cost import node_value
from k3rewrite.graph.provenance import model_lines
from k3rewrite.ops.binding import KERNEL_KEY, Binding
from k3rewrite.ops.kernel import Unit
from k3rewrite.report.run_folder import RunFolder
from k3rewrite.report.schema import KernelReport
from k3rewrite.targets import Target


@dataclass
class _Use:
    """One unit to compile, and the nodes that launch it."""

    binding: Binding
    unit: Unit
    nodes: list[Node] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        return list(dict.fromkeys(line for node in self.nodes for line in model_lines(node)))

    @property
    def bound(self) -> list[str]:
        """Names of the ops that stand in the graph: the op that was bound, or its in-place variant."""
        return list(dict.fromkeys(str(node.target).removesuffix(".default") for node in self.nodes))


def emit_kernels(module: GraphModule, target: Target, folder: RunFolder | None, *, executed: str) -> list[KernelReport]:
    """Reports of all kernels of a graph, in order of first use; files and manifest go into the run folder."""
    uses = _uses(module, target)
    if folder is None:
        return [_unwritten(use, executed) for use in uses]
    path = folder.path / "kernels" / target.name
    emitted = [
        emit_unit(use.unit, target, path, use.binding.op.name,
                  Provenance(use.binding.op.name, use.binding.kernel.name, tuple(use.lines), tuple(use.bound)))
        for use in uses
    ]  # fmt: skip
    if emitted:
        write_manifest(path, target, emitted, {e.name: executed for e in emitted})
    return [_written(use, made, folder, executed) for use, made in zip(uses, emitted, strict=True)]


def _uses(module: GraphModule, target: Target) -> Sequence[_Use]:
    found: dict[str, _Use] = {}
    for node in module.graph.nodes:
        binding = node.meta.get(KERNEL_KEY)
        if binding is None:
            continue
        arguments = {name: node_value(value) for name, value in bound_arguments(node).items()}
        for unit in binding.kernel.units(arguments, target):
            use = found.setdefault(unit_name(unit, target, binding.op.name, ""), _Use(binding, unit))
            use.nodes.append(node)
    return list(found.values())


def _unwritten(use: _Use, executed: str) -> KernelReport:
    return KernelReport(
        op=use.binding.op.name,
        target=use.binding.target.name,
        name=use.binding.name,
        language=use.binding.kernel.language,
        source_hash=use.binding.source_hash,
        executed=executed,
        provenance=use.lines,
        bound=use.bound,
    )


def _written(use: _Use, made: EmittedKernel, folder: RunFolder, executed: str) -> KernelReport:
    needs = made.resources

    def relative(path: Path | None) -> str:
        return path.relative_to(folder.path).as_posix() if path is not None else ""

    report = _unwritten(use, executed)
    report.name, report.source_hash = made.name, made.source_hash
    report.source, report.object, report.skipped = relative(made.source), relative(made.object), made.skipped
    if needs is not None:
        report.registers, report.spills, report.lds_bytes = needs.registers, needs.spills, needs.lds_bytes
        report.occupancy = needs.occupancy.waves_per_simd
    return report
