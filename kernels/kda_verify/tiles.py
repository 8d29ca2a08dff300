"""How the values of a verify window are dealt out: the width of a tile from heads x sequences and the target.

A state has 128 values a head. One program for each makes few workgroups where there are few heads and sequences, and
each waits for its own memory; narrow tiles fill the machine, wide ones load keys and gates less often.

    heads x sequences    compute units      tile                        workgroups a compute unit
    <= 24                256 of 64 lanes    4 values, one wave          3
    <= 96                256                8 values, one wave          6
    more                 256                32 values, four waves

are the figures published for a recurrent kernel on an MI355X (vLLM #58045). As a rule: a tile of w values is taken as
long as its workgroups put no more than 48 w lanes on a compute unit. No target has a rule of its own. An H200 takes
this one too, and the HIP kernel before it: of 12 heads, the tile that the rule chooses is there up to 25 % slower than
the wide one (2 tokens of 4 sequences), or takes up to 25 % less time (8 tokens of 1), by the recurrence alone
(bench/results/kda_verify-h200.json).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True)
class Tile:
    """`width` values a program of so many waves."""

    width: int
    waves: int
    ready: int = 0
    """windows of one length and at most so many tokens are made ready before the first state is stored: as many as
    registers hold"""


@dataclass(frozen=True)
class TileRule:
    """`narrow`: tiles with the lanes that they may put on a compute unit, narrowest first; `wide` for all others."""

    narrow: tuple[tuple[Tile, int], ...]
    wide: Tile

    def tile(self, head_sequences: int, size: int, compute_units: int, wave_size: int) -> Tile:
        for tile, lanes in self.narrow:
            workgroups = head_sequences * -(-size // tile.width)
            if tile.width <= size and workgroups * tile.waves * wave_size <= lanes * compute_units:
                return tile
        return replace(self.wide, width=min(self.wide.width, size))


PUBLISHED = TileRule(((Tile(4, 1, ready=4), 192), (Tile(8, 1, ready=4), 384)), Tile(32, 4))
"""published on gfx950, in lanes a compute unit"""
RULES: Mapping[str, TileRule] = MappingProxyType({})
"""architecture -> its own; none has one yet"""


def tile_for(head_sequences: int, size: int, arch: str, compute_units: int, wave_size: int) -> Tile:
    """The tile for so many heads of all sequences together, of `size` values each."""
    return RULES.get(arch, PUBLISHED).tile(head_sequences, size, compute_units, wave_size)


def tiles_of(size: int, arch: str) -> tuple[Tile, ...]:
    """Every tile that some number of sequences gets: what to compile for a symbolic batch."""
    rule = RULES.get(arch, PUBLISHED)
    narrow = [tile for tile, _ in rule.narrow if tile.width <= size]
    return tuple(dict.fromkeys([*narrow, replace(rule.wide, width=min(rule.wide.width, size))]))
