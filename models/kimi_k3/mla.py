"""Multi-head latent attention without positions, with an output gate.

    c_q = RMS(W_qa x)      [q_n | q_r] = W_qb c_q          per head 128 | 64
    [c | r] = W_kva x      c ← RMS(c)                      512 | 64, cached; r is neither normalised nor rotated
    o_h = softmax(192^-½ · q_h · K_h) V_h                  out = W_o (o ⊙ σ(W_g x))

Keys and values of head h are W_UK,h c (with r appended) and W_UV,h c, the two halves of W_kvb. Expanded attention forms
them; absorbed attention moves W_UK to the query and W_UV behind the sum, and reads the latent cache as one key/value
head of 576 / 512. The scale is 192^-½ in both. Position enters through causality alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3rewrite.models.kimi_k3.config import KimiK3Config
from k3rewrite.models.kimi_k3.inputs import LatentPlan, Plan, PrefillPlan
from k3rewrite.models.kimi_k3.linear import Linear
from k3rewrite.models.kimi_k3.norms import RMSNorm
from k3rewrite.models.kimi_k3.numerics import math_dtype
from k3rewrite.models.kimi_k3.parallel import TensorParallel


class MultiHeadLatentAttention(nn.Module):
    """x `[T, d]` -> `[T, d]`; writes the tokens' latents into `latent` (see `state.py`), then attends to it."""

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
        self.num_heads = parallel.local(config.num_attention_heads, "num_attention_heads")
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.scale = (self.nope + self.rope) ** -0.5
        d, heads, eps = config.hidden_size, self.num_heads, config.lora_norm_eps

        self.q_a_proj = Linear(d, config.q_lora_rank, dtype=dtype, device=device)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps, dtype=dtype, device=device)
        self.q_b_proj = Linear(config.q_lora_rank, heads * (self.nope + self.rope), dtype=dtype, device=device)
        self.kv_a_proj_with_mqa = Linear(d, config.latent_size, dtype=dtype, device=device)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps, dtype=dtype, device=device)
        self.kv_b_proj = Linear(config.kv_lora_rank, heads * (self.nope + self.value), dtype=dtype, device=device)
        self.g_proj = Linear(d, heads * self.value, dtype=dtype, device=device)
        self.o_proj = Linear(heads * self.value, d, dtype=dtype, device=device)

    def forward(self, x: Tensor, plan: Plan, latent: Tensor) -> Tensor:
        context = self._cache(x, plan.latent, latent)
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.view(-1, self.num_heads, self.nope + self.rope)
        if self.config.mla_decode == "expanded" or isinstance(plan, PrefillPlan):
            out = self._attend_expanded(query, context, plan.latent.hidden)
        else:
            out = self._attend_absorbed(query, context, plan.latent.hidden)
        gated = out.flatten(1) * torch.sigmoid(self.g_proj(x))
        return self.parallel.all_reduce(self.o_proj(gated))

    def _cache(self, x: Tensor, plan: LatentPlan, latent: Tensor) -> Tensor:
        """Write the new tokens, return each row's context `[B, C, 576]` with zeros where no query may look."""
        compressed, shared = self.kv_a_proj_with_mqa(x).split([self.config.kv_lora_rank, self.rope], dim=-1)
        new = torch.cat([self.kv_a_layernorm(compressed), shared], dim=-1)
        latent[plan.write_slots, plan.write_positions] = torch.where(plan.write_dead, latent[0, 0], new)
        return latent[plan.read_slots].masked_fill(plan.unread, 0)

    def _attend_absorbed(self, query: Tensor, context: Tensor, hidden: Tensor) -> Tensor:
        """query `[T, H, 192]`, context `[B, C, 576]`, hidden `[B, N, 1, C]` -> `[T, H, 128]`."""
        batch, math = context.shape[0], math_dtype(query.dtype)
        w_uk, w_uv = self.kv_b_proj.weight.view(self.num_heads, -1, self.config.kv_lora_rank).split(
            [self.nope, self.value], dim=1
        )
        q_nope, q_rope = query.split([self.nope, self.rope], dim=-1)
        absorbed = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)  # [T, H, 512]
        absorbed = torch.cat([absorbed, q_rope], dim=-1).view(batch, -1, context.shape[2])
        keys = context.to(math)
        scores = torch.bmm(absorbed.to(math), keys.transpose(1, 2)) * self.scale  # [B, N * H, C]
        weights = _softmax(scores.view(batch, -1, self.num_heads, context.shape[1]), hidden)
        summed = torch.bmm(weights.view(scores.shape), keys[..., : self.config.kv_lora_rank])
        summed = summed.to(query.dtype).view(-1, self.num_heads, self.config.kv_lora_rank)
        return torch.bmm(summed.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)

    def _attend_expanded(self, query: Tensor, context: Tensor, hidden: Tensor) -> Tensor:
        """The same by forming keys and values of every head."""
        batch, length, math = context.shape[0], context.shape[1], math_dtype(query.dtype)
        compressed, shared = context.split([self.config.kv_lora_rank, self.rope], dim=-1)
        expanded = self.kv_b_proj(compressed).view(batch, length, self.num_heads, -1)
        k_nope, values = expanded.split([self.nope, self.value], dim=-1)
        keys = torch.cat([k_nope, shared.unsqueeze(2).expand(-1, -1, self.num_heads, -1)], dim=-1)
        q, k, v = (
            heads.to(math).transpose(1, 2)
            for heads in (query.view(batch, -1, self.num_heads, query.shape[-1]), keys, values)
        )  # [B, H, N or C, 192 or 128]
        scores = (q @ k.transpose(2, 3)) * self.scale
        weights = _softmax(scores, hidden.transpose(1, 2))
        return (weights @ v).to(query.dtype).transpose(1, 2).flatten(0, 1)


def _softmax(scores: Tensor, hidden: Tensor) -> Tensor:
    """Softmax over the context without the hidden positions. The finite fill keeps a row that sees nothing finite."""
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)
