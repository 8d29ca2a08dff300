"""The kernels of k3::kda_chunk on a GPU against fp64: lengths, groups, nearly parallel keys, states, a graph."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from kda_chunk_cases import BY_TOKEN, errors, exact, make_call, near_parallel, relative

from k3rewrite.kernels.devices import device_facts
from k3rewrite.kernels.kda_chunk.checkpoint import checkpoint_table
from k3rewrite.kernels.kda_chunk.launch import kda_chunk
from k3rewrite.kernels.kda_chunk.plan import Plan, plan_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
HEADS, SIZE = 4, 128
OUT, STATE, STRESS = 1e-2, 6e-3, 5e-2
"""Relative, root mean square. Rounding to bf16 is 1.7e-3, and five rounded operands stand one behind the other: in
fp64 with these roundings alone outputs are 5.1e-3 off and states 4.3e-3, with nearly parallel keys 2.4e-2 and 2.2e-2.
Measured on an H200, 4,096 tokens: 4.7e-3 and 3.8e-3; of flash-linear-attention's kernels 4.9e-3 and 4.1e-3."""


def plan(groups: int = 1) -> Plan:
    chosen = plan_for(1, HEADS, SIZE, SIZE, 1, *device_facts(torch.device("cuda")))
    return replace(chosen, groups=groups)


def check(call: dict[str, Any], chosen: Plan | None, out: float = OUT, state: float = STATE) -> None:
    poison = torch.full((1 << 24,), math.nan, device="cuda")  # what is not written would show
    del poison
    found = errors(kda_chunk(**call, plan=chosen), call)
    assert found["out"] <= out and found["state"] <= state, found
    assert (found["dead"], found["untouched"]) == (0, 0), found


@pytest.mark.parametrize("lengths", [[1], [64], [1024], [4096], [513, 64, 1, 1200], [512] * 6])
@pytest.mark.parametrize("packed", [False, True])
def test_lengths(lengths: list[int], packed: bool) -> None:
    slots = [*range(1, len(lengths) + 1)][::-1]
    for bias in (None, -6.0):
        check(make_call(lengths, HEADS, SIZE, slots=slots, packed=packed, bias=bias, device="cuda"), None)


@pytest.mark.parametrize("groups", [2, 4, 8])
@pytest.mark.parametrize("lengths", [[2100], [64], [64, 64], [1300, 64], [513, 64, 1]])
def test_groups(lengths: list[int], groups: int) -> None:
    slots = [*range(1, len(lengths) + 1)]
    for packed in (False, True):
        check(make_call(lengths, HEADS, SIZE, slots=slots, packed=packed, bias=-6.0, device="cuda"), plan(groups))


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("bias", [-40.0, -7.8, -4.0, -1.4])
def test_nearly_parallel_keys(bias: float, groups: int) -> None:
    call = near_parallel(make_call([1100], HEADS, SIZE, slots=[2], bias=bias, device="cuda"))
    check(call, plan(groups), STRESS, STRESS)


@pytest.mark.parametrize("groups", [1, 4])
def test_rows_of_nobody_and_fresh_ones(groups: int) -> None:
    settings = {"slots": [3, 0, 2, 5], "fresh": [False, True, True, False], "bias": -6.0, "device": "cuda"}
    for packed in (False, True):
        check(make_call([300, 70, 1100, 0], HEADS, SIZE, width=1800, packed=packed, **settings), plan(groups))


@pytest.mark.parametrize("groups", [1, 4])
def test_later_gates_leave_earlier_outputs_bit_equal(groups: int) -> None:
    call = make_call([1100], HEADS, SIZE, bias=-3.0, device="cuda")
    out, _ = kda_chunk(**call, plan=plan(groups))
    for t in (17, 40, 63, 64, 530, 1000):
        f = call["f"].clone()
        f[:, t:] = 3.0
        edited, _ = kda_chunk(**call | {"f": f}, plan=plan(groups))
        assert torch.equal(edited[:, :t], out[:, :t]) and not torch.equal(edited[:, t:], out[:, t:]), t


@pytest.mark.parametrize("groups", [1, 4])
def test_checkpoints(groups: int) -> None:
    lengths, slots = [1100, 640], [1, 2]
    call = make_call(lengths, HEADS, SIZE, slots=slots, bias=-6.0, device="cuda")
    call["state"] = torch.cat([call["state"], call["state"][1:]])
    table = checkpoint_table([(0, 64, 3), (0, 1088, 4), (1, 640, 5)], slots, lengths, device="cuda")
    with_table = call | {"checkpoints": table}
    check(with_table, plan(groups))
    out, state = kda_chunk(**with_table, plan=plan(groups))
    assert torch.equal(state[5], state[2])  # the end of the row
    own = call | {name: call[name][:1, 1088:] for name in BY_TOKEN} | {"state": state, "checkpoints": table[:1] * 0}
    own |= {"slots": call["slots"][:1] * 0 + 4, "lengths": call["lengths"][:1] * 0 + 12}
    again, end = kda_chunk(**own, plan=plan())
    assert relative(again.double(), out[:1, 1088:].double()) <= (0 if groups == 1 else OUT)
    assert relative(end[4].double(), state[1].double()) <= (0 if groups == 1 else STATE)


def test_inputs_of_other_kinds() -> None:
    check(make_call([200, 65], HEADS, SIZE, raw=False, normed=True, device="cuda"), None)
    check(make_call([200, 65], HEADS, SIZE, dtype=torch.float32, out_dtype=torch.float32, device="cuda"), None)
    check(make_call([200, 65], 2, 32, values=64, slots=[0, 1], null_slot=False, device="cuda"), None)


@pytest.mark.parametrize("length", [320, 4096])
def test_a_graph_with_changed_lengths(length: int) -> None:
    """Captured once; each replay reads the lengths and slots, and writes the states, of that step."""
    call = make_call([length, length - 70], HEADS, SIZE, slots=[3, 1], bias=-6.0, device="cuda")
    held, eager = (call["state"].clone() for _ in range(2))
    kda_chunk(**call | {"state": held.clone()}, in_place=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kda_chunk(**call | {"state": held}, in_place=True)
    for lengths, slots in (([length, 1], [1, 2]), ([65, 0], [2, 1]), ([130, length - 70], [0, 3])):
        call["lengths"].copy_(torch.tensor(lengths))
        call["slots"].copy_(torch.tensor(slots))
        graph.replay()
        expected = kda_chunk(**call | {"state": eager}, in_place=True)
        assert torch.equal(out, expected) and torch.equal(held.nan_to_num(7), eager.nan_to_num(7))
    assert exact(call)[0].isfinite().all()
