"""Running the kernels on tensors: what each op allocates, stores and returns, and the launch of the Triton kernels.

The functions named after ops take what those ops take, and two things more:

    in_place   True: write into the prefix's or the bank's own storage and return only the normed result, as the op
               with the trailing underscore does
    mix        what runs: `mix_rows` (Triton) or `hip_kernel.mix_rows`
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.attn_res.op import single_sources
from k3rewrite.kernels.attn_res_norm.op import check_bank
from k3rewrite.kernels.attn_res_norm.schedule import MAX_SOURCES, Schedule, padded, schedule_for, wide_enough
from k3rewrite.kernels.devices import device_facts
from k3rewrite.kernels.dtypes import NAMES

MixRows = Callable[..., Tensor]


def attn_res(
    sources: Sequence[Tensor],
    score_norm: Tensor,
    score_proj: Tensor,
    score_eps: float,
    *,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
    mix: MixRows | None = None,
) -> Tensor:
    *blocks, prefix = sources
    return (mix or mix_rows)(
        prefix, None, blocks, None, score_norm, score_proj, score_eps, None, 0.0, out_dtype=out_dtype
    )


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
    mix: MixRows | None = None,
) -> Tensor:
    return (mix or mix_rows)(
        prefix, None, blocks, None, score_norm, score_proj, score_eps, norm_weight, norm_eps,
        mix_dtype=mix_dtype, scale_dtype=scale_dtype, out_dtype=out_dtype,
    )  # fmt: skip


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
    in_place: bool = False,
    mix: MixRows | None = None,
) -> tuple[Tensor, Tensor] | Tensor:
    updated = prefix if in_place else prefix.new_empty(prefix.shape)
    normed = (mix or mix_rows)(
        prefix, delta, blocks, updated, score_norm, score_proj, score_eps, norm_weight, norm_eps,
        mix_dtype=mix_dtype, scale_dtype=scale_dtype, out_dtype=out_dtype,
    )  # fmt: skip
    return normed if in_place else (updated, normed)


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
    in_place: bool = False,
    mix: MixRows | None = None,
) -> tuple[Tensor, Tensor] | Tensor:
    check_bank(prefix, bank, slot)
    written = bank if in_place else bank.new_empty_strided(bank.shape, bank.stride()).copy_(bank)
    normed = (mix or mix_rows)(
        prefix, delta, blocks, written.select(-2, slot), score_norm, score_proj, score_eps, norm_weight, norm_eps,
        mix_dtype=mix_dtype, scale_dtype=scale_dtype, out_dtype=out_dtype,
    )  # fmt: skip
    return normed if in_place else (written, normed)


def mix_rows(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Sequence[Tensor],
    updated: Tensor | None,
    score_norm: Tensor,
    score_proj: Tensor,
    score_eps: float,
    norm_weight: Tensor | None,
    norm_eps: float,
    *,
    out_dtype: torch.dtype,
    mix_dtype: torch.dtype = torch.float32,
    scale_dtype: torch.dtype = torch.float32,
    schedule: Schedule | None = None,
) -> Tensor:
    """One launch. The new prefix goes to `updated`, where given; no output norm without `norm_weight`.

    A `schedule` takes the place of the table's choice: for benchmarks and tests.
    """
    from k3rewrite.kernels.attn_res_norm import triton as kernels

    out = prefix.new_empty(prefix.shape, dtype=out_dtype)
    if out.numel() == 0:
        return out
    columns = prefix.shape[-1]
    *singles, last = (rows_of(source) for source in single_sources(prefix, blocks))
    rows = last.shape[0]
    added = None if delta is None else rows_of(delta)
    stored = None if updated is None else rows_view(updated)
    arch, compute_units = device_facts(prefix.device)
    chosen = schedule or schedule_for(arch, rows, len(singles) + 1, columns, prefix.dtype)
    absent = (None,) * (MAX_SOURCES - 1 - len(singles))
    programs = rows
    options: dict[str, Any] = {"num_warps": chosen.num_warps, "num_stages": 1}
    if not chosen.resident:
        options["STAGES"] = chosen.stages
        programs = min(rows, compute_units * chosen.programs_per_cu) if chosen.programs_per_cu else rows
    nvidia = arch.startswith("sm_")
    if nvidia:
        options["launch_pdl"] = chosen.dependent_launch
        if chosen.max_registers:
            options["maxnreg"] = chosen.max_registers
    kernel = kernels.attn_res_resident if chosen.resident else kernels.attn_res_streamed
    with torch.cuda.device(prefix.device) if prefix.is_cuda else contextlib.nullcontext():
        kernel[(programs,)](
            *singles, *absent, *(single.stride(0) for single in singles), *absent,
            last, last.stride(0), added, None if added is None else added.stride(0),
            stored, None if stored is None else stored.stride(0),
            score_norm.contiguous(), score_proj.reshape(-1), None if norm_weight is None else norm_weight.contiguous(),
            out, columns, rows, score_eps, norm_eps,
            BLOCKS=len(singles), D=columns, BLOCK=padded(columns), DELTA=added is not None, STORE=stored is not None,
            NORM=norm_weight is not None, MIX=NAMES[mix_dtype], SCALE=NAMES[scale_dtype],
            PDL=chosen.dependent_launch and nvidia, PTX=nvidia and wide_enough(columns, chosen), enable_fp_fusion=True,
            **options,
        )  # fmt: skip
    return out


def rows_of(tensor: Tensor) -> Tensor:
    """[..., d] as [rows, d] with contiguous columns: a view where strides allow, else a copy."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def rows_view(tensor: Tensor) -> Tensor:
    """As `rows_of`, but never a copy, because it is written. `accepts` has refused what this cannot do."""
    return tensor.view(-1, tensor.shape[-1])
