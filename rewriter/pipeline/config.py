"""Finding and loading pipelines.

    load_pipeline("kimi-k3-decode", known_passes=PASSES)      a shipped one, by name
    load_pipeline("mine/tuned.yaml", known_passes=PASSES)     a file
    load_pipeline({"version": 1, "extends": "base", "passes": [...]}, known_passes=PASSES)

`extends` names one parent: a file beside the file that says so, else a shipped pipeline. How parent and child are
merged stands in `merge.py` and docs/pipelines.md.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import k3rewrite.pass_configs
from k3rewrite.errors import ConfigError, did_you_mean
from k3rewrite.pipeline.layer import Layer, Problems, read_layer
from k3rewrite.pipeline.merge import check_names, merge
from k3rewrite.pipeline.settings import PipelineConfig
from k3rewrite.plain_data.located import Item, from_mapping, read_yaml

_SUFFIXES = (".yaml", ".yml")


def shipped_pipelines() -> dict[str, Path]:
    """The pipelines that come with the package, by name."""
    folder = Path(k3rewrite.pass_configs.__path__[0])
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_pipeline(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    known_passes: Mapping[str, type],
    known_targets: Iterable[str] | None = None,
    known_names: Iterable[str] | None = None,
) -> PipelineConfig:
    """Read, merge and check a pipeline: a shipped name, a path, or the content as a mapping.

    `known_passes` maps names to pass classes (frozen dataclasses; their fields are the options). `known_targets` and
    `known_names` (names for `expect` and `when`) are checked if given. All problems are listed in one `ConfigError`.
    """
    problems = Problems()
    targets = None if known_targets is None else tuple(known_targets)
    if isinstance(source, Mapping):
        name, item, folder, path = "<mapping>", from_mapping(source, "pipeline"), Path.cwd(), None
    else:
        path = _find(source if isinstance(source, str) else Path(source), None, place="pipeline")
        name, item, folder = path.stem, read_yaml(path, _shown(path)), path.parent
    shown = name if path is None else _shown(path)
    layers: list[Layer] = []
    chain: list[tuple[Path | None, str]] = [(path, shown)]
    while True:
        layers.append(read_layer(item, known_passes, targets, problems))
        parent = _parent(item, folder, problems)
        if parent is None:
            break
        if any(parent.samefile(seen) for seen, _ in chain if seen is not None):
            cycle = " -> ".join([text for _, text in chain] + [_shown(parent)])
            problems.add(f"'extends' goes in a circle: {cycle}", item.value["extends"].place, "take one 'extends' out")
            break
        chain.append((parent, _shown(parent)))
        item, folder = Item({}, _shown(parent)), parent.parent
        with problems.catch():
            item = read_yaml(parent, _shown(parent))
    config = merge(layers[::-1], known_passes, problems)
    if known_names is not None:
        check_names(config, known_names, problems)
    problems.raise_if_any(shown)
    return dataclasses.replace(config, name=name, extends=tuple(text for _, text in chain[:0:-1]))


def _parent(item: Item, folder: Path, problems: Problems) -> Path | None:
    named = item.value.get("extends") if isinstance(item.value, dict) else None
    if named is None or named.value is None:
        return None
    if not isinstance(named.value, str):
        problems.add("'extends': expected the name or file of one pipeline", named.place, "give one name")
        return None
    with problems.catch():
        return _find(named.value, folder, place=named.place)
    return None


def _find(source: str | Path, folder: Path | None, *, place: str) -> Path:
    """A path as it is (or beside `folder`), else a shipped pipeline of that name."""
    shipped = shipped_pipelines()
    text = str(source)
    try:
        path = Path(source).expanduser() if folder is None else folder / Path(source).expanduser()
        is_file_name = isinstance(source, Path) or path.suffix in _SUFFIXES or "/" in text or "\\" in text
        if is_file_name and path.exists():
            return path
    except (OSError, RuntimeError, ValueError) as error:  # too long, a home of nobody, a zero byte
        raise ConfigError(f"no path: {error}", place=place, remedy="correct the path") from None
    bare = Path(text).stem if Path(text).suffix in _SUFFIXES and Path(text).name == text else text
    if bare in shipped:
        return shipped[bare]
    if is_file_name:
        raise ConfigError(f"no file '{text}'", place=place, remedy=f"check the path; shipped: {', '.join(shipped)}")
    raise ConfigError(
        f"no pipeline '{text}'", place=place, remedy=f"{did_you_mean(text, shipped)} (a file name ends in .yaml)"
    )


def _shown(path: Path) -> str:
    """How a file is named in messages: shipped ones by their package folder, others as they were given."""
    folder = Path(k3rewrite.pass_configs.__path__[0])
    return f"pass_configs/{path.name}" if path.parent == folder else str(path)
