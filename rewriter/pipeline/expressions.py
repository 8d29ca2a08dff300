"""The small language of `expect` and `when` in a pipeline; nothing is ever evaluated by Python.

    expect: "== 2 * n_layers"       the number of matches, compared with a number of the model
    expect: "matched == candidates" every candidate was rewritten
    when:   "tp > 1 and phase == 'decode'"

The text is parsed with `ast` and walked by hand. What is allowed: integer, decimal and text literals, names,
`+ - * / // %`, unary minus, comparisons (chained too), `and`, `or`, `not`, parentheses. There is no power, call,
attribute, index or conversion, and a text is at most 200 characters long, so the cost of a value is bounded.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from k3rewrite.errors import ConfigError, did_you_mean

MAX_LENGTH = 200
MAX_DEPTH = 40
ALLOWED = "numbers, 'text', names, + - * / // %, == != < <= > >=, and, or, not, parentheses"

EXPECT_NAMES = ("matched", "candidates", "declined")
"""Names that an `expect` has beside those of the run."""

Value: TypeAlias = bool | int | float | str

_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_DIVISIONS = (ast.Div, ast.FloorDiv, ast.Mod)
_ORDER: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_EQUAL: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {ast.Eq: operator.eq, ast.NotEq: operator.ne}


@dataclass(frozen=True)
class Expression:
    """A parsed and checked condition. `text` is as written, `place` where it was written ("file.yaml:12")."""

    text: str
    place: str
    tree: ast.expr

    @staticmethod
    def parse(text: str, place: str = "expression", *, prefix: str = "") -> Expression:
        """Parse `prefix + text` and check it against the whitelist; `ConfigError` says what is not allowed."""
        if len(text) > MAX_LENGTH:
            raise ConfigError(
                f"an expression of {len(text)} characters", place=place, remedy=f"keep it within {MAX_LENGTH}"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "5in x" makes Python's tokenizer warn before it is refused
                tree = ast.parse((prefix + text).strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ConfigError(f"{text!r} is not an expression", place=place, remedy=f"use only {ALLOWED}") from None
        _check(tree, text, place)
        return Expression(text, place, tree)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name))

    def check_names(self, known: Mapping[str, Any] | frozenset[str]) -> None:
        """`ConfigError` for the first name that is not known."""
        for name in sorted(self.names - set(known)):
            raise ConfigError(
                f"unknown name '{name}' in {self.text!r}", place=self.place, remedy=did_you_mean(name, known)
            )

    def check_constants(self) -> None:
        """`ConfigError` for a part that fails whatever the names stand for: `1 // 0`, `tp % 0`, `'a' < 1`."""
        if not self.names:
            self.holds({})
        for node in ast.walk(self.tree):
            if isinstance(node, ast.expr) and _is_constant(node):
                self._value(node, {})
            elif isinstance(node, ast.BinOp) and type(node.op) in _DIVISIONS and _is_constant(node.right):
                self._value(ast.BinOp(ast.Constant(1), node.op, node.right), {})

    def evaluate(self, names: Mapping[str, Value]) -> Value:
        """The value. `ConfigError` for an unknown name, operands of the wrong kind, a division by zero."""
        self.check_names(names)
        return self._value(self.tree, names)

    def holds(self, names: Mapping[str, Value]) -> bool:
        """The value of a condition; a number or text is a `ConfigError`, not a truth value."""
        value = self.evaluate(names)
        if not isinstance(value, bool):
            raise self._error(f"{self.text!r} gives {value!r}, not true or false", "compare it with something")
        return value

    def _error(self, message: str, remedy: str) -> ConfigError:
        return ConfigError(message, place=self.place, remedy=remedy)

    def _value(self, node: ast.expr, names: Mapping[str, Value]) -> Value:
        if isinstance(node, ast.Constant):
            return node.value  # type: ignore[return-value]  # _check has seen to the type
        if isinstance(node, ast.Name):
            return names[node.id]
        if isinstance(node, ast.BoolOp):
            every = isinstance(node.op, ast.And)
            for part in node.values:
                if self._truth(part, names) is not every:
                    return not every
            return every
        if isinstance(node, ast.UnaryOp):
            if isinstance(node.op, ast.Not):
                return not self._truth(node.operand, names)
            number = self._number(node.operand, names)
            return -number if isinstance(node.op, ast.USub) else number
        if isinstance(node, ast.BinOp):
            left, right = self._number(node.left, names), self._number(node.right, names)
            try:
                result: float | int = _ARITHMETIC[type(node.op)](left, right)
            except (ZeroDivisionError, OverflowError) as error:
                raise self._error(f"{self.text!r}: {error}", "change the expression") from None
            return result
        assert isinstance(node, ast.Compare)
        left_node = node.left
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            if not self._compare(op, self._value(left_node, names), self._value(right_node, names)):
                return False
            left_node = right_node
        return True

    def _truth(self, node: ast.expr, names: Mapping[str, Value]) -> bool:
        value = self._value(node, names)
        if not isinstance(value, bool):
            raise self._error(f"{self.text!r}: {value!r} is not true or false", "compare it with something")
        return value

    def _number(self, node: ast.expr, names: Mapping[str, Value]) -> int | float:
        value = self._value(node, names)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._error(f"{self.text!r}: {value!r} is not a number", "calculate with numbers only")
        return value

    def _compare(self, op: ast.cmpop, left: Value, right: Value) -> bool:
        kinds = {("bool" if isinstance(v, bool) else "text" if isinstance(v, str) else "number") for v in (left, right)}
        if len(kinds) > 1:
            raise self._error(f"{self.text!r} compares {left!r} with {right!r}", "compare values of one kind")
        if type(op) in _EQUAL:
            return _EQUAL[type(op)](left, right)
        if kinds != {"number"}:
            raise self._error(f"{self.text!r} orders {left!r} and {right!r}", "use == or != here")
        return _ORDER[type(op)](left, right)


def parse_when(text: str, place: str = "when") -> Expression:
    """The condition of a pass: `tp > 1`."""
    return Expression.parse(text, place)


def parse_expect(text: str, place: str = "expect") -> Expression:
    """The expectation on a pass. A text that begins with a comparison (`== n_layers`) compares `matched` with it."""
    starts = text.lstrip().startswith(("==", "!=", "<", ">"))
    expression = Expression.parse(text, place, prefix="matched " if starts else "")
    if not expression.names & set(EXPECT_NAMES):
        raise ConfigError(
            f"{text!r} does not speak of the matches", place=place, remedy="begin with a comparison, as in '>= 1'"
        )
    return expression


def _check(tree: ast.expr, text: str, place: str) -> None:
    """Refuse every node that is not on the whitelist. Iterative, so that depth cannot exhaust Python's stack."""
    pending: list[tuple[ast.AST, int]] = [(tree, 1)]
    while pending:
        node, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise ConfigError(
                f"{text!r} is nested too deeply", place=place, remedy=f"keep it within {MAX_DEPTH} levels"
            )
        if not _allowed(node):
            raise ConfigError(
                f"{_describe(node)} is not allowed in {text!r}", place=place, remedy=f"use only {ALLOWED}"
            )
        pending.extend((child, depth + 1) for child in ast.iter_child_nodes(node))


def _is_constant(node: ast.expr) -> bool:
    return not any(isinstance(part, ast.Name) for part in ast.walk(node))


def _allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float, str)
    if isinstance(node, ast.BinOp):
        return type(node.op) in _ARITHMETIC
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, (ast.USub, ast.UAdd, ast.Not))
    if isinstance(node, ast.Compare):
        return all(type(op) in _EQUAL or type(op) in _ORDER for op in node.ops)
    return isinstance(node, (ast.Name, ast.Load, ast.BoolOp, ast.operator, ast.unaryop, ast.cmpop, ast.boolop))


def _describe(node: ast.AST) -> str:
    if isinstance(node, (ast.BinOp, ast.UnaryOp)):
        return f"the operator {type(node.op).__name__}"
    if isinstance(node, ast.Compare):
        return "the comparison " + ", ".join(type(op).__name__ for op in node.ops)
    if isinstance(node, ast.Constant):
        return f"the literal {node.value!r}"
    return type(node).__name__
