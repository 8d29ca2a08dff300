"""Printing: results to stdout, progress and errors to stderr."""

from __future__ import annotations

import io
import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.status import Status
from rich.text import Text

from k3rewrite.errors import K3RewriteError

PIPE_WIDTH = 160
"""columns where there is no terminal"""


def stdout() -> Console:
    return _console(sys.stdout)


def stderr() -> Console:
    return _console(sys.stderr)


def _console(stream: TextIO) -> Console:
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # a report may hold what the terminal's encoding does not
    console = Console(file=stream, highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def show_error(error: K3RewriteError) -> None:
    """The error's message, remedy included, without a traceback."""
    message = Text("error: ", "bold red")
    message.append(str(error), "default")
    stderr().print(message, soft_wrap=True)


class Progress:
    """What is going on: on a terminal one line that moves, with finished stages above it; else a line for each stage.

    with Progress() as progress:
        progress("capturing the model")
    """

    def __init__(self) -> None:
        self._console = stderr()
        self._status: Status | None = None
        self._stage = ""
        self._since = 0.0

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._status = Status("", console=self._console)
        return self

    def __call__(self, stage: str) -> None:
        """A new stage begins; the one before has ended."""
        self._end_stage()
        self._stage, self._since = stage, time.perf_counter()
        if self._status is None:
            self._console.print(Text(f"{stage} ..."), soft_wrap=True)
        else:
            self._status.update(Text(stage))
            self._status.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
        if error is None:
            self._end_stage()

    def _end_stage(self) -> None:
        if self._stage and self._status is not None:
            seconds = time.perf_counter() - self._since
            self._console.print(Text.assemble(("✓ ", "green"), self._stage, (f"  {seconds:.1f} s", "dim")))
        self._stage = ""
