"""Flags, pipelines, targets and configurations that mean nothing and were taken, or broke off with a traceback."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from k3rewrite.cli.catalogue import check_pipeline
from k3rewrite.driver.request import resolve_request
from k3rewrite.errors import ConfigError
from k3rewrite.models.kimi_k3 import KimiK3Config
from k3rewrite.models.kimi_k3 import config_json as reading
from k3rewrite.passes import PASSES
from k3rewrite.targets import known_targets, load_target


@pytest.mark.parametrize("flag", ["phase", "dtype", "verify", "config", "target", "pipeline", "out"])
def test_an_empty_flag_is_no_default(flag: str) -> None:
    """As a shell gives it for a variable that is not set."""
    with pytest.raises(ConfigError):
        resolve_request(model="kimi-k3", known_passes=PASSES, known_targets=known_targets(), **{flag: ""})  # type: ignore[arg-type]


def _refused(**settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_request(model="kimi-k3", known_passes=PASSES, known_targets=known_targets(), **settings)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2 and caught.value.remedy
    return str(caught.value)


@pytest.mark.parametrize("flag", ["out", "config"])
def test_a_name_that_is_too_long(flag: str, tmp_path: Path) -> None:
    message = _refused(**{flag: f"{tmp_path}/{'x' * 5000}.json"})
    assert message.startswith(f"--{flag}: '") and "cannot be used: File name too long" in message and len(message) < 500


@pytest.mark.parametrize("flag", ["out", "config"])
def test_a_folder_that_may_not_be_entered(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = Path.stat

    def stat(path: Path, **settings: Any) -> Any:
        if path.parent.name == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return look(path, **settings)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(Path, "exists", lambda path: bool(stat(path)))  # as in versions of Python that ask `stat`
    monkeypatch.setattr(Path, "is_file", lambda path: bool(stat(path)))
    message = _refused(**{flag: "closed/a.json"})
    assert message.startswith(f"--{flag}: 'closed/a.json' cannot be used: Permission denied\n  remedy: ")


def _pipeline(tmp_path: Path, text: str) -> str:
    (tmp_path / "p.yaml").write_text(f"version: 1\nextends: base.yaml\npasses:\n{text}\n")
    return str(tmp_path / "p.yaml")


def test_an_expression_that_cannot_be_read_is_one_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"p\.yaml:4: '== \(2' is not an expression") as caught:
        check_pipeline(_pipeline(tmp_path, "  - lift_mlp: {expect: '== (2'}"))
    assert str(caught.value).count("is not an expression") == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("expect: '== 1 // 0'", "'== 1 // 0': integer division or modulo by zero"),
        ("expect: '== candidates % (2 - 2)'", "by zero"),
        ("when: '1 % 0 == 0'", "by zero"),
        ("when: 'tp > 1 and tp / 0 == 1'", "division by zero"),
        ("when: '3'", "'3' gives 3, not true or false"),
        ("when: tp == 1 or 'a' < 1", "compares 'a' with 1"),
    ],
)
def test_an_expression_that_fails_in_every_run(setting: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_pipeline(_pipeline(tmp_path, f"  - lift_mlp: {{{setting}}}"))
    assert f"{tmp_path}/p.yaml:4: " in str(caught.value) and message in str(caught.value)


def test_an_expression_that_divides_by_a_name_may_hold(tmp_path: Path) -> None:
    assert check_pipeline(_pipeline(tmp_path, "  - lift_mlp: {expect: '== n_layers // tp', when: 'tp % 2 == 1 - 0'}"))


def test_every_pass_that_is_needed_and_gone_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_pipeline(_pipeline(tmp_path, "  - lift_rms_norm: off\n  - lift_attn_res: off"))
    told = str(caught.value)
    assert "2 problems" in told and "requires 'lift_rms_norm'" in told and "requires 'lift_attn_res'" in told


@pytest.mark.parametrize(
    ("passes", "line"),
    [
        (["lift_mlp", "lift_rms_norm: off"], 5),
        (["lift_rms_norm: {after: lift_mlp}"], 4),
        (["lift_gated_rms_norm: {before: lift_rms_norm}"], 4),
        (["lift_rms_norm: {expect: '>= 0'}", "lift_gated_rms_norm: {before: canonicalise}"], 5),
    ],
)
def test_a_pass_that_another_one_needs_is_taken_away(passes: list[str], line: int, tmp_path: Path) -> None:
    """The line that did so is named, and not that of the shipped file which names the other one."""
    with pytest.raises(ConfigError) as caught:
        check_pipeline(_pipeline(tmp_path, "\n".join(f"  - {entry}" for entry in passes)))
    assert str(caught.value).startswith(
        f"{tmp_path}/p.yaml:{line}: pass 'lift_gated_rms_norm' requires 'lift_rms_norm'"
    )


def test_on_miss_of_a_pass_that_binds_no_kernels(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"p\.yaml:4: the pass 'lift_mlp' binds no kernels, so 'on_miss'"):
        check_pipeline(_pipeline(tmp_path, "  - lift_mlp: {on_miss: error}"))
    assert check_pipeline(_pipeline(tmp_path, "  - select: {on_miss: error}"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "../../my target"}, "name: must be letters, digits and underscores, a letter first"),
        ({"name": "my-target"}, "name: must be letters, digits and underscores"),
        ({"vendor": "nvidia"}, "arch: must be an architecture of NVIDIA such as sm_90, not 'gfx950'"),
        ({"arch": "mi355x"}, "arch: must be an architecture of AMD such as gfx950, not 'mi355x'"),
        ({"memory_bandwidth": float("inf")}, "memory_bandwidth: must be finite"),
    ],
)
def test_targets_that_no_kernel_can_be_compiled_for(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = yaml.safe_dump({**dataclasses.asdict(load_target("mi355x")), "sources": {}, **changes})
    path.write_text(text)
    with pytest.raises(ConfigError, match="correct the figure") as caught:
        load_target(path)
    assert message in str(caught.value)


def _published(**changes: Any) -> dict[str, Any]:
    tiny = KimiK3Config.tiny()
    text = {name: getattr(tiny, field) for name, field in reading._READ.items()}
    text |= {name: values[0] for name, values in reading._FIXED.items()}
    linear = {name: getattr(tiny, field) for name, field in reading._LINEAR_ATTN.items()}
    text["linear_attn_config"] = {**linear, "use_full_rank_gate": True}
    return {**text, **changes}


@pytest.mark.parametrize(
    ("groups", "fine"),
    [([1], False), ({"g": {"weights": 3}}, False), ({"g": 3}, False), ({}, True), ({"g": {"weights": {}}}, True)],
)
def test_quantisation_groups_of_a_published_configuration(groups: Any, fine: bool, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    quantisation = {"format": "mxfp4-pack-quantized", "config_groups": groups}
    path.write_text(json.dumps(_published(quantization_config=quantisation)))
    if fine:
        assert KimiK3Config.from_json(path).experts == "mxfp4"
        return
    with pytest.raises(ConfigError, match="config_groups must be a mapping of groups"):
        KimiK3Config.from_json(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none(value: float, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_published(rms_norm_eps=value)))
    with pytest.raises(ConfigError, match=r"rms_norm_eps is (nan|inf), must be a number"):
        KimiK3Config.from_json(path)
