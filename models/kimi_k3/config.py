"""Configuration of Kimi K3's text decoder: published values as defaults, small twins, validation.

    KimiK3Config()            the published model: 93 layers, 2.78 T parameters
    KimiK3Config.tiny()       every structural feature, runs on a CPU in seconds
    KimiK3Config.from_json()  a published config.json (read by `config_json.py`)

Field names are those of the published `text_config` wherever it has them. Layer lists are 1-indexed, as published.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import Any, Literal

from k3rewrite.errors import ConfigError, did_you_mean

LARGEST_SIZE = 2**24
"""above every size and count of a model; a product of two of them fits 64 bits"""
MXFP4_GROUP = 32
"""Consecutive input columns that share one E8M0 scale."""


def published_layers(layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(KDA layers, MLA layers), 1-indexed: every fourth layer and the last one are MLA, the others KDA."""
    full = tuple(i for i in range(1, layers + 1) if i % 4 == 0 or i == layers)
    return tuple(i for i in range(1, layers + 1) if i not in full), full


@dataclass(frozen=True)
class KimiK3Config:
    """Sizes and switches of the decoder. Raises `ConfigError`, listing every problem, when they do not fit together."""

    # stack
    vocab_size: int = 163840
    hidden_size: int = 7168
    num_hidden_layers: int = 93
    kda_layers: tuple[int, ...] = published_layers(93)[0]
    full_attn_layers: tuple[int, ...] = published_layers(93)[1]
    attn_res_block_size: int = 12
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 1048576
    bos_token_id: int = 163584
    eos_token_id: int = 163586
    pad_token_id: int = 163839
    # Kimi Delta Attention
    kda_num_heads: int = 96
    kda_head_dim: int = 128
    short_conv_kernel_size: int = 4
    gate_lower_bound: float = -5.0
    chunk_size: int = 64
    """Tokens in one chunk of the prefill scan."""
    chunk_block: int = 16
    """Rows of the blocks by which a chunk's triangular matrix is inverted; gates are rebased once a block."""
    # multi-head latent attention
    num_attention_heads: int = 96
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    lora_norm_eps: float = 1e-5
    """eps of q_a_layernorm and kv_a_layernorm: 1e-5 as the serving stacks have it, 1e-6 as the vendor's code does."""
    # feed-forward
    intermediate_size: int = 33792
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    num_experts: int = 896
    num_experts_per_token: int = 16
    num_shared_experts: int = 2
    moe_intermediate_size: int = 3072
    routed_expert_hidden_size: int = 3584
    routed_scaling_factor: float = 1.0
    moe_renormalize: bool = True
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float | None = 25.0
    # how it is stored and spelled; none of these changes what is computed
    experts: Literal["bf16", "mxfp4"] = "mxfp4"
    moe_form: Literal["grouped", "gather"] = "grouped"
    attn_res_storage: Literal["list", "bank"] = "list"
    mla_decode: Literal["absorbed", "expanded"] = "absorbed"

    # ---- derived sizes

    @property
    def kda_projection_size(self) -> int:
        """Channels of each of q, k, v and the output gate of a KDA layer."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def a_log_length(self) -> int:
        """Stored length of A_log: padded with zeros to the head dimension (128 for 96 heads)."""
        return max(self.kda_head_dim, self.kda_num_heads)

    @property
    def latent_size(self) -> int:
        """Values cached per token and MLA layer: the compressed latent and the shared 64 key dimensions."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the one MLP that stands for all shared experts."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def num_blocks(self) -> int:
        """Blocks that AttnRes stores: one at every layer whose 0-based index is a multiple of the block size."""
        return -(-self.num_hidden_layers // self.attn_res_block_size)

    def is_kda(self, layer: int) -> bool:
        """Whether the 0-based `layer` is a KDA layer (the published lists are 1-based)."""
        return layer + 1 in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def counts(self) -> dict[str, int]:
        """What the pipelines for this model call `n_layers`, `n_kda_layers`, `n_mla_layers`, `n_moe_layers`,
        `n_dense_layers` and `n_experts` in their expectations."""
        layers = range(self.num_hidden_layers)
        kda, moe = sum(map(self.is_kda, layers)), sum(map(self.is_moe, layers))
        return {
            "n_layers": len(layers),
            "n_kda_layers": kda,
            "n_mla_layers": len(layers) - kda,
            "n_moe_layers": moe,
            "n_dense_layers": len(layers) - moe,
            "n_experts": self.num_experts,
        }

    def writes_block(self, layer: int) -> bool:
        return layer % self.attn_res_block_size == 0

    # ---- other configurations

    @classmethod
    def tiny(cls, **changes: Any) -> KimiK3Config:
        """13 layers that keep the structure: two trailing MLA layers, a partial last block, 12 of 16 A_log entries."""
        kda, full = published_layers(13)
        sizes = cls(
            vocab_size=256,
            hidden_size=96,
            num_hidden_layers=13,
            kda_layers=kda,
            full_attn_layers=full,
            attn_res_block_size=5,
            max_position_embeddings=4096,
            bos_token_id=250,
            eos_token_id=252,
            pad_token_id=255,
            kda_num_heads=12,
            kda_head_dim=16,
            num_attention_heads=12,
            q_lora_rank=48,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            intermediate_size=192,
            num_experts=16,
            num_experts_per_token=4,
            moe_intermediate_size=128,
            routed_expert_hidden_size=64,
        )
        return replace(sizes, **_checked(cls, changes))

    @classmethod
    def tiny_tp8(cls, **changes: Any) -> KimiK3Config:
        """`tiny` with sizes that split over 8 ranks: 24 heads (3 a rank), 32 columns of each expert a rank."""
        sizes = cls.tiny(
            hidden_size=128,
            kda_num_heads=24,
            kda_head_dim=32,
            num_attention_heads=24,
            intermediate_size=256,
            moe_intermediate_size=256,
        )
        return replace(sizes, **_checked(cls, changes))

    @classmethod
    def minimal(cls, **changes: Any) -> KimiK3Config:
        """9 layers for edge cases: 16-token chunks in blocks of 4; a block is written at an MLA layer."""
        kda, full = published_layers(9)
        sizes = cls.tiny(
            vocab_size=128,
            hidden_size=64,
            num_hidden_layers=9,
            kda_layers=kda,
            full_attn_layers=full,
            attn_res_block_size=4,
            bos_token_id=125,
            eos_token_id=126,
            pad_token_id=127,
            kda_num_heads=6,
            num_attention_heads=6,
            chunk_size=16,
            chunk_block=4,
            q_lora_rank=24,
            intermediate_size=96,
            num_experts=8,
            num_experts_per_token=2,
            moe_intermediate_size=64,
            routed_expert_hidden_size=32,
        )
        return replace(sizes, **_checked(cls, changes))

    @classmethod
    def from_json(cls, path: str | PathLike[str], **changes: Any) -> KimiK3Config:
        """Read a published config.json (the text_config itself or the file that nests it). Raises `ConfigError`."""
        from k3rewrite.models.kimi_k3.config_json import read_config_json

        return replace(read_config_json(path), **_checked(cls, changes))

    def with_layers(self, layers: int) -> KimiK3Config:
        """The first `layers` layers, with their kinds and places unchanged."""
        if not 1 <= layers <= self.num_hidden_layers:
            raise ConfigError(
                f"cannot keep {layers} layers of {self.num_hidden_layers}",
                place="KimiK3Config.with_layers",
                remedy=f"give a number from 1 to {self.num_hidden_layers}",
            )
        return replace(
            self,
            num_hidden_layers=layers,
            kda_layers=tuple(i for i in self.kda_layers if i <= layers),
            full_attn_layers=tuple(i for i in self.full_attn_layers if i <= layers),
        )

    # ---- validation

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError("; ".join(problems), place="KimiK3Config", remedy="correct the fields named above")

    def _problems(self) -> list[str]:
        problems = []
        for name in _POSITIVE:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                problems.append(f"{name} is {value!r}, must be a positive integer")
            elif value > LARGEST_SIZE:
                problems.append(f"{name} is {value!r:.20}, must be at most {LARGEST_SIZE}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                problems.append(f"{name} is {getattr(self, name)!r}, must be one of {', '.join(choices)}")
        if problems:
            return problems  # what follows computes with these
        if sorted((*self.kda_layers, *self.full_attn_layers)) != list(range(1, self.num_hidden_layers + 1)):
            problems.append(
                f"kda_layers and full_attn_layers must name each of the layers 1..{self.num_hidden_layers} once"
            )
        for name in ("rms_norm_eps", "lora_norm_eps", "routed_scaling_factor"):
            if not 0 <= getattr(self, name) < 1e6:
                problems.append(f"{name} is {getattr(self, name)}, must be from 0 to a million")
        for name in ("activation_situ_beta", "activation_situ_linear_beta"):
            if (beta := getattr(self, name)) is not None and not beta > 0:
                problems.append(f"{name} is {beta}, must be above 0")
        if self.gate_lower_bound >= 0:
            problems.append(f"gate_lower_bound is {self.gate_lower_bound}, must be negative")
        elif -self.gate_lower_bound * (self.chunk_block - 1) > 85:
            problems.append(
                f"{self.chunk_block - 1} gates of {self.gate_lower_bound} overflow fp32; chunk_block must be smaller"
            )
        if self.chunk_size % self.chunk_block:
            problems.append(f"chunk_size {self.chunk_size} is no multiple of chunk_block {self.chunk_block}")
        if self.num_experts_per_token > self.num_experts:
            problems.append(
                f"num_experts_per_token {self.num_experts_per_token} exceeds num_experts {self.num_experts}"
            )
        if self.experts == "mxfp4":
            for name in ("routed_expert_hidden_size", "moe_intermediate_size"):
                if getattr(self, name) % MXFP4_GROUP:
                    problems.append(f"{name} {getattr(self, name)} is no multiple of {MXFP4_GROUP}, an MXFP4 group")
        return problems


_POSITIVE = tuple(f.name for f in fields(KimiK3Config) if f.type == "int" and "token_id" not in f.name)
_CHOICES = {
    "experts": ("bf16", "mxfp4"),
    "moe_form": ("grouped", "gather"),
    "attn_res_storage": ("list", "bank"),
    "mla_decode": ("absorbed", "expanded"),
}


def _checked(cls: type, changes: dict[str, Any]) -> dict[str, Any]:
    """`changes`, after refusing names that are no field."""
    known = [f.name for f in fields(cls)]
    if unknown := [name for name in changes if name not in known]:
        raise ConfigError(
            "; ".join(f"no field '{name}', {did_you_mean(name, known)}" for name in unknown),
            place="KimiK3Config",
            remedy="correct or leave out the names",
        )
    return changes
