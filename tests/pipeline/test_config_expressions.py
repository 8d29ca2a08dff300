"""The language of `expect` and `when`: equal to Python where it is allowed, an error everywhere else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rewrite.errors import ConfigError
from k3rewrite.pipeline.expressions import Expression, parse_expect, parse_when

NAMES: dict[str, Any] = {"n_layers": 93, "tp": 8, "phase": "decode", "matched": 186, "candidates": 187}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("== 2 * n_layers", True),
        (">= 1", True),
        ("< n_layers", False),
        ("!= 186", False),
        ("matched == candidates - 1", True),
        ("1 <= matched <= 2 * n_layers", True),
        (">= 1 and matched <= candidates", True),
    ],
)
def test_expect(text: str, value: bool) -> None:
    assert parse_expect(text).holds(NAMES) is value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("tp > 1", True),
        ("phase == 'decode'", True),
        ("phase != 'decode'", False),
        ('not (tp > 1) or phase == "prefill"', False),
        ("(tp + 1) * 2 - 4 // 3 == 17", True),
        ("7 % 4 == 3 and 7 / 2 == 3.5 and -tp < 0", True),
        ("tp == 8.0", True),
        ("tp > 1 or nothing_is_evaluated_here / 0 > 1", True),
    ],
)
def test_when(text: str, value: bool) -> None:
    assert parse_when(text).holds({**NAMES, "nothing_is_evaluated_here": 1}) is value


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is not an expression"),
        ("tp >", "is not an expression"),
        ("tp = 1", "is not an expression"),
        ("tp\x00", "is not an expression"),
        ("a; b", "is not an expression"),
        ("2 ** 3 == 8", "the operator Pow is not allowed"),
        ("1 << 3 == 8", "the operator LShift is not allowed"),
        ("~tp == 1", "the operator Invert is not allowed"),
        ("tp in (1, 2)", "the comparison In is not allowed"),
        ("tp is 8", "the comparison Is is not allowed"),
        ("open('x')", "Call is not allowed"),
        ("tp.real == 1", "Attribute is not allowed"),
        ("phase[0] == 'd'", "Subscript is not allowed"),
        ("[1] == [1]", "List is not allowed"),
        ("(lambda: 1) == 1", "Lambda is not allowed"),
        ("(tp := 3) == 3", "NamedExpr is not allowed"),
        ("tp if tp else 1", "IfExp is not allowed"),
        ("f'{tp}' == '8'", "JoinedStr is not allowed"),
        ("True", "the literal True is not allowed"),
        ("b'x' == 1", "the literal b'x' is not allowed"),
        ("1j == 1", "the literal 1j is not allowed"),
        ("tp == " + "1+" * 150 + "1", "an expression of 307 characters"),
        ("-" * 60 + "1 == 1", "nested too deeply"),
    ],
)
def test_refused_when_read(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_when(text, "p.yaml:3")
    assert part in str(caught.value) and str(caught.value).startswith("p.yaml:3: ") and caught.value.remedy


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("tpp > 1", "unknown name 'tpp' in 'tpp > 1'\n  remedy: did you mean 'tp'?"),
        ("tp", "'tp' gives 8, not true or false"),
        ("tp and phase == 'decode'", "8 is not true or false"),
        ("not tp", "8 is not true or false"),
        ("phase + 1 == 2", "'decode' is not a number"),
        ("phase * 1000000000 == 'x'", "'decode' is not a number"),
        ("(tp > 1) + 1 == 2", "True is not a number"),
        ("phase == 1", "compares 'decode' with 1"),
        ("phase < 'z'", "orders 'decode' and 'z'"),
        ("tp / 0 == 1", "division by zero"),
        ("tp % 0 == 1", "zero"),
    ],
)
def test_refused_when_evaluated(text: str, part: str) -> None:
    expression = parse_when(text, "p.yaml:3")
    with pytest.raises(ConfigError) as caught:
        expression.holds(NAMES)
    assert part in str(caught.value) and str(caught.value).startswith("p.yaml:3: ")


def test_an_expectation_must_speak_of_the_matches() -> None:
    with pytest.raises(ConfigError, match="'n_layers == 93' does not speak of the matches"):
        parse_expect("n_layers == 93")


def test_large_numbers_are_bounded_by_the_length_of_the_text() -> None:
    assert parse_when("9" * 190 + " / 1 > 0").holds(NAMES)
    with pytest.raises(ConfigError, match="expression of 205 characters"):
        parse_when("9" * 201 + " > 0")


def test_names() -> None:
    assert parse_expect("== 2 * n_layers + tp").names == {"matched", "n_layers", "tp"}


NUMBERS = (
    st.integers(0, 1000).map(str) | st.floats(0, 1000, allow_nan=False).map(repr) | st.sampled_from(["n_layers", "tp"])
)


def combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "/", "%"]), inner).map(
        lambda p: f"({p[0]} {p[1]} {p[2]})"
    ) | (inner.map(lambda text: f"-{text}"))


@given(st.recursive(NUMBERS, combine, max_leaves=6), st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), NUMBERS)
def test_arithmetic_is_pythons(left: str, comparison: str, right: str) -> None:
    text = f"{left} {comparison} {right}"
    if len(text) > 200:
        return
    try:
        expected = eval(text, {"__builtins__": {}}, dict(NAMES))  # the oracle; the text is made here
    except (ZeroDivisionError, OverflowError):
        with pytest.raises(ConfigError):
            parse_when(text).holds(NAMES)
    else:
        assert parse_when(text).holds(NAMES) is expected


@given(
    st.text(max_size=60)
    | st.text(st.sampled_from("tp n_layers()+-*/%<>=!'\"andornot 0123456789.[]{}:,@#\\\n"), max_size=60)
)
def test_any_text_gives_a_value_or_a_config_error(text: str) -> None:
    try:
        value = Expression.parse(text).evaluate(NAMES)
    except ConfigError:
        return
    assert isinstance(value, (bool, int, float, str))
