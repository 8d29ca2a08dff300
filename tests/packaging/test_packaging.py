"""The folder mapping: every package of the repository is declared, ships its data, and is imported by its own name."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
FOLDERS = {"rewriter": "k3rewrite", "passes": "k3rewrite.passes", "kernels": "k3rewrite.kernels",
           "models": "k3rewrite.models", "pass_configs": "k3rewrite.pass_configs"}  # fmt: skip


def _declared() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_folder_with_code_is_a_declared_package() -> None:
    wanted = set()
    for folder, name in FOLDERS.items():
        for path in (ROOT / folder).rglob("__init__.py"):
            parts = path.parent.relative_to(ROOT / folder).parts
            wanted.add(".".join((name, *parts)))
    assert set(_declared()["packages"]) == wanted  # type: ignore[call-overload]


@pytest.mark.slow
def test_wheel_holds_code_and_data(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), "."]
    copy = tmp_path / "source"
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in names:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("k3rewrite-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    for name in names:
        folder, _, rest = name.partition("/")
        if folder in FOLDERS and Path(name).suffix in (".py", ".yaml", ".hip", ".h", ".typed"):
            assert f"{FOLDERS[folder].replace('.', '/')}/{rest}" in held
    assert not [h for h in held if h.split("/")[0] in FOLDERS], "a folder would be importable by its own name"
    entry_points = next(h for h in held if h.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(entry_points).decode()
    assert "k3rewrite = k3rewrite.backend:k3rewrite" in text and "k3rewrite = k3rewrite.cli:main" in text


def test_backend_is_found_without_an_import() -> None:
    code = "import torch._dynamo as d; assert 'k3rewrite' in d.list_backends(()), d.list_backends(())"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_no_module_is_imported_by_its_folder() -> None:
    pattern = tuple(f"{word} {name}" for name in FOLDERS for word in ("import", "from"))
    for path in ROOT.rglob("*.py"):
        if ".venv" in path.parts or "build" in path.parts or ".peers" in path.parts:
            continue
        for line in path.read_text().splitlines():
            code = line.strip()
            assert not any(code == p or code.startswith((p + ".", p + " ")) for p in pattern), f"{path}: {line}"
