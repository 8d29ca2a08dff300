"""docs/pipelines.md: its example loads, and it names every key and name that there is."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from k3rewrite.driver.names import names_of_command
from k3rewrite.pipeline.config import load_pipeline, shipped_pipelines
from k3rewrite.pipeline.expressions import EXPECT_NAMES
from k3rewrite.pipeline.layer import ENTRY_KEYS, SECTIONS, TOP_KEYS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()


@dataclass(frozen=True)
class AnyPass:
    roundings: Literal["fewest", "model"] = "fewest"
    allow_changes_rounding: bool = False


def test_the_example_loads(tmp_path: Path) -> None:
    lines = DOCUMENT.splitlines()
    start = lines.index("    version: 1")
    block = lines[start : lines.index("", start)]
    path = tmp_path / "example.yaml"
    path.write_text(textwrap.dedent("\n".join(block)))
    base = (entry.partition(":")[0].strip("- ") for entry in shipped_pipelines()["base"].read_text().splitlines())
    known = {name: AnyPass for name in [*base, "my_pass"] if name.isidentifier()}
    names = [entry.name for entry in load_pipeline(path, known_passes=known).passes]
    assert names[names.index("my_pass") + 1] == "select" and "fuse_block_write" not in names


def test_every_key_and_name_is_explained() -> None:
    keys = [*TOP_KEYS, *ENTRY_KEYS, *EXPECT_NAMES, *names_of_command("kimi-k3")]
    keys += [field.name for section in SECTIONS.values() for field in fields(section)]
    assert not [key for key in keys if f"`{key}`" not in DOCUMENT]
