"""docs/report.md explains every field of a report, under the heading of its part."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from k3rewrite.report.schema import Decomposed, EndToEnd, KernelReport, Miss, PassReport, RunInfo, Site, Timings

DOCUMENT = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
PARTS = {
    "info": (RunInfo,),
    "passes[]": (PassReport, Site, Miss),
    "kernels[]": (KernelReport,),
    "decomposed[]": (Decomposed,),
    "end_to_end": (EndToEnd,),
    "timings": (Timings,),
}


@pytest.mark.parametrize("heading", PARTS)
def test_every_field_is_explained(heading: str) -> None:
    found = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert found, f"docs/report.md has no '## {heading}'"
    names = [field.name for part in PARTS[heading] for field in fields(part)]
    assert not [name for name in names if f"`{name}`" not in found[1]]
