"""`k3::short_conv`: one token of a causal depthwise convolution with SiLU, and the line of past inputs that it moves.

    line    <- the state of the row, C channels by L columns in order of age
    y[c]    =  silu( sum over j of  w[c, j] · (line, x)[c, last taps columns] )         w[:, -1] multiplies x
    line'   =  (line, x) without its oldest column

The sum is computed in `compute_dtype`, rounded to `sum_dtype`, and the SiLU's result to `out_dtype`; `silu` False
leaves the function out. Of a state with more than L columns the others stay as they are: a verify window uses them.
`channels_last`: a state is [columns, C], as in this project and vLLM; otherwise [C, columns], as in transformers.

`slots` and `null_slot` are those of `k3::kda_step`, but that a row of nobody starts from a line of zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3rewrite.kernels.kda_step.op import rows_of_state, with_rows
from k3rewrite.ops.vocabulary import Cost, Op, tensor_bytes


def short_conv(
    x: Tensor, weight: Tensor, state: Tensor, slots: Tensor | None, null_slot: bool, columns: int, channels_last: bool,
    silu: bool, compute_dtype: torch.dtype, sum_dtype: torch.dtype, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [B, C], weight [C, taps], state [S, W, C] or [S, C, W] with W >= columns >= taps - 1, slots [B]
    -> y [B, C], the new state."""
    dim = 1 if channels_last else 2
    part = state if columns == state.shape[dim] else state.narrow(dim, 0, columns)
    line, at = rows_of_state(part, slots, null_slot)
    window = torch.cat([line, x.to(state.dtype).unsqueeze(dim)], dim)
    read = window.narrow(dim, window.shape[dim] - weight.shape[1], weight.shape[1])
    product = read.to(compute_dtype).movedim(dim, 2) * weight.to(compute_dtype)
    y = product.sum(-1).to(sum_dtype)
    moved = with_rows(part, window.narrow(dim, 1, columns), slots, at, null_slot)
    if columns != state.shape[dim]:
        moved = torch.slice_scatter(state, moved, dim, 0, columns)
    elif slots is None:
        moved = torch.empty_like(state).copy_(moved)  # in the state's order, not in the window's
    return (F.silu(y) if silu else y).to(out_dtype), moved


def short_conv_fake(
    x: Tensor, weight: Tensor, state: Tensor, slots: Tensor | None, null_slot: bool, columns: int, channels_last: bool,
    silu: bool, compute_dtype: torch.dtype, sum_dtype: torch.dtype, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape, dtype=out_dtype), torch.empty_like(state)


def _cost(
    x: Tensor, weight: Tensor, state: Tensor, slots: Tensor | None, null_slot: bool, columns: int, channels_last: bool,
    silu: bool, compute_dtype: torch.dtype, sum_dtype: torch.dtype, out_dtype: torch.dtype,
) -> Cost:  # fmt: skip
    lines = tensor_bytes(x) * columns
    written = tensor_bytes(x) // max(1, x.element_size()) * out_dtype.itemsize
    return Cost(1, tensor_bytes(x, weight, slots) + lines, written + lines)


OP = Op(
    name="short_conv",
    schema=(
        "(Tensor x, Tensor weight, Tensor state, Tensor? slots, bool null_slot, int columns, bool channels_last, "
        "bool silu, ScalarType compute_dtype, ScalarType sum_dtype, ScalarType out_dtype) -> (Tensor, Tensor)"
    ),
    reference=short_conv,
    fake=short_conv_fake,
    cost=_cost,
    inplace={"state": 1},
)
OPS = (OP,)
