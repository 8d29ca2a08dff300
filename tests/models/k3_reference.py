"""The decoder again, written to be read and not to be fast: whole sequences, no state, one token and one expert at a
time, from the tensors of a checkpoint by their published names. An oracle that shares no code with the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3rewrite.models.kimi_k3 import KimiK3Config

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def mxfp4_matrix(packed: Tensor, scale: Tensor) -> Tensor:
    """`[rows, columns]` in fp64, byte by byte."""
    rows, half = packed.shape
    matrix = torch.empty(rows, 2 * half, dtype=torch.float64)
    values = torch.tensor(E2M1 + [-v for v in E2M1], dtype=torch.float64)
    matrix[:, 0::2] = values[(packed & 15).long()]
    matrix[:, 1::2] = values[(packed >> 4).long()]
    exponents = scale.double() - 127
    return matrix * torch.exp2(exponents).repeat_interleave(32, dim=1)


class Reference:
    """`logits(tokens)` of one sequence `[L]` -> `[L, vocab]` in fp64."""

    def __init__(self, config: KimiK3Config, tensors: dict[str, Tensor]) -> None:
        self.config, self.tensors = config, tensors

    def w(self, name: str) -> Tensor:
        return self.tensors[name].double()

    def rms(self, x: Tensor, name: str, eps: float) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.w(name)

    def situ(self, gate: Tensor, up: Tensor) -> Tensor:
        beta, linear = self.config.activation_situ_beta, self.config.activation_situ_linear_beta
        assert linear is not None
        return beta * (gate / beta).tanh() * gate.sigmoid() * linear * (up / linear).tanh()

    def mix(self, name: str, sources: list[Tensor]) -> Tensor:
        weight = self.w(f"{name}_norm.weight") * self.w(f"{name}_proj.weight")[0]
        scores = []
        for v in sources:
            scores.append((v / (v.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()) @ weight)
        share = torch.stack(scores).softmax(0)
        return sum(share[j].unsqueeze(-1) * v for j, v in enumerate(sources))  # type: ignore[return-value]

    def logits(self, tokens: Tensor) -> Tensor:
        config = self.config
        prefix = self.w("model.embed_tokens.weight")[tokens]
        blocks: list[Tensor] = []
        for layer in range(config.num_hidden_layers):
            path = f"model.layers.{layer}"
            hidden = self.mix(f"{path}.self_attention_res", [*blocks, prefix]) if blocks else prefix
            fresh = layer % config.attn_res_block_size == 0
            if fresh:
                blocks.append(prefix)
            x = self.rms(hidden, f"{path}.input_layernorm.weight", config.rms_norm_eps)
            kda = layer + 1 in config.kda_layers
            attended = self.kda(f"{path}.self_attn", x) if kda else self.mla(f"{path}.self_attn", x)
            prefix = attended if fresh else prefix + attended
            x = self.mix(f"{path}.mlp_res", [*blocks, prefix])
            x = self.rms(x, f"{path}.post_attention_layernorm.weight", config.rms_norm_eps)
            dense = layer < config.first_k_dense_replace
            prefix = prefix + (self.mlp(f"{path}.mlp", x) if dense else self.moe(f"{path}.block_sparse_moe", x))
        hidden = self.mix("model.output_attn_res", [*blocks, prefix])
        return self.rms(hidden, "model.norm.weight", config.rms_norm_eps) @ self.w("lm_head.weight").T

    def mlp(self, path: str, x: Tensor) -> Tensor:
        gate, up = (x @ self.w(f"{path}.{half}_proj.weight").T for half in ("gate", "up"))
        return self.situ(gate, up) @ self.w(f"{path}.down_proj.weight").T

    def expert(self, path: str, matrix: str) -> Tensor:
        if self.config.experts == "bf16":
            return self.w(f"{path}.{matrix}.weight")
        return mxfp4_matrix(
            self.tensors[f"{path}.{matrix}.weight_packed"], self.tensors[f"{path}.{matrix}.weight_scale"]
        )

    def moe(self, path: str, x: Tensor) -> Tensor:
        scores = (x @ self.w(f"{path}.gate.weight").T).sigmoid()
        biased = scores + self.w(f"{path}.gate.e_score_correction_bias")
        latent = x @ self.w(f"{path}.routed_expert_down_proj.weight").T
        combined = torch.zeros_like(latent)
        for token in range(x.shape[0]):
            chosen = biased[token].argsort(descending=True)[: self.config.num_experts_per_token]
            total = scores[token, chosen].sum() + 1e-20
            for expert in chosen.tolist():
                own = f"{path}.experts.{expert}"
                gate, up = (self.expert(own, m) @ latent[token] for m in ("w1", "w3"))
                out = self.expert(own, "w2") @ self.situ(gate, up)
                combined[token] += scores[token, expert] / total * self.config.routed_scaling_factor * out
        normed = self.rms(combined, f"{path}.routed_expert_norm.weight", self.config.rms_norm_eps)
        routed = normed @ self.w(f"{path}.routed_expert_up_proj.weight").T
        return routed + self.mlp(f"{path}.shared_experts", x)

    def kda(self, path: str, x: Tensor) -> Tensor:
        config = self.config
        heads, size, taps = config.kda_num_heads, config.kda_head_dim, config.short_conv_kernel_size
        length = x.shape[0]

        def convolved(name: str) -> Tensor:
            raw = x @ self.w(f"{path}.{name}_proj.weight").T
            weight = self.w(f"{path}.{name}_conv1d.weight")[:, 0]
            out = torch.zeros_like(raw)
            for t in range(length):
                for j in range(taps):
                    if t - (taps - 1) + j >= 0:
                        out[t] += weight[:, j] * raw[t - (taps - 1) + j]
            return (out * out.sigmoid()).view(length, heads, size)

        q, k, v = (convolved(name) for name in "qkv")
        q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() / size**0.5
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        f = x @ self.w(f"{path}.f_a_proj.weight").T @ self.w(f"{path}.f_b_proj.weight").T + self.w(f"{path}.dt_bias")
        rate = self.w(f"{path}.A_log")[:heads].exp()
        decay = (config.gate_lower_bound * (rate[:, None] * f.view(length, heads, size)).sigmoid()).exp()
        beta = (x @ self.w(f"{path}.b_proj.weight").T).sigmoid()
        gate = (x @ self.w(f"{path}.g_proj.weight").T).view(length, heads, size).sigmoid()
        out = torch.empty(length, heads, size, dtype=torch.float64)
        for h in range(heads):
            memory = torch.zeros(size, size, dtype=torch.float64)  # [K, V]
            for t in range(length):
                memory = decay[t, h][:, None] * memory
                memory = memory + torch.outer(k[t, h], beta[t, h] * (v[t, h] - memory.T @ k[t, h]))
                out[t, h] = memory.T @ q[t, h]
        out = self.rms(out, f"{path}.o_norm.weight", config.rms_norm_eps) * gate
        return out.flatten(1) @ self.w(f"{path}.o_proj.weight").T

    def mla(self, path: str, x: Tensor) -> Tensor:
        config = self.config
        heads, nope, rope, value = (
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        )
        length, eps = x.shape[0], config.lora_norm_eps
        compressed_q = self.rms(x @ self.w(f"{path}.q_a_proj.weight").T, f"{path}.q_a_layernorm.weight", eps)
        q = (compressed_q @ self.w(f"{path}.q_b_proj.weight").T).view(length, heads, nope + rope)
        kv = x @ self.w(f"{path}.kv_a_proj_with_mqa.weight").T
        compressed = self.rms(kv[:, : config.kv_lora_rank], f"{path}.kv_a_layernorm.weight", eps)
        shared = kv[:, config.kv_lora_rank :]
        kv = (compressed @ self.w(f"{path}.kv_b_proj.weight").T).view(length, heads, nope + value)
        out = torch.empty(length, heads, value, dtype=torch.float64)
        for h in range(heads):
            key = torch.cat([kv[:, h, :nope], shared], dim=1)
            for t in range(length):
                share = (key[: t + 1] @ q[t, h] / (nope + rope) ** 0.5).softmax(0)
                out[t, h] = share @ kv[: t + 1, h, nope:]
        gate = (x @ self.w(f"{path}.g_proj.weight").T).sigmoid()
        return (out.flatten(1) * gate) @ self.w(f"{path}.o_proj.weight").T
