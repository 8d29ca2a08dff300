"""Padding rows, the null slot, and tokens past a row's length: whatever they hold, nothing comes of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_cases import decode, empty_state, prefill, random_model, random_tokens, verify
from torch import Tensor

from k3rewrite.models.kimi_k3 import KimiK3, KimiK3Config, KimiK3State, initialise_state

NAN = float("nan")


def model() -> KimiK3:
    return random_model(KimiK3Config.minimal().with_layers(5))


def filled_state(m: KimiK3, *, slots: int, speculative: int = 0) -> KimiK3State:
    """Every slot in the middle of a sequence of 12 tokens, NaN in the null slot and behind the tokens."""
    state = empty_state(m, slots=slots, max_context=24, speculative=speculative)
    initialise_state(state, m, 12)
    for pool in state.tensors():
        pool[0] = NAN
    for pool in state.latent:
        pool[:, 12:] = NAN
    return state


def assert_untouched(state: KimiK3State, before: KimiK3State, slots: list[int]) -> None:
    for now, then in zip(state.tensors(), before.tensors(), strict=True):
        torch.testing.assert_close(now[slots], then[slots], rtol=0, atol=0, equal_nan=True)


@settings(max_examples=15, deadline=None)
@given(slots=st.permutations([1, 2, 3, 4]), pads=st.lists(st.integers(0, 3), max_size=4), null=st.sampled_from([0, -1]))
def test_decode_padding_is_not_there(slots: list[int], pads: list[int], null: int) -> None:
    """Rows with slot 0 or -1 anywhere in the batch, several of them: live rows, their state and all others as without.

    Faults 1 and 13: slot -1 is not clamped onto a live one, and there may be more padding rows than slots.
    """
    m = model()
    real = slots[:2]
    tokens = random_tokens(m, 2)
    expected_state = filled_state(m, slots=5)
    before = expected_state.clone()
    expected = decode(m, expected_state, tokens, real, [12, 12])

    rows, positions, ids = list(real), [12, 12], tokens.tolist()
    for at in pads:
        rows.insert(at, null)
        positions.insert(at, 10_000)
        ids.insert(at, -7)
    state = before.clone()
    logits = decode(m, state, torch.tensor(ids), rows, positions)
    live = [i for i, slot in enumerate(rows) if slot > 0]
    torch.testing.assert_close(logits[live], expected, rtol=0, atol=1e-12)
    assert not logits[[i for i, slot in enumerate(rows) if slot <= 0]].any()
    assert_untouched(state, before, [0, *slots[2:]])
    for now, then in zip(state.tensors(), expected_state.tensors(), strict=True):
        torch.testing.assert_close(now[real], then[real], rtol=0, atol=1e-12, equal_nan=True)


def test_more_padding_rows_than_slots() -> None:
    """Fault 13: a pool of one live slot serves a batch of 8."""
    m = model()
    state = filled_state(m, slots=2)
    logits = decode(m, state, torch.zeros(8, dtype=torch.long), [0, 0, 0, 1, 0, 0, 0, 0], [12] * 8)
    assert logits[3].any() and torch.isfinite(logits).all() and logits[[0, 1, 2, 4, 5, 6, 7]].abs().max() == 0


@pytest.mark.parametrize("phase", ["decode", "verify", "prefill"])
def test_a_batch_of_padding_alone(phase: str) -> None:
    m = model()
    state = filled_state(m, slots=5, speculative=3)
    before = state.clone()
    tokens = random_tokens(m, 2, 4)
    if phase == "decode":
        logits = decode(m, state, tokens[:, 0], [0, -3], [0, 5])
    elif phase == "verify":
        logits = verify(m, state, tokens, torch.tensor([[0] * 4, [-1] * 4]), [1, 9], [3, 4])
    else:
        logits = prefill(m, state, tokens, [0, 2], lengths=[4, 0])
    assert not logits.any()
    assert_untouched(state, before, [0, 1, 2, 3, 4])


def test_verify_padding_is_not_there() -> None:
    m = model()
    table = torch.tensor([[3, 8, 1, 6], [5, 2, 7, 4]])
    tokens = random_tokens(m, 2, 4)
    expected_state = filled_state(m, slots=10, speculative=3)
    before = expected_state.clone()
    expected = verify(m, expected_state, tokens, table, [2, 4], [12, 12])
    pad = torch.zeros(1, 4, dtype=torch.long)
    state = before.clone()
    logits = verify(
        m,
        state,
        torch.cat([pad - 5, tokens[:1], pad, tokens[1:]]),
        torch.cat([pad, table[:1], pad - 1, table[1:]]),
        [0, 2, 99, 4],
        [7, 12, -4, 12],
    )
    torch.testing.assert_close(logits[[1, 3]], expected, rtol=0, atol=1e-12)
    assert not logits[[0, 2]].any()
    assert_untouched(state, before, [0, 9])
    for now, then in zip(state.tensors(), expected_state.tensors(), strict=True):
        torch.testing.assert_close(now[1:9], then[1:9], rtol=0, atol=1e-12, equal_nan=True)


def test_a_null_column_drops_that_state_only() -> None:
    """A live window with a null slot in its table: the other columns and the logits are those of a full table."""
    m = model()
    tokens = random_tokens(m, 1, 4)
    states, logits = [], []
    for third in (6, 0):
        state = filled_state(m, slots=10, speculative=3)
        logits.append(verify(m, state, tokens, torch.tensor([[3, 8, third, 1]]), [1], [12]))
        states.append(state)
    assert torch.equal(*logits)
    before = filled_state(m, slots=10, speculative=3)
    assert_untouched(states[1], before, [0, 2, 4, 5, 6, 7, 9])
    assert_untouched(states[1], states[0], [1, 3, 8])
    assert not torch.equal(states[0].recurrent[0][6], before.recurrent[0][6])


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=2, max_size=3),
    noise=st.integers(0, 99),
    start=st.sampled_from([0, 12]),
)
def test_tokens_past_a_rows_length_have_no_effect(lengths: list[int], noise: int, start: int) -> None:
    """Fault 11: a bucket of 20 with fewer real tokens, from an empty and from a cached start."""
    m = model()
    rows = len(lengths)
    slots = [2, 4, 1][:rows]
    tokens = random_tokens(m, rows, 20)
    state = empty_state(m, slots=5, max_context=40)
    initialise_state(state, m, 12)
    before = state.clone()
    other = random_tokens(m, rows, 20, seed=noise)
    for row, length in enumerate(lengths):
        other[row, :length] = tokens[row, :length]
    logits = prefill(m, state, other, slots, starts=[start] * rows, lengths=lengths)
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        assert not logits[row, length:].any()
        if not length:
            assert_untouched(state, before, [slot])
            continue
        alone = before.clone()
        expected = prefill(m, alone, tokens[row : row + 1, :length], [slot], starts=[start])
        torch.testing.assert_close(logits[row, :length], expected[0], rtol=0, atol=1e-11)
        for now, then in zip(state.tensors(), alone.tensors(), strict=True):
            torch.testing.assert_close(now[slot], then[slot], rtol=0, atol=1e-11)
    assert_untouched(state, before, [0, 3])


def test_ragged_lengths_of_fault_3() -> None:
    """[1, 64, 1, 65] in one batch, 64-token chunks: equal to the recurrent form on all four, in their order."""
    m = random_model(KimiK3Config.tiny().with_layers(4))
    lengths, slots = [1, 64, 1, 65], [3, 1, 4, 2]
    tokens = random_tokens(m, 4, 65)
    state = empty_state(m, slots=5, max_context=65)
    logits = prefill(m, state, tokens, slots, lengths=lengths)
    stepwise = empty_state(m, slots=5, max_context=65)
    for position in range(65):
        rows = [row for row in range(4) if position < lengths[row]]
        step = decode(m, stepwise, tokens[rows, position], [slots[r] for r in rows], [position] * len(rows))
        torch.testing.assert_close(logits[rows, position], step, rtol=0, atol=1e-10)
    for a, b in zip(state.tensors(), stepwise.tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_a_fresh_prompt_forgets_the_slots_past() -> None:
    """start_position 0 starts from zeros, whatever an earlier sequence left in the slot, NaN included."""
    m = model()
    tokens = random_tokens(m, 1, 9)
    logits = []
    for left in (0.0, NAN):
        state = empty_state(m, slots=2, max_context=12)
        for pool in state.tensors():
            pool[1] = left
        logits.append(prefill(m, state, tokens, [1]))
    assert torch.equal(*logits)


def test_rejected_drafts_leave_no_trace() -> None:
    """Fault 9: three drafts, none accepted: all that is read later equals a run without drafting."""
    m = model()
    truth = random_tokens(m, 1, 16)
    table = torch.tensor([[1, 2, 3, 4]])

    def run(drafts: Tensor) -> list[Tensor]:
        state = empty_state(m, slots=5, max_context=20, speculative=3)
        prefill(m, state, truth[:, :5], [1])
        logits = []
        for at in range(5, 10):
            window = torch.cat([truth[:, at : at + 1], drafts], dim=1)
            logits.append(verify(m, state, window, table, [1], [at])[:, 0])
        return logits

    plain, drafted = run(torch.zeros(1, 3, dtype=torch.long)), run(random_tokens(m, 1, 3, seed=5))
    torch.testing.assert_close(torch.stack(plain), torch.stack(drafted), rtol=0, atol=1e-12)


@pytest.mark.parametrize("phase", ["decode", "verify", "prefill"])
def test_padding_rows_stay_finite_inside(phase: str) -> None:
    """Fault 2: a row that carried NaN would be routed somewhere and would poison what sums over rows or tiles."""
    m = model()
    seen: list[Tensor] = []
    for layer in m.model.layers:
        for module in (layer, layer.self_attn, layer.block_sparse_moe if layer.is_moe else layer.mlp):
            module.register_forward_hook(lambda _m, _i, o: seen.append(o))
    state = filled_state(m, slots=10, speculative=3)
    tokens = random_tokens(m, 3, 4)
    if phase == "decode":
        decode(m, state, tokens[:, 0], [0, 2, -1], [12, 12, 12])
    elif phase == "verify":
        table = torch.tensor([[0] * 4, [3, 8, 1, 6], [-1] * 4])
        verify(m, state, tokens, table, [1, 2, 1], [12, 12, 12])
    else:
        prefill(m, state, tokens, [0, 2, 3], starts=[12, 12, 0], lengths=[4, 3, 0])
    assert len(seen) == 15 and all(torch.isfinite(value).all() for value in seen)
