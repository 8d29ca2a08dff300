"""Inputs for the AttnRes tests, and an implementation of the ops written apart from them: one row at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-5
FEWEST = dict.fromkeys(("compute_dtype", "mix_dtype", "scale_dtype"), torch.float32)
IN_FP64 = dict.fromkeys(("compute_dtype", "mix_dtype", "scale_dtype", "out_dtype"), torch.float64)


@dataclass
class Case:
    """Random inputs. `bank` has two slots more than there are blocks; they hold NaN, as unwritten memory may."""

    prefix: Tensor
    delta: Tensor
    bank: Tensor
    count: int
    score_norm: Tensor
    score_proj: Tensor
    norm_weight: Tensor

    @property
    def chunk(self) -> Tensor:
        return self.bank[..., : self.count, :]

    @property
    def weights(self) -> tuple[Tensor, Tensor, float, Tensor, float]:
        return self.score_norm, self.score_proj, EPS, self.norm_weight, EPS


def make_case(
    rows: int | tuple[int, ...],
    count: int,
    columns: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    device: str = "cpu",
    pad: int = 0,
    seed: int = 0,
) -> Case:
    """Rows of `columns` elements, rows of the bank `pad` elements further apart than they need to be."""
    generator = torch.Generator().manual_seed(seed)
    leading = (rows,) if isinstance(rows, int) else rows

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)

    bank = normal(*leading, count + 2, columns + pad)[..., :columns]
    bank[..., count:, :] = math.nan
    return Case(
        prefix=normal(*leading, columns),
        delta=normal(*leading, columns),
        bank=bank,
        count=count,
        score_norm=1 + normal(columns, scale=0.1),
        score_proj=normal(1, columns, scale=3 / columns**0.5),
        norm_weight=1 + normal(columns, scale=0.1),
    )


def row_by_row(
    prefix: Tensor, blocks: Tensor, score_norm: Tensor, score_proj: Tensor, norm_weight: Tensor | None
) -> Tensor:
    """The mix of blocks [..., n, d] and prefix [..., d], and its norm if `norm_weight` is given, in fp64."""
    columns = prefix.shape[-1]
    weight = score_norm.double() * score_proj.double().flatten()
    out = torch.empty(prefix.shape, dtype=torch.float64, device=prefix.device)
    rows = zip(
        prefix.reshape(-1, columns).double(),
        blocks.flatten(0, -3).double(),
        out.view(-1, columns),
        strict=True,
    )
    for last, stored, result in rows:
        sources = [*stored, last]
        scores = [float((v * weight).sum() / (v.square().mean() + EPS).sqrt()) for v in sources]
        shares = [math.exp(s - max(scores)) for s in scores]
        mix = sum((a / sum(shares)) * v for a, v in zip(shares, sources, strict=True))
        assert isinstance(mix, Tensor)
        result.copy_(mix if norm_weight is None else mix / (mix.square().mean() + EPS).sqrt() * norm_weight.double())
    return out


def relative_error(result: Tensor, exact: Tensor) -> float:
    """|result - exact| / |exact|; NaN where anything is."""
    return float((result.double() - exact).norm() / exact.norm()) if exact.numel() else 0.0
