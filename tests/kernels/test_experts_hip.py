"""The experts' HIP source compiled for AMD: the published form of warp decode is what its assembly shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from experts_cases import FEWEST, MODEL
from test_experts_triton import K3_TP8, QWEN3, call

from k3rewrite.emit import Provenance, emit_unit, summarise_assembly
from k3rewrite.kernels.experts import KERNELS, hip_kernel
from k3rewrite.kernels.experts.mxfp4 import bulk, choose, registers, shared
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.targets import load_target

pytest.importorskip("ziglang")
KERNEL = KERNELS[1]
MOST_REGISTERS = 128


@pytest.mark.parametrize(
    ("target", "dtypes", "layout"),  # every two of them together
    [
        ("mi355x", FEWEST, hip_kernel.PUBLISHED),
        ("mi355x", MODEL, hip_kernel.CHOSEN),
        ("mi325x", FEWEST, hip_kernel.CHOSEN),
        ("mi325x", MODEL, hip_kernel.PUBLISHED),
    ],
)
def test_no_shared_memory_no_barrier(
    target: str, dtypes: dict[str, torch.dtype], layout: hip_kernel.Layout, tmp_path: Path
) -> None:
    goal = load_target(target)
    for shape in (K3_TP8, QWEN3):
        arguments = call(1, shape, "dense", dtypes)
        facts = Facts.of(arguments, nvidia=False)
        for unit in hip_kernel.both_units(facts, layout, goal.wave_size):
            made = emit_unit(unit, goal, tmp_path, "experts", Provenance("experts", KERNEL.name))
            assert made.resources is not None and made.assembly is not None
            assert made.resources.spills == 0 and made.resources.lds_bytes == 0
            assert made.resources.registers <= MOST_REGISTERS
            text = made.assembly.read_text()
            assert "s_barrier" not in text and "atomic" not in text
            assert summarise_assembly(text).dpp > 0


@pytest.mark.parametrize("target", ["h200", "b200"])
@pytest.mark.parametrize("layout", [hip_kernel.PUBLISHED, hip_kernel.CHOSEN, hip_kernel.FEW_OUTPUTS])
def test_the_published_form_in_ptx(target: str, layout: hip_kernel.Layout, tmp_path: Path) -> None:
    goal = load_target(target)
    for shape in (K3_TP8, QWEN3):
        facts = Facts.of(call(1, shape, "dense"), nvidia=True)
        for unit in hip_kernel.both_units(facts, layout, goal.wave_size):
            made = emit_unit(unit, goal, tmp_path, "experts", Provenance("experts", KERNEL.name))
            if made.object is None:
                pytest.skip(made.skipped)
            assert made.resources is not None and made.assembly is not None
            assert made.resources.spills == 0 and made.resources.lds_bytes == 0
            assert made.resources.registers <= MOST_REGISTERS
            text = made.assembly.read_text()
            assert "shfl.sync.bfly" in text and "ld.global.nc.L1::no_allocate.v4" in text
            assert "bar.sync" not in text and ".shared" not in text and "atom." not in text and "red." not in text


CHOSEN = {
    "registers": (1, registers.Layout, 168),
    "registers, one expert at a time": (4, registers.Layout, 144),
    "bulk": (16, bulk.Layout, 128),
    "shared": (80, shared.Layout, 96),
}
"""tokens of Kimi K3, what they get, and how many registers it may take"""


@pytest.mark.parametrize(
    ("target", "dtypes", "shape"),  # every two of them together
    [("h200", FEWEST, QWEN3), ("h200", MODEL, K3_TP8), ("b200", FEWEST, K3_TP8), ("b200", MODEL, QWEN3)],
)
@pytest.mark.parametrize("layout", list(CHOSEN))
def test_mxfp4_on_matrix_units(
    target: str, dtypes: dict[str, torch.dtype], shape: tuple[int, int, int, int, int], layout: str, tmp_path: Path
) -> None:
    goal, kernel = load_target(target), KERNELS[2]
    arguments = call(1, shape, "mxfp4", dtypes)
    assert kernel.accepts(arguments, goal) is None
    facts = Facts.of(arguments, nvidia=True)
    tokens, kind, most = CHOSEN[layout]
    made_of = choose.layout_for(arguments, facts, tokens)
    assert isinstance(made_of, kind) or shape is not K3_TP8
    for unit in made_of.units(facts):
        made = emit_unit(unit, goal, tmp_path, "experts", Provenance("experts", kernel.name))
        if made.object is None:
            pytest.skip(made.skipped)
        assert made.resources is not None and made.assembly is not None
        assert made.resources.spills == 0 and made.resources.registers <= most
        assert made.resources.lds_bytes <= goal.lds_bytes_per_cu
        own = made.assembly.read_text().partition(f".entry {unit.symbol}(")[2].partition(".entry ")[0]
        product = "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32" in own
        assert own and product is ("gate_up" in unit.symbol or "down" in unit.symbol)
        assert not re.search(r"\b(atom|red)\.", own)


@pytest.mark.parametrize(("kernel", "format", "width"), [(1, "dense", 4096), (1, "dense", 8192), (2, "mxfp4", 1024)])
def test_the_widest_experts_do_not_spill(kernel: int, format: str, width: int, tmp_path: Path) -> None:
    goal = load_target("h200")
    arguments = call(1, (4, 16, 2048, width, 2048), format)
    assert KERNELS[kernel].accepts(arguments, goal) is None
    for unit in KERNELS[kernel].units(arguments, goal):
        made = emit_unit(unit, goal, tmp_path, "experts", Provenance("experts", KERNELS[kernel].name))
        if made.object is None:
            pytest.skip(made.skipped)
        assert made.resources is not None and made.resources.spills == 0, unit.symbol


def test_what_mxfp4_takes() -> None:
    kernel, h200 = KERNELS[2], load_target("h200")
    assert "gfx950 is none of" in str(kernel.accepts(call(1, K3_TP8, "mxfp4"), load_target("mi355x")))
    assert "not dense" in str(kernel.accepts(call(1, K3_TP8, "dense"), h200))
    assert "a multiple of 256 is needed" in str(kernel.accepts(call(1, (2, 8, 64, 96, 64), "mxfp4"), h200))
    assert "for few tokens; 128 meet" in str(kernel.accepts(call(128, K3_TP8, "mxfp4"), h200))


def test_what_it_takes() -> None:
    h200, cpu = load_target("h200"), load_target("cpu")
    assert KERNEL.accepts(call(2, K3_TP8, "dense"), h200) is None
    assert "for few tokens; 64 meet at experts" in str(KERNEL.accepts(call(64, K3_TP8, "dense"), h200))
    assert "not mxfp4" in str(KERNEL.accepts(call(2, K3_TP8, "mxfp4"), h200))
    assert "has no kernels" in str(KERNEL.accepts(call(2, K3_TP8, "dense"), cpu))
    odd = call(2, K3_TP8, "dense") | {"x": torch.empty(2, 3588, dtype=torch.bfloat16, device="meta")[:, :3584]}
    assert "rows of x do not begin at multiples of 16 bytes" in str(KERNEL.accepts(odd, h200))
