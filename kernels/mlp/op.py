"""`k3::mlp`: gate and up projection, gated activation, down projection (dense and shared expert); `k3::mlp_tail`: what
follows the first two, where they are computed together with other projections.

    silu:  a = silu(g) * u
    situ:  a = [beta * tanh(g / beta) * sigmoid(g)] * [linear_beta * tanh(u / linear_beta)]

g = x Wg^T and u = x Wu^T in the dtype of x; the activation in `compute_dtype` with one rounding to the dtype of x;
y = a Wd^T. `beta` and `linear_beta` are those of Kimi K3's SiTU; a `linear_beta` of 0 leaves the up half as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3rewrite.ops.vocabulary import Cost, Op, size_hint, static_numel, tensor_bytes

ACTIVATIONS = ("silu", "situ")


def gated_activation(gate: Tensor, up: Tensor, activation: str, beta: float, linear_beta: float) -> Tensor:
    """The product of the activated gate half and the up half, in the dtype of the operands."""
    if activation == "silu":
        return F.silu(gate) * up
    wide_up = linear_beta * torch.tanh(up / linear_beta) if linear_beta else up
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * wide_up


def mlp(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, activation: str, beta: float, linear_beta: float,
    compute_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """x [..., d], w_gate and w_up [I, d], w_down [d, I], all of one dtype -> [..., d] in that dtype."""
    return mlp_tail(F.linear(x, w_gate), F.linear(x, w_up), w_down, activation, beta, linear_beta, compute_dtype)


def mlp_tail(
    gate: Tensor, up: Tensor, w_down: Tensor, activation: str, beta: float, linear_beta: float,
    compute_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """gate and up [..., I] as projected, w_down [d, I], all of one dtype -> [..., d] in that dtype."""
    activated = gated_activation(gate.to(compute_dtype), up.to(compute_dtype), activation, beta, linear_beta)
    return F.linear(activated.to(gate.dtype), w_down)


def mlp_fake(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, activation: str, beta: float, linear_beta: float,
    compute_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    if activation not in ACTIVATIONS:
        raise ValueError(f"k3::mlp: activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    return x.new_empty((*x.shape[:-1], w_down.shape[0]))


def mlp_tail_fake(
    gate: Tensor, up: Tensor, w_down: Tensor, activation: str, beta: float, linear_beta: float,
    compute_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    if activation not in ACTIVATIONS:
        raise ValueError(f"k3::mlp_tail: activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    return gate.new_empty((*gate.shape[:-1], w_down.shape[0]))


def _tail_cost(gate: Tensor, up: Tensor, w_down: Tensor, *rest: object) -> Cost:
    rows = static_numel(gate) // max(1, size_hint(gate.shape[-1]))
    written = rows * size_hint(w_down.shape[0]) * gate.element_size()
    return Cost(2, tensor_bytes(gate, up, w_down), written, 2 * rows * static_numel(w_down))


def _cost(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, *rest: object) -> Cost:
    rows = static_numel(x) // max(1, size_hint(x.shape[-1]))
    flops = 2 * rows * sum(static_numel(w) for w in (w_gate, w_up, w_down))
    written = rows * size_hint(w_down.shape[0]) * x.element_size()
    return Cost(2, tensor_bytes(x, w_gate, w_up, w_down), written, flops)


OP = Op(
    name="mlp",
    schema=(
        "(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, str activation, float beta, float linear_beta, "
        "ScalarType compute_dtype) -> Tensor"
    ),
    reference=mlp,
    fake=mlp_fake,
    cost=_cost,
    traits=frozenset({"row_independent"}),
)
TAIL = Op(
    name="mlp_tail",
    schema=(
        "(Tensor gate, Tensor up, Tensor w_down, str activation, float beta, float linear_beta, "
        "ScalarType compute_dtype) -> Tensor"
    ),
    reference=mlp_tail,
    fake=mlp_tail_fake,
    cost=_tail_cost,
    traits=frozenset({"row_independent"}),
)
OPS = (OP, TAIL)
