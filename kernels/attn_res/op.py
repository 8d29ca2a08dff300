"""`k3::attn_res`: attention over depth, K3's replacement of the residual stream.

    v_0 .. v_m   the depth sources of one token: stored blocks in age order, the running prefix last
    s_j = sum_c v_j[c] * rsqrt(mean(v_j^2) + score_eps) * score_norm[c] * score_proj[c]
    out = sum_j softmax(s)_j * v_j                        (the sources as they are, not normalised)

Tokens do not see each other: leading dimensions are rows. A source is written in one of two ways, and both may stand
in one list:

    [..., d]      one source
    [..., n, d]   n sources, such as the slice bank[:, :n]; n may be 0

The last source is always a single [..., d] (the prefix), so its rank tells the two apart: an entry of that rank is
one source, an entry with one dimension more is a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3rewrite.errors import UnsupportedError
from k3rewrite.ops.vocabulary import Cost, Op, static_numel, tensor_bytes


def attn_res(
    sources: Sequence[Tensor],
    score_norm: Tensor,
    score_proj: Tensor,
    score_eps: float,
    *,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    """The mix of `sources`, [..., d] in `out_dtype`; all arithmetic in `compute_dtype`.

    sources: a list as in the module's text, at least one entry; score_norm [d]; score_proj [d] or [1, d].
    `UnsupportedError` for an empty list and for an entry of another rank or width.
    """
    *blocks, prefix = checked_sources(sources)
    return depth_mix(prefix, blocks, score_norm, score_proj, score_eps, compute_dtype).to(out_dtype)


def attn_res_fake(
    sources: Sequence[Tensor],
    score_norm: Tensor,
    score_proj: Tensor,
    score_eps: float,
    *,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    prefix = checked_sources(sources)[-1]
    return prefix.new_empty(prefix.shape, dtype=out_dtype)


def attn_res_cost(
    sources: Sequence[Tensor],
    score_norm: Tensor,
    score_proj: Tensor,
    score_eps: float,
    *,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Cost:
    """One launch: every source read once, the mix written once."""
    prefix = sources[-1]
    return Cost(
        launches=1,
        bytes_read=tensor_bytes(list(sources), score_norm, score_proj),
        bytes_written=static_numel(prefix) * out_dtype.itemsize,
        flops=MIX_FLOPS * sum(static_numel(source) for source in sources),
    )


MIX_FLOPS = 6
"""per element of a source: its square and its product with the score weight, each summed; scaled and summed"""


def depth_mix(
    prefix: Tensor,
    blocks: Sequence[Tensor],
    score_norm: Tensor,
    score_proj: Tensor,
    score_eps: float,
    compute_dtype: torch.dtype,
) -> Tensor:
    """The mix of `blocks` and `prefix` in `compute_dtype`, not rounded. A fresh tensor, shape of `prefix`.

    Chunks stay whole: how many sources one holds may be symbolic.
    """
    chunks = [block if block.dim() > prefix.dim() else block.unsqueeze(-2) for block in (*blocks, prefix)]
    values = torch.cat([chunk.to(compute_dtype) for chunk in chunks], dim=-2)
    rstd = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + score_eps)
    weight = score_norm.to(compute_dtype) * score_proj.reshape(-1).to(compute_dtype)
    scores = (values * rstd * weight).sum(-1, keepdim=True)
    return (scores.softmax(-2) * values).sum(-2)


def single_sources(prefix: Tensor, blocks: Sequence[Tensor]) -> list[Tensor]:
    """Every source as [..., d]: chunks taken apart, depth order kept, the prefix last."""
    singles: list[Tensor] = []
    for block in blocks:
        singles.extend([block] if block.dim() == prefix.dim() else block.unbind(-2))
    return [*singles, prefix]


def checked_sources(sources: Sequence[Tensor]) -> Sequence[Tensor]:
    """`sources`, or `UnsupportedError` that names the entry which is no source beside the last one."""
    if not sources:
        raise UnsupportedError(
            "there are no sources", place="k3::attn_res, sources", remedy="give the prefix as last source"
        )
    check_blocks(sources[-1], sources[:-1], "k3::attn_res, sources")
    return sources


def check_blocks(prefix: Tensor, blocks: Sequence[Tensor], place: str) -> None:
    """`UnsupportedError` unless each of `blocks` is [..., d] or [..., n, d] for a `prefix` of [..., d]."""
    for index, block in enumerate(blocks):
        extra = block.dim() - prefix.dim()
        widths = (block.shape[-1], prefix.shape[-1]) if extra in (0, 1) else ()
        if not widths or (all(isinstance(width, int) for width in widths) and widths[0] != widths[1]):
            raise UnsupportedError(
                f"shape {tuple(block.shape)} is neither one source nor a chunk of sources beside the prefix's "
                f"{tuple(prefix.shape)}",
                place=f"{place}[{index}]",
                remedy="give [..., d] for one source or [..., n, d] for n of them",
            )


ATTN_RES = Op(
    name="attn_res",
    schema=(
        "(Tensor[] sources, Tensor score_norm, Tensor score_proj, float score_eps, *, ScalarType compute_dtype, "
        "ScalarType out_dtype) -> Tensor"
    ),
    reference=attn_res,
    fake=attn_res_fake,
    cost=attn_res_cost,
    traits=frozenset({"row_independent"}),
)
OPS = (ATTN_RES,)
