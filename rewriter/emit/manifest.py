"""`kernels/<target>/manifest.json`: which kernels stand in a folder, what they need and where they ran.

    {"schema": "k3rewrite-kernels", "version": 1, "target": "mi355x", "arch": "gfx950", "kernels": [{...}, ...]}

Entries are in order of name. A unit that several sites share has one entry with all their source lines. A reader takes
any version-1 file and ignores keys that it does not know.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3rewrite.emit.files import write_files
from k3rewrite.emit.unit import EmittedKernel
from k3rewrite.errors import ConfigError
from k3rewrite.plain_data.typed import Misfit, fit
from k3rewrite.targets.target import Target

SCHEMA = "k3rewrite-kernels"
VERSION = 1
FILE_NAME = "manifest.json"


@dataclass(frozen=True)
class ManifestEntry:
    """One kernel. Paths are relative to the manifest's folder, "" where there is no such file.

    `bound` are the names under which the rewritten graph calls the kernel, `provenance` the model's source lines.
    `executed` says where this source ran: a device name, "reference" or "no". Figures are None, and
    `skipped` holds the reason, where this machine had no compiler for it. `occupancy` is in waves (warps) a SIMD
    (scheduler); sizes are bytes; `lds_bytes` is what the kernel asks for, `lds_allocated` what the hardware takes.
    """

    op: str
    target: str
    name: str
    language: str
    kernel: str
    symbol: str
    source: str
    source_hash: str
    compiler: str
    assembly: str = ""
    object: str = ""
    executed: str = "no"
    registers: int | None = None
    agprs: int | None = None
    sgprs: int | None = None
    spills: int | None = None
    scratch_bytes: int | None = None
    lds_bytes: int | None = None
    lds_allocated: int | None = None
    threads: int | None = None
    occupancy: float | None = None
    workgroups_per_cu: int | None = None
    occupancy_limited_by: str = ""
    compile_seconds: float = 0.0
    skipped: str = ""
    provenance: tuple[str, ...] = field(default_factory=tuple)
    bound: tuple[str, ...] = field(default_factory=tuple)


def manifest_entry(emitted: EmittedKernel, folder: Path, executed: str = "no") -> ManifestEntry:
    """The entry of one emitted kernel in the manifest of `folder`."""

    def relative(path: Path | None) -> str:
        return Path(os.path.relpath(path, folder)).as_posix() if path else ""

    figures: dict[str, Any] = {}
    if needs := emitted.resources:
        names = ("registers", "agprs", "sgprs", "spills", "scratch_bytes", "lds_bytes", "lds_allocated", "threads")
        figures = {name: getattr(needs, name) for name in names}
        figures["occupancy"] = needs.occupancy.waves_per_simd
        figures["workgroups_per_cu"] = needs.occupancy.workgroups_per_cu
        figures["occupancy_limited_by"] = needs.occupancy.limited_by
    return ManifestEntry(
        op=emitted.provenance.op,
        target=emitted.target,
        name=emitted.name,
        language=emitted.language,
        kernel=emitted.provenance.kernel,
        symbol=emitted.symbol,
        source=relative(emitted.source),
        source_hash=emitted.source_hash,
        compiler=emitted.compiler,
        assembly=relative(emitted.assembly),
        object=relative(emitted.object),
        executed=executed,
        compile_seconds=round(emitted.compile_seconds, 3),
        skipped=emitted.skipped,
        provenance=emitted.provenance.sites,
        bound=emitted.provenance.bound,
        **figures,
    )


def write_manifest(
    folder: Path, target: Target, emitted: Iterable[EmittedKernel], executed: dict[str, str] | None = None
) -> tuple[ManifestEntry, ...]:
    """Write `folder/manifest.json` for the kernels, in order of name; the entries.

    `executed` maps names of kernels to where they ran. An existing manifest is replaced as a whole.
    """
    entries: dict[str, ManifestEntry] = {}
    for kernel in emitted:
        entry = manifest_entry(kernel, folder, (executed or {}).get(kernel.name, "no"))
        if earlier := entries.get(entry.name):
            lines = tuple(dict.fromkeys(earlier.provenance + entry.provenance))
            bound = tuple(dict.fromkeys(earlier.bound + entry.bound))
            seconds = max(earlier.compile_seconds, entry.compile_seconds)
            entry = dataclasses.replace(entry, provenance=lines, bound=bound, compile_seconds=seconds)
        entries[entry.name] = entry
    ordered = tuple(entries[name] for name in sorted(entries))
    content = {
        "schema": SCHEMA,
        "version": VERSION,
        "target": target.name,
        "arch": target.arch,
        "kernels": [dataclasses.asdict(entry) for entry in ordered],
    }
    write_files(folder, {FILE_NAME: (json.dumps(content, indent=2) + "\n").encode()}, keep=False)
    return ordered


def read_manifest(path: Path) -> tuple[ManifestEntry, ...]:
    """The entries of a manifest file, or of the one in a folder. `ConfigError` if it is not a version-1 manifest."""
    path = path / FILE_NAME if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot be read as JSON: {error}", place=str(path), remedy="emit the kernels again"
        ) from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or content.get("version") != VERSION:
        raise ConfigError(f"not a {SCHEMA} file of version {VERSION}", place=str(path), remedy="emit the kernels again")
    try:
        return fit(content.get("kernels"), tuple[ManifestEntry, ...])  # type: ignore[no-any-return]
    except Misfit as misfit:
        raise ConfigError(f"kernels{misfit}", place=str(path), remedy="emit the kernels again") from None
