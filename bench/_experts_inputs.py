"""What the experts' benchmarks run on: stacked weights in a format, sets of tokens and routings, exact results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from k3rewrite.models.kimi_k3.mxfp4 import dequantise, pair_table, scale_table

SHAPES = {"qwen3-30b": (128, 8, 2048, 768), "k3-tp8": (896, 16, 3584, 384)}
"""experts, experts a token, width of x and of the result, width of an expert"""
ROUTINGS = 16
"""calls of one graph, each with its own routing"""
FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = ("product_dtype", "compute_dtype", "hidden_dtype", "route_dtype", "combine_dtype", "out_dtype")
FEWEST = dict(zip(DTYPES, (FP32, FP32, BF16, FP32, FP32, BF16), strict=True))
MODEL = dict(zip(DTYPES, (BF16, BF16, BF16, BF16, FP32, BF16), strict=True))


@dataclass(frozen=True)
class Weights:
    """Stacks of experts: w13 [E, 2 W, N] (gate, then up) and w2 [E, N, W], or their packed bytes and scales."""

    w13: Tensor
    w2: Tensor
    s13: Tensor | None = None
    s2: Tensor | None = None

    @property
    def width(self) -> int:
        return self.w13.shape[1] // 2

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        stored = (self.w13, self.w2, self.s13, self.s2)
        return sum(t[0].numel() * t.element_size() for t in stored if t is not None)

    def exact(self, expert: int) -> tuple[Tensor, Tensor]:
        """The two matrices of an expert in fp64."""
        if self.s13 is None or self.s2 is None:
            return self.w13[expert].double(), self.w2[expert].double()
        tables = pair_table(torch.float64).cuda(), scale_table(torch.float64).cuda()
        both = ((self.w13, self.s13), (self.w2, self.s2))
        first, second = (dequantise(w[expert], s[expert], *tables) for w, s in both)
        return first, second

    def arguments(self) -> dict[str, Any]:
        """The op's arguments for them."""
        scales = {"s_gate": None, "s_up": None, "s_down": None}
        if self.s13 is not None:
            scales = {"s_gate": self.s13[:, : self.width], "s_up": self.s13[:, self.width :], "s_down": self.s2}
        return {
            "w_gate": self.w13[:, : self.width], "w_up": self.w13[:, self.width :], "w_down": self.w2, **scales,
            "format": "dense" if self.s13 is None else "mxfp4",
        }  # fmt: skip


def make_weights(shape: str, format: str) -> Weights:
    """Random experts that keep the size of what goes through them."""
    experts, _, outer, width = SHAPES[shape]
    if format == "bf16":
        w13 = torch.randn(experts, 2 * width, outer, device="cuda", dtype=BF16) / outer**0.5
        return Weights(w13, torch.randn(experts, outer, width, device="cuda", dtype=BF16) / width**0.5)
    return Weights(
        torch.randint(0, 256, (experts, 2 * width, outer // 2), device="cuda", dtype=torch.uint8),
        torch.randint(0, 256, (experts, outer, width // 2), device="cuda", dtype=torch.uint8),
        _scales(experts, 2 * width, outer),
        _scales(experts, outer, width),
    )


def _scales(experts: int, rows: int, columns: int) -> Tensor:
    """Of random codes, whose root mean square is 2.9, so that about one is left of a product with `columns` columns."""
    middle = 127 - round(math.log2(2.9 * columns**0.5))
    return torch.randint(middle - 1, middle + 2, (experts, rows, columns // 32), device="cuda", dtype=torch.uint8)


@dataclass(frozen=True)
class Inputs:
    """`ROUTINGS` sets of x [T, N], ids and routing weights [T, k]."""

    weights: Weights
    x: Tensor
    ids: Tensor
    shares: Tensor

    def arguments(self, i: int, dtypes: Mapping[str, torch.dtype]) -> dict[str, Any]:
        """Those of the op for set i."""
        return {
            "x": self.x[i], "ids": self.ids[i], "weights": self.shares[i], **self.weights.arguments(),
            "activation": "silu", "beta": 0.0, "linear_beta": 0.0, "first": 0, **dtypes,
        }  # fmt: skip

    def distinct(self) -> float:
        """Experts that one call names, on average."""
        return sum(len(torch.unique(ids)) for ids in self.ids) / len(self.ids)

    def exact(self, i: int) -> Tensor:
        """fp64, a route at a time, from the stored weights."""
        out = torch.zeros_like(self.x[i], dtype=torch.float64)
        for token, row in enumerate(self.ids[i].tolist()):
            for slot, expert in enumerate(row):
                w13, w2 = self.weights.exact(expert)
                gate, up = (w13 @ self.x[i, token].double()).chunk(2)
                out[token] += self.shares[i, token, slot].double() * (w2 @ (F.silu(gate) * up))
        return out


def make_inputs(weights: Weights, shape: str, tokens: int, routing: str) -> Inputs:
    """`uniform`: any expert alike; `skewed`: expert n with a share of 1 / (n + 1); `repeated`: one row for all."""
    experts, top_k, outer, _ = SHAPES[shape]
    noise = -torch.rand(ROUTINGS, tokens, experts, device="cuda").log()
    if routing == "skewed":
        noise *= torch.arange(1, experts + 1, device="cuda")
    elif routing == "repeated":
        noise = noise[:, :1].expand(-1, tokens, -1)
    ids = noise.topk(top_k, -1, largest=False).indices.contiguous()
    shares = torch.rand(ROUTINGS, tokens, top_k, device="cuda")
    x = torch.randn(ROUTINGS, tokens, outer, device="cuda", dtype=BF16)
    return Inputs(weights, x, ids, shares / shares.sum(-1, keepdim=True))
