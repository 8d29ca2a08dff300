"""Which path a number of tokens gets, and with which tiles: a small table for each architecture.

    routes    outputs are owned, and a route reads its expert's weights alone        few tokens
    experts   the routes of an expert share one read of its weights                  tokens begin to meet at experts
    sorted    routes are put in order of their experts first                         many tokens

The choice is made inside the launch, at run time, so that one compiled graph serves every batch size. Nothing is tuned
at run time: entries come from a sweep (`bench/experts.py --sweep`), or are marked as unmeasured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

Path = Literal["routes", "experts", "sorted"]
MAX_TOP_K = 32
MAX_EXPERTS = 2048
"""the widest row of counts that one program of the sorted path holds without spilling, on every target"""
LADDER = (128, 512, 1024)
"""numbers of ids that programs of the `experts` path are compiled for: few, as each is a compilation"""


@dataclass(frozen=True)
class Tiles:
    """One launch: rows of a weight matrix that a program owns, columns that it reads at a time."""

    rows: int
    columns: int
    num_warps: int
    stages: int = 1
    tokens: int = 16
    """routes (positions) of an expert that a program takes together; `experts` and `sorted`"""
    group: int = 1
    """experts of a token that a program of `down_tokens` reads at a time"""
    blocks: int = 1
    """tiles of rows that a program of `down_experts` takes one after the other"""


@dataclass(frozen=True)
class Schedule:
    """The launches of one path."""

    path: Path
    gate_up: Tiles
    down: Tiles


@dataclass(frozen=True)
class Table:
    """The schedules of an architecture.

    `share_from`: routes over the experts that they can be expected to hit, under uniform routing, from which on sharing
    a read pays. `sort_from`: routes from which on it costs less to sort ids than to look through all in every program;
    no program looks through more than the last of `LADDER`.
    """

    routes: Schedule
    experts: Schedule
    packed_experts: Schedule
    """`experts` for MX formats: numbers unpacked in registers leave fewer for the rest"""
    few: Schedule
    """sorted, for few positions an expert"""
    many: Schedule
    """sorted, for `many_from` positions an expert and more"""
    share_from: float = 1.12
    sort_from: int = LADDER[-1] + 1
    many_from: int = 48

    def __post_init__(self) -> None:
        assert self.sort_from <= LADDER[-1] + 1, "more ids than any program of the experts' path is compiled for"


# One H200, bf16, 128 experts of 768 x 2048 and 896 of 384 x 3584 (bench/experts.py --sweep): shared reads win from 8
# tokens on, of 128 experts from the first. `sorted` and the packed tiles are as they were guessed.
_NVIDIA = Table(
    routes=Schedule("routes", Tiles(4, 512, 4, 3), Tiles(8, 128, 4, 2, group=4)),
    experts=Schedule("experts", Tiles(64, 128, 4, 3), Tiles(64, 128, 4, 3, blocks=4)),
    packed_experts=Schedule("experts", Tiles(32, 128, 4, 3), Tiles(64, 128, 4, 3, blocks=4)),
    few=Schedule("sorted", Tiles(64, 64, 4, 3, tokens=32), Tiles(128, 64, 4, 3, tokens=32)),
    many=Schedule("sorted", Tiles(64, 64, 8, 3, tokens=128), Tiles(128, 64, 8, 3, tokens=128)),
    share_from=1.025,
)
# Not measured: MI300 and MI350 were not at hand.
_AMD = Table(
    routes=Schedule("routes", Tiles(4, 512, 4, 2), Tiles(8, 128, 4, 2, group=4)),
    experts=Schedule("experts", Tiles(32, 128, 4, 2), Tiles(64, 128, 4, 2)),
    packed_experts=Schedule("experts", Tiles(32, 128, 4, 2), Tiles(64, 128, 4, 2)),
    few=Schedule("sorted", Tiles(64, 64, 4, 2, tokens=32), Tiles(128, 64, 4, 2, tokens=32)),
    many=Schedule("sorted", Tiles(64, 64, 8, 2, tokens=128), Tiles(128, 64, 8, 2, tokens=128)),
)
_TABLES = MappingProxyType({"sm_90": _NVIDIA, "sm_100": _NVIDIA, "gfx942": _AMD, "gfx950": _AMD})


def schedule_for(arch: str, tokens: int, top_k: int, experts: int, inner: int, width: int, *, packed: bool) -> Schedule:
    """The schedule of `tokens` tokens with `top_k` of `experts` experts, of [width, inner] matrices, which are `packed`
    in an MX format or dense."""
    table, routes = _TABLES.get(arch, _NVIDIA), tokens * top_k
    if routes >= table.sort_from:
        chosen = table.many if routes >= table.many_from * experts else table.few
    elif routes >= table.share_from * expected_hits(routes, experts):
        chosen = table.packed_experts if packed else table.experts
    else:
        chosen = table.routes
    return fitted(chosen, inner, width)


def schedules_of(arch: str, inner: int, width: int, *, packed: bool) -> tuple[Schedule, ...]:
    """Every schedule that some number of tokens gets: what to compile for a symbolic batch."""
    table = _TABLES.get(arch, _NVIDIA)
    shared = table.packed_experts if packed else table.experts
    every = (table.routes, shared, table.few, table.many)
    return tuple(dict.fromkeys(fitted(schedule, inner, width) for schedule in every))


def expected_hits(routes: int, experts: int) -> float:
    """How many of `experts` experts are named by `routes` routes, if each names any of them alike."""
    return experts * (1.0 - (1.0 - 1.0 / experts) ** routes)


def step_of(columns: int) -> int:
    """The largest power of two that divides the columns: what a tile's columns can be at most."""
    return columns & -columns


def power_of_two(number: int) -> int:
    """The next power of two."""
    return 1 << max(0, number - 1).bit_length()


def fitted(schedule: Schedule, inner: int, width: int) -> Schedule:
    """The schedule for narrow or odd matrices: columns that divide them, no more rows than there are."""
    gate_up = replace(schedule.gate_up, columns=min(schedule.gate_up.columns, step_of(inner)))
    least = 1 if schedule.path == "routes" else 16
    gate_up = replace(gate_up, rows=min(gate_up.rows, max(least, power_of_two(width))))
    return replace(
        schedule,
        gate_up=gate_up,
        down=replace(schedule.down, columns=min(schedule.down.columns, step_of(width))),
    )
