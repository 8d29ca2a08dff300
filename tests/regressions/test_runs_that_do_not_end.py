"""What a run leaves behind when it is ended early: a report that says so, or nothing if it never began."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from k3rewrite.backend import Backend
from k3rewrite.checks import end_to_end
from k3rewrite.cli.output import stdout
from k3rewrite.driver import compilation
from k3rewrite.driver.first_call import WatchedFirstCall
from k3rewrite.driver.request import resolve_request
from k3rewrite.driver.run import compile_model
from k3rewrite.errors import CaptureError, ConfigError, ContractError, ModelError, VerificationError
from k3rewrite.passes import PASSES
from k3rewrite.report.explain import explain, list_runs
from k3rewrite.report.run_folder import RunFolder
from k3rewrite.report.schema import SUPERSEDED, UNFINISHED
from k3rewrite.targets import known_targets

SOURCE = """
import torch
class Net(torch.nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
    def forward(self, x):
        return self.body(x)
def branches(x):
    return x + 1 if x.sum() > 0 else x
def raises(x):
    raise ValueError("the model's own")
def mismatch(x):
    return x @ torch.ones(3, 3)
def fails_when_it_runs(x):
    torch._assert_async(x.sum() > 1e9, "too small")
    return x
def make(body): return lambda: (Net(body), (torch.ones(2, 4),), {})
good, branch, own, shape, late = map(make, (torch.sin, branches, raises, mismatch, fails_when_it_runs))
def broken(): raise OSError("no such weights")
"""


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "regression_runs.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "regression_runs", raising=False)


def _compile(name: str, out: Path) -> Any:
    pipeline = {"version": 1, "passes": ["canonicalise"], "finalise": "eager"}
    request = resolve_request(
        model=f"regression_runs:{name}", pipeline=pipeline, known_passes=PASSES, known_targets=known_targets(), out=out
    )
    return compile_model(request)


def _report(out: Path) -> dict[str, Any]:
    return json.loads((out / "run-001" / "report.json").read_text())


def test_a_run_that_ends_well_says_nothing(tmp_path: Path) -> None:
    assert _compile("good", tmp_path / "runs").error == ""
    assert _report(tmp_path / "runs")["error"] == ""


@pytest.mark.parametrize(
    ("name", "message", "place"),
    [
        ("branch", "cannot be captured as one graph: Data-dependent branching", "in branches"),
        ("own", 'the model raises ValueError("the model\'s own")', "in raises"),
        ("shape", "a and b must have same reduction dim", "in mismatch"),
    ],
)
def test_a_model_that_cannot_be_captured(
    name: str, message: str, place: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError) as caught:
        _compile(name, tmp_path / "runs")
    text = str(caught.value)
    assert message in text and place in text.split(": ")[0]
    assert _report(tmp_path / "runs")["error"] == text and caught.value.report is not None
    assert "Traceback" not in capfd.readouterr().err, "torch logs what is reported once, as ours"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interruption_while_a_pass_runs(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: Any) -> None:
        raise error

    monkeypatch.setattr(PASSES["canonicalise"], "run", run)
    with pytest.raises(error):
        _compile("good", tmp_path / "runs")
    assert _report(tmp_path / "runs")["error"] == UNFINISHED


def test_an_error_of_the_model_while_it_runs(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the model, as it is, raised RuntimeError") as caught:
        _compile("late", tmp_path / "runs")
    assert (caught.value.place or "").partition(":")[0].endswith("regression_runs.py")
    assert "too small" in str(caught.value) and _report(tmp_path / "runs")["error"] == str(caught.value)


@pytest.mark.parametrize(("name", "error"), [("broken", ModelError), ("nowhere", ConfigError)])
def test_a_model_that_cannot_be_built_leaves_nothing(name: str, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error):
        _compile(name, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_the_same_in_torch_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any) -> None:
        raise MemoryError

    backend = Backend({"finalise": "eager", "dump": tmp_path, "pipeline": {"version": 1, "passes": ["canonicalise"]}})
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(torch.sin, backend=backend)(torch.ones(2))
    assert _report(tmp_path)["error"] == "" and backend.reports[0].error == ""
    monkeypatch.setattr(PASSES["canonicalise"], "run", run)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="MemoryError"):
        torch.compile(torch.cos, backend=backend)(torch.ones(2))
    assert json.loads((tmp_path / "run-002" / "report.json").read_text())["error"] == UNFINISHED


# ------------------------------------------------------------------------------------------------ a full disk


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and the disk is full."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return lambda: monkeypatch.setattr(os, "replace", full)


def _fails(error: Exception, fill: Callable[[], None]) -> Callable[..., None]:
    def run(*args: Any) -> None:
        fill()
        raise error

    return run


def test_a_disk_that_is_full_from_the_start(tmp_path: Path, fill: Callable[[], None]) -> None:
    fill()
    with pytest.raises(ConfigError, match=r"run-001: 'pipeline\.yaml' cannot be written: No space left") as caught:
        _compile("good", tmp_path / "runs")
    assert caught.value.exit_code == 2 and caught.value.remedy


def test_a_disk_that_is_full_after_some_files(
    tmp_path: Path, fill: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PASSES["canonicalise"], "run", lambda *args: fill())
    with pytest.raises(ConfigError, match=r"run-001: 'graphs/01-canonicalise\.txt' cannot be written: No space left"):
        _compile("good", tmp_path / "runs")
    assert _report(tmp_path / "runs")["error"] == UNFINISHED, "the last report that could be written is whole"
    assert "No space left" not in capsys.readouterr().err, "one error is enough"


def test_the_first_failure_is_not_hidden_by_a_full_disk(
    tmp_path: Path, fill: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ContractError("a defect", place="canonicalise", remedy="report it")
    monkeypatch.setattr(PASSES["canonicalise"], "run", _fails(first, fill))
    with pytest.raises(ContractError) as caught:
        _compile("good", tmp_path / "runs")
    assert caught.value is first and caught.value.report.error == str(first)
    told = capsys.readouterr().err
    assert told.count("run-001: 'report.json' cannot be written: No space left") == 1


def test_an_unexpected_error_is_not_hidden_by_a_full_disk(
    tmp_path: Path, fill: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PASSES["canonicalise"], "run", _fails(ZeroDivisionError("a defect"), fill))
    with pytest.raises(ZeroDivisionError, match="a defect"):
        _compile("good", tmp_path / "runs")


def test_a_failed_check_is_not_hidden_by_a_full_disk(
    tmp_path: Path, fill: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor forgotten: what failed is never run again."""

    def wrong(*values: Any) -> Any:
        fill()
        return end_to_end.Error(0, 0), end_to_end.Error(1, 1)

    monkeypatch.setattr(end_to_end, "measure_both", wrong)
    backend = Backend({"target": "cpu", "finalise": "eager", "verify": "end-to-end", "dump": tmp_path})
    torch._dynamo.reset()
    call = torch.compile(lambda x: x.sin(), backend=backend)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(VerificationError, match="output 0 has error"):
            call(torch.randn(4))


def test_the_models_own_error_in_the_first_call_is_told_as_such() -> None:
    def fails(inputs: list[Any]) -> Any:
        raise ValueError("the model's own")

    ends: list[bool] = []
    with pytest.raises(ValueError, match="the model's own"):
        WatchedFirstCall(fails, lambda runs, ended_well: ends.append(ended_well))([])
    WatchedFirstCall(lambda inputs: inputs, lambda runs, ended_well: ends.append(ended_well))([])
    assert ends == [False, True]


# ------------------------------------------------------------------------------------------------ under torch.compile


def _norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * scale


def test_an_attempt_that_dynamo_gives_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A number in fp64 that scales a tensor becomes an argument of its own, for which Dynamo starts again."""
    backend = Backend({"finalise": "eager", "dump": tmp_path})
    torch._dynamo.reset()
    inputs = torch.randn(3, 4), torch.tensor(2.0, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(_norm, backend=backend)(*inputs), _norm(*inputs))
    (report,) = backend.reports
    first, second = RunFolder.reports(tmp_path)
    assert first.error == SUPERSEDED and second.error == "" and report.folder == second.folder
    assert RunFolder.find(tmp_path).path == second.folder
    stdout().print(list_runs([first, second]), explain(first))
    told = capsys.readouterr().out
    assert "run-001  nothing matched; superseded by a restart" in told and "ended by an error" not in told


def test_an_error_before_the_passes_leaves_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend({"finalise": "eager", "dump": tmp_path})
    monkeypatch.setattr("k3rewrite.backend.lower", _fails(RuntimeError("a defect"), lambda: None))
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="a defect"):
        torch.compile(_norm, backend=backend)(torch.randn(3, 4), torch.tensor(2.0))
    assert _report(tmp_path)["error"] == UNFINISHED


def test_an_unexpected_error_while_finalising_leaves_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend({"finalise": "eager", "dump": tmp_path})
    monkeypatch.setattr(compilation, "finalise", lambda *args, **settings: 1 // 0)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="by zero"):
        torch.compile(_norm, backend=backend)(torch.randn(3, 4), torch.tensor(2.0))
    report = _report(tmp_path)
    assert report["error"] == UNFINISHED and report["passes"]


def test_settings_that_clash_leave_nothing(tmp_path: Path) -> None:
    pipeline = {"version": 1, "passes": ["lift_gated_rms_norm"], "finalise": "eager"}
    backend = Backend({"pipeline": pipeline, "dump": tmp_path / "runs"})
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="requires 'lift_rms_norm' before it"):
        torch.compile(torch.sin, backend=backend)(torch.ones(2))
    assert not (tmp_path / "runs").exists() and not backend.reports
