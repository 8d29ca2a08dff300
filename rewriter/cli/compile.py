"""`k3rewrite compile`: check the request, compile, show the table and where the files are."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rich.text import Text

from k3rewrite.cli.catalogue import known_passes
from k3rewrite.cli.output import Progress, show_error, stdout
from k3rewrite.driver.request import resolve_request
from k3rewrite.errors import K3RewriteError
from k3rewrite.report.schema import RunReport
from k3rewrite.report.table import pass_table, summary_lines
from k3rewrite.targets import known_targets, load_target


def compile_command(**settings: Any) -> int:
    """Compile with the settings of `resolve_request`; the exit code. Bad settings are a `ConfigError`.

    An error that carries the report of an unfinished run (`error.report`) shows its table before its message.
    """
    request = resolve_request(known_passes=known_passes(), known_targets=known_targets(), **settings)
    load_target(request.target)  # a description that cannot be read is an error before anything is built
    if not request.is_kimi_k3 and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the user's module may stand where the command was started

    from k3rewrite.driver.run import compile_model

    try:
        with Progress() as progress:
            report = compile_model(request, progress)
    except K3RewriteError as error:
        partial = getattr(error, "report", None)
        if isinstance(partial, RunReport):
            show_report(partial)
        show_error(error)
        return error.exit_code
    show_report(report)
    return exit_code(report)


def exit_code(report: RunReport) -> int:
    """1 if an expectation or the end-to-end check of the report failed, else 0."""
    unmet = any(entry.expect_ok is False for entry in report.passes)
    differs = report.end_to_end is not None and not report.end_to_end.passed
    return int(unmet or differs or bool(report.error))


def show_report(report: RunReport) -> None:
    """The table, a line for each other part, the folder and what is in it."""
    console = stdout()
    if report.passes:
        console.print(pass_table(report))
    for line in summary_lines(report):
        console.print(Text(line), soft_wrap=True)
    if report.folder is not None:
        console.print(Text(f"files: {report.folder} ({', '.join(contents(report.folder))})"), soft_wrap=True)
        console.print(Text(f"reasons: k3rewrite explain {report.folder}"), soft_wrap=True)


def contents(folder: Path) -> list[str]:
    """What lies in a run folder, sub-folders with their number of files."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    return [f"{e.name}/ {sum(f.is_file() for f in e.rglob('*'))} files" if e.is_dir() else e.name for e in entries]
