"""One model, three ways through a sequence: prompt at once, token by token, window by window with any acceptance."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_cases import (
    decode,
    decode_all,
    empty_state,
    prefill,
    random_model,
    random_tokens,
    relative_error,
    verify,
    with_routes_of,
)
from k3_reference import Reference
from torch import Tensor

from k3rewrite.models.kimi_k3 import KimiK3, KimiK3Config, KimiK3State, leave_speculation
from k3rewrite.models.kimi_k3.checkpoint import checkpoint_tensors

FP64 = 1e-10


def same_sequence_state(a: KimiK3State, slot_a: int, b: KimiK3State, slot_b: int, used: int, history: int) -> None:
    for kind, pools_a, pools_b in zip(a._fields, a, b, strict=True):
        for left, right in zip(pools_a, pools_b, strict=True):
            part = slice(0, {"conv": history, "latent": used}.get(kind))
            torch.testing.assert_close(left[slot_a, part], right[slot_b, part], rtol=0, atol=FP64)


@pytest.mark.parametrize("experts", ["mxfp4", "bf16"])
def test_prefill_equals_the_plain_reference(experts: str) -> None:
    model = random_model(KimiK3Config.minimal(experts=experts))
    tokens = random_tokens(model, 2, 21)
    logits = prefill(model, empty_state(model, slots=3, max_context=21), tokens, [2, 1])
    reference = Reference(model.config, {t.name: t.target for t in checkpoint_tensors(model)})
    for row in range(2):
        torch.testing.assert_close(logits[row], reference.logits(tokens[row]), rtol=0, atol=FP64)


@pytest.mark.parametrize("length", [1, 3, 4, 15, 16, 17, 63, 64, 65])
def test_prefill_equals_decode_at_chunk_edges(length: int) -> None:
    model = random_model(KimiK3Config.minimal().with_layers(5))  # KDA, a block write, MLA; 16-token chunks
    tokens = random_tokens(model, 1, length, seed=length)
    whole, stepwise = (empty_state(model, slots=3, max_context=length) for _ in range(2))
    logits = prefill(model, whole, tokens, [1])
    torch.testing.assert_close(logits, decode_all(model, stepwise, tokens, [2]), rtol=0, atol=FP64)
    same_sequence_state(whole, 1, stepwise, 2, length, 3)


def test_prefill_then_decode_equals_decode_on_all_layers() -> None:
    """70 prompt tokens in 64-token chunks, then 6 steps, with shuffled slots; 13 layers of every kind."""
    model = random_model(KimiK3Config.tiny())
    tokens = random_tokens(model, 2, 76)
    mixed, stepwise = (empty_state(model, slots=5, max_context=80) for _ in range(2))
    logits = torch.cat(
        [prefill(model, mixed, tokens[:, :70], [4, 2]), decode_all(model, mixed, tokens[:, 70:], [4, 2], start=70)],
        dim=1,
    )
    torch.testing.assert_close(logits, decode_all(model, stepwise, tokens, [1, 3]), rtol=0, atol=FP64)
    same_sequence_state(mixed, 4, stepwise, 1, 76, 3)
    same_sequence_state(mixed, 2, stepwise, 3, 76, 3)


@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_prefill_in_pieces_equals_prefill_at_once(cuts: list[int]) -> None:
    """Continuation chunks of any length, 0 and 1 among them, start from the cache."""
    model = random_model(KimiK3Config.minimal().with_layers(5))
    tokens = random_tokens(model, 1, 40)
    whole, pieces = (empty_state(model, slots=2, max_context=40) for _ in range(2))
    expected = prefill(model, whole, tokens, [1])
    edges = sorted({0, *cuts, 40})
    for start, stop in pairwise(edges):
        padded = torch.full((1, 41), 3)
        padded[:, : stop - start] = tokens[:, start:stop]
        got = prefill(model, pieces, padded, [1], starts=[start], lengths=[stop - start])
        torch.testing.assert_close(got[:, : stop - start], expected[:, start:stop], rtol=0, atol=FP64)
    same_sequence_state(whole, 1, pieces, 1, 40, 3)


class Window:
    """Runs verify windows over a fixed true continuation: accepted drafts are true tokens, rejected ones are not."""

    def __init__(self, model: KimiK3, state: KimiK3State, truth: torch.Tensor, table: torch.Tensor, start: int) -> None:
        self.model, self.state, self.truth, self.table = model, state, truth, table
        batch = truth.shape[0]
        self.positions, self.accepted = [start] * batch, [1] * batch
        self.logits: list[dict[int, torch.Tensor]] = [{} for _ in range(batch)]

    def run(self, accept: list[int], seed: int) -> None:
        """One window, of which row b commits `accept[b]` tokens."""
        width = self.table.shape[1]
        drafts = random_tokens(self.model, len(accept), width, seed=seed)
        for row, count in enumerate(accept):
            at = self.positions[row]
            drafts[row, :count] = self.truth[row, at : at + count]
        logits = verify(self.model, self.state, drafts, self.table, self.accepted, self.positions)
        for row, count in enumerate(accept):
            for j in range(count):
                self.logits[row][self.positions[row] + j] = logits[row, j]
            self.positions[row] += count
        self.accepted = accept


@settings(max_examples=6, deadline=None)
@given(
    accepts=st.lists(st.lists(st.integers(1, 4), min_size=2, max_size=2), min_size=1, max_size=5),
    mla=st.sampled_from(["absorbed", "expanded"]),
)
def test_verify_with_any_acceptance_equals_decode(accepts: list[list[int]], mla: str) -> None:
    model = random_model(KimiK3Config.minimal(mla_decode=mla).with_layers(5))
    start, width = 7, 4
    truth = random_tokens(model, 2, 40)
    speculative = empty_state(model, slots=9, max_context=40, speculative=width - 1)
    table = torch.tensor([[3, 8, 1, 6], [5, 2, 7, 4]])
    prefill(model, speculative, truth[:, :start], [3, 5])
    window = Window(model, speculative, truth, table, start)
    for seed, accept in enumerate(accepts):
        window.run(accept, seed)

    stepwise = empty_state(model, slots=3, max_context=40)
    expected = decode_all(model, stepwise, truth[:, : max(window.positions)], [1, 2])
    for row in range(2):
        for position, logits in window.logits[row].items():
            torch.testing.assert_close(logits, expected[row, position], rtol=0, atol=FP64)


def test_all_layers_through_speculation_and_back() -> None:
    """Prefill, windows, plain steps, windows again: a plain step starts from the accepted column."""
    model = random_model(KimiK3Config.tiny())
    truth = random_tokens(model, 2, 40)
    state = empty_state(model, slots=9, max_context=40, speculative=3)
    table = torch.tensor([[3, 8, 1, 6], [5, 2, 7, 4]])
    prefill(model, state, truth[:, :5], [3, 5])
    window = Window(model, state, truth, table, 5)
    for seed, accept in enumerate([[3, 1], [4, 2], [2, 3]]):
        window.run(accept, seed)
    leave_speculation(state, table, torch.tensor(window.accepted))
    expected = decode_all(model, empty_state(model, slots=3, max_context=40), truth, [1, 2])
    for _ in range(2):
        tokens = torch.stack([truth[row, at] for row, at in enumerate(window.positions)])
        logits = decode(model, state, tokens, [3, 5], window.positions)
        for row, at in enumerate(window.positions):
            torch.testing.assert_close(logits[row], expected[row, at], rtol=0, atol=FP64)
        window.positions = [at + 1 for at in window.positions]
    window.accepted = [1, 1]
    window.run([2, 4], seed=9)
    for row in range(2):
        for position, got in window.logits[row].items():
            torch.testing.assert_close(got, expected[row, position], rtol=0, atol=FP64)


def test_leaving_speculation_takes_the_accepted_column() -> None:
    """Columns hold 10, 20, 30, 40 and three tokens were accepted: the next step starts from 30. Null rows stay put."""
    model = random_model(KimiK3Config.minimal().with_layers(1))
    state = empty_state(model, slots=6, max_context=8, speculative=3)
    table = torch.tensor([[2, 5, 3, 4], [0, 0, 0, 0]])
    for column, slot in enumerate(table[0].tolist()):
        state.recurrent[0][slot] = 10.0 * (column + 1)
    state.conv[0][2] = torch.arange(6.0).unsqueeze(1)
    state.conv[0][0] = state.recurrent[0][0] = float("nan")
    leave_speculation(state, table, torch.tensor([3, 1]))
    assert torch.all(state.recurrent[0][2] == 30)
    assert torch.equal(state.conv[0][2, :, 0], torch.tensor([2.0, 3.0, 4.0, 3.0, 4.0, 5.0], dtype=torch.float64))
    assert torch.all(state.conv[0][0].isnan())


BF16_TYPICAL, BF16_WHOLE = 0.1, 0.5
"""Of a token's logits, and of all, against the fp64 twin with its routes: 13 random layers amplify bf16's 2^-9 about
tenfold, and once in some dozens of tokens, where a norm has little to divide by, a hundredfold: the sum over all then
says what that token does, on one machine, and another on the next."""


def by_token(logits: Tensor) -> Tensor:
    return logits.flatten(0, -2)


@pytest.mark.parametrize("experts", ["mxfp4", "bf16"])
@pytest.mark.parametrize("phase", ["decode", "verify", "prefill"])
def test_bf16_stays_near_its_fp64_twin(phase: str, experts: str) -> None:
    model = random_model(KimiK3Config.tiny(experts=experts), torch.bfloat16)
    twin = model.double_copy()
    with_routes_of(model, twin)
    tokens = random_tokens(model, 4, 44)
    state = empty_state(model, slots=17, max_context=44, speculative=3)
    prefill(model, state, tokens[:, :40], [1, 5, 9, 13])
    exact = state.double()
    logits = []
    for m, s in ((model, state), (twin, exact)):
        if phase == "decode":
            logits.append(decode(m, s, tokens[:, 40], [1, 5, 9, 13], [40] * 4))
        elif phase == "verify":
            logits.append(verify(m, s, tokens[:, 40:], torch.arange(1, 17).view(4, 4), [1] * 4, [40] * 4))
        else:
            logits.append(prefill(m, empty_state(m, slots=5, max_context=44), tokens, [1, 2, 3, 4]))
    assert logits[0].dtype is torch.bfloat16 and logits[1].dtype is torch.float64
    of_tokens = torch.tensor([relative_error(*pair) for pair in zip(*map(by_token, logits), strict=True)])
    assert 0 < of_tokens.median() < BF16_TYPICAL and relative_error(*logits) < BF16_WHOLE


def test_bf16_phases_agree_within_their_own_error() -> None:
    """Prefill and decode of a bf16 model differ by no more than both differ from fp64."""
    model = random_model(KimiK3Config.tiny().with_layers(5), torch.bfloat16)
    tokens = random_tokens(model, 2, 20)
    whole = prefill(model, empty_state(model, slots=3, max_context=20), tokens, [1, 2])
    steps = decode_all(model, empty_state(model, slots=3, max_context=20), tokens, [1, 2])
    assert relative_error(steps, whole) < 0.05


def test_the_vendor_eps_is_a_parameter_that_matters() -> None:
    tokens = torch.arange(6).unsqueeze(0)
    logits = []
    for eps in (1e-5, 1e-6):
        model = random_model(KimiK3Config.minimal(lora_norm_eps=eps).with_layers(4))
        logits.append(prefill(model, empty_state(model, slots=2, max_context=6), tokens, [1]))
    assert 0 < (logits[0] - logits[1]).abs().max() < 1e-2
