"""k3::kda_verify without a GPU: its meaning and its Triton kernels against fp64, compiled for every target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreting import results_of
from kda_verify_cases import errors, make_call, through_op, waits_before_it_loads
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from k3rewrite import _torch_private as private
from k3rewrite.emit import Provenance, emit_unit
from k3rewrite.kernels.kda_verify.kernel import KERNELS
from k3rewrite.kernels.kda_verify.op import kda_verify
from k3rewrite.targets import load_target

pytest.importorskip("triton")
KERNEL = KERNELS[0]
BOUNDS = {"fp32": (1e-6, 1e-6)}
NARROW = (1.2e-2, 1e-6)
"""of the output, which the interpreter cuts off in bf16, and of the states"""


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = results_of("kda_verify_interpreted.py")
    assert len(results) == 16
    return results


def test_near_fp64(interpreted: dict[str, dict[str, Any]]) -> None:
    for name, found in interpreted.items():
        if "out" not in found:
            continue
        out, state = BOUNDS.get(name, NARROW)
        assert found["out"] <= out and found["state"] <= state, name


def test_lines_are_copies_and_nothing_else_is_touched(interpreted: dict[str, dict[str, Any]]) -> None:
    for name, found in interpreted.items():
        if "line" in found:
            assert (found["line"], found["untouched"], found["null"]) == (0, 0, 0), name
        assert found.get("inputs_kept", True) and found.get("in_place_same", True), name
    assert interpreted["strided pools"] == {"same": True, "between": True}


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_meaning_itself(data: st.DataObject) -> None:
    """Against the equations, written again token by token: any window, acceptance, null rows, holes and lengths."""
    tokens, rows = data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.integers(0, 4))
    accepted = data.draw(st.lists(st.integers(1, tokens), min_size=rows, max_size=rows))
    ragged, null_slot = data.draw(st.booleans()), data.draw(st.booleans())
    lengths = data.draw(st.lists(st.integers(0, tokens), min_size=rows, max_size=rows)) if ragged else None
    null = tuple(row for row in range(rows) if null_slot and data.draw(st.booleans()))
    holes = null_slot and rows > 0 and tokens > 1 and not null and not ragged and data.draw(st.booleans())
    call = make_call(
        accepted, tokens, 2, 8, null=null, holes=holes, lengths=lengths, null_slot=null_slot, dtype=torch.float64,
        spare=data.draw(st.integers(0, 2)), activation=data.draw(st.sampled_from(["silu", "sigmoid"])),
    )  # fmt: skip
    if lengths is not None:
        call["table"].clamp_(max=len(call["state"]) - 1)  # a reference reads what it does not keep
    found = errors(through_op(call), call)
    assert found["out"] <= 1e-12 and found["state"] <= 1e-12, found
    assert (found["line"], found["untouched"], found["null"]) == (0, 0, 0), found


@pytest.mark.parametrize("inner", [torch.float32, torch.bfloat16])
def test_its_roundings(inner: torch.dtype) -> None:
    call = make_call([4, 1, 2], 4, 3, 16, inner=inner, null=(1,))
    found = errors(kda_verify(**call), call)
    assert found["out"] <= (4e-3 if inner is torch.float32 else 1e-2) and found["state"] <= 1e-2
    assert (found["line"], found["untouched"], found["null"]) == (0, 0, 0)


def test_the_state_of_what_was_accepted() -> None:
    """Columns hold 10, 20, 30, 40 and three tokens were accepted: the next window starts from 30."""
    call = make_call([3], 4, 1, 8, dtype=torch.float32)
    for column, slot in enumerate(call["table"][0].tolist()):
        call["state"][slot] = 10.0 * (column + 1)
    call["a_log"].fill_(9.0)
    call["f"].fill_(-40.0)  # sigmoid 0: nothing decays
    call["b"].fill_(-40.0)  # nothing is updated
    call["state"] = call["state"].clone()
    _, _, state = kda_verify(**call)
    torch.testing.assert_close(state[call["table"][0]], torch.full((4, 1, 8, 8), 30.0))


def test_rejected_tokens_leave_no_trace() -> None:
    """Two windows that agree in what was accepted of them, and in nothing else, are followed by the same window."""
    first, tokens = make_call([1], 4, 2, 8, dtype=torch.float64), 4
    following = []
    for seed, accepted in ((1, 2), (2, 2)):
        other = make_call([1], tokens, 2, 8, dtype=torch.float64, seed=seed)
        drafts = {n: torch.cat([first[n][:, :accepted], other[n][:, accepted:]], 1) for n in ("qkv", "f", "b", "gate")}
        _, line, state = through_op(first | drafts)
        offset = torch.tensor([accepted - 1])
        then = {
            "conv_state": line,
            "state": state,
            "start": first["table"][0, offset],
            "history": offset + torch.arange(3),
        }
        following.append(through_op(first | then | {"history": then["history"].view(1, 3)}))
    assert torch.equal(following[0][0], following[1][0]), "outputs"
    slots = first["table"][0]
    assert torch.equal(following[0][2][slots], following[1][2][slots]), "states"
    assert torch.equal(following[0][1][slots[0], 2:6], following[1][1][slots[0], 2:6]), "what may be read of the line"


@pytest.mark.parametrize("target", ["mi355x", "mi325x", "h200", "b200"])
@pytest.mark.parametrize(
    ("rows", "tokens", "ragged"), [(1, 4, False), (4, 2, False), (4, 8, False), (32, 8, False), (1, 4, True)]
)
def test_compiled_for_every_target(target: str, rows: int, tokens: int, ragged: bool, tmp_path: Path) -> None:
    call = make_call([1] * rows, tokens, 12, 128, lengths=[tokens] * rows if ragged else None)
    goal = load_target(target)
    assert KERNEL.accepts(call, goal) is None
    tile, close = KERNEL.units(call, goal)
    for unit in (tile, close):
        made = emit_unit(unit, goal, tmp_path, "kda_verify", Provenance("kda_verify", KERNEL.name))
        if made.object is None:
            pytest.skip(made.skipped)
        assert made.resources is not None and made.resources.spills == 0, unit.symbol
        assert made.resources.registers <= 255 and made.resources.lds_bytes <= 4 * 1024, unit.symbol
        if goal.vendor == "nvidia":  # weights may come from the kernel before, as inputs do
            assert made.assembly is not None and waits_before_it_loads(made.assembly.read_text()), unit.symbol
    assert (tile.num_warps == 1) is (rows < 32)


def test_a_symbolic_batch_gets_every_tile() -> None:
    call = make_call([1, 1, 1], 4, 12, 128)
    with private.FakeTensorMode(shape_env=ShapeEnv()) as mode:
        context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
        table = mode.from_tensor(call["table"], symbolic_context=context)
    units = KERNEL.units(call | {"table": table}, load_target("mi355x"))
    assert [unit.constants.get("WIDTH") for unit in units] == [4, 8, 32, None]


def test_what_it_does_not_take() -> None:
    h200, call = load_target("h200"), make_call([1, 2], 2, 2, 16)
    assert KERNEL.accepts(call, h200) is None
    assert KERNEL.accepts(call, load_target("cpu")) == "target cpu runs the reference"
    for change, reason in (
        ({"state": call["state"].double()}, "state is float64"),
        ({"gate": call["gate"].transpose(2, 3)}, "gate is not contiguous in its last dimension"),
        ({"state": torch.zeros(4, 2, 24, 24)}, "heads of 24 values and 24 keys"),
        ({"state": torch.zeros(4, 2, 16, 17)[..., :16]}, "does not lie in one piece"),
        ({"table": call["table"].to(torch.int16)}, "table is int16"),
        ({"qkv": call["qkv"].float()}, "qkv is float32, and the line bfloat16"),
        ({"conv_weight": torch.zeros(96, 3)}, "3 taps"),
        ({"conv_state": call["conv_state"][:, :3]}, "lines of 3 columns, and 2 tokens leave 4"),
        ({"out_dtype": torch.float64}, "out_dtype is float64"),
    ):  # fmt: skip
        assert reason in str(KERNEL.accepts(call | change, h200)), change
    long = make_call([1], 9, 2, 16)
    assert "windows of 9 tokens" in str(KERNEL.accepts(long, h200))
