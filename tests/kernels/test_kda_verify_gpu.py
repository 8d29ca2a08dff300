"""The kernels of k3::kda_verify on a GPU against fp64: heads, windows, tiles, ragged, null rows, replay of a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kda_verify_cases import POOLS, errors, make_call

from k3rewrite.kernels.kda_verify import hip_kernel
from k3rewrite.kernels.kda_verify.hip_kernel import Layout
from k3rewrite.kernels.kda_verify.launch import kda_verify
from k3rewrite.kernels.kda_verify.tiles import Tile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
NARROW, FULL = 4e-3, 1e-2
"""relative errors of a bf16 output: convolution and recurrence in fp32, or rounded to bf16"""


def accepted(rows: int, tokens: int) -> list[int]:
    return [1 + (3 * row) % tokens for row in range(rows)]


@pytest.mark.parametrize(("heads", "rows"), [(12, 1), (12, 5), (12, 32), (96, 1)])
@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_the_target_s_own_tiles(heads: int, rows: int, tokens: int) -> None:
    null = (rows - 1,) if rows > 1 else ()
    call = make_call(accepted(rows, tokens), tokens, heads, 128, null=null, by_tap=tokens == 2, device="cuda")
    found = errors(kda_verify(**call), call)
    assert found["out"] <= NARROW and found["state"] <= 1e-4
    assert (found["line"], found["untouched"], found["null"]) == (0, 0, 0)


@pytest.mark.parametrize(
    "tile", [Tile(4, 1, 8), Tile(4, 1), Tile(8, 1, 4), Tile(8, 2), Tile(16, 4), Tile(32, 4)], ids=str
)
@pytest.mark.parametrize("inner", [torch.float32, torch.bfloat16])
def test_every_tile(tile: Tile, inner: torch.dtype) -> None:
    call = make_call([2, 4, 1], 4, 3, 128, holes=True, inner=inner, ids=torch.int32, activation="silu", device="cuda")
    found = errors(kda_verify(**call, tile=tile), call)
    assert found["out"] <= (NARROW if inner is torch.float32 else FULL) and found["state"] <= 1e-2
    assert (found["line"], found["untouched"], found["null"]) == (0, 0, 0)


@pytest.mark.parametrize("tile", [None, Tile(32, 4)], ids=str)
@pytest.mark.parametrize("null_slot", [True, False])
def test_windows_of_several_lengths(tile: Tile | None, null_slot: bool) -> None:
    call = make_call(
        [2, 8, 1, 3, 5], 8, 12, 128, lengths=[8, 0, 1, 5, 2], null_slot=null_slot, null=(3,) * null_slot, device="cuda"
    )
    found = errors(kda_verify(**call, tile=tile), call)
    assert found["out"] <= NARROW and found["state"] <= 1e-4
    assert (found["line"], found["untouched"], found["null"]) == (0, 0, 0)


@pytest.mark.parametrize(("heads", "rows", "layout"), [
    (12, 1, None), (12, 3, None), (12, 32, None), (96, 1, None), (12, 2, Layout(8, 4, True)),
    (12, 2, None), (12, 2, Layout(4, 4, True)), (12, 2, Layout(2, 16, True)), (12, 2, Layout(1, 16, True)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_the_hip_source(heads: int, rows: int, layout: Layout | None, tokens: int) -> None:
    if layout is not None and layout.split > 1 and torch.version.hip:
        pytest.skip("AMD has no clusters")
    null = (rows - 1,) if rows > 1 else ()
    for inner, lengths in ((torch.float32, None), (torch.bfloat16, [1 + row % tokens for row in range(rows)])):
        call = make_call(
            accepted(rows, tokens),
            tokens,
            heads,
            128,
            null=null,
            by_tap=False,
            inner=inner,
            lengths=lengths,
            device="cuda",
        )
        found = errors(hip_kernel.kda_verify(**call, layout=layout), call)
        assert found["out"] <= (NARROW if inner is torch.float32 else FULL), lengths
        assert found["state"] <= (1e-4 if inner is torch.float32 else 1e-2), lengths
        assert (found["line"], found["untouched"], found["null"]) == (0, 0, 0), lengths


@pytest.mark.parametrize("run", [kda_verify, hip_kernel.kda_verify], ids=["triton", "hip"])
def test_many_windows_of_a_captured_graph(run: Any) -> None:
    """Captured once; each replay reads the tables and columns of its step. Null rows come and go."""
    call = make_call([2, 4, 1], 4, 12, 128, by_tap=False, device="cuda")
    held = {name: call[name].clone() for name in POOLS}
    eager = {name: value.clone() for name, value in held.items()}
    run(**call | {name: value.clone() for name, value in held.items()}, in_place=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(**call | held, in_place=True)
    tables = call["table"].clone()
    for order, offsets in (([0, 1, 2], [3, 0, 2]), ([2, 0, 1], [0, 1, 3]), ([1, 2, 0], [2, 2, 1])):
        table = tables[torch.tensor(order, device="cuda")]
        offset = torch.tensor(offsets, device="cuda").view(3, 1)
        table[offsets[0] % 3] = 0
        call["table"].copy_(table)
        call["start"].copy_(table.gather(1, offset).squeeze(1))
        call["history"].copy_(offset + torch.arange(3, device="cuda"))
        graph.replay()
        now = call | {name: value.clone() for name, value in eager.items()}
        expected = run(**call | eager, in_place=True)
        assert torch.equal(out, expected)
        assert all(torch.equal(held[n].nan_to_num(7.0), eager[n].nan_to_num(7.0)) for n in POOLS)
        found = errors((out, held["conv_state"], held["state"]), now)
        assert found["out"] <= NARROW and found["state"] <= 1e-4
        assert (found["line"], found["untouched"], found["null"]) == (0, 0, 0)


@pytest.mark.parametrize("rows", [1, 3])
def test_slots_that_the_kernel_before_writes(rows: int) -> None:
    """What a launch sees of them before that kernel has ended may be old: it is not what it goes by. `torch.add` lets
    nothing begin early, so most looks are right here; wrong ones are those of the emulation."""
    call = make_call(accepted(rows, 4), 4, 12, 128, by_tap=False, device="cuda")
    steps = []
    for step in range(6):
        table = call["table"].roll(step, 0).roll(step % 4, 1)
        offset = torch.full((rows, 1), step % 3, device="cuda")
        start = table.gather(1, offset).squeeze(1)
        steps.append({"table": table, "start": start, "history": offset + torch.arange(3, device="cuda")})
    eager = {name: call[name].clone() for name in POOLS}
    expected = [hip_kernel.kda_verify(**call | eager | step, in_place=True) for step in steps]
    held, given = ({name: call[name].clone() for name in names} for names in (POOLS, steps[0]))
    results = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            for name, value in step.items():
                torch.add(value, 0, out=given[name])
            results.append(hip_kernel.kda_verify(**call | held | given, in_place=True))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert all(torch.equal(held[n].nan_to_num(7.0), eager[n].nan_to_num(7.0)) for n in POOLS)
