"""manifest.json: one entry a kernel, in a fixed order, readable again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from emit_kernels import row_sum_unit

from k3rewrite.emit import EmittedKernel, Provenance, emit_unit, read_manifest, write_manifest
from k3rewrite.errors import ConfigError, EmitError
from k3rewrite.ops.kernel import HipUnit
from k3rewrite.targets import load_target

TARGET = load_target("mi355x")
HIP = HipUnit(Path(__file__).parent / "kernels" / "row_sum.hip", "row_sum")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[EmittedKernel]:
    folder = tmp_path_factory.mktemp("kernels")
    units = [
        (row_sum_unit(), "a.py:1"),
        (row_sum_unit(), "b.py:2"),
        (row_sum_unit(num_warps=1), "c.py:3"),
        (HIP, "d.py:4"),
    ]
    return [
        emit_unit(unit, TARGET, folder, "row_sum", Provenance("k3::row_sum", "small", (site,))) for unit, site in units
    ]


def test_contents(kernels: list[EmittedKernel]) -> None:
    folder = kernels[0].source.parent
    entries = write_manifest(folder, TARGET, kernels, {kernels[3].name: "NVIDIA H200"})
    assert [entry.name for entry in entries] == sorted({kernel.name for kernel in kernels})
    by_name = {entry.name: entry for entry in entries}
    shared, hip = by_name[kernels[0].name], by_name[kernels[3].name]
    assert shared.provenance == ("a.py:1", "b.py:2")
    assert (shared.op, shared.kernel, shared.target, shared.language) == ("k3::row_sum", "small", "mi355x", "triton")
    assert (shared.executed, hip.executed) == ("no", "NVIDIA H200")
    assert shared.source_hash == kernels[2].source_hash != hip.source_hash
    assert shared.spills == 0 and shared.occupancy == 8.0 and shared.workgroups_per_cu == 8
    assert shared.compile_seconds > 0 and shared.compiler.startswith("triton ")
    for entry in entries:
        for file in (entry.source, entry.assembly, entry.object):
            assert file and (folder / file).is_file()
    assert read_manifest(folder) == read_manifest(folder / "manifest.json") == entries


def test_order_of_emission_does_not_matter(kernels: list[EmittedKernel], tmp_path: Path) -> None:
    write_manifest(tmp_path / "a", TARGET, kernels[1:])
    write_manifest(tmp_path / "b", TARGET, reversed(kernels[1:]))
    assert (tmp_path / "a" / "manifest.json").read_bytes() == (tmp_path / "b" / "manifest.json").read_bytes()


def test_an_empty_manifest(tmp_path: Path) -> None:
    assert write_manifest(tmp_path / "new", TARGET, []) == read_manifest(tmp_path / "new") == ()


def test_a_kernel_that_was_not_compiled(kernels: list[EmittedKernel], tmp_path: Path) -> None:
    skipped = dataclasses.replace(kernels[0], assembly=None, object=None, resources=None, skipped="no compiler")
    write_manifest(tmp_path, TARGET, [skipped])
    (entry,) = read_manifest(tmp_path)
    assert (entry.object, entry.registers, entry.occupancy, entry.skipped) == ("", None, None, "no compiler")


def test_a_newer_writer_may_say_more(kernels: list[EmittedKernel], tmp_path: Path) -> None:
    entries = write_manifest(tmp_path, TARGET, kernels)
    content = json.loads((tmp_path / "manifest.json").read_text())
    content["kernels"][0]["colour"] = "blue"
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    assert read_manifest(tmp_path) == entries


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "as JSON"),
        ("[]", "not a k3rewrite-kernels file"),
        ('{"schema": "k3rewrite-kernels", "version": 2, "kernels": []}', "of version 1"),
        ('{"schema": "k3rewrite-kernels", "version": 1}', "kernels"),
        ('{"schema": "k3rewrite-kernels", "version": 1, "kernels": [{"op": 7}]}', r"kernels\[0\]"),
    ],
)
def test_files_that_are_no_manifest(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_manifest(tmp_path)
    assert caught.value.place == str(tmp_path / "manifest.json")


def test_a_failed_write_leaves_the_old_manifest(
    kernels: list[EmittedKernel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = write_manifest(tmp_path, TARGET, kernels)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(EmitError, match="no space left"):
        write_manifest(tmp_path, TARGET, [])
    monkeypatch.undo()
    assert read_manifest(tmp_path) == entries
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
