"""Inputs for the tests of `k3::experts`, and the op written apart from it: one route at a time, in fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3rewrite.models.kimi_k3.mxfp4 import dequantise, pair_table, quantise, scale_table

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
DTYPES = ("product_dtype", "compute_dtype", "hidden_dtype", "route_dtype", "combine_dtype", "out_dtype")
FEWEST = dict(zip(DTYPES, (FP32, FP32, BF16, FP32, FP32, BF16), strict=True))
MODEL = dict(zip(DTYPES, (BF16, FP32, BF16, BF16, FP32, BF16), strict=True))
"""Kimi K3's own roundings"""
ALL_BF16 = dict(zip(DTYPES, (BF16,) * 6, strict=True))


@dataclass
class Case:
    """Arguments of the op up to its dtypes, and the matrices [E, rows, columns] that they mean, in fp64."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    stored: tuple[Tensor | None, ...]
    format: str
    activation: str
    first: int
    gate: Tensor
    up: Tensor
    down: Tensor

    def arguments(self, dtypes: dict[str, torch.dtype]) -> dict[str, Any]:
        names = ("w_gate", "w_up", "w_down", "s_gate", "s_up", "s_down")
        return {
            "x": self.x, "ids": self.ids, "weights": self.weights, **dict(zip(names, self.stored, strict=True)),
            "format": self.format, "activation": self.activation, "beta": 4.0, "linear_beta": 25.0,
            "first": self.first, **dtypes,
        }  # fmt: skip

    def exact(self) -> Tensor:
        """[T, N]: what exact arithmetic gives from the stored weights."""
        out = torch.zeros(self.x.shape[0], self.down.shape[1], dtype=FP64)
        for token, row in enumerate(self.ids.tolist()):
            for slot, named in enumerate(row):
                expert = named - self.first
                if not 0 <= expert < self.gate.shape[0]:
                    continue
                value = self.x[token].double().cpu()
                gate, up = self.gate[expert] @ value, self.up[expert] @ value
                if self.activation == "silu":
                    hidden = gate / (1 + torch.exp(-gate)) * up
                else:
                    hidden = 4 * torch.tanh(gate / 4) / (1 + torch.exp(-gate)) * 25 * torch.tanh(up / 25)
                out[token] += self.weights[token, slot].double().cpu() * (self.down[expert] @ hidden)
        return out


def make_case(
    tokens: int,
    top_k: int,
    experts: int,
    inner: int,
    width: int,
    outer: int,
    *,
    format: str = "dense",
    activation: str = "situ",
    first: int = 0,
    global_experts: int = 0,
    ids: list[list[int]] | None = None,
    pad: int = 0,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """`global_experts` beyond `experts` draws ids outside of the window; `pad` puts rows of weights further apart."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(BF16)

    both = normal(experts, 2 * width, inner + pad, scale=2 / inner**0.5)[..., :inner]
    down = normal(experts, outer, width + pad, scale=2 / width**0.5)[..., :width]
    matrices = (both[:, :width], both[:, width:], down)
    stored: tuple[Tensor | None, ...] = (*matrices, None, None, None)
    exact = tuple(m.double() for m in matrices)
    if format == "mxfp4":
        packed = [quantise(m.float()) for m in matrices]
        tables = pair_table(torch.float64), scale_table(torch.float64)
        exact = tuple(dequantise(p, s, *tables) for p, s in packed)
        stored = (*(p for p, _ in packed), *(s for _, s in packed))
    elif format == "mxfp8":
        scales = [(127 + m.abs().double().unflatten(-1, (-1, 32)).amax(-1).log2().floor() - 8) for m in matrices]
        each = list(zip(matrices, scales, strict=True))
        values = [(m.double().unflatten(-1, (-1, 32)) / (s - 127).exp2()[..., None]).flatten(-2) for m, s in each]
        coded = [v.clamp(-448, 448).to(torch.float8_e4m3fn) for v in values]
        exact = tuple(
            (c.double().unflatten(-1, (-1, 32)) * (s - 127).exp2()[..., None]).flatten(-2)
            for c, s in zip(coded, scales, strict=True)
        )
        stored = (*coded, *(s.to(torch.uint8) for s in scales))
    chosen = torch.stack(
        [
            torch.randperm(global_experts or experts, generator=generator)[:top_k]
            for _ in range(tokens)
        ]
    ) if tokens else torch.empty(0, top_k, dtype=torch.long)  # fmt: skip
    if ids is not None:
        chosen = torch.tensor(ids)
    weights = torch.rand(tokens, top_k, generator=generator)
    return Case(
        normal(tokens, inner).to(device), chosen.to(device), weights.to(device),
        tuple(t.to(device) if t is not None else None for t in stored), format, activation, first, *exact,
    )  # fmt: skip


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference over that of the exact result."""
    if not exact.numel():
        return 0.0
    difference = (result.double().cpu() - exact).square().mean().sqrt()
    error = float(difference / exact.square().mean().sqrt().clamp_min(1e-30))
    return math.inf if math.isnan(error) else error
