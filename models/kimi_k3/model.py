"""The decoder: embedding, layers on an AttnRes stack, output mix, norm, head.

Per layer l, with prefix P and stored blocks B (there is no residual stream; see `attn_res.py`):

    h = P if no block is stored yet, else Mix(self_attention_res; B, P)
    if l is a multiple of the block size: append P to B, and start P afresh
    a = Attention(RMS(h));  P = a if P starts afresh, else P + a
    P = P + MLP(RMS(Mix(mlp_res; B, P)))
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from k3rewrite.errors import UnsupportedError
from k3rewrite.models.kimi_k3.attn_res import BlockBank, BlockList, Blocks, DepthMix
from k3rewrite.models.kimi_k3.config import KimiK3Config
from k3rewrite.models.kimi_k3.inputs import Inputs, Plan, VerifyInputs, prepare
from k3rewrite.models.kimi_k3.kda import KimiDeltaAttention
from k3rewrite.models.kimi_k3.linear import Linear
from k3rewrite.models.kimi_k3.mla import MultiHeadLatentAttention
from k3rewrite.models.kimi_k3.mlp import DenseMLP
from k3rewrite.models.kimi_k3.moe import LatentMoE
from k3rewrite.models.kimi_k3.norms import RMSNorm
from k3rewrite.models.kimi_k3.parallel import TensorParallel
from k3rewrite.models.kimi_k3.state import KimiK3State


class VocabularyEmbedding(nn.Module):
    """Token ids `[T]` -> `[T, d]`. A rank holds a range of rows; tokens of other ranks are zero before the sum."""

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
        rows = parallel.local(config.vocab_size, "vocab_size")
        self.weight = nn.Parameter(
            torch.empty(rows, config.hidden_size, dtype=dtype, device=device), requires_grad=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        if self.parallel.size == 1:
            return F.embedding(tokens, self.weight)
        rows = self.weight.shape[0]
        local = tokens - rows * self.parallel.rank
        elsewhere = (local < 0) | (local >= rows)
        embedded = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.parallel.all_reduce(embedded.masked_fill(elsewhere.unsqueeze(1), 0))


class DecoderLayer(nn.Module):
    """One layer: two depth mixes, attention, feed-forward. Takes and returns the prefix; may append a block."""

    def __init__(
        self,
        config: KimiK3Config,
        index: int,
        parallel: TensorParallel,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.writes_block, self.is_moe = config.writes_block(index), config.is_moe(index)
        self.self_attention_res = DepthMix(d, eps, dtype=dtype, device=device)
        self.input_layernorm = RMSNorm(d, eps, dtype=dtype, device=device)
        attention = KimiDeltaAttention if config.is_kda(index) else MultiHeadLatentAttention
        self.self_attn = attention(config, parallel, dtype=dtype, device=device)
        self.mlp_res = DepthMix(d, eps, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(d, eps, dtype=dtype, device=device)
        if self.is_moe:
            self.block_sparse_moe = LatentMoE(config, parallel, dtype=dtype, device=device)
        else:
            self.mlp = DenseMLP(config, parallel, dtype=dtype, device=device)

    def forward(self, prefix: Tensor, blocks: Blocks, plan: Plan, state: tuple[Tensor, ...]) -> Tensor:
        hidden = self.self_attention_res(blocks, prefix) if len(blocks) else prefix
        if self.writes_block:
            blocks.append(prefix)
        attended = self.self_attn(self.input_layernorm(hidden), plan, *state)
        prefix = attended if self.writes_block else prefix + attended
        hidden = self.post_attention_layernorm(self.mlp_res(blocks, prefix))
        return prefix + (self.block_sparse_moe(hidden) if self.is_moe else self.mlp(hidden))


class Decoder(nn.Module):
    """Everything below the head: token ids -> normalised hidden states `[T, d]`."""

    def __init__(
        self,
        config: KimiK3Config,
        parallel: TensorParallel,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        d, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = VocabularyEmbedding(config, parallel, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, parallel, dtype=dtype, device=device) for i in range(config.num_hidden_layers)
        )
        self.output_attn_res = DepthMix(d, eps, dtype=dtype, device=device)
        self.norm = RMSNorm(d, eps, dtype=dtype, device=device)

    def forward(self, tokens: Tensor, plan: Plan, state: KimiK3State) -> Tensor:
        prefix = self.embed_tokens(tokens)
        bank = self.config.attn_res_storage == "bank"
        blocks = BlockBank(prefix, self.config.num_blocks) if bank else BlockList()
        kda = mla = 0
        for index, layer in enumerate(self.layers):
            if self.config.is_kda(index):
                own: tuple[Tensor, ...] = (state.conv[kda], state.recurrent[kda])
                kda += 1
            else:
                own = (state.latent[mla],)
                mla += 1
            prefix = layer(prefix, blocks, plan, own)
        return self.norm(self.output_attn_res(blocks, prefix))


class KimiK3(nn.Module):
    """Kimi K3's text decoder. Weights are left uninitialised: see `load_checkpoint` and `build_kimi_k3`.

    dtype    bf16 (default), fp32 or fp64. Convolution weights, A_log, dt_bias, o_norm and the router's correction bias
             are fp32 (fp64 in an fp64 model); MXFP4 experts are bytes in any of them.
    group    process group, or its name, for tensor parallelism; this rank's shard is built.
    Raises `ConfigError` when the sizes do not split over the group, `UnsupportedError` for another dtype.
    """

    def __init__(
        self,
        config: KimiK3Config,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        group: Any = None,
    ) -> None:
        super().__init__()
        if dtype not in (torch.bfloat16, torch.float32, torch.float64):
            raise UnsupportedError(f"dtype {dtype}", place="KimiK3", remedy="use bfloat16, float32 or float64")
        self.config, self.parallel = config, TensorParallel.of(group)
        device = torch.device(device) if device is not None else None
        self.model = Decoder(config, self.parallel, dtype=dtype, device=device)
        rows = self.parallel.local(config.vocab_size, "vocab_size")
        self.lm_head = Linear(config.hidden_size, rows, dtype=dtype, device=device)

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def forward(self, inputs: Inputs, state: KimiK3State) -> Tensor:
        """Logits `[B, vocab]` of a decode step, `[B, N, vocab]` of a verify window, `[B, L, vocab]` of a prefill.

        `state` is updated in place. Logits of padding rows and of tokens past a row's length are zero.
        """
        history = self.config.short_conv_kernel_size - 1
        self._check(inputs, state, history)
        step = prepare(inputs, max_context=_max_context(state), history=history)
        hidden = self.model(step.tokens, step.plan, state).masked_fill(step.dead, 0)
        logits = self.parallel.all_gather_last(self.lm_head(hidden))
        return logits.view(*step.shape, logits.shape[-1])

    def double_copy(self) -> KimiK3:
        """An fp64 twin with the same weight values: the oracle for this model."""
        return copy.deepcopy(self).double()

    def _check(self, inputs: Inputs, state: KimiK3State, history: int) -> None:
        expected = (len(self.config.kda_layers), len(self.config.kda_layers), len(self.config.full_attn_layers))
        if tuple(len(kind) for kind in state) != expected:
            raise UnsupportedError(
                f"state has {tuple(len(kind) for kind in state)} (conv, recurrent, latent) pools, needs {expected}",
                place="KimiK3.forward",
                remedy="build it for this model's config: KimiK3State.zeros(config, ...)",
            )
        if isinstance(inputs, VerifyInputs) and state.conv:
            need = history + inputs.tokens.shape[1] - 1
            if state.conv[0].shape[1] < need:
                raise UnsupportedError(
                    f"a window of {inputs.tokens.shape[1]} tokens needs conv pools of {need} columns, "
                    f"they have {state.conv[0].shape[1]}",
                    place="KimiK3.forward",
                    remedy=f"build the state with speculative={inputs.tokens.shape[1] - 1} or more",
                )


def _max_context(state: KimiK3State) -> int:
    """Positions that the latent cache holds; 1 in a model (cut to a few layers) that has none."""
    return state.latent[0].shape[1] if state.latent else 1
