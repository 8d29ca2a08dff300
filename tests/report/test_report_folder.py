"""Run folders: fresh numbers, also under contention; nothing is overwritten; files are whole or absent."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from k3rewrite.errors import ConfigError
from k3rewrite.report.run_folder import RunFolder, safe_name
from k3rewrite.report.schema import RunInfo, RunReport


def test_numbers_go_up_and_gaps_stay(tmp_path: Path) -> None:
    assert RunFolder.create(tmp_path / "new" / "out").path == tmp_path / "new" / "out" / "run-001"
    for name in ("run-007", "run-x", "run-12", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "run-009").write_text("a file")
    assert RunFolder.create(tmp_path).path.name == "run-008"
    assert RunFolder.create(tmp_path).path.name == "run-010"  # the file keeps its name
    (tmp_path / "run-999").mkdir()
    assert RunFolder.create(str(tmp_path)).path.name == "run-1000"
    assert (tmp_path / "run-009").read_text() == "a file"


def test_many_at_once_get_different_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: RunFolder.create(tmp_path).path, range(40)))
    assert len(set(folders)) == 40 and all(folder.is_dir() for folder in folders)


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "run-001").mkdir()
    (tmp_path / "run-001" / "report.json").write_text("mine")
    RunFolder.create(tmp_path).write("report.json", "new")
    assert (tmp_path / "run-001" / "report.json").read_text() == "mine"


def test_write_refuses_to_overwrite_and_to_leave_the_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    path = folder.write("kernels/mi355x/a.hip", "one")
    assert path == folder.path / "kernels" / "mi355x" / "a.hip" and path.read_text() == "one"
    with pytest.raises(FileExistsError):
        folder.write("kernels/mi355x/a.hip", "two")
    assert path.read_text() == "one"
    assert folder.write("kernels/mi355x/a.hip", b"two", replace=True).read_bytes() == b"two"
    for bad in ("../x", "a/../../x", str(tmp_path / "x"), ""):
        with pytest.raises(ValueError, match="does not lie in the run folder"):
            folder.write(bad, "x")


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(tmp_path)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigError, match=r"run-001: 'report\.json' cannot be written: disk full") as caught:
        folder.write("report.json", "text")
    assert caught.value.remedy and list(folder.path.iterdir()) == []


def test_an_empty_text_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a path it would be the current folder, which may hold runs."""
    monkeypatch.chdir(tmp_path)
    RunFolder.create(tmp_path).write_report(RunReport(RunInfo("one")))
    with pytest.raises(ConfigError, match="no run is named"):
        RunFolder.find("")


def test_a_path_with_a_zero_byte(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run folder can be made"):
        RunFolder.create(f"{tmp_path}/a\0b")


def test_graph_names_are_safe(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    assert folder.write_graph(3, "lift_mlp", "txt", "x").relative_to(folder.path).as_posix() == "graphs/03-lift_mlp.txt"
    assert folder.write_graph(4, "../a b/ü", "svg", "x").parent == folder.path / "graphs"
    assert safe_name("..") == "_" and safe_name("a/b") == "a_b"


def test_out_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="no run folder can be made"):
        RunFolder.create(tmp_path / "file")


def test_find(tmp_path: Path) -> None:
    first, second = RunFolder.create(tmp_path), RunFolder.create(tmp_path)
    first.write_report(RunReport(RunInfo("one")))
    second.write_report(RunReport(RunInfo("two")))
    assert RunFolder.find(tmp_path) == second
    assert RunFolder.find(first.path) == first == RunFolder.find(first.path / "report.json")
    report = RunFolder.find(tmp_path).read_report()
    assert report.info.model == "two" and report.folder == second.path


def test_find_gives_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run"):
        RunFolder.find(tmp_path / "none")
    with pytest.raises(ConfigError, match="neither a run nor a folder of runs"):
        RunFolder.find(tmp_path)
    RunFolder.create(tmp_path).write_report(RunReport(RunInfo("one")))
    RunFolder.create(tmp_path)
    with pytest.raises(ConfigError, match=r"run-002: the latest run has no report\.json"):
        RunFolder.find(tmp_path)


def test_report_that_is_no_text(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write("report.json", b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        folder.read_report()


def test_files_are_readable_by_others(tmp_path: Path) -> None:
    assert RunFolder.create(tmp_path).write("a", "x").stat().st_mode & 0o777 == 0o644
