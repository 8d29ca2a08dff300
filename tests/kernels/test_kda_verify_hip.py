"""The HIP source of k3::kda_verify without a GPU: emulated against fp64, compiled for every target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hip_emulation import COMPILER, emulating
from kda_verify_cases import errors, in_one_buffer, make_call, waits_before_it_loads

from k3rewrite.emit import Provenance, emit_unit, summarise_assembly
from k3rewrite.kernels.kda_verify import hip_kernel, launch
from k3rewrite.kernels.kda_verify.hip_kernel import Layout, layout_for
from k3rewrite.kernels.kda_verify.kernel import KERNELS
from k3rewrite.targets import load_target

KERNEL = KERNELS[1]
BY_CHANNEL = {"by_tap": False}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("layout", "wave_size"),
    [(Layout(1, 4, True, True), 32), (Layout(1, 4), 32), (Layout(1, 4), 64), (Layout(1, 16), 64)],
)
@pytest.mark.parametrize(
    "settings",
    [
        {"accepted": [2, 4, 1], "tokens": 4, "heads": 2, "size": 64, "null": (1,)},
        {"accepted": [1, 2], "tokens": 2, "heads": 2, "size": 128, "null_slot": False, "ids": torch.int32},
        {"accepted": [2, 3, 1], "tokens": 3, "heads": 1, "size": 128, "holes": True, "inner": torch.bfloat16,
         "activation": "silu"},
        {"accepted": [5, 1, 2, 8], "tokens": 8, "heads": 1, "size": 64, "lengths": [8, 3, 0, 1], "spare": 0},
    ],
)  # fmt: skip
def test_near_fp64(settings: dict[str, Any], layout: Layout, wave_size: int, compiled: Path) -> None:
    call = make_call(**settings | BY_CHANNEL)
    own = in_one_buffer(call)
    with emulating(hip_kernel, compiled, wave_size):
        out = hip_kernel.kda_verify(**call | own, in_place=True, layout=layout)
    shared = (out, own["conv_state"], own["state"])
    kept = {name: value.clone() for name, value in call.items() if isinstance(value, torch.Tensor)}
    with emulating(hip_kernel, compiled, wave_size):
        results = hip_kernel.kda_verify(**call, layout=layout)
    found = errors(results, call)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(shared, results, strict=True))
    assert found["out"] <= (3e-3 if call["inner_dtype"] is torch.float32 else 6e-3)
    assert found["state"] <= (1e-6 if call["inner_dtype"] is torch.float32 else 3e-3)
    assert (found["line"], found["untouched"], found["null"]) == (0, 0, 0)
    assert all(torch.equal(kept[name].nan_to_num(7.0), call[name].nan_to_num(7.0)) for name in kept)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("looks", ["right", "mixed", "wrong"])
def test_what_was_seen_too_early_decides_nothing(looks: str, compiled: Path) -> None:
    """Slots, starts and columns that are looked at before the kernel before has ended are right, or another row's."""
    call = make_call([2, 4, 1, 3], 4, 2, 64, null=(1,), spare=1, **BY_CHANNEL)
    with emulating(hip_kernel, compiled, 32, looks):
        results = hip_kernel.kda_verify(**call, layout=Layout(1, 4, True, True))
    found = errors(results, call)
    assert found["out"] <= 3e-3 and found["state"] <= 1e-6
    assert (found["line"], found["untouched"], found["null"]) == (0, 0, 0)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("ahead", [False, True])
def test_ids_beyond_32_bits(ahead: bool, compiled: Path) -> None:
    """Null slots and starts far below zero, lengths far above the window and below zero; columns of a row of nobody."""
    call = make_call([1, 2, 1, 1], 2, 2, 64, lengths=[1, 2, 2, 0], null=(2,), **BY_CHANNEL)
    near = {name: call[name].clone() for name in ("table", "start", "history", "lengths")}
    call["table"][2], call["start"][2], call["history"][2] = -(2**40), -(2**33) + 1, -(2**50)
    call["start"][0], near["start"][0] = -(2**33), 0  # starts from nothing
    call["lengths"][1], call["lengths"][3] = 2**33, -(2**32) + 1
    with emulating(hip_kernel, compiled, 32):
        layout = Layout(1, 4, ahead, ahead)
        results = [hip_kernel.kda_verify(**call | numbers, layout=layout) for numbers in ({}, near)]
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(*results, strict=True))
    found = errors(results[0], call | near)
    assert found["out"] <= 3e-3 and found["state"] <= 1e-6 and found["null"] == 0


@pytest.mark.parametrize("target", ["mi355x", "mi325x", "h200", "b200"])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 4), (4, 8), (32, 8)])
def test_compiled_for_every_target(target: str, rows: int, tokens: int, tmp_path: Path) -> None:
    """No spills; states by 16 bytes a lane; sums over keys by moves between lanes."""
    pytest.importorskip("ziglang")
    call, goal = make_call([1] * rows, tokens, 12, 128, by_tap=False), load_target(target)
    assert KERNEL.accepts(call, goal) is None
    (unit,) = KERNEL.units(call, goal)
    made = emit_unit(unit, goal, tmp_path, "kda_verify", Provenance("kda_verify", KERNEL.name))
    if made.object is None:
        pytest.skip(made.skipped)
    assert made.resources is not None and made.assembly is not None
    assert made.resources.spills == 0 and made.resources.lds_bytes <= 24 * 1024
    text = made.assembly.read_text()
    if goal.vendor == "amd":
        passes = 128 // (int(unit.defines["KDA_WAVES"]) * 8)
        assert text.count("global_load_dwordx4") >= 4 * passes + 1
        assert text.count("global_store_dwordx4") >= 4 * passes * tokens
        assert summarise_assembly(text).dpp > 0 and "_atomic" not in text
    else:
        assert "ld.global.v4" in text and text.count("st.global.v4") >= 4 * tokens and "shfl.sync.bfly" in text
        assert ("st.async" in text) is (int(unit.defines["KDA_SPLIT"]) > 1)
        assert waits_before_it_loads(text), "weights may come from the kernel before, as inputs do"


def test_layouts() -> None:
    every = {heads: layout_for(heads, "sm_90", 132) for heads in (12, 16, 17, 33, 66, 67, 384)}
    assert [layout.split for layout in every.values()] == [8, 8, 4, 4, 2, 1, 1]
    assert [layout.waves for layout in every.values()] == [4, 4, 4, 4, 8, 8, 8]
    assert [layout.ahead for layout in every.values()] == [True] * 6 + [False]
    assert all(layout.dependent for layout in every.values())
    assert layout_for(12, "gfx950", 256) == Layout(1, 16) and layout_for(384, "gfx950", 256) == Layout(1, 8)


def test_what_it_does_not_take() -> None:
    h200, call = load_target("h200"), make_call([1, 2], 2, 2, 64, by_tap=False)
    assert KERNEL.accepts(call, h200) is None
    for change, reason in (
        ({"f": call["f"].float()}, "f is float32; bfloat16 is read"),
        ({"out_dtype": torch.float32}, "writes bfloat16"),
        ({"conv_state": call["conv_state"][:, :3]}, "lines of 3 columns, and 2 tokens leave 4"),
        ({"start": call["start"].int()}, "of several dtypes"),
        ({"conv_weight": call["conv_weight"].t().contiguous().t()}, "do not lie together"),
    ):
        assert reason in str(KERNEL.accepts(call | change, h200)), change
    assert "64 or 128" in str(KERNEL.accepts(make_call([1], 2, 2, 16, by_tap=False), h200))


def test_states_at_odd_addresses_are_handed_over_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []
    monkeypatch.setattr(launch, "kda_verify", lambda *call, in_place: ran.append(in_place))
    call = make_call([2, 1], 2, 2, 64, by_tap=False)
    for name in ("state", "conv_weight"):
        room = torch.zeros(call[name].numel() + 1)
        odd = room[1:].view(call[name].shape).copy_(call[name])
        hip_kernel.kda_verify(**call | {name: odd}, in_place=True)
    assert ran == [True, True]
