"""A pipeline as values: what a YAML file says once it has been read, merged and checked.

load_pipeline("kimi-k3-decode", known_passes=...).passes[0]   ->   PassConfig(name="canonicalise", ...)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from k3rewrite.plain_data.located import dump_yaml

VERSION = 1
AUTO_TARGET = "auto"

OnMiss: TypeAlias = Literal["reference", "error"]
Finalise: TypeAlias = Literal["inductor", "eager"]
DumpFormat: TypeAlias = Literal["txt", "svg"]


MOST_RANKS = 1024


@dataclass(frozen=True)
class Parallel:
    """Number of ranks: `tp` tensor parallel, `dcp` decode context parallel."""

    tp: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "dcp"):
            if not 1 <= getattr(self, name) <= MOST_RANKS:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from 1 to {MOST_RANKS}")


@dataclass(frozen=True)
class Verify:
    """Checks beside the contract, which is always checked: each rewritten region, and the model end to end."""

    regions: bool = False
    end_to_end: bool = False


@dataclass(frozen=True)
class Dump:
    """What is written after which pass; `passes` is "all" or a list of names."""

    formats: tuple[DumpFormat, ...] = ("txt", "svg")
    passes: Literal["all"] | tuple[str, ...] = "all"

    def wants(self, pass_name: str) -> bool:
        return bool(self.formats) and (self.passes == "all" or pass_name in self.passes)


@dataclass(frozen=True)
class Inductor:
    """How `finalise: inductor` compiles what no kernel took.

    `cuda_graphs` replays the compiled graph as one CUDA (HIP) graph. `keep_roundings` rounds between low-precision
    operators as eager does; without it Inductor drops casts down and up again, and numbers change.
    """

    cuda_graphs: bool = False
    keep_roundings: bool = True


@dataclass(frozen=True)
class PassConfig:
    """One pass of a pipeline. `options` holds the dataclass fields of the pass that the YAML sets, already converted.

    `expect` and `when` are texts for `expressions.parse_expect` and `parse_when`. `on_miss` says what happens to an op
    that no kernel takes: its reference, or an error. `place` is "file.yaml:12".
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    expect: str | None = None
    when: str | None = None
    on_miss: OnMiss = "reference"
    place: str = field(default="", compare=False)


@dataclass(frozen=True)
class PipelineConfig:
    """A whole pipeline. `name` and `extends` (from the base to the nearest parent) only say where it came from, and
    `moves` where passes were taken out or moved ("file.yaml:12" by name of the pass, the latest last)."""

    passes: tuple[PassConfig, ...] = ()
    target: str = AUTO_TARGET
    parallel: Parallel = Parallel()
    verify: Verify = Verify()
    dump: Dump = Dump()
    finalise: Finalise = "inductor"
    inductor: Inductor = Inductor()
    on_miss: OnMiss = "reference"
    version: int = VERSION
    name: str = field(default="", compare=False)
    extends: tuple[str, ...] = field(default=(), compare=False)
    moves: dict[str, str] = field(default_factory=dict, compare=False)

    def override(
        self,
        *,
        target: str | None = None,
        tp: int | None = None,
        dcp: int | None = None,
        verify: Verify | None = None,
        finalise: Finalise | None = None,
    ) -> PipelineConfig:
        """The pipeline with some settings replaced (flags win over YAML); None leaves a setting as it is."""
        return dataclasses.replace(
            self,
            target=self.target if target is None else target,
            finalise=self.finalise if finalise is None else finalise,
            parallel=_given(self.parallel, tp=tp, dcp=dcp),
            verify=self.verify if verify is None else verify,
        )

    def to_yaml(self) -> str:
        """The pipeline without `extends`, every setting spelt out; loading the text gives an equal pipeline."""
        content = {
            "version": self.version,
            "target": self.target,
            "parallel": dataclasses.asdict(self.parallel),
            "passes": [self._entry(p) for p in self.passes],
            "verify": dataclasses.asdict(self.verify),
            "dump": {"formats": list(self.dump.formats), "passes": _listed(self.dump.passes)},
            "finalise": self.finalise,
            "inductor": dataclasses.asdict(self.inductor),
            "on_miss": self.on_miss,
        }
        origin = " extends ".join(filter(None, (self.name, *reversed(self.extends))))
        heading = "".join(f"# {line}\n" for line in origin.splitlines())
        return heading + dump_yaml(content)

    def _entry(self, entry: PassConfig) -> Any:
        settings = {key: _listed(value) for key, value in entry.options.items()}
        if entry.expect is not None:
            settings["expect"] = entry.expect
        if entry.when is not None:
            settings["when"] = entry.when
        if entry.on_miss != self.on_miss:
            settings["on_miss"] = entry.on_miss
        return {entry.name: settings} if settings else entry.name


def _given(section: Any, **settings: Any) -> Any:
    return dataclasses.replace(section, **{key: value for key, value in settings.items() if value is not None})


def _listed(value: Any) -> Any:
    return [_listed(entry) for entry in value] if isinstance(value, (tuple, list)) else value
