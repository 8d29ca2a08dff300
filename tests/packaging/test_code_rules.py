"""Rules of the library's own code that no linter knows: private torch in one place, a remedy with every error."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from k3rewrite import errors

ROOT = Path(__file__).parents[2]
FOLDERS = ("rewriter", "passes", "kernels", "models")
PRIVATE_TORCH = ("rewriter/_torch_private/", "rewriter/capture/dynamo.py")
ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def private_names(tree: ast.AST) -> list[str]:
    """Every private part of torch that a module names: imported, reached as an attribute, or written as text."""
    known, named = {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
            known |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            named += [f"{node.module}.{alias.name}" for alias in node.names]
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            named.append(f"{known.get(first, first)}.{rest}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            named.append(node.value)
    return [name for name in named if _is_private(name)]


def _is_private(name: str) -> bool:
    """`torch._ops` (types of the dispatcher) and what follows `torch.ops` (namespaces and names of ops) are public."""
    parts = name.split(".")
    if (
        parts[0] != "torch"
        or len(parts) == 1
        or parts[1] in ("ops", "_ops")
        or not all(p.isidentifier() for p in parts)
    ):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in parts[1:])


@pytest.mark.parametrize(
    ("code", "private"),
    [
        ("import torch._dynamo", True),
        ("from torch.testing._internal.common_utils import run_tests", True),
        ("from torch.fx.node import _side_effectful_functions", True),
        ("import torch\ntorch._dynamo.reset()", True),
        ("import torch.distributed as dist\ndist.distributed_c10d._resolve_process_group('a')", True),
        ("from importlib import import_module\nimport_module('torch.distributed._functional_collectives')", True),
        ("import torch\ntorch._ops.OpOverload, torch.ops._c10d_functional.all_reduce, torch.__version__", False),
        ("import torch\ntorch.ops.aten._to_copy.default", False),
    ],
)
def test_private_names_are_recognised(code: str, private: bool) -> None:
    assert bool(private_names(ast.parse(code))) is private


def test_private_torch_is_reached_in_one_place() -> None:
    found = {name: names for name, tree in trees() if (names := private_names(tree))}
    assert not {name: names for name, names in found.items() if not name.startswith(PRIVATE_TORCH)}
    assert any(name.startswith(PRIVATE_TORCH[0]) for name in found)


def test_every_error_names_a_remedy() -> None:
    bare, seen = [], 0
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
                seen += 1
                if "remedy" not in {keyword.arg for keyword in node.keywords}:
                    bare.append(f"{name}:{node.lineno} {ast.unparse(node)[:80]}")
    assert seen > 100 and not bare, "\n".join(bare)


# ------------------------------------------------------------------------------------------------ which way imports go


def imported_packages(name: str, tree: ast.Module) -> set[str]:
    """The packages of this project that a module imports when it runs, also inside of functions."""
    found: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("k3rewrite"):
            module = f"{node.module}.".split(".")[1]
            found |= {module} if module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("k3rewrite.")}
        pending += ast.iter_child_nodes(node)
    return found - {package_of(name)}


def package_of(name: str) -> str:
    """ "patterns" of rewriter/patterns/match.py, "passes" of passes/select.py, "backend" of rewriter/backend.py."""
    parts = name.removesuffix(".py").split("/")
    return parts[1] if parts[0] == "rewriter" else parts[0]


def import_graph() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for name, tree in trees():
        graph.setdefault(package_of(name), set()).update(imported_packages(name, tree))
    return graph


def cycle_in(graph: Mapping[str, set[str]]) -> list[str]:
    """The packages of a cycle, or none: what remains when those that import nothing that remains are taken out."""
    rest = {package: set(imports) for package, imports in graph.items()}
    while free := [package for package, imports in rest.items() if not imports & rest.keys()]:
        for package in free:
            del rest[package]
    return sorted(rest)


def test_packages_import_in_one_direction() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    graph = import_graph()
    assert graph["passes"] >= {"patterns", "pipeline"} and len(graph) > 15, "the imports are seen"
    assert cycle_in(graph) == []


def test_only_the_doors_know_all_passes_and_kernels() -> None:
    """The core works on what it is given: a pass or a kernel of another package is as good as one of this."""
    graph = import_graph()
    assert {p for p, imports in graph.items() if "passes" in imports} <= {"backend", "cli", "driver"}
    assert {p for p, imports in graph.items() if "kernels" in imports} <= {"driver", "passes"}
