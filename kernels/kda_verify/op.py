"""`k3::kda_verify`: a window of N tokens of a KDA layer between its projections, with one state for each of them.

    q, k, v  = conv_verify([q̂ | k̂ | v̂])                              -> k3::conv_verify, the line in slot table[b, 0]
    q, k     = l2_norm(q) · q_scale, l2_norm(k)                        -> k3::l2_norm, eps inside of the sum
    g        = bound · sigmoid(exp(A_log[h]) · (f + dt_bias))          log-decay of each key channel ("bounded")
    beta     = sigmoid(b)
    o, S     = kda_window(q, k, v, g, beta; S)                         -> k3::kda_window, values by keys
    y        = rms_norm(o) · norm_weight · activation(gate)            -> k3::gated_rms_norm

What the convolution and the recurrence give is rounded to `inner_dtype` on its way, everything else is computed in
the dtype of the state and rounded once, to `out_dtype`. Null rows, and what is past a window's end, give zeros and
leave both states as they are.

No two tokens share a slot, and no columns of `history` are below zero: a kernel does not count such from the last one.
A start is a slot of the row's own table, or one that no row writes, or, with null slots, none: a kernel reads it while
other rows already write theirs, where the meaning below reads every start first.

Convolution and norm are part of it, so that a layer is two launches: values can be dealt out in tiles of any width
(each tile convolves the keys anew; that costs less than a launch), but the norm needs the whole head, and the line may
only move on when every tile has read it. Both are what the second launch does.

Sources: Kimi K3's model code, for the bounded decay; Kimi Linear (arXiv 2510.26692) for the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3rewrite.kernels.conv_verify.op import conv_verify
from k3rewrite.kernels.gated_rms_norm.op import gated_rms_norm
from k3rewrite.kernels.kda_window.op import kda_window
from k3rewrite.kernels.l2_norm.op import l2_norm
from k3rewrite.ops.vocabulary import Cost, Op, tensor_bytes


def kda_verify(
    qkv: Tensor, f: Tensor, b: Tensor, gate: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor,
    norm_weight: Tensor, conv_state: Tensor, state: Tensor, start: Tensor, table: Tensor, history: Tensor,
    lengths: Tensor | None, null_slot: bool, bound: float, q_scale: float, l2_eps: float, norm_eps: float,
    activation: str, inner_dtype: torch.dtype, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """qkv [B, N, 3 H K], f [B, N, H K], b [B, N, H], gate [B, N, H, K], conv_weight [3 H K, taps], a_log [H],
    dt_bias [H K], norm_weight [K], conv_state [S, taps - 2 + N or more, 3 H K], state [S, H, K, K] of values by keys,
    start [B], table [B, N], history [B, taps - 1], lengths [B] -> y [B, N, H, K], both new states."""
    heads, size, wide = state.shape[1], state.shape[3], state.dtype
    y, conv_state = conv_verify(
        qkv, conv_weight, conv_state, table[:, 0], history, lengths, null_slot, True, wide, wide, inner_dtype
    )
    q, k, v = y.unflatten(2, (3, heads, size)).unbind(2)
    decay = (f.to(wide) + dt_bias).unflatten(2, (heads, size))
    g = torch.sigmoid(torch.exp(a_log).unsqueeze(1) * decay) * bound
    o, state = kda_window(
        l2_norm(q, l2_eps, True, wide, wide) * q_scale, l2_norm(k, l2_eps, True, wide, wide), v.to(wide), g,
        torch.sigmoid(b.to(wide)), state, start, table, lengths, null_slot,
    )  # fmt: skip
    out = gated_rms_norm(
        o.to(inner_dtype), norm_weight, gate, norm_eps, activation, wide, wide, wide, wide, wide, out_dtype
    )
    silent = torch.zeros_like(table, dtype=torch.bool)  # also where the gate is no number
    if null_slot:
        silent = silent | (table[:, :1] <= 0)
    if lengths is not None:
        silent = silent | (torch.arange(table.shape[1], device=table.device) >= lengths.unsqueeze(1))
    return out.masked_fill(silent[:, :, None, None], 0), conv_state, state


def kda_verify_fake(
    qkv: Tensor, f: Tensor, b: Tensor, gate: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor,
    norm_weight: Tensor, conv_state: Tensor, state: Tensor, start: Tensor, table: Tensor, history: Tensor,
    lengths: Tensor | None, null_slot: bool, bound: float, q_scale: float, l2_eps: float, norm_eps: float,
    activation: str, inner_dtype: torch.dtype, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out = qkv.new_empty((*qkv.shape[:2], state.shape[1], state.shape[3]), dtype=out_dtype)
    return out, torch.empty_like(conv_state), torch.empty_like(state)


def _cost(
    qkv: Tensor, f: Tensor, b: Tensor, gate: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor,
    norm_weight: Tensor, conv_state: Tensor, state: Tensor, start: Tensor, table: Tensor, history: Tensor,
    lengths: Tensor | None, null_slot: bool, bound: float, q_scale: float, l2_eps: float, norm_eps: float,
    activation: str, inner_dtype: torch.dtype, out_dtype: torch.dtype,
) -> Cost:  # fmt: skip
    """Of each row one state is read, and one for each token written; what the recurrence gives is written and read."""
    one = tensor_bytes(state[:1].expand(start.shape[0], *state.shape[1:]))
    past = tensor_bytes(qkv[:, :1]) * (conv_weight.shape[1] - 1)
    read = tensor_bytes(qkv, f, b, gate, conv_weight, a_log, dt_bias, norm_weight, start, table, history, lengths)
    values = tensor_bytes(gate) // max(1, gate.element_size())
    between = values * state.element_size()
    written = values * out_dtype.itemsize + tensor_bytes(qkv) + past + one * table.shape[1] + between
    return Cost(2, read + past + one + between, written)


OP = Op(
    name="kda_verify",
    schema=(
        "(Tensor qkv, Tensor f, Tensor b, Tensor gate, Tensor conv_weight, Tensor a_log, Tensor dt_bias, "
        "Tensor norm_weight, Tensor conv_state, Tensor state, Tensor start, Tensor table, Tensor history, "
        "Tensor? lengths, bool null_slot, float bound, float q_scale, float l2_eps, float norm_eps, str activation, "
        "ScalarType inner_dtype, ScalarType out_dtype) -> (Tensor, Tensor, Tensor)"
    ),
    reference=kda_verify,
    fake=kda_verify_fake,
    cost=_cost,
    inplace={"conv_state": 1, "state": 2},
)
OPS = (OP,)
