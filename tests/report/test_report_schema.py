"""report.json: written and read back equal; files that are not as documented are refused with place and remedy."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rewrite.errors import ConfigError
from k3rewrite.report import (
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

DOCUMENT = Path(__file__).parents[2] / "docs" / "report.md"
CLASSES = (RunReport, RunInfo, PassReport, Site, Miss, KernelReport, Decomposed, EndToEnd, Timings)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
COUNT = st.integers(0, 2**60)
NUMBER = st.floats(allow_nan=False)
REPORTS = st.builds(
    RunReport,
    info=st.builds(RunInfo, model=TEXT, layers=st.none() | COUNT, versions=st.dictionaries(TEXT, TEXT, max_size=2)),
    passes=st.lists(
        st.builds(
            PassReport,
            name=TEXT,
            options=st.dictionaries(
                TEXT, st.none() | st.booleans() | COUNT | TEXT | st.lists(COUNT, max_size=2), max_size=2
            ),
            candidates=COUNT,
            missed=st.lists(st.builds(Miss, TEXT, TEXT, TEXT, TEXT, TEXT, TEXT), max_size=2),
            sites=st.lists(st.builds(Site, TEXT, TEXT, TEXT, TEXT, TEXT), max_size=2),
            expect=st.none() | TEXT,
            expect_ok=st.none() | st.booleans(),
            seconds=NUMBER,
        ),
        max_size=2,
    ),
    kernels=st.lists(
        st.builds(
            KernelReport,
            TEXT,
            TEXT,
            TEXT,
            TEXT,
            registers=st.none() | COUNT,
            occupancy=st.none() | NUMBER,
            provenance=st.lists(TEXT),
        ),
        max_size=2,
    ),
    decomposed=st.lists(st.builds(Decomposed, TEXT, TEXT, TEXT, TEXT), max_size=2),
    end_to_end=st.none() | st.builds(EndToEnd, st.booleans(), NUMBER, NUMBER, TEXT),
    timings=st.builds(Timings, capture_s=st.none() | NUMBER),
    error=TEXT,
)


def small() -> RunReport:
    return RunReport(RunInfo("kimi-k3"), passes=[PassReport("a", missed=[Miss("n", "f.py:1 in g", "why")])])


@settings(max_examples=60, deadline=None)
@given(REPORTS)
def test_round_trip(report: RunReport) -> None:
    assert RunReport.from_json(report.to_json()) == report


def test_numbers_that_json_lacks() -> None:
    report = small()
    report.end_to_end = EndToEnd(False, float("inf"), float("nan"), "cpu")
    text = report.to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))
    again = RunReport.from_json(text).end_to_end
    assert again is not None and again.max_rel_error_vs_fp64 == float("inf")
    assert again.eager_rel_error_vs_fp64 != again.eager_rel_error_vs_fp64


def test_folder_is_not_part_of_the_file(tmp_path: Path) -> None:
    report = small()
    report.folder = tmp_path
    assert str(tmp_path) not in report.to_json() and RunReport.from_json(report.to_json()).folder is None


def test_options_may_hold_tuples_and_paths() -> None:
    report = small()
    report.passes[0].options = {"sizes": (1, 2), "path": Path("x")}
    assert RunReport.from_json(report.to_json()).passes[0].options == {"sizes": [1, 2], "path": "x"}


def test_every_field_is_documented() -> None:
    document = DOCUMENT.read_text()
    fields = {f.name for cls in CLASSES for f in dataclasses.fields(cls) if f.metadata.get("json", True)}
    assert not {name for name in fields if f"`{name}`" not in document and f'"{name}"' not in document}


def changed(**changes: Any) -> str:
    return json.dumps({**json.loads(small().to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "r.json: not a JSON text"),
        ("[" * 100000, "r.json: not a JSON text"),
        ("[]", "r.json: not a k3rewrite-report file"),
        (changed(schema="other"), "r.json: not a k3rewrite-report file"),
        (changed(version=2), "r.json: report version 2 is not known; this k3rewrite reads version 1"),
        (changed(version="1"), "r.json: report version '1' is not known"),
        (changed(version=True), "r.json: report version True is not known"),
        (changed(info={}), "r.json at info.model: expected text, found nothing"),
        (
            changed(passes=[{"name": "a", "seconds": "x"}]),
            "r.json at passes[0].seconds: expected a number, found 'x' (text)",
        ),
        (
            changed(passes=[{"name": "a", "missed": [{"site": "n", "source": 3}]}]),
            "r.json at passes[0].missed[0].source: expected text, found 3 (integer)",
        ),
        (changed(kernels=None), "r.json at kernels: expected a list with each entry a mapping, found null"),
        (changed(end_to_end={"passed": 1}), "r.json at end_to_end.passed: expected true or false, found 1 (integer)"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunReport.from_json(text, place="r.json")
    assert message in str(caught.value) and "remedy: " in str(caught.value)


def test_fields_that_a_reader_does_not_know_are_ignored() -> None:
    assert RunReport.from_json(changed(later=[1])) == small()
