"""`k3::kda_window`: the gated delta rule over a window of tokens, with one full state for each of them.

    S     = state[start[b]]
    o_i, S = kda_step(q_i, k_i, v_i, g_i, beta_i; S)                       -> k3::kda_step, values by keys
    state[table[b, i]] = S                                                 for each token i of the window

Accepting a tokens of a window is choosing `table[b, a - 1]` as the start of the next: nothing is computed again.

lengths   None: every window has N tokens. Else row b has lengths[b]; what is past them gives zeros and stores nothing.
null_slot True: slots at or below zero are nobody's. A row whose first slot is one gives zeros, whatever it holds, and
          stores nothing; a start that is one is a state of zeros; a token whose slot is one stores nothing.
          False: slot 0 is a slot as any other.

No two tokens share a slot. A start is a slot of the row's own table, or one that no row writes (a kernel reads it while
other rows already write theirs), or, with null slots, none. All of it is computed in the state's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3rewrite.kernels.kda_step.op import kda_step
from k3rewrite.ops.vocabulary import Cost, Op, tensor_bytes


def kda_window(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, start: Tensor, table: Tensor,
    lengths: Tensor | None, null_slot: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q, k [B, N, H, K], v [B, N, H, V], g [B, N, H, K] or [B, N, H, 1], beta [B, N, H], state [S, H, V, K], start [B],
    table [B, N], lengths [B] -> o [B, N, H, V] in the state's dtype, the new state."""
    dead = table[:, :1] <= 0 if null_slot else torch.zeros_like(table[:, :1], dtype=torch.bool)
    unstarted, unkept = dead.squeeze(1), dead.expand_as(table)
    if null_slot:
        unstarted, unkept = unstarted | (start <= 0), unkept | (table <= 0)
    rows = state[start.masked_fill(unstarted, 0)].masked_fill(unstarted[:, None, None, None], 0)
    outputs, states = [], []
    for i in range(table.shape[1]):
        out, rows = kda_step(q[:, i], k[:, i], v[:, i], g[:, i], beta[:, i], rows, None, False, True)
        outputs.append(out)
        states.append(rows)
    silent = dead.expand_as(table)
    if lengths is not None:
        silent = silent | (torch.arange(table.shape[1], device=table.device) >= lengths.unsqueeze(1))
        state = _stored_in_turn(state, states, table, unkept | silent, dead)
    else:
        at = table.masked_fill(unkept, 0)
        stacked = torch.stack(states, 1)
        if null_slot:
            stacked = torch.where(unkept[:, :, None, None, None], state[0], stacked)
        state = state.index_put((at,), stacked)
    return torch.stack(outputs, 1).masked_fill(silent[:, :, None, None], 0), state


def _stored_in_turn(state: Tensor, states: list[Tensor], table: Tensor, unkept: Tensor, dead: Tensor) -> Tensor:
    """Token by token. Where nothing is stored, the row's first slot gets what it has: what the table holds past a
    window's end may be anything."""
    own = table[:, 0].masked_fill(dead.squeeze(1), 0)
    for i, rows in enumerate(states):
        at = torch.where(unkept[:, i], own, table[:, i])
        state = state.index_put((at,), torch.where(unkept[:, i, None, None, None], state[at], rows))
    return state


def kda_window_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, start: Tensor, table: Tensor,
    lengths: Tensor | None, null_slot: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return v.new_empty(v.shape, dtype=state.dtype), torch.empty_like(state)


def _cost(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, start: Tensor, table: Tensor,
    lengths: Tensor | None, null_slot: bool,
) -> Cost:  # fmt: skip
    """Of each row one state is read, and one for each token written."""
    one = tensor_bytes(state[:1].expand(start.shape[0], *state.shape[1:]))
    read = tensor_bytes(q, k, v, g, beta, start, table, lengths)
    written = tensor_bytes(v) // max(1, v.element_size()) * state.element_size()
    return Cost(1, read + one, written + one * table.shape[1])


OP = Op(
    name="kda_window",
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, Tensor start, Tensor table, "
        "Tensor? lengths, bool null_slot) -> (Tensor, Tensor)"
    ),
    reference=kda_window,
    fake=kda_window_fake,
    cost=_cost,
    inplace={"state": 1},
)
OPS = (OP,)
