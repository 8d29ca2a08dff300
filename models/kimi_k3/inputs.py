"""What a caller passes for each phase, and what every layer of one step shares.

A row of a batch is one sequence. Rows whose slot is <= 0 are padding: whatever else they hold, they read no state,
write none, and their logits are zero. `plan` turns the inputs into masks and indices once; the layers only use them.

Padding is made harmless in two places, so that shapes never depend on data. A gather from a pool goes to slot 0 and is
then masked, because slot 0 may hold NaN. A scatter goes to slot 0 as well and writes there what slot 0 held before;
several padding rows then write the same value, so their order does not matter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DecodeInputs(NamedTuple):
    """One new token per sequence. All `[B]` int64; `positions` is the number of tokens already in the context."""

    tokens: Tensor
    slots: Tensor
    positions: Tensor


class VerifyInputs(NamedTuple):
    """A window of N tokens per sequence: the one sampled last and N - 1 drafts.

    tokens     [B, N]
    slots      [B, N]  slot table: the state after token j goes to slot j; the window starts from slot accepted - 1
    accepted   [B]     tokens committed of the previous window, 1..N; 1 after a plain step or a prefill
    positions  [B]     position of the first token of the window
    """

    tokens: Tensor
    slots: Tensor
    accepted: Tensor
    positions: Tensor


class PrefillInputs(NamedTuple):
    """Up to L prompt tokens per sequence; those past a row's length have no effect.

    tokens           [B, L]
    slots            [B]
    start_positions  [B]  0 starts from empty state, otherwise the row continues from its cached state
    lengths          [B]  0..L
    """

    tokens: Tensor
    slots: Tensor
    start_positions: Tensor
    lengths: Tensor


Inputs = DecodeInputs | VerifyInputs | PrefillInputs


class LatentPlan(NamedTuple):
    """How one step writes and reads the MLA latent cache. T = B * N token rows, C = max_context.

    Shapes: write_slots, write_positions [T]; write_dead [T, 1]; read_slots [B]; unread [B, C, 1]: positions that no
    query of the row may see; hidden [B, N, 1, C]: positions that a query may not see.
    """

    write_slots: Tensor
    write_positions: Tensor
    write_dead: Tensor
    read_slots: Tensor
    unread: Tensor
    hidden: Tensor


class DecodePlan(NamedTuple):
    """slots [B] with padding at 0; dead [B, 1, 1] marks padding rows."""

    slots: Tensor
    dead: Tensor
    latent: LatentPlan


class VerifyPlan(NamedTuple):
    """slots [B] and dead [B, 1, 1] as in `DecodePlan`; start [B] and start_dead [B, 1, 1, 1]: where a window's state
    comes from; table [B, N] and table_dead [B, N, 1, 1, 1]: where states go; history [B, 3]: columns of the conv
    buffer that precede the window."""

    slots: Tensor
    dead: Tensor
    start: Tensor
    start_dead: Tensor
    table: Tensor
    table_dead: Tensor
    history: Tensor
    latent: LatentPlan


class PrefillPlan(NamedTuple):
    """slots [B]; dead [B, 1, 1]: rows that write no state; fresh [B, 1, 1]: rows that start from empty state;
    dead_tokens [B, L, 1, 1]: tokens past a row's length; tail [B, 3]: columns of (history, inputs) that are the history
    of the next token."""

    slots: Tensor
    dead: Tensor
    fresh: Tensor
    dead_tokens: Tensor
    tail: Tensor
    latent: LatentPlan


Plan = DecodePlan | VerifyPlan | PrefillPlan


class Step(NamedTuple):
    """tokens [T] with padding at token 0; dead [T, 1]: token rows whose result is dropped; shape of the result."""

    tokens: Tensor
    dead: Tensor
    shape: tuple[int, ...]
    plan: Plan


def prepare(inputs: Inputs, *, max_context: int, history: int) -> Step:
    """The shared values of a step. `history` is the number of inputs the short convolution looks back on (3)."""
    if isinstance(inputs, DecodeInputs):
        return _prepare_decode(inputs, max_context)
    if isinstance(inputs, VerifyInputs):
        return _prepare_verify(inputs, max_context, history)
    return _prepare_prefill(inputs, max_context, history)


def _prepare_decode(inputs: DecodeInputs, max_context: int) -> Step:
    dead = inputs.slots <= 0
    slots = inputs.slots.masked_fill(dead, 0)
    positions = inputs.positions.masked_fill(dead, 0)
    context = torch.arange(max_context, device=slots.device)
    hidden = (context > positions.unsqueeze(1)) | dead.unsqueeze(1)
    latent = LatentPlan(
        write_slots=slots,
        write_positions=positions,
        write_dead=dead.unsqueeze(1),
        read_slots=slots,
        unread=hidden.unsqueeze(2),
        hidden=hidden[:, None, None],
    )
    plan = DecodePlan(slots, dead.view(-1, 1, 1), latent)
    return Step(inputs.tokens.masked_fill(dead, 0), dead.unsqueeze(1), tuple(inputs.tokens.shape), plan)


def _latent_plan(slots: Tensor, positions: Tensor, dead: Tensor, last: Tensor, max_context: int) -> LatentPlan:
    """For N query tokens a row: positions `[B, N]`, dead `[B, N]`, last `[B, 1]` the last readable position or -1."""
    context = torch.arange(max_context, device=slots.device)
    return LatentPlan(
        write_slots=slots.unsqueeze(1).masked_fill(dead, 0).flatten(),
        write_positions=positions.masked_fill(dead, 0).flatten(),
        write_dead=dead.reshape(-1, 1),
        read_slots=slots,
        unread=(context > last).unsqueeze(2),
        hidden=(context > positions.unsqueeze(2)).unsqueeze(2),
    )


def _prepare_verify(inputs: VerifyInputs, max_context: int, history: int) -> Step:
    batch, width = inputs.tokens.shape
    dead = inputs.slots[:, :1] <= 0
    table_dead = (inputs.slots <= 0) | dead
    table = inputs.slots.masked_fill(table_dead, 0)
    offset = (inputs.accepted.unsqueeze(1) - 1).masked_fill(dead, 0)
    start = table.gather(1, offset)
    positions = inputs.positions.unsqueeze(1).masked_fill(dead, 0) + torch.arange(width, device=table.device)
    dead_tokens = dead.expand(batch, width)
    last = positions[:, -1:].masked_fill(dead, -1)
    plan = VerifyPlan(
        slots=table[:, 0],
        dead=dead.unsqueeze(2),
        start=start.squeeze(1),
        start_dead=(start <= 0)[:, :, None, None],
        table=table,
        table_dead=table_dead[:, :, None, None, None],
        history=offset + torch.arange(history, device=table.device),
        latent=_latent_plan(table[:, 0], positions, dead_tokens, last, max_context),
    )
    tokens = inputs.tokens.masked_fill(dead, 0).flatten()
    return Step(tokens, dead_tokens.reshape(-1, 1), (batch, width), plan)


def _prepare_prefill(inputs: PrefillInputs, max_context: int, history: int) -> Step:
    batch, width = inputs.tokens.shape
    dead = (inputs.slots <= 0) | (inputs.lengths <= 0)
    slots = inputs.slots.masked_fill(dead, 0)
    lengths = inputs.lengths.masked_fill(dead, 0).unsqueeze(1)
    starts = inputs.start_positions.masked_fill(dead, 0).unsqueeze(1)
    offsets = torch.arange(width, device=slots.device)
    dead_tokens = offsets >= lengths
    plan = PrefillPlan(
        slots=slots,
        dead=dead.view(-1, 1, 1),
        fresh=(starts <= 0).unsqueeze(2),
        dead_tokens=dead_tokens[:, :, None, None],
        tail=lengths + torch.arange(history, device=slots.device),
        latent=_latent_plan(slots, starts + offsets, dead_tokens, starts + lengths - 1, max_context),
    )
    tokens = inputs.tokens.masked_fill(dead_tokens, 0).flatten()
    return Step(tokens, dead_tokens.reshape(-1, 1), (batch, width), plan)
