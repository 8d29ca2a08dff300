"""The torch.compile backend.

    torch.compile(model, backend="k3rewrite")
    torch.compile(model, backend="k3rewrite", options={"pipeline": "kimi-k3-decode", "target": "mi355x",
                                                       "dump": "runs", "verify": "end-to-end", "finalise": "eager",
                                                       "names": {"n_layers": 93}})

    pipeline  name of a shipped pipeline, a YAML file, or its content as a mapping   (default: "default")
    target    a target's name or file, or "auto" for the device at hand              (default: the pipeline's)
    dump      folder in which each compiled graph leaves a fresh run-NNN             (default: nothing on disk)
    verify    "none", "regions", "end-to-end" or "all"                               (default: the pipeline's)
    finalise  "inductor" or "eager"                                                  (default: the pipeline's)
    names     values that `expect` and `when` of the pipeline may use, beside tp, dcp, rank and target, which every run
              has, and n_layers, which is read off the model

A `Backend` made by hand does the same and keeps the reports: `backend = Backend(options)`, `backend.reports`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from k3rewrite.capture import lower
from k3rewrite.capture.dynamo import RESTARTS, broken_graph
from k3rewrite.driver.choices import FINALISE, VERIFY, check_choice
from k3rewrite.driver.compilation import Compilation
from k3rewrite.driver.names import check_given, names_in_programs, own_values
from k3rewrite.errors import ConfigError, K3RewriteError, did_you_mean
from k3rewrite.passes import PASSES
from k3rewrite.pipeline.config import load_pipeline
from k3rewrite.pipeline.expressions import Value
from k3rewrite.report.run_folder import RunFolder
from k3rewrite.report.schema import UNFINISHED, RunInfo, RunReport
from k3rewrite.report.versions import describe_versions
from k3rewrite.targets import known_targets, load_target

_log = logging.getLogger(__name__)

OPTIONS = ("pipeline", "target", "dump", "verify", "finalise", "names")
PLACE = "options of backend 'k3rewrite'"


class Backend:
    """A torch.compile backend with its settings checked when it is made. `reports` has one entry a compiled graph.

    An attempt that Dynamo gives up to start again is none: only its run folder, if there is one, says that it was.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        options = {} if options is None else options
        if not isinstance(options, Mapping):
            raise ConfigError(f"options is {options!r}", place=PLACE, remedy="give a mapping of option names to values")
        for name in options:
            if name not in OPTIONS:
                raise ConfigError(f"unknown option '{name}'", place=PLACE, remedy=did_you_mean(str(name), OPTIONS))
        names = _names(options)
        pipeline = load_pipeline(
            _pipeline(options),
            known_passes=PASSES,
            known_targets=known_targets(),
            known_names=names_in_programs(names),
        )
        verify, how = _choice(options, "verify", VERIFY), _choice(options, "finalise", FINALISE)
        self.pipeline = pipeline.override(
            target=_text(options, "target"),
            verify=None if verify is None else VERIFY[verify],
            finalise=how,  # type: ignore[arg-type]  # _choice returns one of FINALISE
        )
        self.target = load_target(self.pipeline.target)
        self.rank, self.world = _ranks(self.pipeline.parallel.tp)
        self.names = {**names, **own_values(self.pipeline, self.target.name, rank=self.rank, world=self.world)}
        self.dump = options.get("dump")
        if self.dump is not None and (not isinstance(self.dump, (str, os.PathLike)) or not os.fspath(self.dump)):
            raise ConfigError(f"dump is {self.dump!r}", place=PLACE, remedy="give the folder for dumps as a path")
        self.reports: list[RunReport] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
        """Compile one Dynamo graph. Settings that torch.compile hands over are refused: this object has its own."""
        if settings:
            raise ConfigError(
                f"torch.compile passes {', '.join(sorted(settings))} to a backend that has its settings already",
                place=PLACE,
                remedy="give them to Backend({...}), or name the backend as text: backend='k3rewrite'",
            )
        report = RunReport(
            info=RunInfo(
                model="torch.compile",
                target=self.target.name,
                pipeline=self.pipeline.name,
                rank=self.rank,
                world=self.world,
                **describe_versions(),
            ),
            error=UNFINISHED,
        )
        compilation = Compilation(self.pipeline, self.target, report, self.names)  # settings that clash leave nothing
        if self.dump is not None:
            compilation.folder = RunFolder.create(self.dump)
            report.folder = compilation.folder.path
            compilation.folder.write("pipeline.yaml", self.pipeline.to_yaml())
        self.reports.append(report)
        if (broken := broken_graph(module)) is not None:
            report.notes.append(broken)
            _log.warning("%s", broken)
        compilation.write_report()
        try:
            compilation.rewrite_dynamo(module)
            compiled = lower(module, inputs, compilation)
        except K3RewriteError as error:
            compilation.failed(error)
            raise
        except RESTARTS:
            self.reports[:] = [kept for kept in self.reports if kept is not report]
            compilation.superseded()
            raise
        except BaseException:
            compilation.keep_report()
            raise
        report.error = ""
        compilation.write_report()
        return compiled


def k3rewrite(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Entry point of `torch.compile(model, backend="k3rewrite", options={...})`."""
    if mode is not None:
        raise ConfigError(
            f"mode={mode!r} is not an option of this backend",
            place=PLACE,
            remedy="leave 'mode' out; settings go into options={...}",
        )
    return Backend(options)(module, inputs)


def _ranks(tp: int) -> tuple[int, int]:
    """Rank and number of ranks of the process group, which must be what the pipeline's `parallel: {tp: N}` says."""
    initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if initialised else (0, 1)
    if tp not in (1, world):
        raise ConfigError(
            f"the pipeline is for tp {tp}, and the process group has {world} rank{'s' if world > 1 else ''}",
            place=PLACE,
            remedy=f"start {tp} processes with a process group, or take 'parallel' out of the pipeline",
        )
    return rank, world


def _choice(options: Mapping[str, Any], name: str, choices: Iterable[str]) -> str | None:
    value = options.get(name)
    return None if value is None else check_choice(value, choices, f"{PLACE}, '{name}'")


def _pipeline(options: Mapping[str, Any]) -> str | os.PathLike[str] | Mapping[str, Any]:
    value = options.get("pipeline")
    if value is None:
        return "default"
    if not isinstance(value, (str, os.PathLike, Mapping)):
        raise ConfigError(f"pipeline is {value!r}", place=PLACE, remedy="give a name, a YAML file, or its content")
    return value


def _text(options: Mapping[str, Any], name: str) -> str | None:
    value = options.get(name)
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name} is {value!r}", place=PLACE, remedy="give a name or a file")
    return None if value is None else os.fspath(value)


def _names(options: Mapping[str, Any]) -> dict[str, Value]:
    names = {} if options.get("names") is None else options["names"]
    if not isinstance(names, Mapping):
        raise ConfigError(f"names is {names!r}", place=PLACE, remedy="give a mapping of names to numbers or texts")
    for key, value in names.items():
        if not isinstance(key, str) or not isinstance(value, (bool, int, float, str)):
            raise ConfigError(f"names[{key!r}] is {value!r}", place=PLACE, remedy="give a number or a text")
    check_given(names, PLACE)
    return dict(names)
