"""`fit`: plain data against type hints, with the path to what does not fit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from k3rewrite.plain_data.typed import Misfit, fit


@dataclass
class Inner:
    size: int
    names: list[str] = field(default_factory=list)


@dataclass
class Outer:
    inner: Inner
    many: dict[str, Inner] = field(default_factory=dict)
    secret: int = field(default=0, metadata={"json": False})


@pytest.mark.parametrize(
    ("value", "hint", "result"),
    [
        (True, bool, True),
        (3, int, 3),
        (3, float, 3.0),
        ("x", str, "x"),
        (None, int | None, None),
        (3, int | None, 3),
        (3, float | None, 3.0),
        ("a", Literal["a", "b"], "a"),
        ([1, 2], tuple[int, ...], (1, 2)),
        ([], tuple[int, ...], ()),
        ([1, "x"], tuple[int, str], (1, "x")),
        ([1], list[float], [1.0]),
        ({"a": 1}, dict[str, Any], {"a": 1}),
        ("all", Literal["all"] | tuple[str, ...], "all"),
        (["a"], Literal["all"] | tuple[str, ...], ("a",)),
        ({"inner": {"size": 1, "later": 2}}, Outer, Outer(Inner(1))),
        (
            {"inner": {"size": 1}, "many": {"x": {"size": 2, "names": ["n"]}}},
            Outer,
            Outer(Inner(1), {"x": Inner(2, ["n"])}),
        ),
        ({"inner": {"size": 1}, "secret": 5}, Outer, Outer(Inner(1))),
        ("Infinity", float, math.inf),
    ],
)
def test_fits(value: Any, hint: Any, result: Any) -> None:
    fitted = fit(value, hint)
    assert fitted == result and type(fitted) is type(result)


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        (1, bool, "expected true or false, found 1 (integer)"),
        (True, int, "expected an integer, found true"),
        (True, float, "expected a number, found true"),
        (1.0, int, "expected an integer, found 1.0 (number)"),
        ("1", int, "expected an integer, found '1' (text)"),
        ("1", float, "expected a number, found '1' (text)"),
        (1, str, "expected text, found 1 (integer)"),
        (None, str, "expected text, found null"),
        ("x" * 99, int, f"expected an integer, found '{'x' * 57}...' (text)"),
        (True, Literal[1, 2], "expected one of 1, 2, found true"),
        ("c", Literal["a", "b"], "expected one of 'a', 'b', found 'c' (text)"),
        ("ab", tuple[str, ...], "expected a list with each entry text, found 'ab' (text)"),
        ([1, "x"], tuple[int, ...], "[1]: expected an integer, found 'x' (text)"),
        ([1], tuple[int, str], "expected a list of 2 entries (an integer, text), found a list of 1"),
        ({1: 2}, dict[str, int], "expected a mapping, found a mapping"),
        ([{"size": "x"}], list[Inner], "[0].size: expected an integer, found 'x' (text)"),
        ({"inner": {}}, Outer, ".inner.size: expected an integer, found nothing"),
        ({"inner": {"size": 1}, "many": {"x": 3}}, Outer, ".many.x: expected a mapping, found 3 (integer)"),
        ([1], Literal["all"] | tuple[str, ...], "[0]: expected text, found 1 (integer)"),
        ("a", int | None, "expected an integer or null, found 'a' (text)"),
    ],
)
def test_misfits(value: Any, hint: Any, message: str) -> None:
    with pytest.raises(Misfit) as caught:
        fit(value, hint)
    assert str(caught.value) == message
