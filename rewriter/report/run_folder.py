"""The numbered folder of one run. Nothing that is already there is ever overwritten or deleted.

DIR/run-001/   report.json  pipeline.yaml  graphs/03-lift_mlp.txt  graphs/03-lift_mlp.svg  kernels/mi355x/...
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from k3rewrite.errors import ConfigError
from k3rewrite.report.schema import RunReport

REPORT = "report.json"
_RUN = re.compile(r"run-(\d{3,})")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.+-]+")


@dataclass(frozen=True)
class RunFolder:
    """One run's folder. All writing goes through `write`, which is atomic: a file is there as a whole or not at all."""

    path: Path

    @staticmethod
    def create(out: Path | str) -> RunFolder:
        """A fresh `out/run-NNN`, one above the highest number there. Safe when several processes do this at once."""
        out = Path(out)
        try:
            out.mkdir(parents=True, exist_ok=True)
            number = max((n for n, _ in _runs(out)), default=0)
            while True:
                number += 1
                path = out / f"run-{number:03d}"
                try:
                    path.mkdir()
                except FileExistsError:
                    continue
                return RunFolder(path)
        except (OSError, ValueError) as error:  # also a path with a zero byte, which is none
            raise ConfigError(
                f"no run folder can be made: {getattr(error, 'strerror', error)}",
                place=str(out),
                remedy="give a folder that can be written",
            ) from None

    @staticmethod
    def find(run: Path | str) -> RunFolder:
        """The folder of an existing run: given itself, by its report.json, or the latest of the runs in a folder."""
        if not str(run):  # as a path it would be the current folder
            raise ConfigError("no run is named", place="RUN", remedy="give a run folder, or the folder of several runs")
        path = Path(run)
        try:
            path.exists()
        except (OSError, ValueError) as error:
            raise ConfigError(f"no path: {error}", place=str(run)[:80], remedy="give a run folder") from None
        if path.name == REPORT and path.is_file():
            path = path.parent
        if (path / REPORT).is_file():
            return RunFolder(path)
        if not path.exists():
            raise ConfigError("no such run", place=str(run), remedy="give a run folder, or the folder of several runs")
        runs = _runs(path) if path.is_dir() else []
        if not runs:
            raise ConfigError(
                "neither a run nor a folder of runs", place=str(run), remedy=f"give a folder that holds a {REPORT}"
            )
        latest = max(runs)[1]
        if not (latest / REPORT).is_file():
            raise ConfigError(
                f"the latest run has no {REPORT}: it did not end", place=str(latest), remedy="name an earlier run"
            )
        return RunFolder(latest)

    @staticmethod
    def reports(run: Path | str) -> list[RunReport]:
        """The reports of all runs in a folder, in their order, without those that cannot be read; of a run its own."""
        path = Path(run)
        several = path.is_dir() and not (path / REPORT).is_file()
        places = [RunFolder(place) for _, place in sorted(_runs(path))] if several else []
        found = []
        for folder in places or [RunFolder.find(path)]:
            try:
                found.append(folder.read_report())
            except ConfigError:
                continue
        return found

    def write(self, relative: str, content: str | bytes, *, replace: bool = False) -> Path:
        """Write `content` to a file of this run, given with forward slashes. `FileExistsError` unless `replace`.

        `ConfigError` names the folder if it cannot be written: a full disk, say.
        """
        parts = PurePosixPath(relative).parts
        if not parts or ".." in parts or PurePosixPath(relative).is_absolute():
            raise ValueError(f"'{relative}' does not lie in the run folder")
        path = self.path.joinpath(*parts)
        if path.exists() and not replace:
            raise FileExistsError(path)
        data = content.encode() if isinstance(content, str) else content
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(path, data)
        except OSError as error:
            raise unwritable(self.path, relative, error) from None
        return path

    def write_graph(self, index: int, pass_name: str, suffix: str, text: str) -> Path:
        """`graphs/NN-<pass>.<suffix>`."""
        return self.write(f"graphs/{index:02d}-{safe_name(pass_name)}.{suffix}", text)

    def write_report(self, report: RunReport) -> Path:
        """`report.json`; written again when the run gets further."""
        report.folder = self.path
        return self.write(REPORT, report.to_json(), replace=True)

    def read_report(self) -> RunReport:
        """The report of this run. `ConfigError` if the file is not one."""
        place = self.path / REPORT
        try:
            text = place.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot be read: {error}", place=str(place), remedy="run the compilation again"
            ) from None
        report = RunReport.from_json(text, place=str(place))
        report.folder = self.path
        return report


def unwritable(folder: Path, file: str, error: Exception) -> ConfigError:
    """The error for a file of a run that cannot be written."""
    return ConfigError(
        f"'{file}' cannot be written: {getattr(error, 'strerror', None) or error}",
        place=str(folder),
        remedy="make room there, or give a folder that can be written",
    )


def _write_whole(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)  # mkstemp makes files for their owner only
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # what failed first is what counts
            os.unlink(temporary)
        raise


def safe_name(name: str) -> str:
    """A name with only characters that every file system takes."""
    return _UNSAFE.sub("_", name).strip(".") or "_"


def _runs(folder: Path) -> list[tuple[int, Path]]:
    return [
        (int(match[1]), entry) for entry in folder.iterdir() if (match := _RUN.fullmatch(entry.name)) and entry.is_dir()
    ]
