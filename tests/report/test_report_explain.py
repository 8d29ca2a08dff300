"""The table and the explanation: numbers in their columns, equal misses in one line, reasons with examples."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from k3rewrite.errors import ConfigError
from k3rewrite.report.explain import explain, group_by
from k3rewrite.report.schema import (
    Decomposed,
    EndToEnd,
    KernelReport,
    Miss,
    PassReport,
    RunInfo,
    RunReport,
    Site,
    Timings,
)
from k3rewrite.report.table import human_bytes, pass_table, summary_lines


def shown(renderable: RenderableType, width: int = 160) -> str:
    buffer = io.StringIO()
    Console(file=buffer, width=width, color_system=None).print(renderable)
    return buffer.getvalue()


def misses(count: int, reason: str = "eps of sqrt_{i} is not a constant") -> list[Miss]:
    return [
        Miss(
            f"mul_{i}",
            f"net.py:{10 + i % 2} in forward",
            reason.format(i=i),
            "a number",
            f"add_{i}",
            f"layers.{i}.norm",
        )
        for i in range(count)
    ]


@pytest.fixture
def report() -> RunReport:
    lift = PassReport(
        "lift_rms_norm",
        level="aten",
        options={"eps": 1e-6},
        candidates=96,
        matched=2,
        missed=[*misses(93), Miss("pow_7", "net.py:50 in other", "the mean is over another dim", "dim -1", "dim 0")],
        refused=[Miss("pow_9", "net.py:60 in f", "the output would change its dtype", "bf16", "f32")],
        sites=[
            Site("mul_1", "net.py:7 in forward", "layers.0.norm", "k3_rms_norm", "exact"),
            Site("mul_2", "net.py:8 in forward"),
        ],
        expect=">= 96",
        expect_ok=False,
        nodes_before=1000,
        nodes_after=800,
        launches_before=500,
        launches_after=500,
        bytes_before=2_500_000,
        bytes_after=1_234_567,
        seconds=0.4567,
    )
    skipped = PassReport("shard", skipped="tp > 1 is false (tp = 1)")
    good = PassReport("select", candidates=3, matched=3, expect="== 3", expect_ok=True)
    return RunReport(
        RunInfo("kimi-k3", config="tiny", phase="decode", target="mi355x", pipeline="kimi-k3-decode"),
        passes=[lift, skipped, good],
        kernels=[
            KernelReport("rms_norm", "mi355x", "a", "triton"),
            KernelReport("mlp", "mi355x", "b", "hip", executed="H200"),
        ],
        decomposed=[Decomposed("mlp", f"mlp_{i}", "net.py:9 in f", "no kernel for mi355x") for i in range(13)],
        end_to_end=EndToEnd(True, 1.25e-3, 1.5e-3, "cpu"),
        timings=Timings(capture_s=1.5, passes_s=0.25, total_s=2.0),
    )


def row(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if line.strip().startswith(name)).split()


def test_table(report: RunReport) -> None:
    text = shown(pass_table(report))
    assert " ".join(row(text, "lift_rms_norm")) == "lift_rms_norm 96 2 ✗ 95 1000 → 800 500 2.5 MB → 1.23 MB 0.46"
    assert "skipped" in row(text, "shard") and "✓" in row(text, "select")


def test_table_keeps_its_columns_in_a_narrow_terminal(report: RunReport) -> None:
    text = shown(pass_table(report), width=80)
    assert "lift_rms_norm" in text and "…" not in text
    assert all(word in text for word in ("launches", "seconds", "0.46", "1000", "800", "2 ✗"))


def test_markup_in_names_is_text(report: RunReport) -> None:
    report.passes[0].name = "[red]x[/red]"
    assert "[red]x[/red]" in shown(pass_table(report)) and "[red]x[/red]" in shown(explain(report))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (1_234_567, "1.23 MB"),
        (999_600, "1 MB"),
        (5_600_000_000_000, "5.6 TB"),
        (10**19, "1e+04 PB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_summary(report: RunReport) -> None:
    assert summary_lines(report) == [
        "kernels: 2 for mi355x (executed: 1 not run, 1 on H200)",
        "reference: mlp x 13: no kernel for mi355x",
        "end to end: passed on cpu; relative error against fp64 0.00125, eager 0.0015",
        "time: capture 1.5 s, passes 0.2 s, total 2.0 s",
    ]
    assert summary_lines(RunReport(RunInfo("m"))) == []


def test_equal_misses_are_one_line_with_examples(report: RunReport) -> None:
    text = shown(explain(report))
    assert "96 candidates: 2 matched, 94 missed, 1 refused" in text
    assert "expectation '>= 96' does NOT hold" in text
    assert text.count("is not a constant") == 1 and "missed 93: eps of sqrt_0 is not a constant" in text
    assert "expected a number" in text and "found    add_0" in text
    assert "in layers.2.norm and 90 more" in text
    assert "missed 1: the mean is over another dim" in text and "refused 1: the output would change its dtype" in text
    assert "skipped: tp > 1 is false (tp = 1)" in text
    assert "13 x mlp: no kernel for mi355x" in text
    assert len(text.splitlines()) < 45


def test_what_belongs_to_no_pass_comes_last(report: RunReport) -> None:
    report.passes += [PassReport("lift_a"), PassReport("lift_b")]
    report.notes = ["a read was pinned"]
    text = shown(explain(report))
    assert "no candidates: lift_a, lift_b" in text and "notes\n  a read was pinned" in text
    assert text.index("left to the reference") < text.index("end to end: passed on cpu; relative error")
    assert text.count("no kernel for mi355x") == 1
    assert "end to end" not in shown(explain(report, "select"))


def test_misses_that_differ_in_nodes_and_lines_are_one() -> None:
    missed = [
        Miss(f"mul_{i}", f"net.py:{i} in f", f"expected k3.norm, found {found}", "k3.norm", found, f"layers.{i}")
        for i, found in enumerate(["view 'view' (net.py:1 in f)", "view 'view_7' (net.py:2 in f)", "mul 'mul'"])
    ]
    text = shown(explain(RunReport(RunInfo("m"), [PassReport("lift", candidates=3, missed=missed)])))
    assert "missed 2: expected k3.norm, found view 'view'\n" in text and "missed 1: " in text
    assert "found    " not in text  # the reason has it already


def test_one_pass_lists_every_site(report: RunReport) -> None:
    text = shown(explain(report, "lift_rms_norm"))
    assert "mul_1 -> k3_rms_norm  at net.py:7 in forward in layers.0.norm" in text
    assert all(f"mul_{i}  at " in text for i in range(93))
    assert "select" not in text


def test_unknown_pass(report: RunReport) -> None:
    with pytest.raises(
        ConfigError, match=r"--pass: no pass 'lift_rms' in this run\n  remedy: did you mean 'lift_rms_norm'\?"
    ):
        explain(report, "lift_rms")


def test_error_of_a_run_is_shown(report: RunReport) -> None:
    report.error = "lift_rms_norm: expected >= 96"
    assert "ended by an error: lift_rms_norm: expected >= 96" in shown(explain(report))


def test_a_node_without_a_number_is_of_the_same_group() -> None:
    reasons = ["found view '_unsafe_view'", "found view '_unsafe_view_1'", "found view 'view'", "found view 'view_12'"]
    assert [len(entries) for _, entries in group_by(reasons, lambda reason: (reason,))] == [2, 2]


def test_different_values_are_different_groups() -> None:
    reasons = [
        "eps 1e-05",
        "eps 1e-06",
        "eps 1e-05",
        "node add_3",
        "node add_4",
        "layers.3 differs",
        "layers.4 differs",
        "1.5",
        "1.6",
    ]
    groups = group_by(reasons, lambda reason: (reason,))
    assert sorted(len(entries) for _, entries in groups) == [1, 1, 1, 2, 2, 2]
