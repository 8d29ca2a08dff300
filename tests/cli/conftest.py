"""The fixture `cli`: the command line with fakes behind it, in a folder of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cli_fakes import FAKE_PASSES, CommandLine, report_of

import k3rewrite.passes
from k3rewrite.driver.request import CompileRequest
from k3rewrite.report.schema import RunReport


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    line = CommandLine(tmp_path, [], report_of)

    def compile_model(request: CompileRequest, progress: Callable[[str], None]) -> RunReport:
        line.requests.append(request)
        progress("capture")
        return line.outcome(request)

    fake: Any = ModuleType("k3rewrite.driver.run")
    fake.compile_model = compile_model
    monkeypatch.setitem(sys.modules, "k3rewrite.driver.run", fake)
    monkeypatch.setattr(k3rewrite.passes, "ALL_PASSES", FAKE_PASSES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return line
