"""How many queries and keys a workgroup multiplies at once, by target.

    queries of a row    gfx942, gfx950           elsewhere                 elsewhere, keys in fp8
    up to 16            16 x 32 keys, 4 waves    16 x 64 keys, 4 warps     16 x 32 keys, 8 warps
    more                32 x 16 keys, 8 waves    32 x 32 keys, 8 warps     (not taken: every tile spills)

Sums of 512 values a query are held in registers. These are the widest tiles of 16 and 32 queries that Triton 3.9
compiles without spills and within the shared memory of each; none was timed. With 64 queries every tile spills.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """`queries` by `keys`; `stages`: tiles of keys that are under way."""

    queries: int
    keys: int
    warps: int
    stages: int


_NVIDIA = (Tile(16, 64, 4, 2), Tile(32, 32, 8, 2))
_NVIDIA_FP8 = (Tile(16, 32, 8, 2), Tile(32, 16, 8, 2))
_AMD = (Tile(16, 32, 4, 2), Tile(32, 16, 8, 1))


def tile_for(queries: int, arch: str, *, fp8: bool = False) -> Tile:
    """`queries`: tokens x heads of a row; `fp8`: what the cache is in."""
    few, many = _AMD if arch.startswith("gfx") else _NVIDIA_FP8 if fp8 else _NVIDIA
    return few if queries <= few.queries else many
