"""The main job for real: the command of the README on a cut model, and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3rewrite.cli import main
from k3rewrite.emit import read_manifest

PIPELINE = """
version: 1
extends: kimi-k3-decode
finalise: eager
"""


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_compile_verifies_emits_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = tmp_path / "eager.yaml"
    pipeline.write_text(PIPELINE)
    code = _run(
        "compile", "kimi-k3", "--config", "tiny", "--layers", "4", "--target", "mi355x", "--verify", "all",
        "--pipeline", str(pipeline), "--out", str(tmp_path / "runs"),
    )  # fmt: skip
    shown = capsys.readouterr()
    assert code == 0, shown.err
    run = tmp_path / "runs" / "run-001"
    report = json.loads((run / "report.json").read_text())
    assert report["end_to_end"]["passed"] and report["error"] == ""
    matched = {p["name"]: p["matched"] for p in report["passes"]}
    assert (matched["fuse_attn_res_norm"], matched["lift_moe"], matched["fuse_kda_decode"]) == (8, 3, 3)
    assert matched["select"] == 14
    assert all(
        site["verified"]
        for p in report["passes"]
        for site in p["sites"]
        if site["policy"] and p["name"] != "canonicalise"
    )
    for kernel in report["kernels"]:
        assert kernel["executed"] == "reference" and kernel["spills"] == 0
        assert (run / kernel["object"]).is_file() and (run / kernel["source"]).is_file()
        assert any("attn_res.py" in line or "experts.py" in line or "norms.py" in line for line in kernel["provenance"])
    rewritten = sorted((run / "graphs").glob("*.txt"))[-1].read_text()
    bound = {name for kernel in report["kernels"] for name in kernel["bound"]}
    assert bound and all(name in rewritten for name in bound)
    listed = read_manifest(run / "kernels" / "mi355x")
    assert {name for entry in listed for name in entry.bound} == bound
    assert len(list((run / "graphs").glob("*.svg"))) == len(report["passes"]) + 1
    assert "fuse_attn_res_norm" in shown.out

    assert _run("explain", str(tmp_path / "runs"), "--pass", "lift_rms_norm") == 0
    assert "expected mean" in capsys.readouterr().out


def test_an_expectation_that_fails_leaves_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = tmp_path / "more.yaml"
    pipeline.write_text("version: 1\nextends: kimi-k3-decode\npasses:\n  - lift_route: {expect: '== 99'}\n")
    code = _run(
        "compile", "kimi-k3", "--config", "tiny", "--layers", "2", "--no-run", "--target", "h200",
        "--pipeline", str(pipeline), "--out", str(tmp_path / "runs"),
    )  # fmt: skip
    shown = capsys.readouterr()
    assert code == 1
    assert "more.yaml:4" in shown.err and "rewrote 1 of 1 sites" in shown.err
    report = json.loads((tmp_path / "runs" / "run-001" / "report.json").read_text())
    assert report["passes"][-1]["name"] == "lift_route" and report["passes"][-1]["expect_ok"] is False
    assert "'== 99'" in report["error"]
