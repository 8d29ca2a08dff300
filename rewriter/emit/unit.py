"""Compile one unit for one target and write what came of it.

    attn_res_norm_0a1b2c3d4e5f6071.py      the source, complete in itself (.hip for HIP C++)
    attn_res_norm_0a1b2c3d4e5f6071.s       the assembly (.ptx for NVIDIA)
    attn_res_norm_0a1b2c3d4e5f6071.hsaco   the object (.cubin for NVIDIA)

Each text begins with a header: operation, kernel, model lines, target, source hash. The name holds a hash of the
source, what it was compiled for and by what, so an object of that name that is already there is the same one and is
kept. Files appear complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3rewrite.emit.compiler import Compiled, Missing, defines_text, find_compiler, place_of
from k3rewrite.emit.files import write_files
from k3rewrite.emit.resources import Resources, read_resources
from k3rewrite.emit.source import is_triton_function, triton_source, unit_source, unit_source_hash
from k3rewrite.errors import EmitError
from k3rewrite.ops.kernel import HipUnit, Unit
from k3rewrite.targets.target import Target

_STEM = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SOURCE_SUFFIX = {"triton": ".py", "hip": ".hip"}
_SUFFIXES = {"amd": (".s", ".hsaco"), "nvidia": (".ptx", ".cubin")}


@dataclass(frozen=True)
class Provenance:
    """What a kernel stands for: the op, the name of its `Kernel`, and the model's source lines that it computes.

    `bound` are the names under which the rewritten graph calls it ("k3_kernels.attn_res_norm__triton_h200_1f0c...").
    """

    op: str
    kernel: str
    sites: tuple[str, ...] = ()
    bound: tuple[str, ...] = ()


@dataclass(frozen=True)
class EmittedKernel:
    """One unit on disk. Without a compiler on this machine `skipped` says why, and there is only the source."""

    name: str
    symbol: str
    language: str
    target: str
    provenance: Provenance
    source: Path
    assembly: Path | None
    object: Path | None
    source_hash: str
    compiler: str
    compile_seconds: float
    """0 without a compiler; little where Triton had it in its own cache"""
    resources: Resources | None
    skipped: str = ""


def emit_unit(unit: Unit, target: Target, folder: Path, stem: str, provenance: Provenance) -> EmittedKernel:
    """Compile `unit` for `target` into `folder` (made if it is not there), under the name `<stem>_<content hash>`.

    `stem` is the op's name. `EmitError`, naming kernel, target and the compiler's message, if the unit does not
    compile, needs more than the target has, or the target is the CPU; nothing is written then.
    """
    place = place_of(unit, target)
    if target.vendor not in _SUFFIXES:
        raise EmitError(
            f"the target '{target.name}' has no kernels to compile",
            place=place,
            remedy="the CPU runs the references; name a GPU target to emit kernels",
        )
    if not _STEM.fullmatch(stem):
        raise EmitError(f"'{stem}' cannot begin a file name", place=place, remedy="use the op's name as the stem")
    compiler = find_compiler(unit, target)
    identity = "none" if isinstance(compiler, Missing) else compiler.identity
    text, source_hash = unit_source(unit), unit_source_hash(unit)
    if isinstance(unit, HipUnit):
        text = defines_text(unit) + text
    name = unit_name(unit, target, stem, identity)
    header = _header(unit, target, provenance, source_hash, identity)
    source = folder / (name + _SOURCE_SUFFIX[unit.language])
    files = {source.name: (_commented(header, "#" if unit.language == "triton" else "//") + text).encode()}
    assembly: Path | None = None
    binary: Path | None = None
    resources: Resources | None = None
    seconds = 0.0
    if not isinstance(compiler, Missing):
        started = time.perf_counter()
        compiled = compiler.compile(unit, target, text)
        seconds = time.perf_counter() - started
        resources = _fitting_resources(compiled, unit, target)
        assembly, binary = (folder / (name + suffix) for suffix in _SUFFIXES[target.vendor])
        comment = ";" if target.vendor == "amd" else "//"
        files[assembly.name] = (_commented(header, comment) + compiled.assembly).encode()
        files[binary.name] = compiled.object
    write_files(folder, files, keep=True)
    return EmittedKernel(
        name=name,
        symbol=unit.symbol,
        language=unit.language,
        target=target.name,
        provenance=provenance,
        source=source,
        assembly=assembly,
        object=binary,
        source_hash=source_hash,
        compiler=identity,
        compile_seconds=seconds,
        resources=resources,
        skipped=compiler.reason if isinstance(compiler, Missing) else "",
    )


def unit_name(unit: Unit, target: Target, stem: str, compiler: str) -> str:
    """`<stem>_<16 hexadecimal digits>` of everything that decides the object: the same in every process."""
    content: dict[str, Any] = {
        "source": unit_source_hash(unit),
        "symbol": unit.symbol,
        "target": [target.name, target.arch],
        "compiler": compiler,
        "fp_fusion": unit.fp_fusion,
        **_compiled_for(unit),
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"{stem}_{digest[:16]}"


def _compiled_for(unit: Unit) -> dict[str, Any]:
    """What a unit fixes beside its source, as plain data."""
    if isinstance(unit, HipUnit):
        return {"defines": {key: str(value) for key, value in unit.defines.items()}, "dynamic_lds": unit.dynamic_lds}
    return {
        "signature": dict(unit.signature),
        "constants": {key: _constant(value) for key, value in unit.constants.items()},
        "aligned": sorted(unit.aligned),
        "num_warps": unit.num_warps,
        "num_stages": unit.num_stages,
        "options": {key: repr(value) for key, value in unit.options.items()},
    }


def _constant(value: Any) -> str:
    """A constexpr value as text: a function by its source, all else as Python writes it (1, 1.0 and True differ)."""
    return triton_source(value) if is_triton_function(value) else repr(value)


def _fitting_resources(compiled: Compiled, unit: Unit, target: Target) -> Resources:
    """The object's needs. `EmitError` if not even one workgroup fits a compute unit of the target."""
    resources = read_resources(
        compiled.object, target, unit.symbol, threads=compiled.threads, dynamic_lds=compiled.dynamic_lds
    )
    if resources.occupancy.workgroups_per_cu == 0:
        raise EmitError(
            f"a workgroup needs more {resources.occupancy.limited_by} than a compute unit has: {resources.threads} "
            f"threads, {resources.registers} registers a thread, {resources.lds_bytes} bytes of LDS",
            place=place_of(unit, target),
            remedy="make the tiles smaller, or bind another kernel",
        )
    return resources


def _header(unit: Unit, target: Target, provenance: Provenance, source_hash: str, compiler: str) -> list[str]:
    lines = [
        f"op:       {provenance.op}",
        f"kernel:   {provenance.kernel} ({unit.language}), function {unit.symbol}",
        f"target:   {target.name} ({target.arch})",
        f"compiler: {compiler}, floating-point fusion {'on' if unit.fp_fusion else 'off'}",
        f"source:   {source_hash}",
        *(f"{key}: {value}" for key, value in _compiled_for(unit).items() if value),
    ]
    return [*lines, *(f"computes: {site}" for site in provenance.sites)]


def _commented(lines: Sequence[str], comment: str) -> str:
    text = [part for line in lines for part in line.splitlines()]
    return "".join(f"{comment} {line}\n" for line in text) + "\n"
