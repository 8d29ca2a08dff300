"""Ahead-of-time compilation of Triton and HIP units for GPUs that are not there."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from emit_kernels import multiply_add, product_unit, row_sum_unit

from k3rewrite.emit import EmittedKernel, Provenance, cuda_compiler, emit_unit, summarise_assembly
from k3rewrite.emit import unit as unit_module
from k3rewrite.emit.compiler import Compiler, Missing, find_compiler
from k3rewrite.ops.kernel import HipUnit, Unit
from k3rewrite.targets import load_target

KIB = 1024
SOURCES = Path(__file__).parent / "kernels"
GPUS = ("mi355x", "mi325x", "h200", "b200")
AMD = ("mi355x", "mi325x")
SITES = ("model.py:12 in forward", "model.py:15 in forward")


def hip_unit(name: str = "row_sum", symbol: str = "", **fields) -> HipUnit:
    return HipUnit(SOURCES / f"{name}.hip", symbol or name, **fields)


def emit(unit: Unit, target: str, folder: Path) -> EmittedKernel:
    return emit_unit(unit, load_target(target), folder, "row_sum", Provenance("k3::row_sum", "row_sum_small", SITES))


def has_compiler(target: str) -> bool:
    return not isinstance(find_compiler(hip_unit(), load_target(target)), Missing)


@pytest.mark.parametrize("target", GPUS)
def test_triton_kernel(tmp_path: Path, target: str) -> None:
    emitted = emit(row_sum_unit(), target, tmp_path)
    assert emitted.assembly and emitted.object and emitted.resources
    needs = emitted.resources
    assert (needs.spills, needs.scratch_bytes) == (0, 0)
    assert needs.threads == 4 * load_target(target).wave_size
    assert 0 < needs.registers <= 64
    assert needs.lds_bytes == 16, "one partial sum of each of the four waves"
    assert needs.lds_allocated == {"mi355x": 1280, "mi325x": 512}.get(target, 128 + 1024)
    summary = summarise_assembly(emitted.assembly.read_text())
    assert summary.wide_loads == summary.global_loads >= 1
    assert summary.scratch_accesses == 0
    assert (summary.dpp, summary.butterfly_shuffles)[target not in AMD] >= 5
    assert summary.barriers >= 1
    assert {path.suffix for path in tmp_path.iterdir()} == (
        {".py", ".s", ".hsaco"} if target in AMD else {".py", ".ptx", ".cubin"}
    )


@pytest.mark.parametrize("target", GPUS)
def test_matrix_instructions_and_lds(tmp_path: Path, target: str) -> None:
    emitted = emit(product_unit(64), target, tmp_path)
    assert emitted.assembly and emitted.resources
    assert summarise_assembly(emitted.assembly.read_text()).matrix_instructions >= 1
    assert emitted.resources.lds_bytes >= 64 * 64 * 2
    assert emitted.resources.spills == 0


@pytest.mark.parametrize("target", GPUS)
def test_hip_kernel(tmp_path: Path, target: str) -> None:
    emitted = emit(hip_unit(defines={"THREADS": "128"}), target, tmp_path)
    if not has_compiler(target):
        assert emitted.object is None and "nvcc" in emitted.skipped
        return
    assert emitted.assembly and emitted.object and emitted.resources
    needs, waves = emitted.resources, 128 // load_target(target).wave_size
    assert (needs.spills, needs.scratch_bytes, needs.threads, needs.lds_bytes) == (0, 0, 128, 4 * waves)
    summary = summarise_assembly(emitted.assembly.read_text())
    assert summary.wide_loads == summary.global_loads >= 1
    exchanged = {"mi355x": (4, 2, 0, 0), "mi325x": (4, 0, 2, 0)}.get(target, (0, 0, 0, 5))
    counted = (summary.dpp, summary.permlane_swaps, summary.lds_permutes, summary.butterfly_shuffles)
    assert counted == exchanged, "a reduction over a wave, one exchange a step"


@pytest.mark.parametrize("make", [row_sum_unit, hip_unit])
@pytest.mark.parametrize("target", GPUS)
def test_texts_begin_with_where_they_come_from(tmp_path: Path, target: str, make) -> None:
    unit = make()
    emitted = emit(unit, target, tmp_path)
    comment = "#" if unit.language == "triton" else "//"
    texts = {emitted.source: comment}
    if emitted.assembly:
        texts[emitted.assembly] = ";" if target in AMD else "//"
    for path, mark in texts.items():
        header = path.read_text().split("\n\n")[0].splitlines()
        assert all(line.startswith(f"{mark} ") for line in header)
        text = "\n".join(header)
        for part in ("k3::row_sum", "row_sum_small", *SITES, load_target(target).arch, emitted.source_hash):
            assert part in text


def test_the_written_hip_source_is_what_was_compiled(tmp_path: Path) -> None:
    first = emit(hip_unit(defines={"THREADS": "128"}), "mi355x", tmp_path / "a")
    again = emit(HipUnit(first.source, "row_sum"), "mi355x", tmp_path / "b")
    assert first.object and again.object and first.object.read_bytes() == again.object.read_bytes()


@pytest.mark.parametrize("target", AMD)
def test_lds_budgets(tmp_path: Path, target: str) -> None:
    """79.5 KiB become 80, and two workgroups fit the 160 KiB of a gfx950 CU; two of 81.25 KiB do not."""
    sizes = (79 * KIB + 512, 81 * KIB + 256) if target == "mi355x" else (32 * KIB, 33 * KIB)
    for size, workgroups in zip(sizes, (2, 1), strict=True):
        emitted = emit(hip_unit("lds", "uses_lds", defines={"LDS_BYTES": str(size)}), target, tmp_path)
        assert emitted.resources
        assert emitted.resources.lds_bytes == size
        assert emitted.resources.lds_allocated == load_target(target).allocated_lds(size)
        assert emitted.resources.occupancy.workgroups_per_cu == workgroups
        assert emitted.resources.occupancy.limited_by == "lds"


def test_dynamic_lds_counts(tmp_path: Path) -> None:
    plain = emit(hip_unit(), "mi355x", tmp_path).resources
    more = emit(hip_unit(dynamic_lds=80 * KIB), "mi355x", tmp_path).resources
    assert plain and more
    assert more.lds_bytes == plain.lds_bytes + 80 * KIB
    assert (plain.occupancy.workgroups_per_cu, more.occupancy.workgroups_per_cu) == (8, 1)


@pytest.mark.parametrize("target", GPUS)
def test_spills_are_seen(tmp_path: Path, target: str) -> None:
    emitted = emit(hip_unit("spill", "spills"), target, tmp_path)
    if not has_compiler(target):
        pytest.skip(emitted.skipped)
    assert emitted.assembly and emitted.resources
    assert emitted.resources.spills > 20
    assert emitted.resources.scratch_bytes > 80
    assert emitted.resources.occupancy.workgroups_per_cu == 1
    if target in AMD:
        assert summarise_assembly(emitted.assembly.read_text()).scratch_accesses > 20


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("kind", ["triton", "hip"])
def test_floating_point_fusion_is_what_the_unit_says(
    tmp_path: Path, target: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment says: Triton's own default is read from TRITON_DEFAULT_FP_FUSION."""
    unit: Unit = row_sum_unit(
        function=multiply_add, signature={"x": "*fp32", "out": "*fp32"}, constants={}, aligned=frozenset()
    )
    if kind == "hip":
        unit = hip_unit("numbers", "multiply_add")
    if kind == "hip" and not has_compiler(target):
        pytest.skip("no compiler for HIP C++ on this target")
    instruction = r"\bv_(pk_)?(fma|fmac|mad|mac)\w*_f32" if target in AMD else r"\bfma\.rn\S*f32"
    for environment, fused in (("0", True), ("1", False)):
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", environment)
        emitted = emit(dataclasses.replace(unit, fp_fusion=fused), target, tmp_path)
        assert emitted.assembly
        body = symbol_body(emitted.assembly.read_text(), emitted.symbol)
        assert bool(re.search(instruction, body)) is fused


def symbol_body(text: str, symbol: str) -> str:
    """The instructions of one kernel of an assembly text."""
    start = re.search(rf"^{symbol}:|\.entry {symbol}\(", text, re.MULTILINE)
    assert start
    return re.split(r"\.Lfunc_end|^\}", text[start.start() :], maxsplit=1, flags=re.MULTILINE)[0]


def test_emitting_twice_keeps_the_first_files(tmp_path: Path) -> None:
    first = emit(hip_unit(), "mi355x", tmp_path)
    assert first.object
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    second = emit(hip_unit(), "mi355x", tmp_path)
    assert (second.name, second.resources) == (first.name, first.resources)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written


def test_without_a_compiler_the_reason_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_unit: Unit, _target: object) -> Compiler | Missing:
        return Missing("install a compiler")

    monkeypatch.setattr(unit_module, "find_compiler", nothing)
    emitted = emit(hip_unit(), "h200", tmp_path)
    assert (emitted.skipped, emitted.object, emitted.resources) == ("install a compiler", None, None)
    assert [path.name for path in tmp_path.iterdir()] == [emitted.source.name]


def test_a_machine_without_cuda_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.path", [])
    found = cuda_compiler.find.__wrapped__()
    assert isinstance(found, Missing) and "nvcc" in found.reason and "NVRTC" in found.reason
