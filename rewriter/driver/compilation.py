"""One compilation: a captured graph goes through a pipeline and becomes a callable, with a report of everything.

    captured -> passes -> kernels emitted -> finalised (Inductor or eager) -> callable
                  \\-> graphs/NN-pass.txt|svg   \\-> kernels/<target>/...       report.json

`Compilation` is what the backend makes for each graph that Dynamo hands over, and what the command line drives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from k3rewrite.capture import Captured
from k3rewrite.checks.end_to_end import EndToEndCheck
from k3rewrite.checks.regions import region_check
from k3rewrite.driver import heap
from k3rewrite.driver.cache_key import compilation_key
from k3rewrite.driver.first_call import WatchedFirstCall
from k3rewrite.emit.emission import Emission, emit_kernels
from k3rewrite.errors import ConfigError, K3RewriteError
from k3rewrite.finalise import finalise
from k3rewrite.kernels import KERNELS, OPS
from k3rewrite.ops.runs import Run
from k3rewrite.passes import PASSES
from k3rewrite.pipeline.expressions import Value
from k3rewrite.pipeline.pass_base import PassContext
from k3rewrite.pipeline.runner import AfterPass, build_passes, run_pipeline
from k3rewrite.pipeline.settings import PipelineConfig
from k3rewrite.report.dump import Dumper, trace_report
from k3rewrite.report.run_folder import RunFolder
from k3rewrite.report.schema import SUPERSEDED, EndToEnd, PassReport, RunReport
from k3rewrite.targets import Target, machine_arch

_log = logging.getLogger(__name__)

Progress = Callable[[str], None]


class Rewritten(K3RewriteError):
    """Ends a compilation that is not to be run, once everything else is done."""


class _Timed:
    """An after-pass hook with the seconds that it took."""

    def __init__(self, hook: AfterPass) -> None:
        self._hook, self.seconds = hook, 0.0

    def __call__(self, index: int, module: torch.fx.GraphModule, entry: PassReport) -> None:
        started = time.perf_counter()
        self._hook(index, module, entry)
        self.seconds += time.perf_counter() - started


@dataclass
class Compilation:
    """Settings of one compilation and the report that it fills.

    `run=False` stops before code is generated, by raising `Rewritten`. `folder` None leaves nothing on disk.
    """

    pipeline: PipelineConfig
    target: Target
    report: RunReport
    names: Mapping[str, Value] = field(default_factory=dict)
    folder: RunFolder | None = None
    run: bool = True
    progress: Progress = lambda text: None
    _lost: bool = field(default=False, init=False)
    """whether it was said that the report cannot be written"""

    def __post_init__(self) -> None:
        self.passes = build_passes(self.pipeline, PASSES)
        if self.pipeline.finalise == "eager" and self.pipeline.inductor.cuda_graphs:
            raise ConfigError(
                "cuda_graphs does nothing without Inductor",
                place="inductor: {cuda_graphs: true}, finalise: eager",
                remedy="take cuda_graphs out, or set 'finalise: inductor'",
            )
        info = self.report.info
        info.cache_key = compilation_key(
            self.pipeline, self.target, OPS.values(), KERNELS,
            rank=info.rank, world=info.world, names=self.names, native=self._native(),
        )  # fmt: skip

    def rewrite_dynamo(self, module: torch.fx.GraphModule) -> None:
        """Passes that work on Dynamo's graph, before it is lowered."""
        run_pipeline(
            module, self.passes, self._context(), self.names, self.report.passes, level="dynamo", progress=self.progress
        )

    def __call__(self, captured: Captured) -> Callable[..., Any]:
        """The compiled function of a captured graph, which is changed. The report is written also on an error."""
        try:
            compiled = self._compile(captured)
        except Rewritten:
            self.write_report()
            raise
        except K3RewriteError as error:
            self.failed(error)
            raise
        except BaseException:
            self.keep_report()
            raise
        self.write_report()
        return compiled

    def failed(self, error: K3RewriteError) -> None:
        """Note what ended the compilation, also before or after it got the captured graph, or its first call."""
        self.report.error = str(error)
        error.report = self.report
        self.keep_report(error)

    def superseded(self) -> None:
        """Note that Dynamo gave this compilation up and makes another one of the same code."""
        self.report.error = SUPERSEDED
        self.keep_report()

    def keep_report(self, cause: K3RewriteError | None = None) -> None:
        """Write report.json while an error is on its way, whose place one of the writing must not take."""
        try:
            self.write_report()
        except K3RewriteError as error:
            # A cause with the same place is the full disk itself, and `failed` may be told of one error twice.
            if (cause is None or cause.place != error.place) and not self._lost:
                _log.warning("the report of a run that failed is not complete: %s", error)
            self._lost = True

    def write_report(self) -> None:
        """Write report.json (again: a run adds to it)."""
        if self.folder is not None:
            self.folder.write_report(self.report)
        trace_report(self.report)

    def _context(self) -> PassContext:
        verify = self.pipeline.verify.regions and self.run
        folder = self.folder.path / "mismatches" if self.folder is not None else None
        return PassContext(
            self.target, OPS, KERNELS, region_check(folder=folder) if verify else None, native=self._native(),
            ranks=(self.report.info.rank, self.report.info.world),
        )  # fmt: skip

    def _native(self) -> bool:
        return self.target.is_gpu and machine_arch() == self.target.arch

    def _compile(self, captured: Captured) -> Callable[..., Any]:
        module, timings = captured.module, self.report.timings
        end_to_end = None
        if self.pipeline.verify.end_to_end and self.run:
            end_to_end = EndToEndCheck(captured.fresh(), self._verified, self.failed, self.report.notes)
        dumper = _Timed(Dumper(self.folder, self.pipeline.dump, module))
        with heap.left_alone():
            run_pipeline(
                module, self.passes, self._context(), self.names, self.report.passes,
                after_pass=dumper, progress=self.progress,
            )  # fmt: skip
        timings.passes_s = sum(p.seconds for p in self.report.passes)
        timings.dump_s = dumper.seconds

        started = time.perf_counter()
        self.progress("emit")
        emission = emit_kernels(module, self.target, self.folder)
        self.report.kernels += emission.reports
        timings.emit_s = time.perf_counter() - started
        if not self.run:
            raise Rewritten("the graph is rewritten, nothing is to be run")

        started = time.perf_counter()
        self.progress(f"finalise ({self.pipeline.finalise})")
        if end_to_end is not None:
            end_to_end.expose_choices(module)
        compiled, decomposed = finalise(
            module,
            captured.inputs,
            ops={op.overload: op for op in OPS.values()},
            how=self.pipeline.finalise,
            static_inputs=captured.static_inputs,
            keep_roundings=self.pipeline.inductor.keep_roundings,
            cuda_graphs=self.pipeline.inductor.cuda_graphs,
        )
        self.report.decomposed += decomposed
        if not self.pipeline.inductor.keep_roundings and self.pipeline.finalise == "inductor":
            self.report.notes.append("keep_roundings is off: Inductor drops roundings of the model outside of kernels")
        self.report.notes += [
            *compiled.notes,
            *(f"added a guard while finalising: {guard}" for guard in compiled.guards),
            *(str(hazard) for hazard in compiled.hazards),
        ]
        timings.finalise_s = time.perf_counter() - started
        function = end_to_end.wrap(compiled) if end_to_end is not None else compiled
        return WatchedFirstCall(function, partial(self._called, emission)) if emission.reports else function

    def _verified(self, result: EndToEnd) -> None:
        self.report.end_to_end = result
        if result.passed:  # else `failed` is called with the error, and writes
            self.write_report()

    def _called(self, emission: Emission, runs: set[Run], ended_well: bool) -> None:
        try:
            emission.note_runs(runs)
        except K3RewriteError:
            if ended_well:
                raise
        if ended_well:
            self.write_report()
        else:
            self.keep_report()
