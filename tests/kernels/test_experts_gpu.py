"""The experts' kernels on a GPU against fp64, with poisoned memory: shapes, windows, formats, seams, graph replay."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from experts_cases import ALL_BF16, FEWEST, MODEL, Case, make_case, relative_error

from k3rewrite.kernels.experts import KERNELS, hip_kernel, launch
from k3rewrite.kernels.experts.mxfp4 import bulk, choose, registers, shared
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.kernels.experts.schedule import Schedule, schedules_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

K3, QWEN3 = {"inner": 3584, "width": 384, "outer": 3584}, {"inner": 2048, "width": 768, "outer": 2048}
SMALL = {"experts": 16, "inner": 256, "width": 128, "outer": 192}
BOUND = {"fewest": 3e-3, "model": 8e-3, "bf16": 1.2e-2}
Run = Callable[..., torch.Tensor]


def poison(case: Case) -> None:
    """Leave NaN in memory that the next allocations will get."""
    held = [torch.full((case.ids.numel() + 1, 4096), math.nan, device="cuda") for _ in range(3)]
    del held


def by_path(path: str, case: Case) -> Schedule:
    every = schedules_of("sm_90", case.x.shape[1], case.gate.shape[1], packed=case.format != "dense")
    return next(schedule for schedule in every if schedule.path == path)


def published(**arguments: Any) -> torch.Tensor:
    return hip_kernel.warp_decode(arguments, Facts.of(arguments, torch.version.hip is None), hip_kernel.PUBLISHED)


ALONE = (
    registers.Layout(4, down_waves=4, group=1),
    bulk.Layout(),
    bulk.Layout(4, gate_up_ring=1, down_waves=8, down_ring=1, tiles=1),
)


SHARED = (
    shared.Layout(2, gate_up_waves=4, gate_up_ring=4, down_waves=4, down_ring=4, shares=2),
    shared.Layout(),
    shared.Layout(8, occupancy=4),
)


def mxfp4(layout: choose.Layout, **arguments: Any) -> torch.Tensor:
    return layout.run(arguments, Facts.of(arguments, True))


def check(run: Run, case: Case, mode: str = "fewest") -> None:
    dtypes = {"fewest": FEWEST, "model": MODEL, "bf16": ALL_BF16}[mode]
    poison(case)
    result = run(**case.arguments(dtypes))
    assert result.dtype == torch.bfloat16
    assert relative_error(result, case.exact()) <= BOUND[mode]
    assert torch.equal(result, run(**case.arguments(dtypes)))


@pytest.mark.parametrize("path", ["routes", "experts", "sorted"])
@pytest.mark.parametrize("format", ["dense", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_paths_and_formats(path: str, format: str, tokens: int) -> None:
    case = make_case(tokens, 4, **SMALL, format=format, device="cuda")
    check(functools.partial(launch.experts, schedule=by_path(path, case)), case)


@pytest.mark.parametrize("path", ["routes", "experts", "sorted"])
@pytest.mark.parametrize("mode", ["model", "bf16"])
def test_roundings_of_models(path: str, mode: str) -> None:
    case = make_case(9, 4, **SMALL, activation="silu" if mode == "bf16" else "situ", device="cuda")
    check(functools.partial(launch.experts, schedule=by_path(path, case)), case, mode)


@pytest.mark.parametrize("path", ["routes", "experts", "sorted"])
def test_windows_duplicates_and_nobody(path: str) -> None:
    for settings in (
        {"tokens": 5, "top_k": 4, "first": 16, "global_experts": 48},
        {"tokens": 3, "top_k": 3, "ids": [[1, 1, 1], [-1, 15, 99], [-1, -1, -1]]},
        {"tokens": 40, "top_k": 1, "ids": [[3]] * 40},
    ):
        case = make_case(**settings, **SMALL, device="cuda")  # type: ignore[arg-type]
        check(functools.partial(launch.experts, schedule=by_path(path, case)), case)


@pytest.mark.parametrize("run", [published, KERNELS[1].launch])
@pytest.mark.parametrize(("shape", "activation"), [(K3, "situ"), (QWEN3, "silu")])
def test_hip_source(run: Run, shape: dict[str, int], activation: str) -> None:
    for tokens in (1, 3):
        case = make_case(tokens, 4, 8, **shape, activation=activation, device="cuda")
        check(run, case)
        case.weights = case.weights.bfloat16()
        check(run, case, "model" if activation == "situ" else "bf16")


@pytest.mark.skipif(torch.version.hip is not None, reason="for NVIDIA")
@pytest.mark.parametrize(("shape", "activation"), [(K3, "situ"), (QWEN3, "silu"), (SMALL, "situ")])
def test_mxfp4_on_matrix_units(shape: dict[str, int], activation: str) -> None:
    """As near to fp64 as the Triton kernels: the two parts of an activation hold all of its bits."""
    for tokens, run in itertools.product((1, 3), (KERNELS[2].launch, *(functools.partial(mxfp4, r) for r in ALONE))):
        case = make_case(tokens, 4, **{"experts": 8, **shape}, format="mxfp4", activation=activation, device="cuda")
        check(run, case)
        check(run, case, "model" if activation == "situ" else "bf16")


@pytest.mark.skipif(torch.version.hip is not None, reason="for NVIDIA")
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 16), (6, 16), (7, 5), (48, 16)])
def test_mxfp4_of_many_experts_a_token(tokens: int, top_k: int) -> None:
    """Waves of down take several experts one after the other, and refill their stages."""
    case = make_case(tokens, top_k, 64, **K3, format="mxfp4", device="cuda")
    check(KERNELS[2].launch, case)
    for layout in (*ALONE, SHARED[1]):
        check(functools.partial(mxfp4, layout), case)


@pytest.mark.skipif(torch.version.hip is not None, reason="for NVIDIA")
@pytest.mark.parametrize("layout", SHARED)
@pytest.mark.parametrize(("shape", "activation"), [(K3, "situ"), (QWEN3, "silu"), (SMALL, "situ")])
def test_mxfp4_of_tokens_that_meet(layout: shared.Layout, shape: dict[str, int], activation: str) -> None:
    """Eight experts for up to 40 tokens: up to 40 routes of one, and none of some where a token stands alone."""
    for tokens in (1, 9, 40):
        case = make_case(tokens, 4, **{"experts": 8, **shape}, format="mxfp4", activation=activation, device="cuda")
        check(functools.partial(mxfp4, layout), case)
        check(functools.partial(mxfp4, layout), case, "model" if activation == "situ" else "bf16")


@pytest.mark.skipif(torch.version.hip is not None, reason="for NVIDIA")
def test_mxfp4_rows_with_zeros_and_with_what_is_no_number() -> None:
    case = make_case(5, 4, **SMALL, format="mxfp4", device="cuda")
    clean = KERNELS[2].launch(**case.arguments(FEWEST))
    case.x[1] = 0
    case.x[2, 3], case.x[3, 7] = math.nan, math.inf
    dirty = KERNELS[2].launch(**case.arguments(FEWEST))
    assert bool((dirty[1] == 0).all()) and not bool(dirty[2:4].isfinite().any())
    assert torch.equal(dirty[[0, 4]], clean[[0, 4]])


def test_numbers_across_the_seams() -> None:
    """One batch and the same batch with one token more get the same numbers for the tokens that they share."""
    kernel = KERNELS[0].launch
    case = make_case(300, 8, 128, **QWEN3, activation="silu", device="cuda")
    arguments = case.arguments(FEWEST)
    whole = kernel(**arguments)
    for tokens in (1, 2, 4, 5, 8, 127, 128, 129, 255):
        part = kernel(**{n: v[:tokens] if n in ("x", "ids", "weights") else v for n, v in arguments.items()})
        torch.testing.assert_close(part, whole[:tokens], rtol=2e-2, atol=2e-2)


def test_the_last_experts_of_a_large_stack() -> None:
    """K3 at TP8: the gate and up matrices from expert 781 on lie behind 2^31 elements."""
    experts = 896
    both = torch.zeros(experts, 768, 3584, dtype=torch.bfloat16, device="cuda")
    down = torch.zeros(experts, 3584, 384, dtype=torch.bfloat16, device="cuda")
    small = make_case(2, 2, 2, **K3, ids=[[0, 1], [1, 0]], device="cuda")
    for place, expert in enumerate((780, 895)):
        both[expert, :384], both[expert, 384:] = small.gate[place].bfloat16(), small.up[place].bfloat16()
        down[expert] = small.down[place].bfloat16()
    ids = torch.tensor([[780, 895], [895, 780]], device="cuda")
    arguments = small.arguments(FEWEST) | {"ids": ids, "w_gate": both[:, :384], "w_up": both[:, 384:], "w_down": down}
    for run in (KERNELS[0].launch, KERNELS[1].launch, published):
        assert relative_error(run(**arguments), small.exact()) <= BOUND["fewest"]


def test_replays_of_one_graph_with_other_routings() -> None:
    case = make_case(4, 4, **SMALL, device="cuda")
    arguments = case.arguments(FEWEST)
    launch.experts(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = launch.experts(**arguments)
    for seed in range(5):
        other = make_case(4, 4, **SMALL, device="cuda", seed=seed + 1)
        case.ids.copy_(other.ids)
        case.x.copy_(other.x)
        graph.replay()
        assert relative_error(result, case.exact()) <= BOUND["fewest"]
