"""The width of a verify tile: published on 256 compute units of 64 lanes, a rule for all others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rewrite.kernels.kda_verify.tiles import PUBLISHED, RULES, Tile, TileRule, tile_for, tiles_of
from k3rewrite.targets import load_target


@pytest.mark.parametrize(
    ("head_sequences", "width", "waves"),
    [(1, 4, 1), (12, 4, 1), (24, 4, 1), (25, 8, 1), (36, 8, 1), (96, 8, 1), (97, 32, 4), (3072, 32, 4)],
)
def test_as_published_on_mi355x(head_sequences: int, width: int, waves: int) -> None:
    goal = load_target("mi355x")
    tile = tile_for(head_sequences, 128, goal.arch, goal.compute_units, goal.wave_size)
    assert (tile.width, tile.waves) == (width, waves)


@pytest.mark.parametrize(
    ("units", "wave", "narrowest", "narrow"), [(132, 32, 24, 99), (304, 64, 28, 114), (64, 64, 6, 24)]
)
def test_by_lanes_of_other_machines(units: int, wave: int, narrowest: int, narrow: int) -> None:
    """The same lanes a compute unit: a machine of half as many lanes a wave takes twice as many waves."""
    widths = [PUBLISHED.tile(count, 128, units, wave).width for count in range(1, 200)]
    assert (widths.count(4), widths.count(4) + widths.count(8)) == (narrowest, narrow)


@given(st.integers(1, 4096), st.sampled_from([16, 32, 64, 128]), st.sampled_from([132, 256, 304]))
def test_never_wider_for_fewer_heads_and_never_wider_than_a_head(count: int, size: int, units: int) -> None:
    here, more = (PUBLISHED.tile(n, size, units, 64) for n in (count, count + 1))
    assert here.width <= more.width <= size
    assert here in tiles_of(size, "gfx950")


def test_a_measured_rule_takes_the_place_of_the_published() -> None:
    """`RULES` may name an architecture; what it says is what is taken."""
    own = TileRule(((Tile(16, 2), 640),), Tile(64, 4))
    assert own.tile(10, 128, 8, 64) == Tile(64, 4) and own.tile(5, 128, 8, 64) == Tile(16, 2)
    for arch, rule in RULES.items():
        assert tile_for(1, 128, arch, 132, 32) == rule.narrow[0][0]
