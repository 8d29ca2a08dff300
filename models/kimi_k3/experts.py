"""The routed experts on the latent: y = Σ_e w_e · W2_e · SiTU(W1_e z, W3_e z), with all experts' weights stacked.

Two spellings with the same result. Expert-centric (`grouped`): routes sorted by expert, histogram, prefix sum, two
grouped products, inverse permutation, weighted sum. Token-centric (`gather`): the matrices of each route, one batched
product. Two storages: bf16, and MXFP4 as the checkpoint has it, of which only experts that are hit are unpacked: a
token batch of T can hit min(E, T · k) at most, which is a static bound.

Roundings: gate, up, the activation and each expert's output in the model's dtype; weights and sum fp32, rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3rewrite.models.kimi_k3.activation import situ
from k3rewrite.models.kimi_k3.config import MXFP4_GROUP, KimiK3Config
from k3rewrite.models.kimi_k3.grouped_mm import grouped_mm
from k3rewrite.models.kimi_k3.mxfp4 import dequantise, pair_table, scale_table
from k3rewrite.models.kimi_k3.numerics import math_dtype
from k3rewrite.models.kimi_k3.parallel import TensorParallel


class RoutedExperts(nn.Module):
    """z `[T, latent]`, weights and ids `[T, k]` -> this rank's partial `[T, latent]`.

    Stacked weights: w13 `[E, 2 * I, latent]` (rows of w1, the gate, then rows of w3, up) and w2 `[E, latent, I]`, where
    I is this rank's share of the expert's columns.
    """

    def __init__(self, config: KimiK3Config, parallel: TensorParallel) -> None:
        super().__init__()
        self.config = config
        self.num_experts, self.top_k = config.num_experts, config.num_experts_per_token
        self.width = parallel.local(config.moe_intermediate_size, "moe_intermediate_size")
        self.latent = config.routed_expert_hidden_size

    def forward(self, z: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        routed = self._grouped(z, ids) if self.config.moe_form == "grouped" else self._gather(z, ids)
        routed = routed.view(-1, self.top_k, self.latent).to(math_dtype(z.dtype))
        return (routed * weights.unsqueeze(2)).sum(1).to(z.dtype)

    def _grouped(self, z: Tensor, ids: Tensor) -> Tensor:
        """Output of every route `[T * k, latent]`, in the order of `ids`."""
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = flat.new_zeros(self.num_experts).scatter_add(0, flat, torch.ones_like(flat))
        w13, w2, counts = self.hit(counts, routes=flat.shape[0])
        offsets = counts.cumsum(0, dtype=torch.int32)
        out = grouped_mm(self._activate(grouped_mm(z[order // self.top_k], w13, offsets)), w2, offsets)
        return out[order.argsort()]

    def _gather(self, z: Tensor, ids: Tensor) -> Tensor:
        """The same, one matrix a route."""
        w13, w2 = self.take(ids.flatten())
        x = z.unsqueeze(1).expand(-1, self.top_k, -1).reshape(-1, self.latent, 1)
        hidden = self._activate(torch.bmm(w13, x).squeeze(2))
        return torch.bmm(w2, hidden.unsqueeze(2)).squeeze(2)

    def _activate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.split(self.width, dim=-1)
        return situ(gate, up, self.config.activation_situ_beta, self.config.activation_situ_linear_beta)

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(w13, w2) of the experts `ids` `[R]`, stacked, in the model's dtype."""
        raise NotImplementedError

    def hit(self, counts: Tensor, routes: int) -> tuple[Tensor, Tensor, Tensor]:
        """(w13, w2, counts) for the grouped products: every expert with a route, in ascending order, and its routes."""
        raise NotImplementedError


class Bf16Experts(RoutedExperts):
    """Experts in the model's dtype."""

    def __init__(
        self,
        config: KimiK3Config,
        parallel: TensorParallel,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(config, parallel)
        e, i, z = self.num_experts, self.width, self.latent
        self.w13 = nn.Parameter(torch.empty(e, 2 * i, z, dtype=dtype, device=device), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(e, z, i, dtype=dtype, device=device), requires_grad=False)

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.w13[ids], self.w2[ids]

    def hit(self, counts: Tensor, routes: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.w13, self.w2, counts


class Mxfp4Experts(RoutedExperts):
    """Experts as packed bytes and E8M0 scales (see `mxfp4.py`); unpacked values are exact in the model's dtype."""

    w13_packed: Tensor
    w13_scale: Tensor
    w2_packed: Tensor
    w2_scale: Tensor
    pairs: Tensor
    scales: Tensor

    def __init__(
        self,
        config: KimiK3Config,
        parallel: TensorParallel,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(config, parallel)
        e, i, z = self.num_experts, self.width, self.latent
        parallel.local(config.moe_intermediate_size // MXFP4_GROUP, "MXFP4 groups of moe_intermediate_size")

        def stored(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.uint8, device=device)

        self.register_buffer("w13_packed", stored(e, 2 * i, z // 2))
        self.register_buffer("w13_scale", stored(e, 2 * i, z // MXFP4_GROUP))
        self.register_buffer("w2_packed", stored(e, z, i // 2))
        self.register_buffer("w2_scale", stored(e, z, i // MXFP4_GROUP))
        self.register_buffer("pairs", pair_table(dtype, device), persistent=False)
        self.register_buffer("scales", scale_table(dtype, device), persistent=False)

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        w13 = dequantise(self.w13_packed[ids], self.w13_scale[ids], self.pairs, self.scales)
        return w13, dequantise(self.w2_packed[ids], self.w2_scale[ids], self.pairs, self.scales)

    def hit(self, counts: Tensor, routes: int) -> tuple[Tensor, Tensor, Tensor]:
        if routes >= self.num_experts:
            ids = torch.arange(self.num_experts, device=counts.device)
        else:  # experts with a route come first, in ascending order; what follows them is empty and only fills up
            ids = (counts == 0).argsort(stable=True)[:routes]
        return *self.take(ids), counts[ids]


def build_experts(
    config: KimiK3Config, parallel: TensorParallel, *, dtype: torch.dtype, device: torch.device | None = None
) -> RoutedExperts:
    """The experts in the storage that the configuration names."""
    kind = Mxfp4Experts if config.experts == "mxfp4" else Bf16Experts
    return kind(config, parallel, dtype=dtype, device=device)
