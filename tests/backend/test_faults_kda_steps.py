"""Faults of fused recurrent decode that others met, each with its right answer.

row  where
1    test_a_pad_does_not_land_in_slot_0; graphs: rule state_slots, "slots may be below zero", "another null slot"
2    test_rows_of_padding_reach_nobody
4    test_two_steps_of_a_log_decay_of_one
8    test_a_plain_step_behind_a_window_starts_from_what_was_accepted
10   test_weights_that_are_loaded_later_are_used
12   test_a_strided_pool_is_written_where_it_is; kernels/test_kda_decode_triton.py, "strided pools"
13   test_fewer_slots_than_rows
15   test_kda_decode.py::test_a_verify_window_is_no_decode_step
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from k3rewrite.backend import Backend
from k3rewrite.models.kimi_k3 import KimiK3Config, build_kimi_k3
from k3rewrite.models.kimi_k3.inputs import DecodeInputs
from k3rewrite.models.kimi_k3.state import leave_speculation

CONFIG = KimiK3Config.minimal().with_layers(4)
OPTIONS = {"pipeline": "kimi-k3-decode", "target": "h200", "finalise": "eager", "names": CONFIG.counts()}
CLOSE = {"rtol": 2e-4, "atol": 2e-4}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _compiled(model: Any) -> tuple[Any, Backend]:
    backend = Backend(OPTIONS)
    return torch.compile(model, backend=backend, fullgraph=True), backend


def _fused(backend: Backend) -> list[int]:
    return [p.matched for report in backend.reports for p in report.passes if p.name == "fuse_kda_decode"]


def test_rows_of_padding_reach_nobody() -> None:
    """Whatever padding holds, rows of requests are the same and no NaN comes out."""
    model, (inputs, state), _ = build_kimi_k3(CONFIG, batch=4, dtype=torch.float32, seed=3, padding_rows=2)
    results = []
    compiled, backend = _compiled(model)
    for filled in (0, CONFIG.vocab_size - 1):
        own = state.clone()
        for pool in (*own.conv, *own.recurrent):
            pool[0] = math.nan if filled else 1.0
        tokens = inputs.tokens.clone()
        tokens[2:] = filled
        with torch.no_grad():
            results.append((compiled(DecodeInputs(tokens, *inputs[1:]), own), own))
    (first, kept), (second, other) = results
    assert torch.equal(first, second) and bool(second.isfinite().all())
    assert all(torch.equal(a[1:], b[1:]) for a, b in zip(kept.recurrent, other.recurrent, strict=True))
    assert _fused(backend) == [CONFIG.counts()["n_kda_layers"]]


def test_a_plain_step_behind_a_window_starts_from_what_was_accepted() -> None:
    """Columns hold 10, 20, 30, 40 and three tokens were accepted: the step starts from 30."""
    model, (inputs, state), _ = build_kimi_k3(CONFIG, phase="verify", batch=1, tokens=4, dtype=torch.float32)
    table = inputs.slots
    for pool in state.recurrent:
        for column in range(4):
            pool[table[0, column]] = 10.0 * (column + 1)
    leave_speculation(state, table, torch.tensor([3]))
    assert all(bool((pool[table[0, 0]] == 30).all()) for pool in state.recurrent)
    twin, now = state.clone(), DecodeInputs(torch.tensor([7]), table[:, 0], inputs.positions + 3)
    compiled, backend = _compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(compiled(now, twin), model(now, state), **CLOSE)
    assert _fused(backend) == [CONFIG.counts()["n_kda_layers"]]
    for mine, its in zip(twin.tensors(), state.tensors(), strict=True):
        torch.testing.assert_close(mine, its, **CLOSE)


@pytest.mark.parametrize("how", ["copy_", "data", "load_state_dict"])
def test_weights_that_are_loaded_later_are_used(how: str) -> None:
    """The taps of q, k and v are one stack, made once: taps loaded behind the first step are those of the second."""
    model, (inputs, state), _ = build_kimi_k3(CONFIG, batch=3, dtype=torch.float32, seed=3)
    compiled, backend = _compiled(model)
    with torch.no_grad():
        compiled(inputs, state.clone())
        names = [n for n, _ in model.named_parameters() if "conv1d" in n]
        later = {n: torch.randn_like(p) for n, p in model.named_parameters() if n in names}
        assert len(later) == 3 * CONFIG.counts()["n_kda_layers"]
        for name, parameter in model.named_parameters():
            if name in later and how != "load_state_dict":
                parameter.copy_(later[name]) if how == "copy_" else setattr(parameter, "data", later[name])
        if how == "load_state_dict":
            model.load_state_dict(model.state_dict() | later, assign=True)
        mine, its = state.clone(), state.clone()
        torch.testing.assert_close(compiled(inputs, mine), model(inputs, its), **CLOSE)
    for a, b in zip(mine.tensors(), its.tensors(), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    assert set(_fused(backend)) == {CONFIG.counts()["n_kda_layers"]}


def test_a_strided_pool_is_written_where_it_is() -> None:
    """Pools that are every second part of a larger one: a contiguous copy that is updated would be lost."""
    model, (inputs, state), _ = build_kimi_k3(CONFIG, batch=3, dtype=torch.float32, seed=3)
    larger = [torch.full((pool.shape[0], 2, *pool.shape[1:]), 5.0) for pool in state.recurrent]
    for whole, pool in zip(larger, state.recurrent, strict=True):
        whole[:, 0] = pool
    twin = state.clone()._replace(recurrent=tuple(whole[:, 0] for whole in larger))
    compiled, backend = _compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(compiled(inputs, twin), model(inputs, state), **CLOSE)
    for whole, its in zip(larger, state.recurrent, strict=True):
        torch.testing.assert_close(whole[:, 0], its, **CLOSE)
        assert bool((whole[:, 1] == 5).all())
    found = next(p for p in backend.reports[0].passes if p.name == "reuse_storage")
    written = [site.replaced_by for site in found.sites]
    assert written.count("writes 'state' in place") == CONFIG.counts()["n_kda_layers"]


def test_fewer_slots_than_rows() -> None:
    """Four lines in the cache, eight rows in the batch, of which five are null: null rows need no line."""
    model, (inputs, state), _ = build_kimi_k3(CONFIG, batch=8, dtype=torch.float32, seed=3, padding_rows=5)
    order = torch.arange(8)
    slots = torch.where(order < 3, order + 1, 0)
    few = type(state)(*(tuple(pool[:4].clone() for pool in pools) for pools in state))
    assert {len(pool) for pool in few.tensors()} == {4}
    twin, now = few.clone(), inputs._replace(slots=slots)
    compiled, backend = _compiled(model)
    with torch.no_grad():
        got, want = compiled(now, twin), model(now, few)
    torch.testing.assert_close(got, want, **CLOSE)
    assert bool((got[3:] == 0).all()) and _fused(backend) == [CONFIG.counts()["n_kda_layers"]]
    for mine, its in zip(twin.tensors(), few.tensors(), strict=True):
        torch.testing.assert_close(mine, its, **CLOSE)
