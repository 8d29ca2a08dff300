"""What cannot be compiled: one error that names kernel, target and the compiler's words, and nothing on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from emit_kernels import does_not_compile, product_unit, row_sum_unit

from k3rewrite.emit import Provenance, emit_unit
from k3rewrite.errors import EmitError
from k3rewrite.ops.kernel import HipUnit, Unit
from k3rewrite.targets import load_target

SOURCES = Path(__file__).parent / "kernels"
GPUS = ("mi355x", "mi325x", "h200", "b200")
BROKEN = row_sum_unit(
    function=does_not_compile,
    signature={"x": "*fp32", "BLOCK": "constexpr"},
    constants={"BLOCK": 64},
    aligned=frozenset(),
)


def refused(unit: Unit, target: str, folder: Path, stem: str = "row_sum") -> EmitError:
    """The error of emitting `unit`; asserts that it left nothing behind."""
    with pytest.raises(EmitError) as caught:
        emit_unit(unit, load_target(target), folder, stem, Provenance("k3::row_sum", "row_sum_small"))
    assert not folder.exists() or list(folder.iterdir()) == []
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("target", GPUS)
def test_triton_that_does_not_compile(tmp_path: Path, target: str) -> None:
    error = refused(BROKEN, target, tmp_path)
    assert error.place == f"kernel does_not_compile (triton) for {target} ({load_target(target).arch})"
    assert "128" in error.message and "64" in error.message, "Triton's words"


@pytest.mark.parametrize("target", ["mi355x", "h200"])
def test_hip_that_does_not_compile(tmp_path: Path, target: str) -> None:
    source = tmp_path / "broken.hip"
    source.write_text('#include "portability.h"\n\nK3_KERNEL(64) broken(float* x) { x[0] = nothing; }\n')
    folder = tmp_path / "out"
    if target == "h200":
        from k3rewrite.emit.compiler import Missing, find_compiler

        if isinstance(find_compiler(HipUnit(source, "broken"), load_target(target)), Missing):
            pytest.skip("no CUDA compiler")
    error = refused(HipUnit(source, "broken"), target, folder)
    assert "kernel broken (hip)" in str(error.place)
    assert "broken.hip" in error.message and "nothing" in error.message, "the file's own name, the compiler's words"


def test_a_symbol_that_the_source_does_not_have(tmp_path: Path) -> None:
    error = refused(HipUnit(SOURCES / "row_sum.hip", "row_product"), "mi355x", tmp_path)
    assert "no kernel 'row_product'; it has: row_sum" in error.message


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        (row_sum_unit(signature={"x": "*bf16"}), "parameter 'out' has no type"),
        (
            row_sum_unit(signature={**row_sum_unit().signature, "colums": "i32"}),
            "no parameter 'colums'; did you mean 'columns'",
        ),
        (row_sum_unit(constants={}), "constexpr parameter 'BLOCK' has no value"),
        (
            row_sum_unit(constants={"BLOCK": 64, "columns": 7}),
            "parameter 'columns' has a value in the constants, but is i32",
        ),
        (row_sum_unit(aligned=frozenset({"y"})), "aligned: no parameter 'y'"),
        (row_sum_unit(options={"wave_per_eu": 2}), "no compile option 'wave_per_eu'"),
        (row_sum_unit(signature={**row_sum_unit().signature, "x": "*bf17"}), "does not compile"),
        (row_sum_unit(num_warps=3), "does not compile"),
        (row_sum_unit(constants={"BLOCK": 1000}), "power of 2"),
    ],
)
def test_bad_units(tmp_path: Path, unit: Unit, message: str) -> None:
    assert message in refused(unit, "mi355x", tmp_path).message


@pytest.mark.parametrize("unit", [row_sum_unit(), HipUnit(SOURCES / "row_sum.hip", "row_sum")])
def test_the_cpu_has_no_kernels(tmp_path: Path, unit: Unit) -> None:
    assert "'cpu' has no kernels" in refused(unit, "cpu", tmp_path).message


@pytest.mark.parametrize(
    ("unit", "target"),
    [
        (HipUnit(SOURCES / "row_sum.hip", "row_sum", dynamic_lds=64 * 1024), "mi325x"),
        (product_unit(256, num_warps=8), "mi325x"),
    ],
)
def test_more_lds_than_there_is(tmp_path: Path, unit: Unit, target: str) -> None:
    error = refused(unit, target, tmp_path)
    assert "lds" in error.message.lower() or "memory" in error.message.lower()


@pytest.mark.parametrize("stem", ["", "a/b", "../up", "1st", "a.b"])
def test_stems_that_are_no_names(tmp_path: Path, stem: str) -> None:
    error = refused(row_sum_unit(), "mi355x", tmp_path, stem)
    assert error.message == f"'{stem}' cannot begin a file name"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(EmitError, match="cannot write"):
        emit_unit(
            row_sum_unit(), load_target("mi355x"), tmp_path / "file", "row_sum", Provenance("k3::row_sum", "small")
        )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
