"""The experts' Triton kernels without a GPU: in the interpreter against fp64, and compiled for every target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from experts_cases import BF16, FEWEST, FP32, MODEL
from interpreting import results_of

from k3rewrite.emit import Provenance, emit_unit
from k3rewrite.kernels.experts import KERNELS
from k3rewrite.kernels.experts.kernel import as_unit
from k3rewrite.kernels.experts.plan import Facts, plan
from k3rewrite.kernels.experts.schedule import MAX_EXPERTS, expected_hits, schedule_for, schedules_of
from k3rewrite.targets import load_target

pytest.importorskip("triton")
KERNEL = KERNELS[0]
GPU_TARGETS = ("mi355x", "mi325x", "h200", "b200")
BOUND = {"fewest": 1e-6, "model": 1.2e-2, "bf16": 3e-2}
"""of the interpreter's error: it cuts bf16 off"""


@pytest.fixture(scope="module")
def interpreted() -> list[dict[str, Any]]:
    return results_of("experts_interpreted.py", timeout=280)


def test_every_path_computes_the_op(interpreted: list[dict[str, Any]]) -> None:
    assert {r["path"] for r in interpreted} == {"routes", "experts", "sorted"}
    assert len(interpreted) == 3 * (2 + 3 + 10) and sum(len(r["repeats"]) for r in interpreted) == 3 * (3 + 1 + 1)
    for result in interpreted:
        name = f"{result['name']}, {result['path']}, {result['mode']}"
        assert result["finite"] and all(result["repeats"]), name
        if result["name"] == "none local":
            assert result["largest"] == 0.0, name
        else:
            assert result["error"] <= BOUND[result["mode"]], f"{name}: {result['error']}"


def test_the_paths_round_alike(interpreted: list[dict[str, Any]]) -> None:
    """A batch that grows past the seam gets the same numbers but for the order of sums."""
    for mode in ("model", "bf16"):
        errors = [r["error"] for r in interpreted if r["name"] == "silu" and r["mode"] == mode]
        assert len(errors) == 3 and max(errors) < 1.05 * min(errors)


def call(
    tokens: int, shape: tuple[int, int, int, int, int], format: str, dtypes: dict[str, torch.dtype] = FEWEST
) -> dict[str, Any]:
    """Arguments without memory; shape: experts a token, experts, widths of x, of an expert and of the result."""
    top_k, experts, inner, width, outer = shape
    dtype = {"dense": BF16, "mxfp4": torch.uint8, "mxfp8": torch.float8_e4m3fn}[format]
    packing = 2 if format == "mxfp4" else 1
    with torch.device("meta"):

        def halves(columns: int, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
            both = torch.empty(experts, 2 * width, columns, dtype=kind)
            return both[:, :width], both[:, width:]

        gate, up = halves(inner // packing, dtype)
        scales: tuple[Any, ...] = (None, None, None)
        if format != "dense":
            scales = (*halves(inner // 32, torch.uint8), torch.empty(experts, outer, width // 32, dtype=torch.uint8))
        return {
            "x": torch.empty(tokens, inner, dtype=BF16),
            "ids": torch.empty(tokens, top_k, dtype=torch.int64),
            "weights": torch.empty(tokens, top_k, dtype=FP32),
            "w_gate": gate,
            "w_up": up,
            "w_down": torch.empty(experts, outer, width // packing, dtype=dtype),
            **dict(zip(("s_gate", "s_up", "s_down"), scales, strict=True)),
            "format": format,
            "activation": "situ" if inner == 3584 else "silu",
            "beta": 4.0,
            "linear_beta": 25.0,
            "first": 0,
            **dtypes,
        }


K3_TP8, QWEN3 = (16, 896, 3584, 384, 3584), (8, 128, 2048, 768, 2048)


@pytest.mark.parametrize(
    ("target", "shape", "format"),
    [
        *((target, K3_TP8, format) for target in GPU_TARGETS for format in ("dense", "mxfp4")),
        *((target, K3_TP8, "mxfp8") for target in ("mi355x", "h200")),
        *((target, QWEN3, "dense") for target in ("mi325x", "b200")),
    ],
)
def test_every_launch_compiles_without_spills(
    target: str, shape: tuple[int, int, int, int, int], format: str, tmp_path: Path
) -> None:
    goal, launched = load_target(target), set()
    for tokens in (1, 64, 4096):
        arguments = call(tokens, shape, format)
        assert KERNEL.accepts(arguments, goal) is None
        facts = Facts.of(arguments, nvidia=goal.vendor == "nvidia")
        every = schedules_of(goal.arch, facts.inner, facts.width, packed=format != "dense")
        routes = every[0]  # what the table never gives this shape must compile too
        units = [*KERNEL.units(arguments, goal), *(as_unit(step, facts, arguments) for step in plan(facts, routes, 1))]
        for unit in units:
            made = emit_unit(unit, goal, tmp_path, "experts", Provenance("experts", KERNEL.name))
            assert made.object is not None and made.resources is not None, made.skipped
            assert made.resources.spills == 0, f"{unit.symbol}, {tokens} tokens"
            assert made.resources.registers <= 255
            assert made.resources.lds_bytes <= goal.lds_bytes_per_cu
            launched.add(unit.symbol)
    assert launched == {
        "gate_up_routes", "down_tokens", "gate_up_experts", "down_experts", "combine_routes",
        "count_routes", "place_routes", "gate_up_sorted", "down_sorted",
    }  # fmt: skip


def test_a_symbolic_batch_is_compiled_for_every_path() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    arguments = call(6, K3_TP8, "dense", MODEL)
    for name in ("x", "ids", "weights"):
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
        arguments[name] = mode.from_tensor(arguments[name], symbolic_context=context)
    goal = load_target("h200")
    assert KERNEL.accepts(arguments, goal) is None
    symbols = [unit.symbol for unit in KERNEL.units(arguments, goal)]
    assert {"gate_up_routes", "gate_up_experts", "gate_up_sorted"} <= set(symbols)
    assert KERNEL.cost_us(arguments, goal) > 0
    assert not environment.guards


def test_tokens_that_meet_at_experts_share_reads() -> None:
    def paths(shape: tuple[int, int, int, int, int], arch: str) -> list[str]:
        top_k, experts, inner, width, _ = shape
        return [schedule_for(arch, n, top_k, experts, inner, width, packed=False).path for n in (1, 2, 8, 64, 4096)]

    assert paths(K3_TP8, "sm_90") == ["routes", "routes", "experts", "experts", "sorted"]
    assert paths(QWEN3, "sm_90") == ["experts", "experts", "experts", "experts", "sorted"]
    assert paths(QWEN3, "gfx950") == ["routes", "routes", "experts", "experts", "sorted"]
    assert expected_hits(1, 896) == pytest.approx(1) and expected_hits(10**6, 896) == pytest.approx(896)


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_the_most_experts_do_not_spill(target: str, tmp_path: Path) -> None:
    """A program of the sorted path holds a row of counts of all experts."""
    goal, shape = load_target(target), (8, MAX_EXPERTS, 256, 128, 256)
    arguments = call(512, shape, "dense")
    assert KERNEL.accepts(arguments, goal) is None
    symbols = set()
    for unit in KERNEL.units(arguments, goal):
        made = emit_unit(unit, goal, tmp_path, "experts", Provenance("experts", KERNEL.name))
        assert made.resources is not None and made.resources.spills == 0, unit.symbol
        symbols.add(unit.symbol)
    assert "place_routes" in symbols and "gate_up_sorted" in symbols
