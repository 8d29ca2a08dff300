"""`k3::kda_step`: the gated delta rule, one token a row, with its state.

Per row and head, with a state S of values by keys:

    S' = S · diag(exp(g))        decay first, each key channel by its own gate, or all of a head by one
    u  = beta · (v - S' k)       the prediction uses the decayed state
    S  <- S' + u kᵀ
    o  = S q                     the readout uses the updated one

q and k come normalised and scaled. All of it is computed in the state's dtype. `keys_last`: a state is [V, K], as this
project, vLLM and FLA's serving kernels have it; otherwise [K, V], as transformers does.

slots     None: row i of the state belongs to row i of the input.
          Else row i has the state in slot `slots[i]`, and two rows never share one.
null_slot True: slots at or below zero are nobody's. Such a row gives zeros, whatever it holds, and leaves the state
          as it is.
          False: slot 0 is a slot as any other, and there is none below it.

Sources: Kimi Linear (arXiv 2510.26692), section 3; the rounding points are those of the eager models.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from k3rewrite.ops.vocabulary import Cost, Op, size_hint, tensor_bytes


def kda_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor | None, null_slot: bool,
    keys_last: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q, k [B, H, K], v [B, H, V], g [B, H, K] or [B, H, 1], beta [B, H], state [S, H, V, K] or [S, H, K, V], slots [B]
    -> o [B, H, V] in the state's dtype, the new state."""
    q, k, v, g, beta = (value.to(state.dtype) for value in (q, k, v, g, beta))
    rows, at = rows_of_state(state, slots, null_slot)
    keys, values = (2, 3) if keys_last else (3, 2)
    rows = rows * torch.exp(g).unsqueeze(keys)
    wide_k = k.unsqueeze(keys)
    predicted = (rows * wide_k).sum(-1 if keys_last else -2)
    update = beta.unsqueeze(2) * (v - predicted)
    rows = rows + update.unsqueeze(values) * wide_k
    out = (rows * q.unsqueeze(keys)).sum(-1 if keys_last else -2)
    if null_slot and slots is not None:
        out = out.masked_fill(_like_rows(slots <= 0, out), 0)
    return out, with_rows(state, rows, slots, at, null_slot)


def rows_of_state(state: Tensor, slots: Tensor | None, null_slot: bool) -> tuple[Tensor, Tensor | None]:
    """(the state of each row, zeros for one that has none; where it lies, or None without slots)."""
    if slots is None:
        return state, None
    if not null_slot:
        return state[slots], slots
    dead = slots <= 0
    at = slots.masked_fill(dead, 0)
    return state[at].masked_fill(_like_rows(dead, state), 0), at


def with_rows(state: Tensor, rows: Tensor, slots: Tensor | None, at: Tensor | None, null_slot: bool) -> Tensor:
    """A state in which every row that has a slot has left its own; all others are as they were."""
    if slots is None or at is None:
        return rows
    if null_slot:
        rows = torch.where(_like_rows(slots <= 0, state), state[0], rows)
    return state.index_put((at,), rows)


def _like_rows(rows: Tensor, other: Tensor) -> Tensor:
    return rows.view(-1, *[1] * (other.dim() - 1))


def kda_step_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor | None, null_slot: bool,
    keys_last: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return v.new_empty(v.shape, dtype=state.dtype), torch.empty_like(state)


def _cost(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor | None, null_slot: bool,
    keys_last: bool,
) -> Cost:  # fmt: skip
    """Only the rows' own states are read and written, in place."""
    rows = math.prod(map(size_hint, (q.shape[0], *state.shape[1:]))) * state.element_size()
    return Cost(1, tensor_bytes(q, k, v, g, beta, slots) + rows, tensor_bytes(v) + rows)


OP = Op(
    name="kda_step",
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, Tensor? slots, bool null_slot, "
        "bool keys_last) -> (Tensor, Tensor)"
    ),
    reference=kda_step,
    fake=kda_step_fake,
    cost=_cost,
    inplace={"state": 1},
)
OPS = (OP,)
