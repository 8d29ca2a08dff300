"""YAML (or a Python mapping) as a tree of values that know their place, so that every problem can name its line.

    tp: 8      ->   Item({"tp": Item(8, "p.yaml:1")}, "p.yaml:1")

Only plain data is read: YAML 1.2 core scalars (`true`, not `yes`; `1e-5` is a number), lists and mappings with text
keys. Tags, anchors, aliases, duplicate keys and several documents are errors; nothing is constructed but plain values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from k3rewrite.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_DEPTH = 20

_SCALARS: tuple[tuple[str, str, list[str] | None], ...] = (
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("tag:yaml.org,2002:int", r"^[-+]?(?:[0-9]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+.0123456789"),
    ),
)
_TAGS = frozenset({tag for tag, _, _ in _SCALARS} | {f"tag:yaml.org,2002:{kind}" for kind in ("str", "map", "seq")})


@dataclass(frozen=True)
class Item:
    """A value at a place. `value` is a scalar, a list or a dict of items; `keys` gives the place of each key."""

    value: Any
    place: str
    keys: Mapping[str, str] = field(default_factory=dict)

    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 core scalars, without aliases, with bounded depth."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  # PyYAML's own shape
    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.MarkedYAMLError(problem="anchors and aliases are not read", problem_mark=event.start_mark)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what `_Loader` would not read back as text; lists of scalars stand on one line."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), _first)
    _Dumper.add_implicit_resolver(_tag, re.compile(_pattern), _first)


def dump_yaml(content: Any) -> str:
    """Plain data as YAML that `read_yaml` reads back equal; the order of keys is kept."""
    text: str = yaml.dump(
        content, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=False, width=110
    )
    return text


def read_yaml(path: Path, shown: str) -> Item:
    """The YAML file at `path`, named `shown` in places. `ConfigError` with file and line if it is not plain YAML."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError("no such file", place=shown, remedy="check the path") from None
    except (OSError, ValueError) as error:  # also a path with a zero byte, which is none
        raise ConfigError(
            f"cannot be read: {getattr(error, 'strerror', error)}", place=shown, remedy="check the path"
        ) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"larger than {MAX_BYTES} bytes", place=shown, remedy="give a pipeline file")
    try:
        return parse_yaml(data.decode("utf-8"), shown)
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text (byte {error.start})", place=shown, remedy="save it as UTF-8") from None


def parse_yaml(text: str, shown: str) -> Item:
    """One YAML document as an `Item`; an empty one is an empty mapping."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        return Item({}, f"{shown}:1") if node is None else _item(loader, node, shown)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{shown}:{mark.line + 1}" if mark else shown
        problem = " ".join(filter(None, [error.context, error.problem]))
        raise ConfigError(f"not readable as YAML: {problem}", place=place, remedy="correct the line") from None
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"not readable as YAML: {problem}", place=shown, remedy="correct the file") from None


def from_mapping(content: Any, place: str) -> Item:
    """A Python value as an `Item`; places are paths: "options['pipeline'].passes[2]"."""
    if isinstance(content, Mapping):
        for key in content:
            if not isinstance(key, str):
                raise ConfigError(f"the key {key!r} is not text", place=place, remedy="use text keys")
        items = {key: from_mapping(value, f"{place}.{key}") for key, value in content.items()}
        return Item(items, place, {key: f"{place}.{key}" for key in items})
    if isinstance(content, (list, tuple)):
        return Item([from_mapping(entry, f"{place}[{i}]") for i, entry in enumerate(content)], place)
    return Item(content, place)


def _item(loader: _Loader, node: yaml.Node, shown: str) -> Item:
    place = f"{shown}:{node.start_mark.line + 1}"
    if node.tag not in _TAGS:
        raise yaml.MarkedYAMLError(problem=f"the tag {node.tag} is not read", problem_mark=node.start_mark)
    if isinstance(node, yaml.MappingNode):
        items: dict[str, Item] = {}
        keys: dict[str, str] = {}
        for key_node, value_node in node.value:
            key_place = f"{shown}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError("a key is not text", place=key_place, remedy="use text keys")
            key = key_node.value
            if key in items:
                raise ConfigError(f"the key '{key}' stands twice", place=key_place, remedy=f"see also {keys[key]}")
            items[key], keys[key] = _item(loader, value_node, shown), key_place
        return Item(items, place, keys)
    if isinstance(node, yaml.SequenceNode):
        return Item([_item(loader, entry, shown) for entry in node.value], place)
    assert isinstance(node, yaml.ScalarNode)
    try:
        return Item(_scalar(node), place)
    except ValueError:
        raise yaml.MarkedYAMLError(problem="not a number that can be read", problem_mark=node.start_mark) from None


def _scalar(node: yaml.ScalarNode) -> Any:
    text: str = node.value
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if kind == "str":
        return text
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        digits = text.lstrip("+-")
        number = int(digits, 16) if digits.startswith("0x") else int(digits)
        return -number if text.startswith("-") else number
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
