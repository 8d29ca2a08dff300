"""`k3::conv_verify`: a window of tokens through a causal depthwise convolution, from any place of its line.

    window = (line[slot, history], x_0 .. x_{N-1})                         taps - 1 past inputs, then N new ones
    y_i[c] = silu( sum over j of  w[c, j] · window[i + j, c] )              w[:, -1] multiplies x_i
    line'[slot, j] = window[j + 1]      for j < taps - 2 + N                what the next window may start from

`history` are the columns that precede the window: accepted - 1 and the taps - 2 behind it, where `accepted` tokens of
the window before were committed. Whatever is accepted of this one, its history is contiguous in line'. Columns past
those keep what they have.

lengths   None: every window has N tokens. Else row b has lengths[b]; what is past them gives zeros, and line' ends
          with the last real one.
null_slot True: slots at or below zero are nobody's. Such a row starts from zeros and leaves the line as it is.
          False: slot 0 is a slot as any other.

Rounding is that of `k3::short_conv`. Two rows never share a slot. Columns of somebody's row are not below zero: a
kernel need not count such from the last one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3rewrite.ops.vocabulary import Cost, Op, tensor_bytes


def conv_verify(
    x: Tensor, weight: Tensor, state: Tensor, slots: Tensor, history: Tensor, lengths: Tensor | None, null_slot: bool,
    silu: bool, compute_dtype: torch.dtype, sum_dtype: torch.dtype, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [B, N, C], weight [C, taps], state [S, taps - 2 + N or more, C], slots [B], history [B, taps - 1], lengths [B]
    -> y [B, N, C], the new state."""
    dead = (slots <= 0 if null_slot else torch.zeros_like(slots, dtype=torch.bool)).view(-1, 1)
    at, columns = slots.masked_fill(dead.squeeze(1), 0), history.masked_fill(dead, 0)
    past = state[at.unsqueeze(1), columns].masked_fill(dead.unsqueeze(2), 0)
    window = torch.cat([past, x.to(state.dtype)], 1)
    product = window.to(compute_dtype).unfold(1, weight.shape[1], 1) * weight.to(compute_dtype)
    y = product.sum(-1).to(sum_dtype)
    y = (F.silu(y) if silu else y).to(out_dtype)

    kept = window.shape[1] - 1
    line = state if state.shape[1] == kept else state.narrow(1, 0, kept)
    moved = window[:, 1:]
    if lengths is not None:
        y = y.masked_fill((_index(x, 1) >= lengths.unsqueeze(1)).unsqueeze(2), 0)
        past_end = _index(moved, 1) >= lengths.unsqueeze(1) + (history.shape[1] - 1)
        moved = torch.where((past_end | (lengths <= 0).unsqueeze(1)).unsqueeze(2), line[at], moved)
    if null_slot:
        moved = torch.where(dead.unsqueeze(2), line[0], moved)
    line = line.index_put((at,), moved)
    return y, line if state.shape[1] == kept else torch.slice_scatter(state, line, 1, 0, kept)


def _index(of: Tensor, dim: int) -> Tensor:
    return torch.arange(of.shape[dim], device=of.device)


def conv_verify_fake(
    x: Tensor, weight: Tensor, state: Tensor, slots: Tensor, history: Tensor, lengths: Tensor | None, null_slot: bool,
    silu: bool, compute_dtype: torch.dtype, sum_dtype: torch.dtype, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape, dtype=out_dtype), torch.empty_like(state)


def _cost(
    x: Tensor, weight: Tensor, state: Tensor, slots: Tensor, history: Tensor, lengths: Tensor | None, null_slot: bool,
    silu: bool, compute_dtype: torch.dtype, sum_dtype: torch.dtype, out_dtype: torch.dtype,
) -> Cost:  # fmt: skip
    """Only the rows' own columns are read and written."""
    past = tensor_bytes(x[:, :1]) * (weight.shape[1] - 1)
    written = tensor_bytes(x) // max(1, x.element_size()) * out_dtype.itemsize
    return Cost(1, tensor_bytes(x, weight, slots, history, lengths) + past, written + tensor_bytes(x) + past)


OP = Op(
    name="conv_verify",
    schema=(
        "(Tensor x, Tensor weight, Tensor state, Tensor slots, Tensor history, Tensor? lengths, bool null_slot, "
        "bool silu, ScalarType compute_dtype, ScalarType sum_dtype, ScalarType out_dtype) -> (Tensor, Tensor)"
    ),
    reference=conv_verify,
    fake=conv_verify_fake,
    cost=_cost,
    inplace={"state": 1},
)
OPS = (OP,)
