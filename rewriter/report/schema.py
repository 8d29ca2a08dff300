"""What a run reports: the classes behind `report.json` (schema "k3rewrite-report", version 1; see docs/report.md).

The pipeline fills them while it works; `explain`, the table and every later tool read nothing else.

    report = RunReport(info=RunInfo(model="kimi-k3", ...))
    report.passes.append(PassReport(name="lift_rms_norm", level="aten", candidates=3, matched=2, ...))
    RunReport.from_json(report.to_json()) == report
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3rewrite.errors import ConfigError
from k3rewrite.plain_data.typed import Misfit, fit

SCHEMA = "k3rewrite-report"
VERSION = 1


@dataclass
class Site:
    """One place that a pass rewrote.

    `site` is the name of the anchor node, `source` the user's line ("file.py:123 in forward"), `module` the module
    path ("layers.3.self_attn"), `replaced_by` the node that stands there now, `policy` the numerics policy of the rule
    ("exact", "reassociates", "changes_rounding"), "" where no rule decided. `verified` says whether old and new nodes
    were run against each other (`verify: regions`).
    """

    site: str
    source: str
    module: str = ""
    replaced_by: str = ""
    policy: str = ""
    verified: bool = False


@dataclass
class Miss:
    """One candidate that was not rewritten, with the deepest reason.

    `expected` is what the pattern or the contract wanted there, `found` what the graph has; both in words, "" if the
    reason says it all.
    """

    site: str
    source: str
    reason: str
    expected: str = ""
    found: str = ""
    module: str = ""


@dataclass
class PassReport:
    """What one pass did. Byte counts are bytes read and written in device memory by one execution of the graph.

    `missed` are candidates whose pattern or guard failed. `refused` are those that were recognised: their rewrite would
    have broken the contract, no kernel takes it, or another site had claimed their nodes; `declined` counts those of
    which nothing but the rule's own last condition was in the way (`lift_moe`: no kernel takes it). `expect_ok` is None
    without an expectation. `skipped` holds the reason if the pass did not run (its `when` was false), else "".
    """

    name: str
    level: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    candidates: int = 0
    matched: int = 0
    missed: list[Miss] = field(default_factory=list)
    refused: list[Miss] = field(default_factory=list)
    declined: int = 0
    sites: list[Site] = field(default_factory=list)
    expect: str | None = None
    expect_ok: bool | None = None
    skipped: str = ""
    nodes_before: int = 0
    nodes_after: int = 0
    launches_before: int = 0
    launches_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    seconds: float = 0.0


@dataclass
class KernelReport:
    """One kernel of the rewritten graph.

    `source` and `object` are paths relative to the run folder ("" if there is no such file), `source_hash` is shared
    by the object and the code that ran. `executed` says where this source was seen to run in the first call: a device
    name, "reference" (its meaning ran in its place) or "no". `skipped` says why there is no object. Resource figures
    come from the compiled object and are None where it does not give them; `occupancy` is in waves (warps) per SIMD or
    scheduler. `provenance` lists the sites and source lines that use it, `bound` the names under which the rewritten
    graph and its dumps call it.
    """

    op: str
    target: str
    name: str
    language: str
    source: str = ""
    object: str = ""
    source_hash: str = ""
    executed: str = "no"
    skipped: str = ""
    registers: int | None = None
    spills: int | None = None
    lds_bytes: int | None = None
    occupancy: float | None = None
    provenance: list[str] = field(default_factory=list)
    bound: list[str] = field(default_factory=list)


@dataclass
class Decomposed:
    """One `k3::` node that no kernel took and that was expanded to its reference, with the reason."""

    op: str
    site: str
    source: str
    reason: str


@dataclass
class EndToEnd:
    """The rewritten model against eager, both against an fp64 run of the same weights and inputs."""

    passed: bool
    max_rel_error_vs_fp64: float
    eager_rel_error_vs_fp64: float
    executed_on: str


@dataclass
class Timings:
    """Wall-clock seconds of the stages; None for a stage that did not run."""

    capture_s: float | None = None
    passes_s: float | None = None
    dump_s: float | None = None
    emit_s: float | None = None
    finalise_s: float | None = None
    run_s: float | None = None
    total_s: float | None = None


@dataclass
class RunInfo:
    """What was compiled, how, with which versions; "" and None for a setting that the model was not given.

    `date` is ISO 8601 with the offset; `commit` is "" outside git. `cache_key` stands for everything beside the graph
    that decides the result (see driver/cache_key.py).
    """

    model: str
    config: str = ""
    layers: int | None = None
    phase: str = ""
    batch: int | None = None
    tokens: int | None = None
    context: int | None = None
    dtype: str = ""
    target: str = ""
    pipeline: str = ""
    rank: int = 0
    world: int = 1
    seed: int | None = None
    command: str = ""
    date: str = ""
    commit: str = ""
    cache_key: str = ""
    versions: dict[str, str] = field(default_factory=dict)


UNFINISHED = "the run did not end: it was interrupted, or stopped by an error that is none of k3rewrite's own"
"""`RunReport.error` of a run that is going on, so that a report which is left behind says so"""


SUPERSEDED = "superseded: Dynamo gave this attempt up and started again; a later run is that of the same code"
"""`RunReport.error` of an attempt that was no failure, and that nothing came of"""


BROKEN_GRAPH = "Dynamo ended this graph"
"""how a note begins that says of a graph that it is a part of what it was to be"""


@dataclass
class RunReport:
    """Everything about one run. `notes` are things to know that no field above has: reads pinned before a write, guards
    added while finalising, why a graph was not captured. `error` is the message of the error that ended it, "" for a
    run that ended well.

    `folder` is where the report lies; it is not part of the file.
    """

    info: RunInfo
    passes: list[PassReport] = field(default_factory=list)
    kernels: list[KernelReport] = field(default_factory=list)
    decomposed: list[Decomposed] = field(default_factory=list)
    end_to_end: EndToEnd | None = None
    timings: Timings = field(default_factory=Timings)
    notes: list[str] = field(default_factory=list)
    error: str = ""
    folder: Path | None = field(default=None, compare=False, metadata={"json": False})

    def to_json(self) -> str:
        """The text of `report.json`: strict JSON, keys in the order of the classes above."""
        content = {"schema": SCHEMA, "version": VERSION, **_plain(self)}
        return json.dumps(content, indent=1, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str, *, place: str = "report.json") -> RunReport:
        """Read `to_json`'s text. `ConfigError` names the place and key that is not as documented."""
        try:
            content = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(f"not a JSON text: {error}", place=place, remedy="run the compilation again") from None
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise ConfigError(f"not a {SCHEMA} file", place=place, remedy="give the report.json of a k3rewrite run")
        version = content.get("version")
        if version != VERSION or isinstance(version, bool):
            raise ConfigError(
                f"report version {version!r} is not known; this k3rewrite reads version {VERSION}",
                place=place,
                remedy="read it with the k3rewrite that wrote it, or run the compilation again",
            )
        try:
            report: RunReport = fit(content, RunReport)
        except Misfit as error:
            where = f"{place} at {error.path.lstrip('.')}" if error.path else place
            raise ConfigError(
                f"expected {error.expected}, found {error.found}", place=where, remedy="run the compilation again"
            ) from None
        return report


def _plain(value: Any) -> Any:
    """Dataclasses, tuples and paths as JSON values; numbers that JSON lacks as NaN, Infinity, -Infinity in text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = [f for f in dataclasses.fields(value) if f.metadata.get("json", True)]
        return {f.name: _plain(getattr(value, f.name)) for f in kept}
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
