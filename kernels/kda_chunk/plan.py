"""How a call of `k3::kda_chunk` is laid out on a target: tiles of values, warps, loads ahead, groups of chunks.

Grouping doubles the arithmetic of the scan and adds two launches, so that it pays only where the scan of whole rows
leaves compute units idle. The choice is made from shapes, when the op is called; how long rows really are is known on
the device alone, and groups that come out empty there do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_GROUPS = 32
FEWEST_CHUNKS = 4
"""of a group"""
FEWEST_GROUPS = 4
"""with fewer, what both passes cost is not won back"""


@dataclass(frozen=True)
class Plan:
    """Values of a program's state, groups of a row (1: one pass), and how the programs are compiled."""

    tile: int = 64
    groups: int = 1
    scan_warps: int = 4
    scan_stages: int = 3
    group_stages: int = 3
    prologue_warps: int = 8
    slab: int = 128
    """channels that the prologue takes at a time"""
    prologue_registers: int = 0
    """NVIDIA: upper bound of registers a thread of the prologue; 0: none. With 128 two programs fit an SM, which is
    worth more than the registers that spill then: 3 % on an H200."""
    order_tile: int = 16
    order_precision: str = "ieee"
    """of products of fp32 numbers: "tf32" where the target has it"""
    ptx: bool = False
    """NVIDIA: exponentials are single instructions"""


def groups_for(programs: int, chunks: int, compute_units: int) -> int:
    """Groups of each row, if `programs` scan rows of up to `chunks` chunks: as many as leave no compute unit with two
    programs, of at least 4 chunks each, at most 32; none at all (1) if that makes fewer than 4."""
    wanted = min(compute_units // max(1, programs), chunks // FEWEST_CHUNKS, MOST_GROUPS)
    return wanted if wanted >= FEWEST_GROUPS else 1


def plan_for(rows: int, heads: int, keys: int, values: int, chunks: int, arch: str, compute_units: int) -> Plan:
    """The plan of a call. `chunks`: of the longest row, as far as shapes tell. No tile of the groups' summaries, keys
    followed by values, has some of both."""
    tile = min(64, keys, values)
    groups = groups_for(rows * heads * (values // tile), chunks, compute_units)
    if arch.startswith("sm_"):
        return Plan(tile, groups, prologue_registers=128, ptx=True, order_precision="tf32")
    return Plan(tile, groups, scan_stages=1, group_stages=1, prologue_warps=4)
