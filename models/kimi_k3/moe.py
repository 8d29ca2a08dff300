"""The latent MoE: routed experts on a narrow latent, a shared expert on the full width.

    z = W_down x      y = experts(z)      out = W_up RMS(y) + shared(x)

The router reads the full x. The norm is on the combined latent, once per token; it is not linear, so with tensor
parallelism y is reduced before it. Form A: a second all-reduce sums the shared expert's partials.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3rewrite.models.kimi_k3.config import KimiK3Config
from k3rewrite.models.kimi_k3.experts import build_experts
from k3rewrite.models.kimi_k3.linear import Linear
from k3rewrite.models.kimi_k3.mlp import MLP
from k3rewrite.models.kimi_k3.norms import RMSNorm
from k3rewrite.models.kimi_k3.parallel import TensorParallel
from k3rewrite.models.kimi_k3.router import Router


class LatentMoE(nn.Module):
    """x `[T, d]` -> `[T, d]`."""

    def __init__(
        self,
        config: KimiK3Config,
        parallel: TensorParallel,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        d, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Router(config, dtype=dtype, device=device)
        self.routed_expert_down_proj = Linear(d, latent, dtype=dtype, device=device)
        self.experts = build_experts(config, parallel, dtype=dtype, device=device)
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps, dtype=dtype, device=device)
        self.routed_expert_up_proj = Linear(latent, d, dtype=dtype, device=device)
        self.shared_experts = MLP(config, config.shared_intermediate_size, parallel, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x)
        latent = self.parallel.all_reduce(self.experts(self.routed_expert_down_proj(x), weights, ids))
        routed = self.routed_expert_up_proj(self.routed_expert_norm(latent))
        return routed + self.parallel.all_reduce(self.shared_experts(x))
