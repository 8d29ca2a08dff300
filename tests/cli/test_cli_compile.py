"""`k3rewrite compile`: what the compiler is asked for, what is shown, exit codes, and every bad flag's message."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from cli_fakes import CommandLine

from k3rewrite.driver.request import CompileRequest
from k3rewrite.errors import CaptureError, ExpectationError, VerificationError
from k3rewrite.report.schema import EndToEnd, PassReport, RunInfo, RunReport


def test_defaults(cli: CommandLine) -> None:
    r = cli.compile("kimi-k3")
    assert (r.model, r.config, r.layers, r.phase) == ("kimi-k3", "tiny", None, "decode")
    assert (r.batch, r.tokens, r.context, r.torch_dtype) == (4, 1, 64, torch.bfloat16)
    assert (r.pipeline.name, r.target, r.tp, r.rank, r.seed, r.run) == ("kimi-k3-decode", "auto", 1, 0, 0, True)
    assert (r.verify_regions, r.verify_end_to_end, r.out, r.given) == (
        False,
        False,
        Path("k3rewrite-runs"),
        frozenset(),
    )
    assert r.command.startswith("k3rewrite")


@pytest.mark.parametrize(("phase", "tokens", "context"), [("decode", 1, 64), ("verify", 4, 64), ("prefill", 128, 0)])
def test_phase_decides_pipeline_and_shapes(cli: CommandLine, phase: str, tokens: int, context: int) -> None:
    r = cli.compile("kimi-k3", "--phase", phase)
    assert (r.pipeline.name, r.tokens, r.context, r.given) == (f"kimi-k3-{phase}", tokens, context, {"phase"})


def test_every_flag(cli: CommandLine) -> None:
    flags = (
        "--config full --layers 12 --phase verify --batch 8 --tokens 3 --context 1000 --dtype fp32 --pipeline default "
        "--target mi355x --tp 8 --rank 7 --out somewhere --verify all --seed 5"
    )
    r = cli.compile("kimi-k3", *flags.split())
    assert (r.config, r.layers, r.phase, r.batch, r.tokens, r.context) == ("full", 12, "verify", 8, 3, 1000)
    assert (r.dtype, r.pipeline.name, r.target, r.tp, r.rank) == ("float32", "default", "mi355x", 8, 7)
    assert (r.out, r.verify_regions, r.verify_end_to_end, r.seed) == (Path("somewhere"), True, True, 5)
    assert r.given == {"phase", "batch", "tokens", "context", "dtype", "seed"}


def test_full_without_a_run(cli: CommandLine) -> None:
    r = cli.compile("kimi-k3", "--config", "full", "--no-run")
    assert (r.config, r.run) == ("full", False)


def test_flags_win_over_yaml(cli: CommandLine) -> None:
    Path("p.yaml").write_text(
        "version: 1\nextends: base.yaml\ntarget: mi355x\nparallel: {tp: 2}\nverify: {regions: true, end_to_end: true}\n"
    )
    r = cli.compile("kimi-k3", "--pipeline", "p.yaml", "--rank", "1")
    assert (r.target, r.tp, r.verify_regions, r.verify_end_to_end) == ("mi355x", 2, True, True)
    r = cli.compile("kimi-k3", "--pipeline", "p.yaml", "--target", "h200", "--tp", "4", "--verify", "none")
    assert (r.target, r.tp, r.verify_regions, r.verify_end_to_end) == ("h200", 4, False, False)


@pytest.mark.parametrize(
    ("choice", "regions", "end_to_end"),
    [("none", False, False), ("regions", True, False), ("end-to-end", False, True), ("all", True, True)],
)
def test_verify(cli: CommandLine, choice: str, regions: bool, end_to_end: bool) -> None:
    r = cli.compile("kimi-k3", "--verify", choice)
    assert (r.verify_regions, r.verify_end_to_end) == (regions, end_to_end)


def test_a_factory_gets_the_default_pipeline_and_the_current_folder(cli: CommandLine) -> None:
    r = cli.compile("my.models:tiny", "--batch", "2")
    assert (r.model, r.pipeline.name, r.config, r.given) == ("my.models:tiny", "default", "", {"batch"})
    assert sys.path[0] == os.getcwd()


def test_result_is_a_table_and_the_place_of_the_files(cli: CommandLine) -> None:
    result = cli.run("compile", "kimi-k3", "--out", "runs")
    assert "20 → 12" in result.stdout and "lift_mlp" in result.stdout
    assert "files: runs/run-001 (report.json)" in result.stdout
    assert "capture ..." in result.stderr and "capture" not in result.stdout
    assert "files: runs/run-002" in cli.run("compile", "kimi-k3", "--out", "runs").stdout


def test_expectation_that_fails(cli: CommandLine) -> None:
    def fail(request: CompileRequest) -> RunReport:
        error = ExpectationError("matched 1, expected == 2", place="p.yaml:3", remedy="look at the misses")
        error.report = RunReport(RunInfo("m"), [PassReport("lift_mlp", expect="== 2", expect_ok=False)])  # type: ignore[attr-defined]
        raise error

    cli.outcome = fail
    result = cli.run("compile", "kimi-k3")
    assert result.exit_code == 1
    assert "error: p.yaml:3: matched 1, expected == 2\n  remedy: look at the misses\n" in result.stderr
    assert "✗" in result.stdout and "Traceback" not in result.output


@pytest.mark.parametrize(("error", "code"), [(VerificationError("differs"), 1), (CaptureError("net.py:3: no"), 2)])
def test_errors_of_the_compiler(cli: CommandLine, error: Exception, code: int) -> None:
    def fail(request: CompileRequest) -> RunReport:
        raise error

    cli.outcome = fail
    result = cli.run("compile", "kimi-k3")
    assert result.exit_code == code and f"error: {error}" in result.stderr


def test_unexpected_error_keeps_its_traceback(cli: CommandLine) -> None:
    def fail(request: CompileRequest) -> RunReport:
        raise ZeroDivisionError("a bug")

    cli.outcome = fail
    result = cli.run("compile", "kimi-k3")
    assert isinstance(result.exception, ZeroDivisionError) and result.exit_code == 1


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (RunReport(RunInfo("m")), 0),
        (RunReport(RunInfo("m"), [PassReport("a", expect="== 1", expect_ok=True)]), 0),
        (RunReport(RunInfo("m"), [PassReport("a", expect="== 1", expect_ok=False)]), 1),
        (RunReport(RunInfo("m"), end_to_end=EndToEnd(True, 0.0, 0.0, "cpu")), 0),
        (RunReport(RunInfo("m"), end_to_end=EndToEnd(False, 1.0, 0.0, "cpu")), 1),
        (RunReport(RunInfo("m"), error="stopped"), 1),
    ],
)
def test_exit_code_of_a_report(cli: CommandLine, report: RunReport, code: int) -> None:
    cli.outcome = lambda request: report
    assert cli.run("compile", "kimi-k3").exit_code == code


BAD = {
    "no model": ("nothing", "MODEL: no model 'nothing'\n  remedy: give 'kimi-k3' or 'package.module:factory'"),
    "nearly a model": ("kimik3", "MODEL: no model 'kimik3'\n  remedy: did you mean 'kimi-k3'?"),
    "not a factory": ("a b:c", "MODEL: no model 'a b:c'"),
    "config": (
        "kimi-k3 --config tinny",
        "--config: no configuration 'tinny'\n  remedy: did you mean 'tiny'? or give a .json file",
    ),
    "config file": ("kimi-k3 --config x.json", "--config: no file 'x.json'"),
    "config of a factory": ("a:b --config tiny", "--config: only Kimi K3 has configurations"),
    "full with a run": (
        "kimi-k3 --config full",
        "--config: the full model has 2.78 T parameters\n  remedy: add --no-run",
    ),
    "no layers": ("kimi-k3 --layers 0", "--layers: 0 is not a whole number from 1 to 1000"),
    "layers of a factory": ("a:b --layers 2", "--layers: only Kimi K3 can be cut to N layers"),
    "phase": ("kimi-k3 --phase decod", "--phase: 'decod' is none of the choices\n  remedy: did you mean 'decode'?"),
    "batch": ("kimi-k3 --batch 0", "--batch: 0 is not a whole number from 1 to 65536"),
    "negative batch": ("kimi-k3 --batch -1", "--batch: -1 is not a whole number"),
    "tokens of decode": (
        "kimi-k3 --tokens 2",
        "--tokens: decode takes one token a sequence, not 2\n  remedy: use --phase verify",
    ),
    "tokens of verify": (
        "kimi-k3 --phase verify --tokens 1",
        "--tokens: verify takes the sampled token and at least one draft",
    ),
    "context": ("kimi-k3 --context -1", "--context: -1 is not a whole number from 0 to 1048576"),
    "too long": ("kimi-k3 --context 1048576", "--context: context + tokens is 1048577\n  remedy: at most 1048576"),
    "dtype": (
        "kimi-k3 --dtype bfloat61",
        "--dtype: 'bfloat61' is none of the choices\n  remedy: did you mean 'bfloat16'?",
    ),
    "pipeline": (
        "kimi-k3 --pipeline kimi-k3-decod",
        "no pipeline 'kimi-k3-decod'\n  remedy: did you mean 'kimi-k3-decode'?",
    ),
    "pipeline file": ("kimi-k3 --pipeline none.yaml", "no file 'none.yaml'"),
    "target": ("kimi-k3 --target mi355", "--target: unknown target 'mi355'\n  remedy: did you mean 'mi355x'?"),
    "target file": ("kimi-k3 --target mine.yaml", "mine.yaml: no such file"),
    "tp": ("kimi-k3 --tp 0", "--tp: 0 is not a whole number from 1 to 1024"),
    "rank": ("kimi-k3 --tp 8 --rank 8", "--rank: there is no rank 8 of 8\n  remedy: give 0 to 7, or a larger --tp"),
    "negative rank": ("kimi-k3 --rank -1", "--rank: there is no rank -1 of 1"),
    "verify": (
        "kimi-k3 --verify region",
        "--verify: 'region' is none of the choices\n  remedy: did you mean 'regions'?",
    ),
    "verify without a run": (
        "kimi-k3 --verify all --no-run",
        "--no-run: checks of regions and end to end compute with real tensors",
    ),
    "seed": ("kimi-k3 --seed -1", "--seed: -1 is not a whole number from 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_flag(cli: CommandLine, case: str) -> None:
    args, message = BAD[case]
    model, *flags = args.split(" --")
    error = cli.refused("compile", model, *[word for flag in flags for word in f"--{flag}".split()])
    assert error.startswith("error: ") and message in error


def test_bad_pipeline_names_file_and_line(cli: CommandLine) -> None:
    Path("p.yaml").write_text("version: 1\npasses:\n  - lift_mpl\n  - fuse_attn_res_norm: {rounding: model}\n")
    message = cli.refused("compile", "kimi-k3", "--pipeline", "p.yaml")
    assert "error: p.yaml: 2 problems:" in message
    assert "p.yaml:3: unknown pass 'lift_mpl' (did you mean 'lift_mlp'?)" in message
    assert "p.yaml:4: the pass 'fuse_attn_res_norm' has no option 'rounding' (did you mean 'roundings'?)" in message


@pytest.mark.parametrize("model", ["kimi-k3", "a:b"])
def test_names_of_conditions_are_checked_before_anything_is_built(cli: CommandLine, model: str) -> None:
    Path("p.yaml").write_text("version: 1\npasses: [lift_mlp: {expect: '== n_lairs'}]\n")
    message = cli.refused("compile", model, "--pipeline", "p.yaml")
    assert "p.yaml:2: unknown name 'n_lairs' in '== n_lairs'\n  remedy: did you mean 'n_layers'?" in message


def test_out_that_is_a_file(cli: CommandLine) -> None:
    Path("file").write_text("mine")
    assert "--out: " in cli.refused("compile", "kimi-k3", "--out", "file/runs")
    assert Path("file").read_text() == "mine"


def test_unknown_flag_and_words_for_numbers(cli: CommandLine) -> None:
    assert "No such option" in cli.refused("compile", "kimi-k3", "--bach", "2")
    assert "--batch" in cli.refused("compile", "kimi-k3", "--batch", "two")
    assert "MODEL" in cli.refused("compile")
