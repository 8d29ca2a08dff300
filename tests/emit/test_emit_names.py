"""Names are content hashes: equal in every process, different as soon as anything that decides the object differs."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from emit_kernels import multiply_add, row_sum, row_sum_unit

from k3rewrite.emit import unit_name, unit_source, unit_source_hash
from k3rewrite.errors import EmitError
from k3rewrite.ops.kernel import HipUnit, TritonUnit, Unit
from k3rewrite.targets import load_target

HERE = Path(__file__).parent
HIP = HipUnit(HERE / "kernels" / "row_sum.hip", "row_sum")
HELPERS = """
import triton
import triton.language as tl

FACTOR = tl.constexpr(3.0)
KIND = tl.constexpr(tl.float32)

@triton.jit
def scale(value):
    return value * FACTOR
"""
KERNEL = """
import triton
import triton.language as tl
from name_test_helpers import KIND, scale
from name_test_helpers import scale as rescale

@triton.jit
def doubled(x, out, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out + offsets, rescale(scale(tl.load(x + offsets).to(KIND))))
"""


def name(unit: Unit, target: str = "mi355x", compiler: str = "triton 3.9.0") -> str:
    return unit_name(unit, load_target(target), "row_sum", compiler)


def imported(monkeypatch: pytest.MonkeyPatch, folder: Path, module: str, text: str) -> ModuleType:
    """A module made of `text`, importable by its name until the test ends."""
    path = folder / f"{module}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module, loaded)
    spec.loader.exec_module(loaded)
    return loaded


def source_of(monkeypatch: pytest.MonkeyPatch, folder: Path, helpers: str = HELPERS, kernel: str = KERNEL) -> str:
    folder.mkdir(exist_ok=True)
    imported(monkeypatch, folder, "name_test_helpers", helpers)
    module = imported(monkeypatch, folder, "name_test_kernel", kernel)
    return unit_source(TritonUnit(module.doubled, {}))


def test_the_same_in_another_process() -> None:
    program = (
        "from emit_kernels import row_sum_unit; from test_emit_names import HIP, name; "
        "print(name(row_sum_unit()), name(HIP))"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=HERE,
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
        )
        assert done.stdout.split() == [name(row_sum_unit()), name(HIP)], done.stderr


@pytest.mark.parametrize(
    "changed",
    [
        row_sum_unit(constants={"BLOCK": 4096}),
        row_sum_unit(constants={"BLOCK": True}),
        row_sum_unit(constants={"BLOCK": 1}),
        row_sum_unit(constants={"BLOCK": 1.0}),
        row_sum_unit(aligned=frozenset({"x"})),
        row_sum_unit(signature={**row_sum_unit().signature, "x": "*fp16"}),
        row_sum_unit(num_warps=8),
        row_sum_unit(num_stages=1),
        row_sum_unit(fp_fusion=False),
        row_sum_unit(options={"waves_per_eu": 2}),
        row_sum_unit(function=multiply_add),
        HIP,
        dataclasses.replace(HIP, defines={"THREADS": "128"}),
        dataclasses.replace(HIP, dynamic_lds=16),
        dataclasses.replace(HIP, fp_fusion=False),
        dataclasses.replace(HIP, symbol="other"),
    ],
)
def test_every_field_counts(changed: Unit) -> None:
    others = [name(row_sum_unit()), name(row_sum_unit(), "h200"), name(row_sum_unit(), compiler="triton 3.6.0")]
    if changed != HIP:
        others.append(name(HIP))
    assert len({name(changed), *others}) == len(others) + 1


def test_true_one_and_one_point_zero_differ() -> None:
    names = {name(row_sum_unit(constants={"BLOCK": value})) for value in (True, 1, 1.0, "1")}
    assert len(names) == 4


def test_the_source_hash_is_the_same_for_every_size_and_target() -> None:
    assert unit_source_hash(row_sum_unit()) == unit_source_hash(row_sum_unit(constants={"BLOCK": 64}, num_warps=1))
    assert unit_source_hash(HIP) == unit_source_hash(dataclasses.replace(HIP, defines={"THREADS": "64"}))


def test_a_helper_counts_and_a_line_number_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = source_of(monkeypatch, tmp_path / "a")
    moved = source_of(monkeypatch, tmp_path / "b", "\n\n# a comment\n" + HELPERS, "# moved\n" * 9 + KERNEL)
    other_helper = source_of(monkeypatch, tmp_path / "c", HELPERS.replace("* FACTOR", "+ FACTOR"))
    other_constant = source_of(monkeypatch, tmp_path / "d", HELPERS.replace("3.0", "4.0"))
    other_type = source_of(monkeypatch, tmp_path / "e", HELPERS.replace("tl.float32", "tl.float64"))
    assert first == moved
    assert len({first, other_helper, other_constant, other_type}) == 4


def test_the_written_source_stands_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is written can be imported without the modules that it came from, and has the same source again."""
    text = source_of(monkeypatch, tmp_path)
    monkeypatch.delitem(sys.modules, "name_test_helpers")
    alone = imported(monkeypatch, tmp_path, "name_test_alone", text)
    again = unit_source(TritonUnit(alone.doubled, {}))
    assert again == text
    assert "def scale" in text and "rescale = scale" in text and "FACTOR = " in text


def test_one_name_for_two_things_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel = KERNEL.replace("KIND, scale", "KIND, scale\nFACTOR = tl.constexpr(7.0)").replace(
        "(KIND)", "(KIND) * FACTOR"
    )
    with pytest.raises(EmitError, match="'FACTOR' means two things"):
        source_of(monkeypatch, tmp_path, kernel=kernel)


def test_functions_behind_a_module_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel = KERNEL.replace(
        "from name_test_helpers import KIND, scale\n", "import name_test_helpers as lib\nKIND = lib.KIND\n"
    )
    kernel = kernel.replace("scale(tl.load", "lib.scale(tl.load")
    with pytest.raises(EmitError, match=r"uses the module 'lib' \(name_test_helpers\)") as caught:
        source_of(monkeypatch, tmp_path, kernel=kernel)
    assert "import the function itself" in str(caught.value.remedy)


def test_only_plain_triton_functions() -> None:
    import triton

    tuned = triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=["columns"])(row_sum)
    with pytest.raises(EmitError, match=r"plain @triton\.jit function is needed, not Autotuner"):
        unit_source(row_sum_unit(function=tuned))


def test_the_interpreter_cannot_compile() -> None:
    program = (
        "from emit_kernels import row_sum_unit; from k3rewrite.emit import unit_source; unit_source(row_sum_unit())"
    )
    environment = {"TRITON_INTERPRET": "1", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], cwd=HERE, env=environment, capture_output=True, text=True)
    assert "not InterpretedFunction" in done.stderr and "unset TRITON_INTERPRET" in done.stderr


def test_hip_includes_are_part_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "inner.h").write_text("#pragma once\nint inner;\n")
    (tmp_path / "outer.h").write_text('#pragma once\n#include "inner.h"\nint outer;\n')
    kernel = tmp_path / "kernel.hip"
    kernel.write_text('#include "outer.h"\n#include "inner.h"\nint last;\n')
    text = unit_source(HipUnit(kernel, "k"))
    assert [text.count(word) for word in ("int inner;", "int outer;", "int last;", "#include", "pragma")] == [
        1,
        1,
        1,
        0,
        0,
    ]
    before = unit_source_hash(HipUnit(kernel, "k"))
    (tmp_path / "inner.h").write_text("#pragma once\nint changed;\n")
    assert unit_source_hash(HipUnit(kernel, "k")) != before


def test_hip_include_that_is_not_there(tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.hip"
    kernel.write_text('// one\n#include "hip_runtime.h"\n')
    with pytest.raises(EmitError, match=r'#include "hip_runtime\.h": no such file') as caught:
        unit_source(HipUnit(kernel, "k"))
    assert caught.value.place == "kernel.hip:2"


def test_hip_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EmitError, match="cannot be read"):
        unit_source(HipUnit(tmp_path / "none.hip", "k"))
