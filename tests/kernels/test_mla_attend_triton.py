"""k3::mla_attend: its meaning, the rules of parts and tiles, and the Triton kernels without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreting import results_of
from mla_cases import FP8, errors, make_call

from k3rewrite.emit import Provenance, emit_unit
from k3rewrite.kernels.mla_attend.kernel import KERNELS
from k3rewrite.kernels.mla_attend.op import mla_attend
from k3rewrite.kernels.mla_attend.splits import FILLED, MOST_PARTS, SHORTEST_PART, parts_for
from k3rewrite.kernels.mla_attend.tiles import tile_for
from k3rewrite.targets import load_target

pytest.importorskip("triton")
(KERNEL,) = KERNELS
BOUNDS = {"fp32": 3e-6, "fp16": 3e-6}
NARROW = 3e-2
"""of the largest output, which the interpreter cuts off in bf16"""


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = results_of("mla_attend_interpreted.py")
    assert len(results) == 18
    return results


def test_near_fp64(interpreted: dict[str, dict[str, float]]) -> None:
    for name, found in interpreted.items():
        assert found["out"] <= BOUNDS.get(name, NARROW) and found["lse"] <= 5e-6, name


def test_what_sees_nothing_gives_zeros_and_no_weight(interpreted: dict[str, dict[str, float]]) -> None:
    """Also parts behind the end of a row; pages that are not there or that nobody sees hold NaN."""
    assert all(found["unseen"] == 0 for found in interpreted.values()), interpreted


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_meaning_itself(data: st.DataObject) -> None:
    """Against the definition, query by query: any lengths, windows, pages, pages that are not there."""
    rows, tokens = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(-1, 20), min_size=rows, max_size=rows))
    pages, page = 6, data.draw(st.sampled_from([4, 7]))
    missing = [
        (row, i)
        for row, length in enumerate(lengths)
        for i in range(-(-max(length + tokens - 1, 0) // page) if length > 0 else 0)
        if data.draw(st.booleans())
    ]
    call = make_call(lengths, tokens, 2, 16, 16, page=page, pages=pages, dtype=torch.float64, missing=missing)
    found = errors(mla_attend(**call), call)
    assert found["out"] <= 1e-12 and found["lse"] <= 1e-12 and found["unseen"] == 0, found


def test_parts() -> None:
    """One request fills the device; many need no parts; no part is shorter than is worth it."""
    one = parts_for(1, 128 * 1024, 132)
    assert 0.85 * 132 <= one <= 132 and parts_for(1, 1024, 132) == 4 and parts_for(1, 100, 132) == 1
    assert parts_for(132, 128 * 1024, 132) == parts_for(500, 128 * 1024, 132) == parts_for(0, 5, 132) == 1
    assert MOST_PARTS * FILLED <= parts_for(1, 10**7, 10**4) <= MOST_PARTS


@given(groups=st.integers(1, 300), context=st.integers(1, 200_000), units=st.sampled_from([104, 132, 148, 256, 304]))
def test_parts_fill_the_device(groups: int, context: int, units: int) -> None:
    parts = parts_for(groups, context, units)
    most = min(MOST_PARTS, -(-context // SHORTEST_PART))
    assert 1 <= parts <= max(1, most)
    if groups < FILLED * units:
        filled = [groups * n / (-(-groups * n // units) * units) for n in range(1, most + 1)]
        assert filled[parts - 1] >= FILLED * max(filled)


def test_tiles() -> None:
    """12 heads are as many as 16; AMD's tiles are narrower."""
    assert tile_for(12, "sm_90") == tile_for(16, "sm_90") != tile_for(17, "sm_90") == tile_for(96 * 8, "sm_90")
    assert [tile_for(n, "gfx950").keys for n in (12, 96)] == [32, 16]


@pytest.mark.parametrize("target", ["mi355x", "mi325x", "h200", "b200"])
@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "fp8"), [(1, 1, 12, False), (8, 4, 12, False), (160, 1, 16, True), (1, 1, 96, False)]
)
def test_compiled_for_every_target(target: str, rows: int, tokens: int, heads: int, fp8: bool, tmp_path: Path) -> None:
    """No spills; a part of the LDS; keys by loads that do not wait (NVIDIA), products on matrix units."""
    goal = load_target(target)
    call = make_call([3] * rows, tokens, heads, 512, 64, page=64, cache_dtype=FP8 if fp8 else None)
    call["table"] = call["table"][:, :1].repeat(1, 512)
    assert KERNEL.accepts(call, goal) is None
    units = KERNEL.units(call, goal)
    assert [unit.symbol for unit in units] == ["mla_attend_part", *["mla_attend_merge"] * (rows < 160)] or rows == 160
    for unit in units:
        made = emit_unit(unit, goal, tmp_path, "mla_attend", Provenance("mla_attend", KERNEL.name))
        if made.object is None:
            pytest.skip(made.skipped)
        assert made.resources is not None and made.assembly is not None
        assert made.resources.spills == 0, unit.symbol
        assert made.resources.lds_bytes <= (112 if goal.vendor == "nvidia" else 48) * 1024, unit.symbol
        if unit.symbol == "mla_attend_part":
            text = made.assembly.read_text()
            assert ("mfma" if goal.vendor == "amd" else "mma.") in text
            assert goal.vendor == "amd" or "cp.async" in text


def test_what_it_does_not_take() -> None:
    h200, call = load_target("h200"), make_call([5, 9], 1, 2)
    assert KERNEL.accepts(call, h200) is None and KERNEL.cost_us(call, h200) > 0
    assert KERNEL.accepts(call, load_target("cpu")) == "target cpu runs the reference"
    query, cache = call["query"], call["cache"]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"query": query.double()}, "query is float64"),
        ({"cache": cache.half()}, "query is bfloat16, and the cache float16"),
        ({"cache": cache.to(FP8)}, "a cache of fp8 has a scale"),
        ({"cache_scale": torch.ones(1)}, "another has none"),
        ({"cache": cache.to(FP8), "cache_scale": torch.ones(2)}, "is not one float32"),
        ({"out_dtype": torch.float64}, "out_dtype is float64"),
        ({"lengths": call["lengths"].to(torch.int16)}, "lengths is int16"),
        ({"query": query.transpose(2, 3).contiguous().transpose(2, 3)}, "query is not contiguous"),
        ({"value_size": 24}, "values of 24 and 24 more numbers of a key"),
        ({"cache": cache.to(FP8), "cache_scale": torch.ones(1), "query": query.repeat(1, 1, 9, 1)}, "18 queries a row"),
        ({"value_size": 48}, "values of 48 and 0 more numbers of a key"),
    ]
    for change, reason in changes:
        assert reason in str(KERNEL.accepts(call | change, h200)), change
