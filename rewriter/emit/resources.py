"""Registers, spills, LDS and occupancy of a kernel, read from its compiled object. No GPU is needed.

    AMD      the metadata note of the .hsaco (MessagePack; LLVM, "AMDGPU usage", code object metadata)
    NVIDIA   the .nv.info sections of the .cubin, and the size of .nv.shared.<kernel>

NVIDIA's objects do not tell a spilled register from an array in local memory; both count as spills there, so 0 means
that there are none of either.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from k3rewrite.emit.elf import Section, read_notes, read_sections, symbol_names
from k3rewrite.emit.occupancy import Occupancy, occupancy
from k3rewrite.errors import EmitError, UnsupportedError
from k3rewrite.targets.target import Target

_AMDGPU_METADATA = 32
_NV_FRAME_SIZE, _NV_REGISTERS, _NV_MAX_THREADS, _NV_REQUIRED_THREADS = 0x11, 0x2F, 0x05, 0x10
_NV_SIZED, _NV_RESERVED_SHARED_SINCE = 0x04, 90


@dataclass(frozen=True)
class Resources:
    """What one kernel needs. `registers` counts all vector registers of a thread, AGPRs included."""

    registers: int
    agprs: int
    sgprs: int
    spills: int
    """registers kept in memory (vector and scalar), each counted once"""
    scratch_bytes: int
    """private memory of one thread"""
    lds_bytes: int
    """as asked for, static and dynamic together"""
    lds_allocated: int
    """as the hardware allocates it for one workgroup, with what the system reserves"""
    threads: int
    """of one workgroup"""
    occupancy: Occupancy


def read_resources(content: bytes, target: Target, symbol: str, *, threads: int = 0, dynamic_lds: int = 0) -> Resources:
    """The needs of kernel `symbol` in a .hsaco or .cubin.

    `threads` of a workgroup is taken from the object where it is 0; `dynamic_lds` is the LDS that a launch asks for
    beside what the object declares. `EmitError` if the object is damaged or has no such kernel.
    """
    if not target.is_gpu:
        raise UnsupportedError("the CPU has no objects", place=f"target {target.name}", remedy="name a GPU target")
    try:
        sections = read_sections(content)
        raw = _amd(sections, symbol) if target.vendor == "amd" else _nvidia(sections, symbol, target)
    except (ValueError, TypeError, LookupError, AttributeError, struct.error) as error:
        raise EmitError(
            f"a damaged object: {error}", place=f"kernel {symbol}", remedy="emit the kernel again"
        ) from None
    threads = threads or raw.threads
    lds = raw.lds + dynamic_lds
    if threads < 1 or min(dataclasses.astuple(raw)) < 0:
        raise EmitError(
            "the object does not say how many threads a workgroup has",
            place=f"kernel {symbol}",
            remedy="declare the kernel with K3_KERNEL(threads)",
        )
    return Resources(
        registers=raw.registers,
        agprs=raw.agprs,
        sgprs=raw.sgprs,
        spills=raw.spills,
        scratch_bytes=raw.scratch,
        lds_bytes=lds,
        lds_allocated=target.allocated_lds(lds),
        threads=threads,
        occupancy=occupancy(target, threads=threads, registers=raw.registers, scalars=raw.sgprs, lds_bytes=lds),
    )


@dataclass(frozen=True)
class _Raw:
    registers: int
    agprs: int
    sgprs: int
    spills: int
    scratch: int
    lds: int
    threads: int


def _amd(sections: tuple[Section, ...], symbol: str) -> _Raw:
    import msgpack

    kernels: list[dict[str, Any]] = []
    for note in read_notes(sections):
        if note.owner == "AMDGPU" and note.kind == _AMDGPU_METADATA:
            kernels += msgpack.unpackb(note.data, raw=False, strict_map_key=False).get("amdhsa.kernels", [])
    kernel = next((entry for entry in kernels if entry[".name"] == symbol), None)
    if kernel is None:
        raise _no_kernel(symbol, [str(entry[".name"]) for entry in kernels])
    return _Raw(
        registers=kernel[".vgpr_count"],
        agprs=kernel.get(".agpr_count", 0),
        sgprs=kernel[".sgpr_count"],
        spills=kernel.get(".vgpr_spill_count", 0) + kernel.get(".sgpr_spill_count", 0),
        scratch=kernel[".private_segment_fixed_size"],
        lds=kernel[".group_segment_fixed_size"],
        threads=kernel[".max_flat_workgroup_size"],
    )


def _nvidia(sections: tuple[Section, ...], symbol: str, target: Target) -> _Raw:
    by_name = {section.name: section for section in sections}
    if f".text.{symbol}" not in by_name:
        raise _no_kernel(symbol, [name.removeprefix(".text.") for name in by_name if name.startswith(".text.")])
    names = symbol_names(sections)
    figures: dict[int, int] = {}
    for kind, value in _nv_attributes(by_name[".nv.info"].data):
        if kind in (_NV_REGISTERS, _NV_FRAME_SIZE) and len(value) == 8:
            index, figure = struct.unpack("<II", value)
            if names[index] == symbol:
                figures[kind] = figure
    threads = 0
    for kind, value in _nv_attributes(by_name[f".nv.info.{symbol}"].data):
        if kind in (_NV_MAX_THREADS, _NV_REQUIRED_THREADS) and len(value) == 12:
            x, y, z = struct.unpack("<III", value)
            threads = x * y * z
    shared = by_name.get(f".nv.shared.{symbol}")
    static = shared.size if shared else 0
    if static and int(target.arch.removeprefix("sm_")) >= _NV_RESERVED_SHARED_SINCE:
        static -= target.lds_reserved_per_workgroup  # the section begins with what the system reserves
    frame = figures.get(_NV_FRAME_SIZE, 0)
    return _Raw(figures[_NV_REGISTERS], 0, 0, frame // 4, frame, static, threads)


def _nv_attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) pairs of a .nv.info section: a format byte, an attribute byte, a size and its bytes."""
    at = 0
    while at + 4 <= len(data):
        form, kind, size = struct.unpack_from("<BBH", data, at)
        if form == _NV_SIZED:
            yield kind, data[at + 4 : at + 4 + size]
            at += 4 + size
        else:
            yield kind, data[at + 2 : at + 4]
            at += 4


def _no_kernel(symbol: str, there: list[str]) -> EmitError:
    return EmitError(
        f"the object has no kernel '{symbol}'; it has: {', '.join(sorted(there)) or 'none'}",
        place="compiled object",
        remedy='the unit\'s symbol must be the name of an extern "C" kernel in its source',
    )
