"""What `k3rewrite compile` does: build the model, compile it, run it, report.

    compile_model(request, progress) -> RunReport      (also in <out>/run-NNN/report.json)

Without a run (`--no-run`) everything is built and traced on fake tensors: the 93-layer model needs no weights.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from k3rewrite._torch_private import FakeTensorMode, convertible_fakes
from k3rewrite.capture import dynamo, lower, run_captured
from k3rewrite.driver import kimi_k3
from k3rewrite.driver.compilation import Compilation, Progress, Rewritten
from k3rewrite.driver.factory import build_from_factory, check_call, settings_taken
from k3rewrite.driver.names import SHAPE_NAMES, own_values
from k3rewrite.driver.ranks import rank_group
from k3rewrite.driver.request import CompileRequest
from k3rewrite.errors import ConfigError, K3RewriteError
from k3rewrite.pipeline.expressions import Value
from k3rewrite.report.run_folder import RunFolder
from k3rewrite.report.schema import UNFINISHED, RunInfo, RunReport
from k3rewrite.report.versions import describe_versions
from k3rewrite.targets import Target, load_target, machine_arch

Built = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]


def compile_model(request: CompileRequest, progress: Progress = lambda text: None) -> RunReport:
    """Compile what `request` names; `progress` is told each stage.

    Raises the errors of `k3rewrite.errors`. A model that cannot be built leaves no run folder; after that the report is
    on disk, with the error that ended the run in it.
    """
    started = time.perf_counter()
    target = load_target(request.target)
    config = kimi_k3.configuration(request.config, request.layers) if request.is_kimi_k3 else None
    names = {**_run_names(request, target), **(config.counts() if config is not None else {})}
    with rank_group(request.rank, request.tp) as group, _tensors(request.run):
        progress("build the model")
        model, args, kwargs = _build(request, config, group, _device(request, target))
        report = RunReport(info=_info(request, target), error=UNFINISHED)
        # Settings that clash are an error here, before there is a folder.
        compilation = Compilation(request.pipeline, target, report, names, None, request.run, progress)
        compilation.folder = RunFolder.create(request.out)
        compilation.folder.write("pipeline.yaml", request.pipeline.to_yaml())
        compilation.write_report()
        progress("trace")
        try:
            _compile(compilation, model, args, kwargs)
        except K3RewriteError as error:
            compilation.failed(error)
            raise
    report.error = ""
    report.timings.total_s = time.perf_counter() - started
    compilation.write_report()
    return report


def _compile(
    compilation: Compilation, model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    timings = compilation.report.timings
    started = time.perf_counter()
    lowered: list[float] = []

    def compiler(captured: Any) -> Callable[..., Any]:
        timings.capture_s = time.perf_counter() - started
        try:
            return compilation(captured)
        finally:
            lowered.append(time.perf_counter())

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compilation.report.passes.clear()  # of an attempt that Dynamo gave up to start again
        compilation.rewrite_dynamo(module)
        return lower(module, inputs, compiler)

    dynamo.reset()
    try:
        run_captured(model, backend, args, kwargs, stop=Rewritten)
    except K3RewriteError:
        raise
    except Exception:
        if lowered and compilation.run:
            check_call(model, args, kwargs)
        raise
    if not lowered:
        raise ConfigError("the model computes nothing on tensors", place="MODEL", remedy="give a model that does")
    if compilation.run:
        timings.run_s = time.perf_counter() - lowered[0]


def _build(request: CompileRequest, config: Any, group: Any, device: str) -> Built:
    if config is None:
        settings = {
            "phase": request.phase, "batch": request.batch, "tokens": request.tokens, "context": request.context,
            "dtype": request.torch_dtype, "device": device, "seed": request.seed,
        }  # fmt: skip
        with convertible_fakes():
            return build_from_factory(request.model, settings, asked=request.given, run=request.run)
    from k3rewrite.models.kimi_k3 import build_kimi_k3

    if request.run:
        kimi_k3.check_memory(config, request.torch_dtype, group, _memory(device))
    return build_kimi_k3(
        config, phase=request.phase, batch=request.batch, tokens=request.tokens, context=request.context,
        dtype=request.torch_dtype, device=device, seed=request.seed, group=group,
    )  # fmt: skip


def _device(request: CompileRequest, target: Target) -> str:
    """The GPU if the target is the one of this machine, else the CPU (whose tensors stand for those of the target)."""
    if not request.run or not target.is_gpu:
        return "cpu"
    return "cuda" if machine_arch() == target.arch else "cpu"


def _memory(device: str) -> int:
    """Bytes of memory of a device, in use or not."""
    if device == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def _tensors(real: bool) -> Iterator[None]:
    if real:
        yield
    else:
        with FakeTensorMode():
            yield


def _run_names(request: CompileRequest, target: Target) -> dict[str, Value]:
    shapes = {name: getattr(request, name) for name in SHAPE_NAMES}
    return {**shapes, **own_values(request.pipeline, target.name, rank=request.rank, world=request.tp)}


def _info(request: CompileRequest, target: Target) -> RunInfo:
    """What was compiled. Of a model of the user's, only those settings that its factory was given."""
    shapes = {name: getattr(request, name) for name in (*SHAPE_NAMES, "seed")}
    if not request.is_kimi_k3:
        taken = settings_taken(request.model, shapes)
        shapes = {name: value for name, value in shapes.items() if name in taken}
    return RunInfo(
        model=request.model, config=request.config, layers=request.layers, target=target.name,
        pipeline=request.pipeline.name, rank=request.rank, world=request.tp, command=request.command,
        **shapes, **describe_versions(),
    )  # fmt: skip
