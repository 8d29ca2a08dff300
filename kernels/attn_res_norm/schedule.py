"""Which schedule a call gets: a small table for each architecture, looked up with the real number of rows.

The choice is made inside the launch, at run time, so that one compiled graph serves every batch size. Nothing is tuned
at run time: the entries come from a sweep (`bench/attn_res_norm.py --sweep`), or are marked as unmeasured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

MAX_SOURCES = 16
MAX_COLUMNS = 16384


@dataclass(frozen=True)
class Schedule:
    """How one launch of `triton.py` is laid out."""

    resident: bool
    """all sources in registers; else streamed"""
    num_warps: int
    stages: int = 1
    """streamed: loads that run ahead, plus one"""
    programs_per_cu: int = 0
    """streamed: programs of a compute unit, each looping over rows; 0: one program a row"""
    max_registers: int = 0
    """NVIDIA: upper bound of registers a thread; 0: none"""
    dependent_launch: bool = False
    """NVIDIA, sm_90 and later: programmatic dependent launch (the launch overlaps the end of the kernel before it)"""


@dataclass(frozen=True)
class _Row:
    """`schedule` for at most `rows` rows (0: any number) and, if resident, for bf16 sources of `row_bytes` together."""

    rows: int
    row_bytes: int
    schedule: Schedule


_NINE_SOURCES = 9 * 8192 * 2
"""bytes of K3's largest row of sources, 9 of 7168 bf16, padded: what still fits in registers without spills"""

# Measured on an H200 (bench/attn_res_norm.py --sweep) at 9 sources of 7168 bf16: with at most one row a compute unit
# resident is faster (128 rows: 8.5 us against 10.4), with more rows streamed (512: 27.2 against 31.1).
_HOPPER = (
    _Row(132, _NINE_SOURCES, Schedule(resident=True, num_warps=16, dependent_launch=True)),
    _Row(0, 0, Schedule(resident=False, num_warps=4, stages=3, dependent_launch=True)),
)
# Not measured, only compiled. 9 sources spill two registers on sm_100.
_BLACKWELL = (
    _Row(148, _NINE_SOURCES * 8 // 9, Schedule(resident=True, num_warps=16, dependent_launch=True)),
    _Row(0, 0, Schedule(resident=False, num_warps=4, stages=3, dependent_launch=True)),
)
# Not measured, only compiled.
_CDNA = (
    _Row(256, _NINE_SOURCES, Schedule(resident=True, num_warps=8)),
    _Row(0, 0, Schedule(resident=False, num_warps=4, stages=2)),
)
_ANY = (_Row(0, 0, Schedule(resident=False, num_warps=8, stages=2)),)
_TABLES = MappingProxyType({"sm_90": _HOPPER, "sm_100": _BLACKWELL, "gfx950": _CDNA, "gfx942": _CDNA})


def schedule_for(arch: str, rows: int, sources: int, columns: int, dtype: torch.dtype) -> Schedule:
    """The schedule of a call with `rows` rows of `sources` sources of `columns` elements."""
    row_bytes = sources * padded(columns) * dtype.itemsize
    for entry in _TABLES.get(arch, _ANY):
        fits = not entry.schedule.resident or (dtype == torch.bfloat16 and row_bytes <= entry.row_bytes)
        if fits and (not entry.rows or rows <= entry.rows):
            return _narrowed(entry.schedule, columns)
    raise AssertionError("the last entry of a table takes every call")


def schedules_of(arch: str, sources: int, columns: int, dtype: torch.dtype) -> tuple[Schedule, ...]:
    """Every schedule that some number of rows gets, without repetition: what to compile for a symbolic batch."""
    ends = sorted({entry.rows for entry in _TABLES.get(arch, _ANY) if entry.rows})
    rows = [*ends, (ends[-1] if ends else 0) + 1]
    return tuple(dict.fromkeys(schedule_for(arch, count, sources, columns, dtype) for count in rows))


def padded(columns: int) -> int:
    """The next power of two: the width of a Triton block that holds a row."""
    return 1 << max(0, columns - 1).bit_length()


def wide_enough(columns: int, schedule: Schedule) -> bool:
    """Whether each lane has two neighbouring elements, as conversions two at a time need."""
    return padded(columns) >= 64 * schedule.num_warps


def _narrowed(schedule: Schedule, columns: int) -> Schedule:
    """Fewer warps for a row too short to give each lane eight elements."""
    fitting = max(1, padded(columns) // 256)
    if fitting >= schedule.num_warps:
        return schedule
    return replace(schedule, num_warps=fitting, max_registers=0)
