"""The meaning of k3::kda_chunk: equal to k3::kda_step token after token, whatever unused tokens and slots hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kda_chunk_cases import BY_TOKEN, errors, exact, make_call, near_parallel, token_by_token

from k3rewrite.kernels.kda_chunk.checkpoint import checkpoint_table
from k3rewrite.kernels.kda_chunk.op import OP, kda_chunk


@pytest.mark.parametrize(
    ("lengths", "settings"),
    [
        ([150, 70, 64, 1, 0, 63], {"slots": [4, 0, 6, 2, 5, 1]}),
        ([65, 3], {"slots": [0, 2], "null_slot": False, "width": 70}),
        ([130, 17], {"slots": [2, 3], "fresh": [True, False], "values": 16}),
        ([20, 66], {"raw": False, "normed": True}),
    ],
)
def test_token_by_token(lengths: list[int], settings: dict[str, Any]) -> None:
    call = make_call(lengths, 2, 32, **settings)
    out, state = exact(call)
    expected, states = token_by_token(call)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(state, states, rtol=1e-11, atol=1e-12, equal_nan=True)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 140), min_size=1, max_size=4), st.integers(0, 30), st.randoms())
def test_one_line_equals_a_batch(lengths: list[int], spare: int, random: Any) -> None:
    slots = random.sample(range(len(lengths) + 3), len(lengths))
    line = make_call(lengths, 1, 16, slots=slots, packed=True, width=sum(lengths) + spare)
    batch = make_call(lengths, 1, 16, slots=slots) | {name: line[name] for name in ("a_log", "dt_bias", "state")}
    starts = line["offsets"].tolist()
    for row, length in enumerate(lengths):
        for name in BY_TOKEN:
            batch[name][row, :length] = line[name][0, starts[row] : starts[row] + length]
    out, state = exact(line)
    expected, states = exact(batch)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(out[0, starts[row] : starts[row] + length], expected[row, :length])
    assert not out[0, starts[-1] :].any()
    torch.testing.assert_close(state, states, equal_nan=True)


def test_fp32_of_bf16_inputs() -> None:
    call = make_call([200, 1, 64], 2, 64, slots=[3, 1, 2])
    found = errors(kda_chunk(**call), call)
    assert found["out"] <= 3e-3 and found["state"] <= 1e-6 and (found["dead"], found["untouched"]) == (0, 0)


def test_keys_that_are_nearly_parallel() -> None:
    """A doubling inverse fails here in fp32 by 2e10 (and in bf16 by 4e14); the largest entry of the true one is 1."""
    call = near_parallel(make_call([128], 2, 128, bias=-40.0, out_dtype=torch.float32))
    out, state = kda_chunk(**call)
    expected, states = token_by_token(call)
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (state - states).abs().max() <= 1e-5 * states.abs().max()


def test_sixteen_gates_of_minus_five() -> None:
    """exp(75) between the ends of a block is held; products stay below 1."""
    call = make_call([64], 1, 128, raw=False, normed=True, out_dtype=torch.float32, dtype=torch.float32)
    call |= {"f": torch.full_like(call["f"], -5.0), "k": torch.full_like(call["k"], 128**-0.5)}
    out, _ = kda_chunk(**call | {"q": call["k"]})
    expected, _ = token_by_token(call | {"q": call["k"]})
    assert out.isfinite().all() and (out - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_gates_are_natural_logarithms() -> None:
    """Two steps with g = -1 leave exp(-2) of the state, not 2^-2."""
    call = make_call([2], 1, 32, raw=False, normed=True, dtype=torch.float32)
    call |= {"f": torch.full_like(call["f"], -1.0), "b": torch.zeros_like(call["b"])}
    torch.testing.assert_close(kda_chunk(**call)[1], call["state"] * math.exp(-2))


def test_tokens_behind_a_row_have_no_effect() -> None:
    """Bucket of 8, 5 real tokens: the state is that after token 5."""
    call = make_call([5], 2, 32, width=8, dtype=torch.float32)
    short = call | {name: call[name][:, :5] for name in BY_TOKEN} | {"lengths": None}
    assert torch.equal(kda_chunk(**call)[1], kda_chunk(**short)[1])
    changed = {name: call[name].clone() for name in BY_TOKEN}
    for value in changed.values():
        value[:, 5:] = 9.0
    assert torch.equal(kda_chunk(**call | changed)[1], kda_chunk(**call)[1])


def test_later_gates_leave_earlier_outputs_bit_equal() -> None:
    call = make_call([160], 2, 64, out_dtype=torch.float32)
    out, _ = kda_chunk(**call)
    for t in (33, 64, 90, 127):
        f = call["f"].clone()
        f[:, t:] = 3.0
        edited, _ = kda_chunk(**call | {"f": f})
        assert torch.equal(edited[:, :t], out[:, :t]) and not torch.equal(edited[:, t:], out[:, t:]), t


@pytest.mark.parametrize("packed", [False, True])
def test_checkpoints(packed: bool) -> None:
    lengths, slots = [200, 63, 128], [3, 1, 0]
    table = checkpoint_table([(0, 64, 5), (0, 192, 6), (2, 128, 4)], slots, lengths)
    call = make_call(lengths, 2, 32, slots=slots, packed=packed)
    call |= {"checkpoints": table, "state": torch.cat([call["state"], call["state"][1:3]])}
    _, state = exact(call)
    for tokens, slot in ((64, 5), (192, 6)):
        part = {name: call[name][:1, :tokens] for name in BY_TOKEN}
        one = call | part | {"slots": call["slots"][:1], "lengths": None, "offsets": None, "checkpoints": None}
        torch.testing.assert_close(state[slot], exact(one)[1][3], rtol=1e-11, atol=1e-12)
    assert torch.equal(state[4], call["state"][4].double())  # that row is nobody's


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ((0, 100, 5), "at multiples of 64 tokens; ask for 64"),
        ((0, 0, 5), "at multiples of 64"),
        ((0, 256, 5), "the row ends after 200"),
        ((0, 64, 3), "a row's own"),
        ((0, 64, 0), "slots from 1 on"),
        ((2, 64, 5), "there are 2 rows"),
    ],
)
def test_checkpoints_that_cannot_be_had(request_: tuple[int, int, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        checkpoint_table([request_], [3, 1], [200, 63])
    with pytest.raises(ValueError, match="asked for twice"):
        checkpoint_table([(0, 64, 5), (0, 128, 5)], [3, 1], [200, 63])


def test_bad_input_is_refused_before_a_state_is_written() -> None:
    call = make_call([64], 1, 32)
    for change, reason in (
        ({"bound": -8.0}, "bound -8.0 is not within"),
        ({"offsets": torch.tensor([0, 64])}, "exclude lengths"),
        ({"checkpoints": torch.tensor([3])}, r"checkpoints are \[rows, chunks\]"),
    ):
        with pytest.raises(ValueError, match=reason):
            OP.overload(*(call | change).values())


@pytest.mark.parametrize(
    ("name", "stray", "inside"),
    [
        ("lengths", [70, -40], [64, 0]),
        ("offsets", [-3, 64, 300], [0, 64, 128]),
        ("offsets", [0, 150, 150], [0, 128, 128]),
    ],
)
def test_lengths_and_offsets_outside_of_the_tokens(name: str, stray: list[int], inside: list[int]) -> None:
    call = make_call([64, 64], 1, 32, slots=[2, 1], packed=name == "offsets")
    found, expected = (exact(call | {name: torch.tensor(values)}) for values in (stray, inside))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_no_rows_and_no_tokens() -> None:
    for call in (
        make_call([], 2, 16, width=3),
        make_call([0, 0], 2, 16, slots=[1, 2]),
        make_call([], 2, 16, packed=True),
    ):
        out, state = kda_chunk(**call)
        assert out.shape == call["v"].shape and torch.equal(state.nan_to_num(7), call["state"].nan_to_num(7))
