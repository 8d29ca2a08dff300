"""Plain data (from YAML or JSON) checked against Python type hints, with the path to what does not fit.

    fit([1, "2"], tuple[int, ...])   ->   Misfit: [1]: expected an integer, found '2' (text)

Used for the options of a pass (its dataclass fields) and for reading `report.json` (its dataclasses).
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union

_NON_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


class Misfit(Exception):
    """A value that does not fit its type. `path` leads to it ("" for the value itself, "[1].name" inside it)."""

    def __init__(self, path: str, expected: str, found: str) -> None:
        self.path, self.expected, self.found = path, expected, found
        super().__init__(f"{path + ': ' if path else ''}expected {expected}, found {found}")


def fit(value: Any, hint: Any, path: str = "") -> Any:
    """`value` as an instance of `hint`, or `Misfit`.

    Hints: bool, int, float, str, None, Any, Literal, unions, tuple, list, dict with text keys, dataclasses. An integer
    is a float where a float is asked for, a list is a tuple where a tuple is asked for; nothing else is converted (True
    is no integer, "1" no number). A float may also be the text NaN, Infinity or -Infinity, as JSON has no such numbers.
    A dataclass takes a mapping; keys that are not its fields are ignored (`report.json` may grow), missing fields
    without a default are a `Misfit`.
    """
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _fit_union(value, hint, path)
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in typing.get_args(hint)):
            return value
    elif hint is None or hint is type(None):
        if value is None:
            return None
    elif hint is float:
        if isinstance(value, str) and value in _NON_FINITE:
            return _NON_FINITE[value]
        fits = isinstance(value, float) or (type(value) is int and abs(value) <= sys.float_info.max)
        if fits:
            return float(value)
    elif hint in (bool, int, str):
        if type(value) is hint:
            return value
    elif origin is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        return _fit_tuple(value, hint, path)
    elif origin is list and isinstance(value, Sequence) and not isinstance(value, str):
        (item,) = typing.get_args(hint)
        return [fit(entry, item, f"{path}[{i}]") for i, entry in enumerate(value)]
    elif origin is dict and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        item = typing.get_args(hint)[1]
        return {key: fit(entry, item, f"{path}.{key}") for key, entry in value.items()}
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return _fit_dataclass(value, hint, path)
    raise Misfit(path, describe_hint(hint), describe_value(value))


def _fit_union(value: Any, hint: Any, path: str) -> Any:
    deepest: Misfit | None = None
    for choice in typing.get_args(hint):
        try:
            return fit(value, choice, path)
        except Misfit as error:
            if len(error.path) > len(path) and (deepest is None or len(error.path) > len(deepest.path)):
                deepest = error
    raise deepest or Misfit(path, describe_hint(hint), describe_value(value))


def _fit_tuple(value: Sequence[Any], hint: Any, path: str) -> tuple[Any, ...]:
    items = typing.get_args(hint)
    if len(items) == 2 and items[1] is Ellipsis:
        items = (items[0],) * len(value)
    if len(items) != len(value):
        raise Misfit(path, describe_hint(hint), describe_value(value))
    return tuple(fit(entry, item, f"{path}[{i}]") for i, (entry, item) in enumerate(zip(value, items, strict=True)))


def _fit_dataclass(value: Mapping[str, Any], hint: type, path: str) -> Any:
    hints = typing.get_type_hints(hint)
    arguments = {}
    for field in dataclasses.fields(hint):
        if not field.init or field.metadata.get("json", True) is False:
            continue
        if field.name in value:
            arguments[field.name] = fit(value[field.name], hints[field.name], f"{path}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise Misfit(f"{path}.{field.name}", describe_hint(hints[field.name]), "nothing")
    return hint(**arguments)


def describe_hint(hint: Any) -> str:
    """A type hint in words: "an integer", "one of 'fewest', 'model'"."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_hint(choice) for choice in typing.get_args(hint))
    if origin is Literal:
        choices = ", ".join(repr(choice) for choice in typing.get_args(hint))
        return f"one of {choices}" if len(typing.get_args(hint)) > 1 else choices
    if origin is tuple:
        items = typing.get_args(hint)
        if len(items) == 2 and items[1] is Ellipsis:
            return f"a list with each entry {describe_hint(items[0])}"
        return f"a list of {len(items)} entries ({', '.join(describe_hint(item) for item in items)})"
    if origin is list:
        return f"a list with each entry {describe_hint(typing.get_args(hint)[0])}"
    if origin is dict or (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        return "a mapping"
    words = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "null", None: "null"}
    return words.get(hint, str(hint))


def describe_value(value: Any) -> str:
    """A found value in words: "'yes' (text)", "3 (integer)"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, str):
        return f"{value if len(value) <= 60 else value[:57] + '...'!r} (text)"
    if isinstance(value, Sequence):
        return f"a list of {len(value)}"
    kind = {int: "integer", float: "number"}.get(type(value), type(value).__name__)
    return f"{value!r} ({kind})"
