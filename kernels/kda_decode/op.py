"""`k3::kda_decode`: one token of a KDA layer between its projections, with both states.

    q, k, v  = short_conv([q̂ | k̂ | v̂])                               -> k3::short_conv
    q, k     = l2_norm(q) · q_scale, l2_norm(k)                        -> k3::l2_norm, eps inside of the sum
    g        = bound · sigmoid(exp(A_log[h]) · (f + dt_bias))          log-decay of each key channel
             = -exp(A_log[h]) · softplus(f + dt_bias)                  where there is no bound
    beta     = sigmoid(b)
    o, S     = kda_step(q, k, v, g, beta; S)                           -> k3::kda_step, values by keys
    y        = rms_norm(o) · norm_weight · activation(gate)            -> k3::gated_rms_norm

What the convolution and the recurrence give is rounded to `inner_dtype` on its way, everything else is computed in that
of the state and rounded once, to `out_dtype`. A null row gives zeros and leaves both states as they are. A decay
may be one of each head, f [B, H] and dt_bias [H]. States are values by keys and lines columns by channels in their
shapes; a cache that has them the other way round, as transformers does, is given as a transposed view.

Sources: Kimi K3's model code, for the bounded decay; Kimi Linear (arXiv 2510.26692) for the rest; Gated Delta Networks
(arXiv 2412.06464) for the decay of a head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from k3rewrite.kernels.gated_rms_norm.op import gated_rms_norm
from k3rewrite.kernels.kda_step.op import kda_step
from k3rewrite.kernels.l2_norm.op import l2_norm
from k3rewrite.kernels.short_conv.op import short_conv
from k3rewrite.ops.vocabulary import Cost, Op, size_hint, tensor_bytes


def kda_decode(
    qkv: Tensor, f: Tensor, b: Tensor, gate: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor,
    norm_weight: Tensor, conv_state: Tensor, state: Tensor, slots: Tensor | None, null_slot: bool, columns: int,
    bound: float | None, q_scale: float, l2_eps: float, norm_eps: float, activation: str, inner_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """qkv [B, 3 H K], f [B, H K], b [B, H], gate [B, H, K], conv_weight [3 H K, taps], a_log [H], dt_bias [H K],
    norm_weight [K], conv_state [S, columns or more, 3 H K], state [S, H, K, K] of values by keys, slots [B]
    -> y [B, H, K], both new states."""
    heads, size, wide = state.shape[1], state.shape[3], state.dtype
    y, conv_state = short_conv(
        qkv, conv_weight, conv_state, slots, null_slot, columns, True, True, wide, wide, inner_dtype
    )
    q, k, v = y.view(-1, 3, heads, size).unbind(1)
    moved = (f.to(wide) + dt_bias).unflatten(1, (heads, f.shape[1] // heads))
    rate = torch.exp(a_log.to(wide)).unsqueeze(1)
    g = -rate * F.softplus(moved) if bound is None else torch.sigmoid(rate * moved) * bound
    o, new_state = kda_step(
        l2_norm(q, l2_eps, True, wide, wide) * q_scale, l2_norm(k, l2_eps, True, wide, wide), v, g,
        torch.sigmoid(b.to(wide)), state, slots, null_slot, True,
    )  # fmt: skip
    out = gated_rms_norm(
        o.to(inner_dtype), norm_weight, gate, norm_eps, activation, wide, wide, wide, wide, wide, out_dtype
    )
    if null_slot and slots is not None:  # also where the gate is no number
        out = out.masked_fill((slots <= 0).view(-1, 1, 1), 0)
    if new_state.stride() != state.stride():
        new_state = torch.empty_like(state).copy_(new_state)
    return out, conv_state, new_state


def kda_decode_fake(
    qkv: Tensor, f: Tensor, b: Tensor, gate: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor,
    norm_weight: Tensor, conv_state: Tensor, state: Tensor, slots: Tensor | None, null_slot: bool, columns: int,
    bound: float | None, q_scale: float, l2_eps: float, norm_eps: float, activation: str, inner_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out = qkv.new_empty((qkv.shape[0], state.shape[1], state.shape[3]), dtype=out_dtype)
    return out, torch.empty_like(conv_state), torch.empty_like(state)


def _cost(
    qkv: Tensor, f: Tensor, b: Tensor, gate: Tensor, conv_weight: Tensor, a_log: Tensor, dt_bias: Tensor,
    norm_weight: Tensor, conv_state: Tensor, state: Tensor, slots: Tensor | None, null_slot: bool, columns: int,
    bound: float | None, q_scale: float, l2_eps: float, norm_eps: float, activation: str, inner_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Cost:  # fmt: skip
    """Only the rows' own states are read and written."""
    cells = math.prod(map(size_hint, (qkv.shape[0], *state.shape[1:])))
    rows = cells * state.element_size() + tensor_bytes(qkv) * columns
    read = tensor_bytes(qkv, f, b, gate, conv_weight, a_log, dt_bias, norm_weight, slots)
    return Cost(1, read + rows, tensor_bytes(gate) // gate.element_size() * out_dtype.itemsize + rows)


OP = Op(
    name="kda_decode",
    schema=(
        "(Tensor qkv, Tensor f, Tensor b, Tensor gate, Tensor conv_weight, Tensor a_log, Tensor dt_bias, "
        "Tensor norm_weight, Tensor conv_state, Tensor state, Tensor? slots, bool null_slot, int columns, "
        "float? bound, float q_scale, float l2_eps, float norm_eps, str activation, ScalarType inner_dtype, "
        "ScalarType out_dtype) -> (Tensor, Tensor, Tensor)"
    ),
    reference=kda_decode,
    fake=kda_decode_fake,
    cost=_cost,
    inplace={"conv_state": 1, "state": 2},
)
OPS = (OP,)
