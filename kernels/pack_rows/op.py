"""`k3::pack_rows`: weights one below the other, so that one GEMM computes what several did.

    stack[starts[i] : starts[i] + len(weights[i])] = weights[i]        and zeros in the rows between and behind

`starts` ascend and leave room for each weight; all weights have one dtype and one size apart from their rows. Biases
are weights of rank 1. The op depends on weights alone: finalising takes it out of the graph
(`finalise/prologue.py`), and the weights then live on as parts of the stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from k3rewrite.ops.vocabulary import Cost, Op


def pack_rows(weights: Sequence[Tensor], starts: Sequence[int], rows: int) -> Tensor:
    """weights [n_i, ...], contiguous or not -> [rows, ...], contiguous."""
    stack = weights[0].new_zeros((rows, *weights[0].shape[1:]))
    for part, weight in zip(parts(stack, weights, starts, rows), weights, strict=True):
        part.copy_(weight)
    return stack


def pack_rows_fake(weights: Sequence[Tensor], starts: Sequence[int], rows: int) -> Tensor:
    first, end = weights[0], 0
    for weight, start in zip(weights, starts, strict=True):
        if (weight.dtype, weight.shape[1:]) != (first.dtype, first.shape[1:]) or start < end:
            raise ValueError("k3::pack_rows: weights of one dtype and width, with starts that leave room for each")
        end = start + weight.shape[0]
    if rows < end:
        raise ValueError(f"k3::pack_rows: {end} rows do not fit into {rows}")
    return first.new_empty((rows, *first.shape[1:]))


def parts(stack: Tensor, weights: Sequence[Tensor], starts: Sequence[int], rows: int) -> list[Tensor]:
    """Where each weight is in the stack, as views of it."""
    return [stack.narrow(0, start, weight.shape[0]) for weight, start in zip(weights, starts, strict=True)]


def _cost(*arguments: Any) -> Cost:
    return Cost(0, 0, 0)  # once for a model, not in every call


OP = Op(
    name="pack_rows",
    schema="(Tensor[] weights, int[] starts, int rows) -> Tensor",
    reference=pack_rows,
    fake=pack_rows_fake,
    cost=_cost,
    traits=frozenset({"weight_only"}),
    parts=parts,
)
OPS = (OP,)
