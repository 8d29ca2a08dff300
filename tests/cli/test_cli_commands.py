"""`explain`, `passes`, `targets`, `check` and the console script itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cli_fakes import CommandLine

from k3rewrite.report.run_folder import RunFolder
from k3rewrite.report.schema import BROKEN_GRAPH, EndToEnd, Miss, PassReport, RunInfo, RunReport


def write_run(out: Path, reason: str = "no weight") -> RunFolder:
    folder = RunFolder.create(out)
    missed = [
        Miss(f"mul_{i}", "net.py:3 in forward", reason, "a parameter", "an activation", f"layers.{i}")
        for i in range(93)
    ]
    folder.write_report(RunReport(RunInfo("kimi-k3"), [PassReport("lift_mlp", candidates=93, missed=missed)]))
    return folder


def test_explain_the_latest_run(cli: CommandLine) -> None:
    write_run(Path("runs"), "old reason")
    second = write_run(Path("runs"))
    for place in ("runs", second.path, second.path / "report.json"):
        result = cli.run("explain", str(place))
        assert result.exit_code == 0 and "missed 93: no weight" in result.stdout and "old reason" not in result.stdout
        assert "expected a parameter" in result.stdout and "found    an activation" in result.stdout
        assert len(result.stdout.splitlines()) < 13


def test_explain_lists_the_runs_of_a_folder(cli: CommandLine) -> None:
    first = write_run(Path("runs"))
    assert "1 runs" not in cli.run("explain", "runs").stdout
    (Path("runs") / "run-002").mkdir()  # a run that left no report
    report = RunReport(RunInfo("kimi-k3"), [PassReport("lift_moe", candidates=2, nodes_before=7, matched=2)])
    report.notes = [f"{BROKEN_GRAPH} at net.py:3 in forward: print. It is not rewritten"]
    report.end_to_end = EndToEnd(False, 0.1, 0.0, "cpu")
    RunFolder.create("runs").write_report(report)
    lines = cli.run("explain", "runs").stdout.splitlines()
    assert lines[:3] == [
        "2 runs; the last is explained below",
        "  run-001  0 nodes, nothing matched",
        "  run-003  7 nodes, lift_moe 2; end to end FAILED; ended early by Dynamo",
    ]
    assert "  Dynamo ended this graph at net.py:3 in forward: print. It is not rewritten" in lines
    assert "runs;" not in cli.run("explain", str(first.path)).stdout
    RunFolder.create(first.path)  # a run in the folder of a run
    assert "runs;" not in cli.run("explain", str(first.path)).stdout


def test_explain_one_pass(cli: CommandLine) -> None:
    write_run(Path("runs"))
    result = cli.run("explain", "runs", "--pass", "lift_mlp")
    assert result.exit_code == 0 and "mul_92  at net.py:3 in forward in layers.92" in result.stdout
    assert "no pass 'lift_mpl' in this run\n  remedy: did you mean 'lift_mlp'?" in cli.refused(
        "explain", "runs", "--pass", "lift_mpl"
    )


def test_explain_bad_input(cli: CommandLine) -> None:
    assert "error: none: no such run\n  remedy: give a run folder" in cli.refused("explain", "none")
    assert "neither a run nor a folder of runs" in cli.refused("explain", ".")
    assert "no path: " in cli.refused("explain", "x" * 5000)
    folder = RunFolder.create("runs")
    folder.write("report.json", '{"schema": "k3rewrite-report", "version": 9}')
    assert "report version 9 is not known; this k3rewrite reads version 1" in cli.refused("explain", "runs")


def test_passes(cli: CommandLine) -> None:
    text = cli.run("passes").stdout
    assert [line.split()[0] for line in text.splitlines()[:3]] == [
        "canonicalise",
        "lift_rms_norm",
        "lift_gated_rms_norm",
    ]
    assert "fuse_attn_res_norm  Fuse the mix and the norm." in text and "before -> after" not in text
    assert "roundings: one of 'fewest', 'model', default fewest   how often a value is rounded" in text
    assert "sizes: a list with each entry an integer, default [16]" in text
    assert text.count("allow_changes_rounding: true or false, default false") == 1


def test_one_pass(cli: CommandLine) -> None:
    text = cli.run("passes", "fuse_attn_res_norm").stdout
    assert "before -> after" in text and "level aten; needs lift_attn_res before it" in text
    assert "allow_changes_rounding: true or false, default false   let rules of policy changes_rounding rewrite" in text
    assert "no pass 'fuse'" in cli.refused("passes", "fuse")


def test_targets(cli: CommandLine) -> None:
    text = cli.run("targets").stdout
    rows = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert {"mi355x", "mi325x", "b200", "h200", "cpu"} <= rows.keys()
    assert all(word in rows["mi355x"] for word in ("gfx950", "256", "64", "160 KiB", "288 GB", "8 TB/s"))
    assert all(word in rows["h200"] for word in ("sm_90", "132", "32", "141 GB", "4.8 TB/s"))


def test_check(cli: CommandLine) -> None:
    Path("p.yaml").write_text(
        "version: 1\nextends: base.yaml\npasses: [fuse_attn_res_norm: {expect: '== 2 * n_layers'}]\n"
    )
    result = cli.run("check", "p.yaml")
    assert result.exit_code == 0
    assert result.stdout == (
        "p.yaml: fine (24 passes, 1 with an expectation, target auto, extends pass_configs/base.yaml)\n"
    )
    assert cli.run("check", "kimi-k3-prefill").exit_code == 0


def test_check_bad_files(cli: CommandLine) -> None:
    Path("p.yaml").write_text("version: 1\npasses:\n  - lift_mlp: {expect: '== n_layer'}\n")
    assert "p.yaml:3: unknown name 'n_layer' in '== n_layer'\n  remedy: did you mean 'n_layers'?" in cli.refused(
        "check", "p.yaml"
    )
    Path("p.yaml").write_text("version: 1\ntarget: mi300\n")
    assert "p.yaml:2: unknown target 'mi300'" in cli.refused("check", "p.yaml")
    Path("p.yaml").write_text("version: 1\npasses:\n  - fuse_attn_res_norm\n  - lift_attn_res\n")
    assert "p.yaml:3: pass 'fuse_attn_res_norm' requires 'lift_attn_res' before it" in cli.refused("check", "p.yaml")
    Path("p.yaml").write_text(
        "version: 1\nextends: base\npasses:\n  - lift_mlp: {before: lift_rms_norm}\n"
        "  - lift_rms_norm: {before: lift_mlp}\n"
    )
    assert (
        "p.yaml:4: 'lift_mlp' is to stand before 'lift_rms_norm', which another entry of this file undoes\n"
        "  remedy: take one of the two out: they end up as lift_rms_norm, lift_mlp"
    ) in cli.refused("check", "p.yaml")
    Path("p.yaml").write_text("version: 1\nextends: base\npasses: [lift_attn_res: off]\n")
    assert (
        "pass 'fuse_attn_res_norm' requires 'lift_attn_res' before it, and the pipeline has none\n"
        "  remedy: set 'fuse_attn_res_norm: off' too"
    ) in cli.refused("check", "p.yaml")
    assert "no file 'none.yaml'" in cli.refused("check", "none.yaml")


def test_usage(cli: CommandLine) -> None:
    assert "compile" in cli.run("--help").stdout
    assert "No such command" in cli.refused("compil")
    assert cli.run("--version").stdout.startswith("k3rewrite 0.")


def test_help_needs_no_torch() -> None:
    code = "import sys; from k3rewrite.cli import main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
