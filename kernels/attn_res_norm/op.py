"""The fused AttnRes ops: update of the prefix, depth mix and output norm in one launch.

    attn_res_norm         mix of blocks and prefix -> RMSNorm
    add_attn_res_norm     prefix' = prefix + delta; mix of blocks and prefix' -> RMSNorm
    write_attn_res_norm   prefix' as above (or prefix, without a delta); bank[slot] = prefix'; mix -> RMSNorm

`prefix'` is rounded to the prefix's dtype once and used rounded, as the unfused chain does: the stored prefix is
bit-equal to it. Two more roundings of the unfused chain are choices of the caller:

    mix_dtype     the mix is rounded to it before the norm       bfloat16 in the vendor's code
    scale_dtype   mix * rstd is rounded to it before the weight  bfloat16 in the vendor's code

With both equal to the compute dtype the result is rounded once, at its end: the fewest roundings, nearest to exact
arithmetic. How sources are written, and what the mix is: `kernels/attn_res/op.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from k3rewrite._torch_private import storage_id
from k3rewrite.errors import UnsupportedError
from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.kernels.attn_res.op import MIX_FLOPS, check_blocks, depth_mix
from k3rewrite.ops.vocabulary import Cost, Op, static_numel, tensor_bytes


def attn_res_norm(
    prefix: Tensor,
    blocks: Sequence[Tensor],
    score_norm: Tensor,
    score_proj: Tensor,
    score_eps: float,
    norm_weight: Tensor,
    norm_eps: float,
    *,
    compute_dtype: torch.dtype,
    mix_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    """prefix [..., d]; blocks each [..., d] or [..., n, d], none at all is legal; weights [d] (score_proj also [1, d]).

    Returns [..., d] in `out_dtype`. `UnsupportedError` for a block of another rank or width.
    """
    check_blocks(prefix, blocks, "k3::attn_res_norm, blocks")
    mix = depth_mix(prefix, blocks, score_norm, score_proj, score_eps, compute_dtype)
    mix = mix.to(mix_dtype).to(compute_dtype)
    scaled = (mix * torch.rsqrt(mix.pow(2).mean(-1, keepdim=True) + norm_eps)).to(scale_dtype)
    return (scaled.to(compute_dtype) * norm_weight.to(compute_dtype)).to(out_dtype)


def attn_res_norm_fake(
    prefix: Tensor,
    blocks: Sequence[Tensor],
    score_norm: Tensor,
    score_proj: Tensor,
    score_eps: float,
    norm_weight: Tensor,
    norm_eps: float,
    *,
    compute_dtype: torch.dtype,
    mix_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    check_blocks(prefix, blocks, "k3::attn_res_norm, blocks")
    return prefix.new_empty(prefix.shape, dtype=out_dtype)


def attn_res_norm_cost(
    prefix: Tensor,
    blocks: Sequence[Tensor],
    score_norm: Tensor,
    score_proj: Tensor,
    score_eps: float,
    norm_weight: Tensor,
    norm_eps: float,
    *,
    compute_dtype: torch.dtype,
    mix_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Cost:
    """One launch: every source read once, the result written once."""
    return Cost(
        launches=1,
        bytes_read=tensor_bytes(prefix, list(blocks), score_norm, score_proj, norm_weight),
        bytes_written=static_numel(prefix) * out_dtype.itemsize,
        flops=MIX_FLOPS * sum(static_numel(source) for source in (prefix, *blocks)) + 4 * static_numel(prefix),
    )


def add_attn_res_norm(
    prefix: Tensor,
    delta: Tensor,
    blocks: Sequence[Tensor],
    score_norm: Tensor,
    score_proj: Tensor,
    score_eps: float,
    norm_weight: Tensor,
    norm_eps: float,
    *,
    compute_dtype: torch.dtype,
    mix_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """As `attn_res_norm` of prefix + delta; delta has the shape of prefix. Returns the new prefix and the result."""
    updated = updated_prefix(prefix, delta, compute_dtype)
    normed = attn_res_norm(
        updated, blocks, score_norm, score_proj, score_eps, norm_weight, norm_eps,
        compute_dtype=compute_dtype, mix_dtype=mix_dtype, scale_dtype=scale_dtype, out_dtype=out_dtype,
    )  # fmt: skip
    return updated, normed


def add_attn_res_norm_fake(
    prefix: Tensor,
    delta: Tensor,
    blocks: Sequence[Tensor],
    score_norm: Tensor,
    score_proj: Tensor,
    score_eps: float,
    norm_weight: Tensor,
    norm_eps: float,
    *,
    compute_dtype: torch.dtype,
    mix_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    check_blocks(prefix, blocks, "k3::add_attn_res_norm, blocks")
    return prefix.new_empty(prefix.shape), prefix.new_empty(prefix.shape, dtype=out_dtype)


def add_attn_res_norm_cost(
    prefix: Tensor,
    delta: Tensor,
    blocks: Sequence[Tensor],
    score_norm: Tensor,
    score_proj: Tensor,
    score_eps: float,
    norm_weight: Tensor,
    norm_eps: float,
    *,
    compute_dtype: torch.dtype,
    mix_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Cost:
    """`attn_res_norm`, with delta read and the new prefix written."""
    mixed = attn_res_norm_cost(
        prefix, blocks, score_norm, score_proj, score_eps, norm_weight, norm_eps,
        compute_dtype=compute_dtype, mix_dtype=mix_dtype, scale_dtype=scale_dtype, out_dtype=out_dtype,
    )  # fmt: skip
    return Cost(
        launches=1,
        bytes_read=mixed.bytes_read + tensor_bytes(delta),
        bytes_written=mixed.bytes_written + tensor_bytes(prefix),
        flops=mixed.flops + static_numel(prefix),
    )


def write_attn_res_norm(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Sequence[Tensor],
    bank: Tensor,
    slot: int,
    score_norm: Tensor,
    score_proj: Tensor,
    score_eps: float,
    norm_weight: Tensor,
    norm_eps: float,
    *,
    compute_dtype: torch.dtype,
    mix_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """As `attn_res_norm` of the new prefix, which is also stored in `bank`.

    bank [..., slots, d] in the dtype of prefix, 0 <= slot < slots. `blocks` are the sources beside the new prefix;
    they may be slices of `bank` below `slot`. The other slots keep what they hold, written or not. Returns the new
    bank and the result. `UnsupportedError` for a slot outside the bank and for a bank of another rank or dtype.
    """
    check_bank(prefix, bank, slot)
    updated = prefix if delta is None else updated_prefix(prefix, delta, compute_dtype)
    normed = attn_res_norm(
        updated, blocks, score_norm, score_proj, score_eps, norm_weight, norm_eps,
        compute_dtype=compute_dtype, mix_dtype=mix_dtype, scale_dtype=scale_dtype, out_dtype=out_dtype,
    )  # fmt: skip
    return torch.select_scatter(bank, updated, -2, slot), normed


def write_attn_res_norm_fake(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Sequence[Tensor],
    bank: Tensor,
    slot: int,
    score_norm: Tensor,
    score_proj: Tensor,
    score_eps: float,
    norm_weight: Tensor,
    norm_eps: float,
    *,
    compute_dtype: torch.dtype,
    mix_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    check_bank(prefix, bank, slot)
    check_blocks(prefix, blocks, "k3::write_attn_res_norm, blocks")
    new_bank = bank.new_empty_strided(bank.shape, bank.stride())
    return new_bank, prefix.new_empty(prefix.shape, dtype=out_dtype)


def write_attn_res_norm_cost(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Sequence[Tensor],
    bank: Tensor,
    slot: int,
    score_norm: Tensor,
    score_proj: Tensor,
    score_eps: float,
    norm_weight: Tensor,
    norm_eps: float,
    *,
    compute_dtype: torch.dtype,
    mix_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Cost:
    """In place, as it runs when nothing reads the old bank later: only the slot is written, the rest not copied."""
    mixed = attn_res_norm_cost(
        prefix, blocks, score_norm, score_proj, score_eps, norm_weight, norm_eps,
        compute_dtype=compute_dtype, mix_dtype=mix_dtype, scale_dtype=scale_dtype, out_dtype=out_dtype,
    )  # fmt: skip
    return Cost(
        launches=1,
        bytes_read=mixed.bytes_read + tensor_bytes(delta),
        bytes_written=mixed.bytes_written + tensor_bytes(prefix),
        flops=mixed.flops + (0 if delta is None else static_numel(prefix)),
    )


def updated_prefix(prefix: Tensor, delta: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """prefix + delta, rounded to the prefix's dtype once, contiguous.

    Bit-equal to eager's addition in that dtype: `compute_dtype` has more than twice its bits, so that rounding to it
    first changes nothing, or is that dtype itself.
    """
    return (prefix.to(compute_dtype) + delta.to(compute_dtype)).to(prefix.dtype).contiguous()


def check_bank(prefix: Tensor, bank: Tensor, slot: int) -> None:
    """`UnsupportedError` unless `prefix` fits into bank[..., slot, :]."""
    problem = None
    if bank.dim() != prefix.dim() + 1:
        problem = f"the bank has shape {tuple(bank.shape)}, the prefix {tuple(prefix.shape)}"
    elif bank.dtype != prefix.dtype:
        problem = f"the bank holds {bank.dtype}, the prefix is {prefix.dtype}"
    elif not 0 <= slot < bank.shape[-2]:
        problem = f"the bank has {bank.shape[-2]} slots, and slot {slot} is none of them"
    if problem:
        raise UnsupportedError(
            problem,
            place="k3::write_attn_res_norm, bank",
            remedy="give a bank [..., slots, d] of the prefix's dtype and 0 <= slot < slots",
        )


def bank_reads(arguments: Mapping[str, Any]) -> str | None:
    """`Op.inplace_reads` of the write: None if no source that is a view of the bank covers the slot that is written.

    Such sources are whole slots: bank[..., k, :] or bank[..., k:k+n, :].
    """
    bank, slot = arguments["bank"], arguments["slot"]
    step = bank.stride(-2)
    named = {"prefix": arguments["prefix"], "delta": arguments["delta"]}
    named |= {f"blocks[{i}]": block for i, block in enumerate(arguments["blocks"])}
    for name, source in named.items():
        if source is None or storage_id(source) != storage_id(bank):
            continue
        chunk = source.dim() == bank.dim()
        outer = source.stride()[:-2] if chunk else source.stride()[:-1]
        apart = source.storage_offset() - bank.storage_offset()
        count = source.shape[-2] if chunk else 1
        known = all(isinstance(number, int) for number in (step, apart, count)) and step > 0
        aligned = same_sizes(outer, bank.stride()[:-2]) and same_size(source.stride(-1), bank.stride(-1))
        if not known or not aligned or apart % step or (chunk and not same_size(source.stride(-2), step)):
            return f"{name} is a view of the bank, but not of whole slots"
        if apart // step <= slot < apart // step + count:
            return f"slot {slot} is read as {name} and written"
    return None


_WEIGHTS = "Tensor score_norm, Tensor score_proj, float score_eps, Tensor norm_weight, float norm_eps"
_DTYPES = "*, ScalarType compute_dtype, ScalarType mix_dtype, ScalarType scale_dtype, ScalarType out_dtype"

ATTN_RES_NORM = Op(
    name="attn_res_norm",
    schema=f"(Tensor prefix, Tensor[] blocks, {_WEIGHTS}, {_DTYPES}) -> Tensor",
    reference=attn_res_norm,
    fake=attn_res_norm_fake,
    cost=attn_res_norm_cost,
    traits=frozenset({"row_independent"}),
)
ADD_ATTN_RES_NORM = Op(
    name="add_attn_res_norm",
    schema=f"(Tensor prefix, Tensor delta, Tensor[] blocks, {_WEIGHTS}, {_DTYPES}) -> (Tensor prefix, Tensor normed)",
    reference=add_attn_res_norm,
    fake=add_attn_res_norm_fake,
    cost=add_attn_res_norm_cost,
    traits=frozenset({"row_independent"}),
    inplace={"prefix": 0},
)
WRITE_ATTN_RES_NORM = Op(
    name="write_attn_res_norm",
    schema=(
        f"(Tensor prefix, Tensor? delta, Tensor[] blocks, Tensor bank, int slot, {_WEIGHTS}, {_DTYPES})"
        " -> (Tensor bank, Tensor normed)"
    ),
    reference=write_attn_res_norm,
    fake=write_attn_res_norm_fake,
    cost=write_attn_res_norm_cost,
    traits=frozenset({"row_independent"}),
    inplace={"bank": 0},
    inplace_reads=bank_reads,
)
OPS = (ATTN_RES_NORM, ADD_ATTN_RES_NORM, WRITE_ATTN_RES_NORM)
