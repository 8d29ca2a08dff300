"""Kimi Delta Attention: projections, short convolution, gated delta rule, gated output norm.

    q̂, k̂, v̂, z = W_q x, W_k x, W_v x, W_g x      f = W_fb (W_fa x)      b = W_b x
    q, k, v = short_conv(q̂, k̂, v̂)                q ← l2(q) / √K          k ← l2(k)
    g = lower_bound · σ(exp(A_log[h]) · (f + dt_bias))                     β = σ(b)
    o = delta_rule(q, k, v, g, β; S)               out = W_o (RMS(o) ⊙ σ(z))

One projection path serves all phases; what differs is how the convolution and the recurrence meet the state. A null row
gives zeros from the recurrence, whatever it holds, as serving kernels do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from k3rewrite.models.kimi_k3.config import KimiK3Config
from k3rewrite.models.kimi_k3.delta_chunk import delta_chunk
from k3rewrite.models.kimi_k3.delta_rule import delta_step
from k3rewrite.models.kimi_k3.inputs import DecodePlan, Plan, PrefillPlan, VerifyPlan
from k3rewrite.models.kimi_k3.linear import Linear
from k3rewrite.models.kimi_k3.norms import GatedRMSNorm, l2_norm
from k3rewrite.models.kimi_k3.numerics import math_dtype
from k3rewrite.models.kimi_k3.parallel import TensorParallel
from k3rewrite.models.kimi_k3.short_conv import conv_decode, conv_prefill, conv_verify


class ConvWeight(nn.Module):
    """Taps of a depthwise convolution, fp32, as the checkpoint stores them: `[channels, 1, taps]`."""

    def __init__(self, channels: int, taps: int, *, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__()
        weight = torch.empty(channels, 1, taps, dtype=math_dtype(dtype), device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)


class Heads(NamedTuple):
    """What the recurrence reads: q, k, v, g `[..., H, K]` and beta `[..., H]`, in fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def token(self, index: int) -> Heads:
        """Those of one token of a window `[B, N, ...]`."""
        return Heads(*(x[:, index] for x in self))


class KimiDeltaAttention(nn.Module):
    """x `[T, d]` -> `[T, d]`; updates `conv` and `recurrent` (see `state.py`) in place."""

    def __init__(
        self,
        config: KimiK3Config,
        parallel: TensorParallel,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config, self.parallel = config, parallel
        self.num_heads = parallel.local(config.kda_num_heads, "kda_num_heads")
        self.head_dim = config.kda_head_dim
        d, rank, width = config.hidden_size, config.kda_head_dim, self.num_heads * config.kda_head_dim
        taps, math = config.short_conv_kernel_size, math_dtype(dtype)

        self.q_proj = Linear(d, width, dtype=dtype, device=device)
        self.k_proj = Linear(d, width, dtype=dtype, device=device)
        self.v_proj = Linear(d, width, dtype=dtype, device=device)
        self.g_proj = Linear(d, width, dtype=dtype, device=device)
        self.f_a_proj = Linear(d, rank, dtype=dtype, device=device)
        self.f_b_proj = Linear(rank, width, dtype=dtype, device=device)
        self.b_proj = Linear(d, self.num_heads, dtype=dtype, device=device)
        self.q_conv1d = ConvWeight(width, taps, dtype=dtype, device=device)
        self.k_conv1d = ConvWeight(width, taps, dtype=dtype, device=device)
        self.v_conv1d = ConvWeight(width, taps, dtype=dtype, device=device)
        # Stored padded to the head dimension; only the first num_heads entries count, and a rank holds its own of them.
        stored = config.a_log_length if parallel.size == 1 else self.num_heads
        self.A_log = nn.Parameter(torch.empty(stored, dtype=math, device=device), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(width, dtype=math, device=device), requires_grad=False)
        self.o_norm = GatedRMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
        self.o_proj = Linear(width, d, dtype=dtype, device=device)

    def forward(self, x: Tensor, plan: Plan, conv: Tensor, recurrent: Tensor) -> Tensor:
        inputs = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        weight = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight]).squeeze(1)
        if isinstance(plan, DecodePlan):
            heads = self._heads(x, conv_decode(inputs, weight, conv, plan))
            out = self._decode(heads, recurrent, plan)
        elif isinstance(plan, VerifyPlan):
            shape = plan.table.shape
            heads = self._heads(x, conv_verify(inputs.unflatten(0, shape), weight, conv, plan))
            out = self._verify(heads, recurrent, plan).flatten(0, 1)
        else:
            shape = plan.dead_tokens.shape[:2]
            heads = self._heads(x, conv_prefill(inputs.unflatten(0, shape), weight, conv, plan))
            out = self._prefill(heads, recurrent, plan).flatten(0, 1)
        gate = self.g_proj(x).view(-1, self.num_heads, self.head_dim)
        out = self.o_norm(out.to(x.dtype), gate)  # [T, H, V]
        return self.parallel.all_reduce(self.o_proj(out.flatten(1)))

    def _heads(self, x: Tensor, convolved: Tensor) -> Heads:
        """Normalised, gated heads from x `[T, d]` and the convolved channels `[..., 3 * H * K]`, T = the rest."""
        rows, math = convolved.shape[:-1], math_dtype(x.dtype)
        q, k, v = convolved.view(*rows, 3, self.num_heads, self.head_dim).unbind(-3)
        f = self.f_b_proj(self.f_a_proj(x)).to(math) + self.dt_bias
        f = f.view(*rows, self.num_heads, self.head_dim)
        rate = torch.exp(self.A_log[: self.num_heads]).unsqueeze(1)
        beta = torch.sigmoid(self.b_proj(x).to(math))
        return Heads(
            q=l2_norm(q) * self.head_dim**-0.5,
            k=l2_norm(k),
            v=v.to(math),
            g=torch.sigmoid(rate * f) * self.config.gate_lower_bound,
            beta=beta if len(rows) == 1 else beta.unflatten(0, rows),
        )

    def _decode(self, heads: Heads, pool: Tensor, plan: DecodePlan) -> Tensor:
        dead = plan.dead.unsqueeze(3)
        out, state = delta_step(*heads, pool[plan.slots].masked_fill(dead, 0))
        pool[plan.slots] = torch.where(dead, pool[0], state)
        return out.masked_fill(plan.dead, 0)

    def _verify(self, heads: Heads, pool: Tensor, plan: VerifyPlan) -> Tensor:
        state = pool[plan.start].masked_fill(plan.start_dead, 0)
        outputs, states = [], []
        for token in range(plan.table.shape[1]):
            out, state = delta_step(*heads.token(token), state)
            outputs.append(out)
            states.append(state)
        pool[plan.table] = torch.where(plan.table_dead, pool[0], torch.stack(states, dim=1))
        return torch.stack(outputs, dim=1).masked_fill(plan.dead.unsqueeze(3), 0)

    def _prefill(self, heads: Heads, pool: Tensor, plan: PrefillPlan) -> Tensor:
        out, state = delta_chunk(
            heads.q,
            heads.k,
            heads.v,
            heads.g.masked_fill(plan.dead_tokens, 0),
            heads.beta.masked_fill(plan.dead_tokens.squeeze(3), 0),
            pool[plan.slots].masked_fill(plan.fresh.unsqueeze(3), 0),
            chunk=self.config.chunk_size,
            block=self.config.chunk_block,
        )
        pool[plan.slots] = torch.where(plan.dead.unsqueeze(3), pool[0], state)
        return out.masked_fill(plan.dead_tokens, 0)
