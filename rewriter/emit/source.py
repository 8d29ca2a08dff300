"""The text that a unit is compiled from, complete in itself, and its hash.

    Triton function  ->  imports, module constants, the helper functions that it calls, the function
    HIP file         ->  the file with its #include "..." lines replaced by what they include

This text is written beside the object, and its hash is the `source_hash` of reports and manifests. It does not depend
on the target, on the sizes that a unit is compiled for, on line numbers or on the compiler.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from k3rewrite.errors import EmitError
from k3rewrite.ops.kernel import HipUnit, TritonUnit, Unit

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"[^\n]*$', re.MULTILINE)
_PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*$", re.MULTILINE)
_PLAIN = (bool, int, float, str, type(None))


def unit_source(unit: Unit) -> str:
    """The self-contained source of a unit. `EmitError` if a file or a function's source cannot be read."""
    return triton_source(unit.function) if isinstance(unit, TritonUnit) else hip_source(unit)


def unit_source_hash(unit: Unit) -> str:
    """16 hexadecimal digits: equal for the compiled object and the code that ran if both came from this text."""
    return hashlib.sha256(unit_source(unit).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------ HIP C++


def include_folder() -> Path:
    """Where `portability.h` stands. Found without importing the package, which would register every op."""
    spec = importlib.util.find_spec("k3rewrite.kernels")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def hip_source(unit: HipUnit) -> str:
    """The file and what it includes, as one text. `#line` keeps compiler messages pointing at the real files."""
    return _flatten(Path(unit.path), seen=set())


def _flatten(path: Path, seen: set[Path]) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EmitError(
            f"the source cannot be read: {error}", place=str(path), remedy="check the unit's path"
        ) from None
    seen.add(path.resolve())
    shown = _shown(path)

    def include(match: re.Match[str]) -> str:
        line = text.count("\n", 0, match.end()) + 2
        found = _find_include(match[1], path)
        if found is None:
            raise EmitError(
                f'#include "{match[1]}": no such file beside the source or in the kernels folder',
                place=f"{shown}:{line - 1}",
                remedy='include "portability.h" for the vendors\' headers, and place other headers beside the source',
            )
        inner = "" if found.resolve() in seen else _PRAGMA_ONCE.sub("", _flatten(found, seen))
        return f'{inner}\n#line {line} "{shown}"'

    return f'#line 1 "{shown}"\n{_INCLUDE.sub(include, text)}'


def _find_include(name: str, includer: Path) -> Path | None:
    candidates = (includer.parent / name, include_folder() / name)
    return next((path for path in candidates if path.is_file()), None)


def _shown(path: Path) -> str:
    """The path below the kernels folder, or the bare name: the same on every machine."""
    path, root = path.resolve(), include_folder().resolve()
    return f"kernels/{path.relative_to(root).as_posix()}" if path.is_relative_to(root) else path.name


# ------------------------------------------------------------------------------------------------ Triton


def triton_source(function: Any) -> str:
    """A module that defines `function`: what it imports, the constants it reads, the functions it calls."""
    closure = _Closure()
    closure.add(function)
    parts = ["\n".join(sorted(closure.imports)), "\n".join(sorted(closure.constants)), *closure.definitions]
    return "\n\n\n".join(part for part in parts if part) + "\n"


class _Closure:
    """Everything that a Triton function needs from its module, gathered by name from its syntax tree."""

    def __init__(self) -> None:
        self.imports = {"import triton"}
        self.constants: set[str] = set()
        self.definitions: list[str] = []
        """functions, each after those that it calls"""
        self._owners: dict[str, Any] = {}

    def add(self, function: Any) -> None:
        text, name = _function_text(function), function.__name__
        if not self._claim(name, function):
            return
        scope = _scope(function)
        for used in sorted(_free_names(text) - {name}):
            if used in scope:
                self._add_value(used, scope[used], place=f"kernel {name}")
        self.definitions.append(f"@triton.jit\n{text.strip()}")

    def _add_value(self, name: str, value: Any, place: str) -> None:
        module = str(getattr(value, "__module__", None) or "")
        if isinstance(value, ModuleType):
            if value.__name__.split(".")[0] != "triton":
                raise EmitError(
                    f"uses the module '{name}' ({value.__name__}), whose functions this file could not show",
                    place=place,
                    remedy=f"import the function itself: from {value.__name__} import ...",
                )
            if self._claim(name, value):
                self.imports.add(f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}"))
        elif is_triton_function(value) and not module.startswith("triton."):
            self.add(value)
            if value.__name__ != name and self._claim(name, value):
                self.definitions.append(f"{name} = {value.__name__}")
        elif type(value).__name__ == "constexpr":
            self._add_constant(name, f"triton.language.constexpr({_literal(name, value.value)})")
            self.imports.add("import triton.language")
        elif isinstance(value, _PLAIN):
            self._add_constant(name, repr(value))
        elif module.startswith("triton"):
            own = getattr(value, "__name__", name)
            if self._claim(name, value):
                self.imports.add(f"from {module} import {own}" + ("" if own == name else f" as {name}"))

    def _add_constant(self, name: str, value: str) -> None:
        if self._claim(name, value):
            self.constants.add(f"{name} = {value}")

    def _claim(self, name: str, owner: Any) -> bool:
        """Whether `name` is new. Two modules may use one name for two things; one text cannot."""
        if name not in self._owners:
            self._owners[name] = owner
            return True
        if self._owners[name] is not owner and not (isinstance(owner, str) and self._owners[name] == owner):
            raise EmitError(
                f"the name '{name}' means two things in the modules of this kernel and its helpers",
                place=f"kernel {name}",
                remedy="rename one of them",
            )
        return False


def _function_text(function: Any) -> str:
    """The function from its `def` on, without decorators."""
    source = getattr(function, "src", None)
    if is_triton_function(function) and isinstance(source, str):
        return source
    raise EmitError(
        f"a plain @triton.jit function is needed, not {type(function).__name__}",
        place=f"kernel {getattr(function, '__name__', repr(function))}",
        remedy="give the inner function of an autotuner; unset TRITON_INTERPRET to compile ahead of time",
    )


def _scope(function: Any) -> dict[str, Any]:
    return {**function.fn.__globals__, **inspect.getclosurevars(function.fn).nonlocals}


def _free_names(text: str) -> set[str]:
    """Names that a function reads and does not bind itself."""
    nodes = list(ast.walk(ast.parse(text)))
    bound = {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {node.id for node in nodes if isinstance(node, ast.Name)} - bound


def is_triton_function(value: Any) -> bool:
    """Whether `value` is what @triton.jit returns."""
    return type(value).__name__ == "JITFunction" and type(value).__module__.startswith("triton.")


def _literal(name: str, value: Any) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if type(value).__module__.startswith("triton.") and repr(value).startswith("triton."):
        return repr(value)
    raise EmitError(
        f"the module constant '{name}' is a {type(value).__name__}, which has no source text",
        place=f"constant {name}",
        remedy="use a number, a text or a Triton type, or pass it as a constexpr parameter",
    )
