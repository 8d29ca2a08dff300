"""`k3::gated_rms_norm`: a root-mean-square norm times an activated gate (KDA and gated delta net output).

    y = (rms_norm(x, weight) * activation(gate.to(gate_dtype))).to(out_dtype)

The product promotes: a bf16 norm times an fp32 gate is an fp32 product, as in the spelled chain.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3rewrite.kernels.rms_norm.op import rms_norm
from k3rewrite.ops.vocabulary import Cost, Op, tensor_bytes

ACTIVATIONS = ("sigmoid", "silu")


def gated_rms_norm(
    x: Tensor, weight: Tensor | None, gate: Tensor, eps: float, activation: str, compute_dtype: torch.dtype,
    scale_dtype: torch.dtype, norm_dtype: torch.dtype, gate_dtype: torch.dtype, gated_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """x, gate [..., d], weight [d] or None -> [..., d] in `out_dtype`.

    `gate_dtype` is the dtype in which the activation runs, `gated_dtype` the one that its result is rounded to.
    """
    normed = rms_norm(x, weight, eps, compute_dtype, scale_dtype, norm_dtype)
    wide = gate.to(gate_dtype)
    activated = torch.sigmoid(wide) if activation == "sigmoid" else F.silu(wide)
    return (normed * activated.to(gated_dtype)).to(out_dtype)


def gated_rms_norm_fake(
    x: Tensor, weight: Tensor | None, gate: Tensor, eps: float, activation: str, compute_dtype: torch.dtype,
    scale_dtype: torch.dtype, norm_dtype: torch.dtype, gate_dtype: torch.dtype, gated_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    if activation not in ACTIVATIONS:
        raise ValueError(f"k3::gated_rms_norm: activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
    return (torch.empty_like(x, dtype=norm_dtype) * torch.empty_like(gate, dtype=gated_dtype)).to(out_dtype)


def _cost(x: Tensor, weight: Tensor | None, gate: Tensor, *rest: object) -> Cost:
    out_dtype = rest[-1]
    assert isinstance(out_dtype, torch.dtype)
    return Cost(1, tensor_bytes(x, weight, gate), tensor_bytes(torch.empty_like(x, dtype=out_dtype)))


OP = Op(
    name="gated_rms_norm",
    schema=(
        "(Tensor x, Tensor? weight, Tensor gate, float eps, str activation, ScalarType compute_dtype, "
        "ScalarType scale_dtype, ScalarType norm_dtype, ScalarType gate_dtype, ScalarType gated_dtype, "
        "ScalarType out_dtype) -> Tensor"
    ),
    reference=gated_rms_norm,
    fake=gated_rms_norm_fake,
    cost=_cost,
    traits=frozenset({"row_independent"}),
)
OPS = (OP,)
