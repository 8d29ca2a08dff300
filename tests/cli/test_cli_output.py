"""Progress and errors: a moving line on a terminal, plain lines elsewhere, markup never interpreted."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from k3rewrite.cli import output
from k3rewrite.cli.output import Progress, show_error
from k3rewrite.errors import ConfigError


def on(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> io.StringIO:
    buffer = io.StringIO()
    console = Console(file=buffer, force_terminal=terminal, width=100, color_system=None, highlight=False)
    monkeypatch.setattr(output, "stderr", lambda: console)
    return buffer


def test_progress_on_a_terminal_keeps_finished_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = on(monkeypatch, terminal=True)
    with Progress() as progress:
        progress("capture [bold]")
        progress("passes")
    text = buffer.getvalue()
    assert "✓ capture [bold]  0.0 s" in text and "✓ passes  0.0 s" in text


def test_a_stage_that_failed_is_not_ticked(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = on(monkeypatch, terminal=True)
    with pytest.raises(ConfigError), Progress() as progress:
        progress("capture")
        progress("passes")
        raise ConfigError("no")
    assert "✓ capture" in buffer.getvalue() and "✓ passes" not in buffer.getvalue()


def test_progress_in_a_pipe_is_one_line_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = on(monkeypatch, terminal=False)
    with Progress() as progress:
        progress("capture [bold]")
        progress("passes")
    assert buffer.getvalue() == "capture [bold] ...\npasses ...\n"


def test_errors_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = on(monkeypatch, terminal=False)
    show_error(ConfigError("[red]x[/red] " + "long " * 40, place="p.yaml:3", remedy="do [this]"))
    assert buffer.getvalue() == f"error: p.yaml:3: [red]x[/red] {'long ' * 40}\n  remedy: do [this]\n"
