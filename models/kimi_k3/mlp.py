"""The gated MLP with SiTU: the dense layer, and all shared experts of a layer as one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3rewrite.models.kimi_k3.activation import situ
from k3rewrite.models.kimi_k3.config import KimiK3Config
from k3rewrite.models.kimi_k3.linear import Linear
from k3rewrite.models.kimi_k3.parallel import TensorParallel


class MLP(nn.Module):
    """down(SiTU(gate x, up x)): x `[T, d]` -> this rank's *partial* `[T, d]`; the caller reduces it."""

    def __init__(
        self,
        config: KimiK3Config,
        width: int,
        parallel: TensorParallel,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        local = parallel.local(width, "MLP width")
        self.gate_proj = Linear(config.hidden_size, local, dtype=dtype, device=device)
        self.up_proj = Linear(config.hidden_size, local, dtype=dtype, device=device)
        self.down_proj = Linear(local, config.hidden_size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        beta, linear_beta = self.config.activation_situ_beta, self.config.activation_situ_linear_beta
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x), beta, linear_beta))


class DenseMLP(MLP):
    """The feed-forward part of the first layer, reduced over the ranks."""

    def __init__(
        self,
        config: KimiK3Config,
        parallel: TensorParallel,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(config, config.intermediate_size, parallel, dtype=dtype, device=device)
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        return self.parallel.all_reduce(super().forward(x))
