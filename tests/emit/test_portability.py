"""portability.h: what it compiles to on each target, and what it computes where a device is there to run it.

Lane exchanges within a row of 16 are moves whose meaning the assembly spells out, so for AMD they are checked by
reading the moves and doing them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from k3rewrite.emit import Provenance, emit_unit, launch, summarise_assembly
from k3rewrite.emit.compiler import Missing, find_compiler
from k3rewrite.emit.launch import DeviceFunction, load_function
from k3rewrite.errors import UnsupportedError
from k3rewrite.ops.kernel import HipUnit
from k3rewrite.targets import detect_target, load_target

SOURCES = Path(__file__).parent / "kernels"
ROW = 16
IN_ROW_MASKS = range(1, 16)
AMD = ("mi355x", "mi325x")


def unit(file: str, symbol: str) -> HipUnit:
    return HipUnit(SOURCES / f"{file}.hip", symbol)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """(file, target) -> assembly of the whole file."""
    folder, found = tmp_path_factory.mktemp("texts"), {}
    for file, symbol in (("lanes", "wave_total"), ("numbers", "fast")):
        for target in AMD:
            emitted = emit_unit(unit(file, symbol), load_target(target), folder, file, Provenance("k3::test", file))
            assert emitted.assembly
            found[file, target] = emitted.assembly.read_text()
    return found


def body(text: str, symbol: str) -> str:
    match = re.search(rf"^{symbol}:(.*?)^\.Lfunc_end", text, re.MULTILINE | re.DOTALL)
    assert match
    return match[1]


def lane_map(move: str) -> Callable[[int], int]:
    """Which lane of a row a DPP move reads, from its text."""
    if quad := re.search(r"quad_perm:\[(\d),(\d),(\d),(\d)\]", move):
        order = [int(lane) for lane in quad.groups()]
        return lambda lane: lane // 4 * 4 + order[lane % 4]
    if rotate := re.search(r"row_ror:(\d+)", move):
        return lambda lane: (lane - int(rotate[1])) % ROW
    if "row_half_mirror" in move:
        return lambda lane: lane // 8 * 8 + 7 - lane % 8
    assert "row_mirror" in move, move
    return lambda lane: ROW - 1 - lane


@pytest.mark.parametrize("target", AMD)
@pytest.mark.parametrize("mask", IN_ROW_MASKS)
def test_moves_within_a_row(texts: dict[tuple[str, str], str], target: str, mask: int) -> None:
    moves = [line for line in body(texts["lanes", target], f"xor_{mask}").splitlines() if "row_mask" in line]
    assert 1 <= len(moves) <= 3
    lanes = list(range(ROW))
    for move in moves:
        reads = lane_map(move)
        lanes = [lanes[reads(lane)] for lane in range(ROW)]
    assert lanes == [lane ^ mask for lane in range(ROW)]


@pytest.mark.parametrize("target", AMD)
@pytest.mark.parametrize(
    ("mask", "swizzle"),
    [(16, "SWAP,16"), (17, 'BITMASK_PERM,"ipppi"'), (21, 'BITMASK_PERM,"ipipi"'), (31, "REVERSE,32")],
)
def test_exchanges_within_half_a_wave(texts: dict[tuple[str, str], str], target: str, mask: int, swizzle: str) -> None:
    """i inverts a bit of the lane's number, p keeps it, highest bit first."""
    assert f"swizzle({swizzle})" in body(texts["lanes", target], f"xor_{mask}")


@pytest.mark.parametrize(
    ("target", "upper"),
    [("mi355x", ["v_permlane16_swap", "v_permlane32_swap"]), ("mi325x", ["ds_swizzle", "ds_bpermute"])],
)
def test_a_wave_reduces_in_six_exchanges(texts: dict[tuple[str, str], str], target: str, upper: list[str]) -> None:
    text = body(texts["lanes", target], "wave_total")
    found = re.findall(r"quad_perm:\[\S+\]|row_half_mirror|row_mirror|v_permlane\d+_swap|ds_swizzle|ds_bpermute", text)
    assert found == ["quad_perm:[1,0,3,2]", "quad_perm:[2,3,0,1]", "row_half_mirror", "row_mirror", *upper]


@pytest.mark.parametrize("target", AMD)
def test_one_instruction_each(texts: dict[tuple[str, str], str], target: str) -> None:
    text = texts["numbers", target]
    fast = body(text, "fast")
    assert {name: len(re.findall(rf"\b{name}_f32", fast)) for name in ("v_exp", "v_log", "v_rcp", "v_rsq")} == {
        "v_exp": 3,
        "v_log": 1,
        "v_rcp": 2,
        "v_rsq": 1,
    }
    assert bool(re.search(r"v_cvt_pk_bf16_f32", body(text, "to_bf16"))) is (target == "mi355x")
    assert re.search(r"global_load_dwordx4 .* nt$", body(text, "streamed_copy"), re.MULTILINE)
    plus_one = summarise_assembly(texts["numbers", target].split("streamed_copy:")[0])
    assert (plus_one.wide_loads, plus_one.wide_stores) == (1, 1)


# ---------------------------------------------------------------------------------------------- on a device

on_device = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], DeviceFunction]:
    """(file, symbol) -> the kernel, ready to launch; each file is compiled once."""
    folder, objects = tmp_path_factory.mktemp("objects"), {}

    def loaded(file: str, symbol: str) -> DeviceFunction:
        if file not in objects:
            target = detect_target()
            if isinstance(found := find_compiler(unit(file, symbol), target), Missing):
                pytest.skip(found.reason)
            emitted = emit_unit(unit(file, symbol), target, folder, file, Provenance("k3::test", file))
            assert emitted.object
            objects[file] = emitted.object.read_bytes()
        return load_function(objects[file], symbol)

    return loaded


class TestOnDevice:
    pytestmark = on_device

    def wave(self) -> int:
        return detect_target().wave_size

    @pytest.mark.parametrize("mask", [*IN_ROW_MASKS, 16, 17, 21, 31, 32, 63])
    def test_shuffle_xor(self, load: Callable[[str, str], DeviceFunction], mask: int) -> None:
        if mask >= self.wave():
            pytest.skip("no such lane")
        x = torch.arange(64, device="cuda", dtype=torch.float32)
        load("lanes", f"xor_{mask}")(grid=(1,), threads=64, arguments=(x,))
        assert x.tolist() == [lane ^ mask for lane in range(64)]

    @pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
    def test_group_reductions(self, load: Callable[[str, str], DeviceFunction], width: int) -> None:
        values = torch.randint(-50, 50, (64,), device="cuda").float()
        groups = values.view(-1, width)
        for name, expected in (("sum", groups.sum(1, keepdim=True)), ("max", groups.amax(1, keepdim=True))):
            x = values.clone()
            load("lanes", f"{name}_{width}")(grid=(1,), threads=64, arguments=(x,))
            assert torch.equal(x.view(-1, width), expected.expand(-1, width))

    def test_wave_and_block_sums(self, load: Callable[[str, str], DeviceFunction]) -> None:
        values = torch.randint(-50, 50, (256,), device="cuda").float()
        x = values.clone()
        load("lanes", "block_total")(grid=(1,), threads=256, arguments=(x,))
        assert torch.equal(x, values.sum().expand(256))
        x = values[:64].clone()
        load("lanes", "wave_total")(grid=(1,), threads=64, arguments=(x,))
        expected = values[:64].view(-1, self.wave()).sum(1, keepdim=True).expand(-1, self.wave())
        assert torch.equal(x.view(-1, self.wave()), expected)

    def test_shuffle_from_any_lane(self, load: Callable[[str, str], DeviceFunction]) -> None:
        values = torch.arange(64, device="cuda", dtype=torch.float32)
        x = values.clone()
        load("lanes", "reversed")(grid=(1,), threads=64, arguments=(x,))
        assert torch.equal(x, values.view(-1, self.wave()).flip(1).reshape(-1))

    def test_rounding_to_bf16(self, load: Callable[[str, str], DeviceFunction]) -> None:
        bits = torch.randint(-(2**31), 2**31, (1 << 20,), dtype=torch.int64, device="cuda").to(torch.int32)
        special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4e38, 1e-40, 1e-45])
        ties = (torch.arange(4096, dtype=torch.int32) * 0x8000 + 0x3F800000).view(torch.float32)
        x = torch.cat([bits.view(torch.float32), special.cuda(), ties.cuda()])
        out = torch.full_like(x, float("nan"), dtype=torch.bfloat16)
        load("numbers", "to_bf16")(grid=(-(-x.numel() // 256),), threads=256, arguments=(x, out, x.numel()))
        expected = x.to(torch.bfloat16)
        assert torch.equal(out.isnan(), x.isnan())
        kept = ~x.isnan()
        assert torch.equal(out[kept].view(torch.int16), expected[kept].view(torch.int16))

    @pytest.mark.parametrize("count", [8, 2048, 2056, 40000])
    def test_wide_accesses(self, load: Callable[[str, str], DeviceFunction], count: int) -> None:
        x = torch.randn(count, device="cuda").bfloat16()
        out = torch.full((count + 8,), float("nan"), device="cuda", dtype=torch.bfloat16)
        load("numbers", "plus_one")(grid=(-(-count // 2048),), threads=256, arguments=(x, out, count))
        assert torch.equal(out[:count], (x.float() + 1).bfloat16())
        assert out[count:].isnan().all()
        copied = torch.full((count + 8,), float("nan"), device="cuda")
        load("numbers", "streamed_copy")(grid=(-(-count // 1024),), threads=256, arguments=(x.float(), copied, count))
        assert torch.equal(copied[:count], x.float())
        assert copied[count:].isnan().all()

    def test_fast_functions(self, load: Callable[[str, str], DeviceFunction]) -> None:
        x = torch.cat([torch.randn(4096, device="cuda") * scale for scale in (0.1, 1.0, 10.0, 40.0)])
        x = x.clamp(-80.0, 80.0)  # all results are finite in fp32
        out = torch.full((x.numel(), 6), float("nan"), device="cuda")
        load("numbers", "fast")(grid=(-(-x.numel() // 256),), threads=256, arguments=(x, out, x.numel()))
        wide = x.double()
        one = torch.ones_like(wide)
        # value, relative bound, absolute bound; a result below the smallest normal number may become zero
        cases = {
            "exp2": (wide.exp2(), 4e-7 * one, 1.2e-38),
            "exp": (wide.exp(), 4e-7 + wide.abs() * 2**-23, 1.2e-38),
            "log2": (wide.abs().log2(), 4e-7 * one, 4e-7),
            "reciprocal": (1 / wide, 4e-7 * one, 1.2e-38),
            "rsqrt": (wide.abs().rsqrt(), 6e-7 * one, 0.0),
            "sigmoid": (wide.sigmoid(), 6e-7 + wide.abs() * 2**-23, 1.2e-38),
        }
        for column, (name, (expected, relative, absolute)) in enumerate(cases.items()):
            error = (out[:, column].double() - expected).abs()
            assert (error <= relative * expected.abs() + absolute).all(), (
                f"{name}: {float((error / expected.abs()).max())}"
            )

    def test_sigmoid_far_out(self, load: Callable[[str, str], DeviceFunction]) -> None:
        x = torch.tensor([-1e30, -200.0, 200.0, 1e30, -float("inf"), float("inf"), 0.0, float("nan")], device="cuda")
        out = torch.full((x.numel(), 6), float("nan"), device="cuda")
        load("numbers", "fast")(grid=(1,), threads=256, arguments=(x, out, x.numel()))
        assert torch.equal(out[:7, 5], torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.5], device="cuda"))
        assert out[7, 5].isnan()

    def test_nothing_to_launch(self, load: Callable[[str, str], DeviceFunction]) -> None:
        x = torch.full((4,), float("nan"), device="cuda")
        load("numbers", "fast")(grid=(0,), threads=256, arguments=(x, x, 0))
        assert x.isnan().all()

    def test_inside_graph_capture(self, load: Callable[[str, str], DeviceFunction]) -> None:
        x, out = torch.randn(2048, device="cuda"), torch.full((2048,), float("nan"), device="cuda")
        copy, graph = load("numbers", "streamed_copy"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            copy(grid=(2,), threads=256, arguments=(x, out, 2048))
        x.normal_()
        graph.replay()
        assert torch.equal(out, x)


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="2147483648 does not fit 32 bits"):
        launch._argument(2**31)
    assert launch._argument(-(2**31)).value == -(2**31)


def test_without_a_gpu_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="no GPU"):
        load_function(b"", "kernel")
