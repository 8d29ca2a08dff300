"""`check`, `compile` and torch.compile knew different names, and found that out at different times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from k3rewrite.backend import Backend
from k3rewrite.cli.catalogue import check_pipeline
from k3rewrite.driver.names import OWN_NAMES, names_in_programs, names_of_command, used_names
from k3rewrite.driver.request import CompileRequest, resolve_request
from k3rewrite.errors import ConfigError
from k3rewrite.passes import PASSES
from k3rewrite.pipeline.config import load_pipeline
from k3rewrite.targets import known_targets

PHASE = {"when": "phase == 'decode'"}
COUNT = {"expect": "== n_norms"}


def _pipeline(**settings: str) -> dict[str, Any]:
    return {"version": 1, "target": "cpu", "finalise": "eager", "passes": [{"lift_rms_norm": settings}]}


def _file(folder: Path, **settings: str) -> str:
    path = folder / "p.yaml"
    lines = "".join(f'{key}: "{value}"' for key, value in settings.items())
    path.write_text(f"version: 1\npasses:\n  - lift_rms_norm: {{{lines}}}\n")
    return str(path)


def _request(model: str, pipeline: str) -> CompileRequest:
    return resolve_request(model=model, pipeline=pipeline, known_passes=PASSES, known_targets=known_targets())


def test_each_door_knows_the_names_of_every_run() -> None:
    doors = names_in_programs(), names_of_command("my.module:factory"), names_of_command("kimi-k3")
    for names in doors:
        assert {*OWN_NAMES, "n_layers"} <= {*names} and len({*names}) == len(names)
    assert {*doors[0]} < {*doors[1]} < {*doors[2]}
    assert names_in_programs(["n_norms"]) == (*names_in_programs(), "n_norms")


def test_a_name_of_the_command_line_is_one_there_and_must_be_given_in_a_program(tmp_path: Path) -> None:
    file = _file(tmp_path, **PHASE)
    assert _request("my.module:factory", file).pipeline.passes[0].when == PHASE["when"]
    with pytest.raises(ConfigError, match="unknown name 'phase'"):
        Backend({"pipeline": _pipeline(**PHASE)})
    assert Backend({"pipeline": _pipeline(**PHASE), "names": {"phase": "decode"}}).names["phase"] == "decode"
    assert str(check_pipeline(file)).splitlines()[1:] == [
        "  under torch.compile: give options={'names': ...} with phase"
    ]


def test_check_takes_the_names_that_a_program_gives(tmp_path: Path) -> None:
    file = _file(tmp_path, **COUNT)
    with pytest.raises(ConfigError, match=r"p.yaml:3: unknown name 'n_norms'"):
        check_pipeline(file)
    first, *more = str(check_pipeline(file, ["n_norms"])).splitlines()
    assert "fine (1 passes, 1 with an expectation" in first
    assert len(more) == 3 and all(line.endswith("n_norms") for line in more)
    assert Backend({"pipeline": file, "names": {"n_norms": 1}}).names["n_norms"] == 1
    command = [sys.executable, "-c", "from k3rewrite.cli import main; main()", "check", file, "--names", "a, n_norms"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "fine" in result.stdout, result.stderr


def test_a_condition_that_every_run_can_answer_needs_no_remark(tmp_path: Path) -> None:
    assert len(str(check_pipeline(_file(tmp_path, expect=">= n_layers * tp"))).splitlines()) == 1


def test_a_factory_with_an_unknown_name_is_refused_before_it_is_imported(tmp_path: Path) -> None:
    """Its module does not exist, and the pipeline is what the error is about."""
    for condition in (COUNT, {"expect": "== n_moe_layers"}):
        with pytest.raises(ConfigError, match=r"p.yaml:3: unknown name 'n_\w+'"):
            _request("no.such.module:factory", _file(tmp_path, **condition))
    assert _request("kimi-k3", _file(tmp_path, expect="== n_moe_layers")).pipeline.passes


@pytest.mark.parametrize("name", [*OWN_NAMES, "matched", "candidates"])
def test_what_a_run_defines_itself_cannot_be_given(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"names gives '{name}', which the run defines itself"):
        Backend({"names": {name: 8}, "target": "cpu"})
    with pytest.raises(ConfigError, match=f"--names: names gives '{name}'"):
        check_pipeline(_file(tmp_path), [name])


def test_the_number_of_layers_can_be_given() -> None:
    backend = Backend({"pipeline": _pipeline(expect="matched == 0 and n_layers == 3"), "names": {"n_layers": 3}})
    with torch.no_grad():
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert backend.reports[0].passes[0].expect_ok is True


def test_names_that_conditions_use() -> None:
    settings = {"expect": "matched == a * candidates", "when": "b > 1 and tp == 1"}
    config = load_pipeline(_pipeline(**settings), known_passes=PASSES)
    assert used_names(config) == {"a", "b", "tp"}
