"""The AttnRes kernels on a GPU, against fp64, with poisoned memory: shapes, strides, modes, in place, graph replay."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from attn_res_cases import FEWEST, Case, make_case, relative_error, row_by_row

from k3rewrite.kernels.attn_res_norm import hip_kernel, launch
from k3rewrite.kernels.attn_res_norm.op import attn_res_norm
from k3rewrite.kernels.attn_res_norm.schedule import Schedule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

BF16 = FEWEST | {"out_dtype": torch.bfloat16}
EXACT = BF16 | {"mix_dtype": torch.bfloat16, "scale_dtype": torch.bfloat16}
BOUND = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 2e-6}
RESIDENT, STREAMED = Schedule(True, 16), Schedule(False, 4, 3)
LOOPING = Schedule(False, 8, 3, programs_per_cu=1)


def triton(schedule: Schedule | None) -> launch.MixRows:
    return functools.partial(launch.mix_rows, schedule=schedule)


def poison(case: Case) -> None:
    """Leave NaN in memory that the next allocations will get."""
    held = [torch.full_like(case.prefix, math.nan) for _ in range(3)]
    del held


def check(case: Case, mix: launch.MixRows, dtypes: dict[str, Any]) -> None:
    new = case.prefix + case.delta
    exact = row_by_row(new, case.chunk, case.score_norm, case.score_proj, case.norm_weight)
    before = case.bank.clone()
    poison(case)
    updated, normed = launch.add_attn_res_norm(case.prefix, case.delta, [case.chunk], *case.weights, **dtypes, mix=mix)
    assert torch.equal(updated, new)
    assert relative_error(normed, exact) <= BOUND[normed.dtype]
    bank, again = launch.write_attn_res_norm(
        case.prefix, case.delta, list(case.chunk.unbind(-2)), case.bank, case.count, *case.weights, **dtypes, mix=mix
    )
    assert torch.equal(again, normed) and torch.equal(bank[..., case.count, :], new)
    assert torch.equal(bank[..., : case.count, :], case.chunk)
    assert torch.equal(case.bank.nan_to_num(9.0), before.nan_to_num(9.0))
    prefix, filled = case.prefix.clone(), case.bank.clone()
    in_place = launch.add_attn_res_norm(
        prefix, case.delta, [case.chunk], *case.weights, **dtypes, mix=mix, in_place=True
    )
    written = launch.write_attn_res_norm(
        new, None, [filled[..., : case.count, :]], filled, case.count, *case.weights, **dtypes, mix=mix, in_place=True
    )
    assert torch.equal(in_place, normed) and torch.equal(prefix, new)
    assert torch.equal(written, normed) and torch.equal(filled[..., case.count, :], new)


@pytest.mark.parametrize("schedule", [None, RESIDENT, STREAMED, LOOPING])
@pytest.mark.parametrize(
    ("rows", "count", "columns", "pad"),
    [(0, 3, 128, 0), (1, 1, 128, 0), (3, 0, 7168, 0), (17, 4, 1024, 48), (33, 8, 7168, 0), (300, 5, 200, 8)],
)
def test_triton_shapes(schedule: Schedule | None, rows: int, count: int, columns: int, pad: int) -> None:
    check(make_case(rows, count, columns, device="cuda", pad=pad), triton(schedule), BF16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [2, 300])
def test_triton_other_dtypes(dtype: torch.dtype, rows: int) -> None:
    check(make_case(rows, 8, 7168, dtype, device="cuda"), triton(None), FEWEST | {"out_dtype": dtype})


@pytest.mark.parametrize(
    ("layout", "rows", "count"),
    [
        (None, 1, 8),
        (None, 5, 0),
        (None, 33, 3),
        (None, 16, 8),
        (None, 30, 8),
        (None, 64, 8),
        *((None, rows, count) for rows in (1, 16, 30, 64) for count in (0, 1, 3, 7)),
        (hip_kernel.Layout(1, 448), 1, 8),
        (hip_kernel.Layout(1, 448), 33, 3),
        (hip_kernel.Layout(4, 224, dependent=True), 33, 3),
        (hip_kernel.Layout(7, 128, dependent=True, asynchronous=True), 33, 8),
        (hip_kernel.Layout(4, 224, asynchronous=True, early=True), 5, 0),
        (hip_kernel.Layout(7, 128, dependent=True, early=True), 33, 3),
    ],
)
def test_hip_source(layout: hip_kernel.Layout | None, rows: int, count: int) -> None:
    if torch.version.hip and layout is not None and layout.split > 1:
        pytest.skip("AMD has no clusters")
    check(make_case(rows, count, 7168, device="cuda"), functools.partial(hip_kernel.mix_rows, layout=layout), BF16)


@pytest.mark.parametrize("mix", [triton(RESIDENT), triton(STREAMED), hip_kernel.mix_rows])
def test_exact_mode_follows_the_vendor_chain(mix: launch.MixRows) -> None:
    """Not bit-equal everywhere, because sums are ordered otherwise; but nearly, and far nearer than the other mode."""
    case = make_case(8, 8, 7168, device="cuda")
    chain = attn_res_norm(case.prefix, [case.chunk], *case.weights, **EXACT)
    exact = launch.attn_res_norm(case.prefix, [case.chunk], *case.weights, **EXACT, mix=mix)
    fewest = launch.attn_res_norm(case.prefix, [case.chunk], *case.weights, **BF16, mix=mix)
    assert float((exact != chain).float().mean()) < 0.01 < float((fewest != chain).float().mean())


@pytest.mark.parametrize("mix", [triton(None), hip_kernel.mix_rows])
def test_nan_rows_stay_apart(mix: launch.MixRows) -> None:
    case = make_case(6, 3, 7168, device="cuda")
    clean = launch.attn_res_norm(case.prefix, [case.chunk], *case.weights, **BF16, mix=mix)
    case.prefix[2] = math.nan
    dirty = launch.attn_res_norm(case.prefix, [case.chunk], *case.weights, **BF16, mix=mix)
    assert bool(dirty[2].isnan().all()) and torch.equal(dirty[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("offset", [1, 3, 8])
def test_slices_at_odd_addresses(offset: int) -> None:
    """Through the choice by call: 16 bytes at a time where they are aligned, else the kernels that ask nothing."""
    case = make_case(5, 3, 7168, device="cuda")
    buffer = torch.full((case.prefix.numel() + offset,), math.nan, dtype=torch.bfloat16, device="cuda")
    moved = buffer[offset:].view_as(case.prefix).copy_(case.prefix)
    exact = row_by_row(case.prefix + case.delta, case.chunk, case.score_norm, case.score_proj, case.norm_weight)
    updated, normed = launch.add_attn_res_norm(
        moved, case.delta, [case.chunk], *case.weights, **BF16, mix=hip_kernel.mix_rows_by_call
    )
    assert torch.equal(updated, case.prefix + case.delta)
    assert relative_error(normed, exact) <= BOUND[torch.bfloat16]


ASYNC = functools.partial(hip_kernel.mix_rows, layout=hip_kernel.Layout(7, 128, True, True, True))


@pytest.mark.parametrize("mix", [triton(None), hip_kernel.mix_rows, ASYNC])
def test_dependent_launches_in_a_graph_see_each_other(mix: launch.MixRows) -> None:
    """A chain of in-place updates replayed: each launch must wait for the one before it, also across replays."""
    case = make_case(4, 2, 7168, device="cuda")
    prefix = case.prefix.clone()

    def step() -> torch.Tensor:
        result = launch.add_attn_res_norm(
            prefix, case.delta, [case.chunk], *case.weights, **BF16, mix=mix, in_place=True
        )
        assert isinstance(result, torch.Tensor)
        return result

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            last = step()
    prefix.copy_(case.prefix)
    for _ in range(5):
        graph.replay()
    expected = case.prefix.clone()
    for _ in range(50):
        expected = expected + case.delta
    assert torch.equal(prefix, expected)
    exact = row_by_row(expected, case.chunk, case.score_norm, case.score_proj, case.norm_weight)
    assert relative_error(last, exact) <= BOUND[torch.bfloat16]
