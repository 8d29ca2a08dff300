"""The HIP C++ kernel without a GPU: compiled for every target, within its budgets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_attn_res_triton import BY_NAME, call, emitted

from k3rewrite.emit import Provenance, emit_unit
from k3rewrite.kernels.attn_res_norm.hip_kernel import ARITHMETIC_REGISTERS, Layout, layout_for, unit
from k3rewrite.targets import load_target

pytest.importorskip("ziglang")


@pytest.mark.parametrize("target", ["mi355x", "mi325x"])
@pytest.mark.parametrize("blocks", [0, 3, 8])
def test_compiles_for_amd_without_spills(target: str, blocks: int, tmp_path: Path) -> None:
    """26 loads of 16 bytes at 9 sources (2 vectors of each source, delta and 3 weights), lanes read by DPP moves."""
    (kernel,) = emitted("add_attn_res_norm.hip", call(4, blocks), target, tmp_path)
    resources = kernel.resources
    assert (resources.spills, resources.scratch_bytes, resources.threads) == (0, 0, 448)
    assert resources.lds_bytes < 2048 and resources.registers <= 256
    text = kernel.assembly.read_text()
    assert text.count("global_load_dwordx4") == 2 * (blocks + 1 + 1 + 3)
    assert text.count("global_store_dwordx4") == 4
    assert "_dpp" in text and text.count("s_barrier") == 2


@pytest.mark.parametrize("target", ["h200", "b200"])
def test_compiles_for_nvidia_as_a_cluster(target: str, tmp_path: Path) -> None:
    (kernel,) = emitted("add_attn_res_norm.hip", call(4, 8), target, tmp_path)
    if kernel.skipped:
        pytest.skip(kernel.skipped)
    text = kernel.assembly.read_text()
    assert kernel.resources.spills == 0 and kernel.resources.threads in (0, 128)
    assert "barrier.cluster.arrive" in text and "griddepcontrol.wait" in text and "st.async" in text


@pytest.mark.parametrize("target", ["h200", "b200"])
@pytest.mark.parametrize("early", [False, True])
def test_a_cluster_that_waits_for_bytes(target: str, early: bool, tmp_path: Path) -> None:
    """One meeting is left, at the start: nobody writes to a workgroup that has not begun."""
    layout, kept = Layout(7, 128, True, True, early), {"mix": torch.float32, "scale": torch.float32}
    wanted = unit(layout, 7168, 8, delta=True, store=True, norm=True, **kept)
    kernel = emit_unit(wanted, load_target(target), tmp_path, "attn_res_norm", Provenance("attn_res_norm", "hip"))
    if kernel.assembly is None:
        pytest.skip(kernel.skipped)
    text = kernel.assembly.read_text()
    assert kernel.resources is not None and kernel.resources.spills == 0
    assert text.count("barrier.cluster.arrive") == text.count("barrier.cluster.wait") == 1
    assert text.count("st.async") == 14 and text.count("expect_tx") == 2 and "st.shared::cluster.f32" not in text
    written = text.index("st.global.v4")
    assert (written < text.index("st.async")) is early


@pytest.mark.parametrize(("rows", "sources"), [(1, 1), (1, 9), (16, 2), (16, 16), (30, 4), (64, 8), (64, 16)])
def test_a_workgroup_waits_for_as_many_bytes_as_are_sent(rows: int, sources: int, tmp_path: Path) -> None:
    """Each lane of each wave sends one sum, and one lane of each wave a square: to every workgroup of the cluster."""
    layout = layout_for(7168, "sm_90", rows)
    assert layout is not None and layout.asynchronous
    kept = {"mix": torch.float32, "scale": torch.float32}
    wanted = unit(layout, 7168, sources - 1, delta=True, store=True, norm=True, **kept)
    kernel = emit_unit(wanted, load_target("h200"), tmp_path, "attn_res_norm", Provenance("attn_res_norm", "hip"))
    if kernel.assembly is None:
        pytest.skip(kernel.skipped)
    assert kernel.resources is not None and kernel.resources.spills == 0
    assert kernel.resources.registers <= 4 * sources + ARITHMETIC_REGISTERS["nvidia"]
    text = kernel.assembly.read_text()
    named = re.findall(r"expect_tx\S+ _, \[\S+\], (%r\d+)", text)
    expected = [int(re.findall(rf"mov\.[bu]32 \t?{re.escape(name)}, (\d+)", text)[-1]) for name in named]
    assert expected == [layout.split * layout.threads * 4, layout.split * layout.threads // 32 * 4]
    assert text.count("st.async") == 2 * layout.split


@pytest.mark.parametrize(
    "options", [{"delta": False}, {"norm": False}, {"mix": torch.bfloat16, "scale": torch.bfloat16}]
)
def test_optional_parts_compile(options: dict, tmp_path: Path) -> None:
    values = {"delta": True, "store": True, "norm": True, "mix": torch.float32, "scale": torch.float32} | options
    wanted = unit(Layout(1, 64), 512, 2, **values)
    kernel = emit_unit(wanted, load_target("mi355x"), tmp_path, "attn_res_norm", Provenance("attn_res_norm", "hip"))
    assert kernel.resources is not None and kernel.resources.spills == 0


def test_layouts() -> None:
    every = {rows: layout_for(7168, "sm_90", rows) for rows in (1, 8, 9, 24, 25, 32, 33, 64)}
    assert [every[rows].split for rows in every] == [7, 7, 4, 4, 8, 8, 2, 2]
    assert [every[rows].threads for rows in (8, 24, 32, 64)] == [128, 224, 128, 448]
    assert all(layout.dependent and layout.asynchronous and layout.early for layout in every.values())
    assert layout_for(7168, "gfx950") == Layout(1, 448)
    assert layout_for(4096, "sm_90") == Layout(8, 64, True, True, True)
    assert layout_for(64, "sm_90") is None
    assert layout_for(64, "gfx942") == Layout(1, 64)
    for columns in (8, 64, 200, 2048, 7168, 16384):
        layout = layout_for(columns, "gfx950")
        assert layout is not None and layout.threads % 64 == 0 and layout.threads <= 1024


def test_source_hash_covers_the_portability_header() -> None:
    paths = {path.name for path in BY_NAME["add_attn_res_norm.hip"].sources}
    assert {"attn_res_norm.hip", "portability.h"} <= paths
