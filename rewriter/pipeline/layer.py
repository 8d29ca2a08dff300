"""One pipeline file read into a `Layer`: what it says, checked on its own, each value with its line.

    - lift_mlp: {expect: "== n_layers"}     Entry("lift_mlp", "mine.yaml:4", {"expect": "== n_layers"}, ...)

Reading goes on after a problem, so that one error can list all problems of a file. Layers become a pipeline in
`merge.py`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from k3rewrite.errors import ConfigError, K3RewriteError, did_you_mean
from k3rewrite.pipeline.expressions import parse_expect, parse_when
from k3rewrite.pipeline.settings import AUTO_TARGET, VERSION, Dump, Finalise, Inductor, OnMiss, Parallel, Verify
from k3rewrite.plain_data.located import Item
from k3rewrite.plain_data.typed import Misfit, describe_value, fit

SECTIONS: Mapping[str, type] = {"parallel": Parallel, "verify": Verify, "dump": Dump, "inductor": Inductor}
PLAIN_KEYS: Mapping[str, Any] = {"target": str, "finalise": Finalise, "on_miss": OnMiss}
TOP_KEYS = ("version", "extends", "target", "parallel", "passes", "verify", "dump", "finalise", "inductor", "on_miss")
ENTRY_KEYS: Mapping[str, Any] = {
    "expect": str | None,
    "when": str | None,
    "on_miss": OnMiss,
    "before": str,
    "after": str,
}
"""What any pass entry may say beside the options of its pass."""

OFF = ("off", False)


class Problems:
    """The problems found so far; `raise_if_any` makes one error of them."""

    def __init__(self) -> None:
        self.found: list[ConfigError] = []

    def add(self, message: str, place: str, remedy: str) -> None:
        self.found.append(ConfigError(message, place=place, remedy=remedy))

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Collect a `K3RewriteError` raised inside."""
        try:
            yield
        except K3RewriteError as error:
            self.add(error.message, error.place or "", error.remedy or "")

    def raise_if_any(self, shown: str) -> None:
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            lines = "".join(f"\n  {e.place}: {e.message} ({e.remedy})" for e in sorted(self.found, key=_line))
            raise ConfigError(f"{len(self.found)} problems:{lines}", place=shown, remedy="correct these places")


def _line(error: ConfigError) -> tuple[str, int]:
    file, _, line = (error.place or "").rpartition(":")
    return (file, int(line)) if line.isdigit() else (error.place or "", 0)


@dataclass(frozen=True)
class Entry:
    """One line of `passes:`. `settings` are the converted values given there, options of the pass and `ENTRY_KEYS`."""

    name: str
    place: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    off: bool = False


@dataclass(frozen=True)
class Layer:
    """What one file says, and nothing that it does not say."""

    place: str
    plain: Mapping[str, Any]
    sections: Mapping[str, Mapping[str, Any]]
    entries: tuple[Entry, ...]
    places: Mapping[str, str]


def read_layer(
    item: Item, known_passes: Mapping[str, type], known_targets: Iterable[str] | None, problems: Problems
) -> Layer:
    """Check one file on its own. Values that are wrong are reported and left out."""
    if not isinstance(item.value, dict):
        problems.add(
            f"a pipeline is a mapping, found {describe_value(item.plain())}", item.place, "see docs/pipelines.md"
        )
        return Layer(item.place, {}, {}, (), {})
    for key in item.value:
        if key not in TOP_KEYS:
            problems.add(f"unknown key '{key}'", item.keys[key], did_you_mean(key, TOP_KEYS))
    _check_version(item, problems)
    plain = {}
    for key, hint in PLAIN_KEYS.items():
        if key in item.value:
            plain.update(_value(key, item.value[key], hint, problems))
    targets = None if known_targets is None else {*known_targets, AUTO_TARGET}
    if targets is not None and not is_known_target(plain.get("target", AUTO_TARGET), targets):
        problems.add(
            f"unknown target '{plain['target']}'", item.value["target"].place, did_you_mean(plain["target"], targets)
        )
    sections = {
        key: _section(key, item.value[key], cls, problems) for key, cls in SECTIONS.items() if key in item.value
    }
    places = {key: value.place for key, value in item.value.items()}
    return Layer(item.place, plain, sections, tuple(_entries(item, known_passes, problems)), places)


def is_known_target(target: str, known: Iterable[str]) -> bool:
    """True for a name in `known` and for the path of a description of one's own."""
    return target in known or target.endswith((".yaml", ".yml")) or "/" in target


def _check_version(item: Item, problems: Problems) -> None:
    version = item.value.get("version")
    if version is None or version.value is None:
        problems.add("'version' is missing", item.place, f"add 'version: {VERSION}'")
    elif type(version.value) is not int or version.value != VERSION:
        found = describe_value(version.plain())
        problems.add(f"version {found} is not known", version.place, f"this k3rewrite reads version {VERSION}")


def _value(key: str, item: Item, hint: Any, problems: Problems) -> dict[str, Any]:
    """{key: converted value}, or {} and a problem."""
    try:
        return {key: fit(item.plain(), hint)}
    except Misfit as error:
        message = f"'{key}{error.path}': expected {error.expected}, found {error.found}"
        problems.add(message, _deepest(item, error.path), "correct the value")
        return {}


def _deepest(item: Item, path: str) -> str:
    """The place of the entry `path` ("[1]") of an item, as far down as it goes."""
    for part in path.replace("]", "").split("["):
        if part.isdigit() and isinstance(item.value, list) and int(part) < len(item.value):
            item = item.value[int(part)]
    return item.place


def _section(key: str, item: Item, cls: type, problems: Problems) -> dict[str, Any]:
    if not isinstance(item.value, dict):
        problems.add(
            f"'{key}': expected a mapping, found {describe_value(item.plain())}", item.place, "correct the value"
        )
        return {}
    hints = {f.name: typing.get_type_hints(cls)[f.name] for f in dataclasses.fields(cls)}
    given: dict[str, Any] = {}
    for name, value in item.value.items():
        if name in hints:
            given.update(_value(name, value, hints[name], problems))
        else:
            problems.add(f"unknown key '{name}' in '{key}'", item.keys[name], did_you_mean(name, hints))
    return given


def _entries(item: Item, known_passes: Mapping[str, type], problems: Problems) -> Iterator[Entry]:
    listed = item.value.get("passes", Item([], item.place))
    if not isinstance(listed.value, list):
        found = describe_value(listed.plain())
        problems.add(f"'passes': expected a list, found {found}", listed.place, "write each pass as '- name'")
        return
    seen: dict[str, str] = {}
    for entry in listed.value:
        if isinstance(entry.value, str):
            name, place, settings = entry.value, entry.place, Item(None, entry.place)
        elif isinstance(entry.value, dict) and len(entry.value) == 1:
            ((name, settings),) = entry.value.items()
            place = entry.keys[name]
        else:
            problems.add(
                f"a pass is a name or a mapping with one name, found {describe_value(entry.plain())}",
                entry.place,
                "write '- name' or '- name: {option: value}'",
            )
            continue
        if name in seen:
            problems.add(f"the pass '{name}' stands twice", place, f"merge it with {seen[name]}")
            continue
        seen[name] = place
        if name not in known_passes:
            problems.add(f"unknown pass '{name}'", place, did_you_mean(name, known_passes))
        elif settings.value in OFF:
            yield Entry(name, place, off=True)
        elif settings.value is None:
            yield Entry(name, place)
        elif isinstance(settings.value, dict):
            yield _entry(name, place, settings, known_passes[name], problems)
        else:
            found = describe_value(settings.plain())
            problems.add(f"'{name}': expected options or 'off', found {found}", settings.place, "write {option: value}")


def option_hints(pass_class: type) -> dict[str, Any]:
    """The options of a pass and their types: its dataclass fields."""
    hints = typing.get_type_hints(pass_class)
    return {f.name: hints[f.name] for f in dataclasses.fields(pass_class) if f.init}


def _entry(name: str, place: str, item: Item, pass_class: type, problems: Problems) -> Entry:
    hints = {**ENTRY_KEYS, **option_hints(pass_class)}
    settings: dict[str, Any] = {}
    for key, value in item.value.items():
        if key not in hints:
            problems.add(f"the pass '{name}' has no option '{key}'", item.keys[key], did_you_mean(key, hints))
            continue
        if key == "on_miss" and not getattr(pass_class, "binds_kernels", True):
            problems.add(
                f"the pass '{name}' binds no kernels, so 'on_miss' would do nothing",
                item.keys[key],
                "set it for the pass that does ('select'), or for the whole pipeline",
            )
            continue
        settings.update(_value(key, value, hints[key], problems))
        if isinstance(settings.get(key), str) and key in ("expect", "when"):
            expression = settings.pop(key)  # one that cannot be read is reported here, and no more
            with problems.catch():
                (parse_expect if key == "expect" else parse_when)(expression, value.place).check_constants()
                settings[key] = expression
    if "before" in settings and "after" in settings:
        problems.add(f"'{name}' has both 'before' and 'after'", item.keys["after"], "give one of them")
        del settings["after"]
    return Entry(name, place, settings, {key: value.place for key, value in item.value.items()})
