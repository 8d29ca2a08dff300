"""The Triton kernel of k3::kda_decode without a GPU: interpreted against fp64, compiled for every target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interpreting import results_of
from kda_decode_cases import errors, make_call

from k3rewrite.emit import Provenance, emit_unit
from k3rewrite.kernels.kda_decode.kernel import KERNELS
from k3rewrite.kernels.kda_decode.op import kda_decode
from k3rewrite.targets import load_target

pytest.importorskip("triton")
KERNEL = KERNELS[0]
BOUNDS = dict.fromkeys(("fp32", "a bounded decay of each head"), (1e-5, 1e-6))
NARROW = (1.2e-2, 1e-6)
"""of the output, which the interpreter cuts off in bf16, and of the state"""


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = results_of("kda_decode_interpreted.py")
    assert len(results) == 15
    return results


def test_near_fp64(interpreted: dict[str, dict[str, Any]]) -> None:
    for name, found in interpreted.items():
        out, state = BOUNDS.get(name, NARROW)
        assert found["out"] <= out and found["state"] <= state, name


def test_lines_are_copies_and_nothing_else_is_touched(interpreted: dict[str, dict[str, Any]]) -> None:
    for name, found in interpreted.items():
        assert (found["line"], found["untouched"], found["null"]) == (0, 0, 0), name
        assert found["inputs_kept"] and found["in_place_same"], name


@pytest.mark.parametrize("inner", [torch.float32, torch.bfloat16])
def test_the_meaning_itself(inner: torch.dtype) -> None:
    call = make_call([4, 0, 2, 1], 3, 16, inner=inner)
    found = errors(kda_decode(**call), call)
    assert found["out"] <= (4e-3 if inner is torch.float32 else 1e-2) and found["state"] <= 1e-2
    assert (found["line"], found["untouched"], found["null"]) == (0, 0, 0)


@pytest.mark.parametrize("target", ["mi355x", "mi325x", "h200", "b200"])
@pytest.mark.parametrize("form", ["K3", "no slots", "Kimi-Linear", "a decay of each head"])
def test_compiled_for_every_target(target: str, form: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "K3": {"slots": [1, 2]},
        "no slots": {"slots": None, "rows": 2, "null_slot": False},
        "Kimi-Linear": {"slots": None, "rows": 2, "null_slot": False, "bound": None, "foreign": True},
        "a decay of each head": {"slots": [1, 2], "bound": None, "per_head": True, "activation": "silu"},
    }[form]
    call = make_call(heads=12, size=128, **settings)
    goal = load_target(target)
    assert KERNEL.accepts(call, goal) is None
    (unit,) = KERNEL.units(call, goal)
    made = emit_unit(unit, goal, tmp_path, "kda_decode", Provenance("kda_decode", KERNEL.name))
    if made.object is None:
        pytest.skip(made.skipped)
    assert made.resources is not None and made.resources.spills == 0
    assert made.resources.registers <= 255 and made.resources.lds_bytes <= 16 * 1024


def test_what_it_does_not_take() -> None:
    h200, call = load_target("h200"), make_call([1, 2], 2, 16)
    assert KERNEL.accepts(call, load_target("cpu")) == "target cpu runs the reference"
    for change, reason in (
        ({"state": call["state"].double()}, "state is float64"),
        ({"qkv": call["qkv"].t().contiguous().t()}, "qkv is not contiguous in its last dimension"),
        ({"state": torch.zeros(4, 2, 24, 24)}, "heads of 24 values and 24 keys"),
        ({"state": call["state"].repeat(1, 1, 2, 1)[:, :, ::2]}, "does not lie in one piece"),
        ({"slots": call["slots"].to(torch.int16)}, "slots are not contiguous int32 or int64"),
        ({"out_dtype": torch.float64}, "out_dtype is float64"),
    ):
        assert reason in str(KERNEL.accepts(call | change, h200)), change
