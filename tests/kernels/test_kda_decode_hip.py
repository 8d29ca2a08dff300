"""The HIP source of k3::kda_decode without a GPU: emulated against fp64, compiled for every target."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hip_emulation import COMPILER, emulating
from kda_decode_cases import errors, make_call
from kda_verify_cases import waits_before_it_loads

from k3rewrite.emit import Provenance, emit_unit, summarise_assembly
from k3rewrite.kernels.kda_decode import hip_kernel, launch
from k3rewrite.kernels.kda_decode.hip_kernel import Layout, layout_for
from k3rewrite.kernels.kda_decode.kernel import KERNELS
from k3rewrite.targets import load_target

KERNEL = KERNELS[1]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("layout", "wave_size"),
    [
        (Layout(1, 4, dependent=True, ahead=True), 32),
        (Layout(1, 8, keys=8), 32),
        (Layout(1, 4), 64),
        (Layout(1, 8), 64),
        (Layout(1, 4, bulk=True), 32),
        (Layout(1, 8, dependent=True, keys=8, bulk=True, once=True, ahead=True), 32),
    ],
)
@pytest.mark.parametrize(
    "settings",
    [
        {"slots": [4, 0, 2, 1], "heads": 3, "size": 64},
        {"slots": None, "rows": 2, "heads": 2, "size": 128, "null_slot": False},
        {"slots": [3, 0, 5, -2], "heads": 2, "size": 128, "spare": 3, "inner": torch.bfloat16, "ids": torch.int32,
         "activation": "silu"},
        {"slots": [2, 0, 1], "heads": 2, "size": 64, "bound": None},
    ],
)  # fmt: skip
def test_near_fp64(settings: dict[str, Any], layout: Layout, wave_size: int, compiled: Path) -> None:
    call = make_call(**settings)
    kept = {name: value.clone() for name, value in call.items() if isinstance(value, torch.Tensor)}
    with emulating(hip_kernel, compiled, wave_size):
        results = hip_kernel.kda_decode(**call, layout=layout)
    found = errors(results, call)
    assert found["out"] <= (3e-3 if call["inner_dtype"] is torch.float32 else 6e-3)
    assert found["state"] <= (1e-6 if call["inner_dtype"] is torch.float32 else 2e-3)
    assert (found["line"], found["untouched"], found["null"]) == (0, 0, 0)
    assert all(torch.equal(kept[name].nan_to_num(7.0), call[name].nan_to_num(7.0)) for name in kept)


@pytest.mark.parametrize(
    ("target", "heads", "rows"),
    [
        *((target, *size) for target in ("mi355x", "mi325x", "h200", "b200") for size in ((12, 1), (96, 8))),
        ("h200", 96, 1),  # 128 registers of a head in each thread
        ("h200", 12, 16),  # states in shared memory, and in the L2 before that
    ],
)
def test_compiled_for_every_target(target: str, heads: int, rows: int, tmp_path: Path) -> None:
    """No spills; states by 16 bytes a lane; sums over keys by moves between lanes; little shared memory."""
    pytest.importorskip("ziglang")
    call, goal = make_call([*range(1, rows + 1)], heads, 128), load_target(target)
    assert KERNEL.accepts(call, goal) is None
    (unit,) = KERNEL.units(call, goal)
    made = emit_unit(unit, goal, tmp_path, "kda_decode", Provenance("kda_decode", KERNEL.name))
    if made.object is None:
        pytest.skip(made.skipped)
    assert made.resources is not None and made.assembly is not None
    assert made.resources.spills == 0
    assert made.resources.registers <= (224 if (target, heads, rows) == ("h200", 96, 1) else 168)
    assert made.resources.lds_bytes <= 4096 + unit.dynamic_lds
    text = made.assembly.read_text()
    if goal.vendor == "amd":
        passes = 128 // (int(unit.defines["KDA_WAVES"]) * 8)
        # states, and the taps of q, k and v
        assert text.count("global_load_dwordx4") >= 4 * passes + 1
        assert text.count("global_store_dwordx4") == 4 * passes
        assert summarise_assembly(text).dpp > 0 and "_atomic" not in text
    else:
        bulk = unit.defines["KDA_BULK"] == "1"
        assert ("cp.async.bulk.global.shared" in text) is bulk and ("st.global.v4" in text) is not bulk
        assert "ld.global.v4" in text and "shfl.sync.bfly" in text
        assert made.resources.occupancy is not None and made.resources.occupancy.workgroups_per_cu >= (3 if bulk else 1)
        assert ("st.async" in text) is (int(unit.defines["KDA_SPLIT"]) > 1)
        assert waits_before_it_loads(text), "weights may come from the kernel before, as inputs do"
        if "st.async" in text:
            (name,) = re.findall(r"expect_tx\S+ _, \[\S+\], (%r\d+)", text)
            bytes_of = int(re.findall(rf"mov\.[bu]32 \t?{re.escape(name)}, (\d+)", text)[-1])
            assert bytes_of == int(unit.defines["KDA_SPLIT"]) * int(unit.defines["KDA_WAVES"]) * 4


def test_layouts() -> None:
    every = [layout_for(128, heads, "sm_90", 132) for heads in (12, 33, 34, 66, 67, 132, 133, 264, 265, 1024, 1025)]
    assert [layout.split for layout in every] == [4, 4, 2, 2] + [1] * 7
    assert [layout.bulk for layout in every] == [layout.once for layout in every] == [False] * 6 + [True] * 4 + [False]
    assert [layout.ahead for layout in every] == [True] * 8 + [False] * 3 and all(layout.dependent for layout in every)
    assert layout_for(128, 12, "gfx950", 256) == Layout(1, 16) and layout_for(128, 768, "gfx950", 256) == Layout(1, 8)


def test_what_it_does_not_take() -> None:
    h200, call = load_target("h200"), make_call([1, 2], 2, 64)
    assert KERNEL.accepts(call, h200) is None and KERNEL.cost_us(call, h200) > 0
    for change, reason in (
        ({"qkv": call["qkv"].float()}, "qkv is float32; bfloat16 is read"),
        ({"out_dtype": torch.float32}, "writes bfloat16"),
        ({"a_log": call["a_log"].bfloat16()}, "a_log is bfloat16; float32 is read"),
        ({"state": call["state"].mT.contiguous().mT}, "a state of keys by values"),
        ({"f": call["f"][:, :2]}, "a decay of each head"),
        ({"state": torch.randn(8, 2, 64, 65)[..., 1:]}, "does not lie in one piece"),
    ):
        assert reason in str(KERNEL.accepts(call | change, h200))
    small = make_call([1, 2], 2, 16)
    assert "64 or 128" in str(KERNEL.accepts(small, h200))
    assert "target cpu runs the reference" in str(KERNEL.accepts(call, load_target("cpu")))


def test_states_at_odd_addresses_are_handed_over_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []
    monkeypatch.setattr(launch, "kda_decode", lambda *call, in_place: ran.append(in_place))
    call = make_call([2, 1], 2, 64)
    for name in ("state", "conv_weight"):
        room = torch.zeros(call[name].numel() + 1)
        odd = room[1:].view(call[name].shape).copy_(call[name])
        hip_kernel.kda_decode(**call | {name: odd}, in_place=True)
    assert ran == [True, True]
