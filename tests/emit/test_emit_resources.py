"""Resource figures from the object against a second reader of the same facts: the assembly's metadata, cuobjdump."""

from __future__ import annotations

import re
import subprocess
from importlib import resources
from pathlib import Path

import pytest
from emit_kernels import product_unit, row_sum_unit
from hypothesis import given
from hypothesis import strategies as st

from k3rewrite.emit import EmittedKernel, Provenance, emit_unit, read_resources
from k3rewrite.emit.compiler import Missing, find_compiler
from k3rewrite.emit.resources import Resources
from k3rewrite.errors import EmitError, UnsupportedError
from k3rewrite.ops.kernel import HipUnit, Unit
from k3rewrite.targets import load_target

SOURCES = Path(__file__).parent / "kernels"
UNITS = {
    "row_sum": row_sum_unit(),
    "product": product_unit(32),
    "hip": HipUnit(SOURCES / "row_sum.hip", "row_sum"),
    "spills": HipUnit(SOURCES / "spill.hip", "spills"),
    "several": HipUnit(SOURCES / "lanes.hip", "block_total"),
}


def emit(unit: Unit, target: str, folder: Path) -> EmittedKernel:
    return emit_unit(unit, load_target(target), folder, "kernel", Provenance("k3::kernel", "kernel"))


@pytest.mark.parametrize("target", ["mi355x", "mi325x"])
@pytest.mark.parametrize("unit", UNITS)
def test_amd_agrees_with_the_assembly(tmp_path: Path, target: str, unit: str) -> None:
    emitted = emit(UNITS[unit], target, tmp_path)
    assert emitted.assembly and emitted.resources
    text = emitted.assembly.read_text()
    entries = re.split(r"^  - \.", text[text.index("amdhsa.kernels:") :], flags=re.MULTILINE)[1:]
    entry = next(part for part in entries if re.search(rf"\.name: +{emitted.symbol}$", part, re.MULTILINE))
    said = {key: int(value) for key, value in re.findall(r"(\w+): +(\d+)$", entry, re.MULTILINE)}
    needs = emitted.resources
    assert needs.registers == said["vgpr_count"]
    assert needs.agprs == said["agpr_count"]
    assert needs.sgprs == said["sgpr_count"]
    assert needs.spills == said["vgpr_spill_count"] + said["sgpr_spill_count"]
    assert needs.scratch_bytes == said["private_segment_fixed_size"]
    assert needs.threads == said["max_flat_workgroup_size"]


@pytest.mark.parametrize("target", ["h200", "b200"])
@pytest.mark.parametrize("unit", UNITS)
def test_nvidia_agrees_with_cuobjdump(tmp_path: Path, target: str, unit: str) -> None:
    tool = Path(str(resources.files("triton.backends.nvidia"))) / "bin" / "cuobjdump"
    emitted = emit(UNITS[unit], target, tmp_path)
    if not emitted.object or not tool.exists():
        pytest.skip(emitted.skipped or "this Triton has no cuobjdump")
    assert emitted.resources
    command = [str(tool), "--dump-resource-usage", str(emitted.object)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(rf"Function {emitted.symbol}:\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    assert usage
    registers, stack, shared = (int(value) for value in usage.groups())
    needs = emitted.resources
    assert (needs.registers, needs.scratch_bytes) == (registers, stack)
    if emitted.language == "hip":
        assert needs.lds_bytes == max(shared - load_target(target).lds_reserved_per_workgroup, 0)


def test_the_right_kernel_of_several(tmp_path: Path) -> None:
    emitted = emit(UNITS["several"], "mi355x", tmp_path)
    assert emitted.object
    content, target = emitted.object.read_bytes(), load_target("mi355x")
    assert read_resources(content, target, "block_total").threads == 256
    assert read_resources(content, target, "xor_1").threads == 64
    with pytest.raises(EmitError, match="no kernel 'xor_99'; it has: block_total, max_1"):
        read_resources(content, target, "xor_99")


def outcome(content: bytes, target: str, symbol: str) -> Resources | EmitError:
    """Figures, or the error that was raised in their place."""
    try:
        return read_resources(content, load_target(target), symbol)
    except EmitError as error:
        return error


@pytest.mark.parametrize("target", ["mi355x", "h200"])
@pytest.mark.parametrize(
    "content", [b"", b"not an object", b"\x7fELF\x01\x01" + b"\0" * 90], ids=["empty", "text", "32 bits"]
)
def test_what_is_no_object(content: bytes, target: str) -> None:
    with pytest.raises(EmitError, match="a damaged object: not a 64-bit"):
        read_resources(content, load_target(target), "kernel")


class Objects(dict[str, bytes]):
    """Objects by target; prints as its names."""

    def __repr__(self) -> str:
        return f"objects of {', '.join(self)}"


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    folder = tmp_path_factory.mktemp("objects")
    kernels = {target: emit(row_sum_unit(), target, folder) for target in ("mi355x", "h200")}
    return Objects({target: kernel.object.read_bytes() for target, kernel in kernels.items() if kernel.object})


@given(target=st.sampled_from(["mi355x", "h200"]), cut=st.floats(0.0, 0.99))
def test_a_cut_object_is_an_error(objects: Objects, target: str, cut: float) -> None:
    content = objects[target]
    with pytest.raises(EmitError, match="row_sum"):
        read_resources(content[: int(len(content) * cut)], load_target(target), "row_sum")


@given(
    target=st.sampled_from(["mi355x", "h200"]),
    at=st.floats(0.0, 1.0, exclude_max=True),
    value=st.binary(min_size=1, max_size=9),
)
def test_a_changed_object_is_an_error_at_worst(objects: Objects, target: str, at: float, value: bytes) -> None:
    content = bytearray(objects[target])
    start = int(len(content) * at)
    content[start : start + len(value)] = value
    found = outcome(bytes(content), target, "row_sum")
    if isinstance(found, EmitError):
        assert found.message and found.remedy
    else:
        assert all(figure >= 0 for figure in vars(found).values() if isinstance(figure, int))


def test_a_kernel_without_a_workgroup_size(tmp_path: Path) -> None:
    source = tmp_path / "free.hip"
    source.write_text(
        '#include "portability.h"\nextern "C" __global__ void free_size(float* x) { x[k3::thread_x()] = 1.0f; }\n'
    )
    emitted = emit(HipUnit(source, "free_size"), "mi355x", tmp_path)
    assert emitted.resources and emitted.resources.threads == 1024, "the most that the kernel must be ready for"
    if isinstance(find_compiler(HipUnit(source, "free_size"), load_target("h200")), Missing):
        pytest.skip("no CUDA compiler")
    with pytest.raises(EmitError, match="how many threads") as caught:
        emit(HipUnit(source, "free_size"), "h200", tmp_path)
    assert "K3_KERNEL" in str(caught.value.remedy)


def test_the_cpu_has_no_objects() -> None:
    with pytest.raises(UnsupportedError, match="the CPU has no objects"):
        read_resources(b"", load_target("cpu"), "kernel")
