"""The HIP C++ kernel (`hip/attn_res_norm.hip`): bf16, one workgroup a row, compiled for each shape.

It is chosen on AMD targets. The same source runs on NVIDIA through NVRTC or nvcc, which is how it is tested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3rewrite.errors import EmitError
from k3rewrite.graph.shapes import same_size
from k3rewrite.kernel import HipUnit
from k3rewrite.kernels.attn_res.op import single_sources
from k3rewrite.kernels.attn_res_norm.accept import call_parts, named_tensors, objection, source_count, target_objection
from k3rewrite.kernels.attn_res_norm.launch import rows_of, rows_view
from k3rewrite.kernels.attn_res_norm.schedule import MAX_SOURCES
from k3rewrite.targets import Target, load_target

PATH = Path(__file__).parent / "hip" / "attn_res_norm.hip"
SYMBOL = "attn_res_norm"
VECTOR = 8
"""bf16 elements of a 16-byte access"""


def threads_for(columns: int, split: int = 1) -> int:
    """Threads of a workgroup: two vectors each if that comes out even (448 for 7168 columns), else one, else four."""
    vectors = columns // VECTOR // split
    for each in (2, 1, 4):
        if vectors % each == 0 and vectors // each <= 1024 and (vectors // each) % 64 == 0:
            return vectors // each
    return min(1024, -(-vectors // 64) * 64)


def accepts(arguments: Mapping[str, Any], target: Target) -> str | None:
    if target.vendor != "amd":
        return target_objection(target) or f"written for AMD; on {target.vendor} the Triton kernel is chosen"
    if reason := objection(arguments):
        return reason
    if arguments["out_dtype"] != torch.bfloat16:
        return "writes bfloat16"
    for name, tensor in named_tensors(arguments):
        if tensor.dtype != torch.bfloat16:
            return f"{name} is {tensor.dtype}; everything is bfloat16 in this kernel".replace("torch.", "")
    for name in ("mix_dtype", "scale_dtype"):
        if arguments.get(name) == torch.float16:
            return f"{name} is float16; bfloat16 and float32 are offered"
    prefix, blocks = call_parts(arguments)
    columns, count = prefix.shape[-1], source_count(prefix, blocks)
    if columns % VECTOR:
        return f"rows of {columns} elements; a multiple of {VECTOR} is needed for 16-byte accesses"
    for name, tensor in named_tensors(arguments):
        for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True):
            if not same_size(size, 1) and not (isinstance(stride, int) and stride % VECTOR == 0):
                return f"{name} has a row stride of {stride}; a multiple of {VECTOR} is needed for 16-byte accesses"
    threads = threads_for(columns)
    registers = (count or 1) * -(-columns // VECTOR // threads) * 4
    if registers + 64 > (available := _registers(target, threads)):
        return f"{count} sources take {registers} registers a thread, of {available} beside what the arithmetic needs"
    return None


def _registers(target: Target, threads: int) -> int:
    """Vector registers a thread may use when one workgroup of that size fills a compute unit."""
    waves = -(-threads // target.wave_size // target.simds_per_cu)
    return min(target.max_registers_per_thread, target.registers_per_simd // waves)


def units(arguments: Mapping[str, Any], target: Target) -> Sequence[HipUnit]:
    prefix, blocks = call_parts(arguments)
    count = source_count(prefix, blocks)
    assert count is not None, "accepts has refused a symbolic number of sources"
    delta = arguments.get("delta") is not None
    return [
        unit(
            prefix.shape[-1],
            count - 1,
            delta=delta,
            store=delta or "bank" in arguments,
            norm="norm_weight" in arguments,
            mix=arguments.get("mix_dtype", torch.float32),
            scale=arguments.get("scale_dtype", torch.float32),
        )
    ]


def unit(
    columns: int,
    blocks: int,
    *,
    delta: bool,
    store: bool,
    norm: bool,
    mix: torch.dtype,
    scale: torch.dtype,
    split: int = 1,
    threads: int = 0,
) -> HipUnit:
    """What to compile for rows of `columns` elements and `blocks` sources beside the prefix.

    `split` workgroups share a row (NVIDIA only); 0 threads: as many as suit the rows.
    """
    values = {
        "D": columns,
        "BLOCKS": blocks,
        "SPLIT": split,
        "THREADS": threads or threads_for(columns, split),
        "DELTA": int(delta),
        "STORE": int(store),
        "NORM": int(norm),
        "MIX_BF16": int(mix == torch.bfloat16),
        "SCALE_BF16": int(scale == torch.bfloat16),
    }
    return HipUnit(PATH, SYMBOL, {f"ATTN_RES_{name}": str(value) for name, value in values.items()})


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
    split: int = 1,
    threads: int = 0,
) -> Tensor:
    """As `launch.mix_rows`, by the HIP kernel, compiled at the first call of each shape."""
    out = prefix.new_empty(prefix.shape, dtype=out_dtype)
    if out.numel() == 0:
        return out
    columns = prefix.shape[-1]
    *singles, last = (rows_of(source) for source in single_sources(prefix, blocks))
    wanted = unit(
        columns, len(singles), delta=delta is not None, store=updated is not None, norm=norm_weight is not None,
        mix=mix_dtype, scale=scale_dtype, split=split, threads=threads,
    )  # fmt: skip
    stored = last if updated is None else rows_view(updated)
    added = last if delta is None else rows_of(delta)
    absent = MAX_SOURCES - 1 - len(singles)
    with torch.cuda.device(prefix.device):
        _function(tuple(wanted.defines.items()), prefix.device)(
            grid=(last.shape[0] * split,),
            threads=int(wanted.defines["ATTN_RES_THREADS"]),
            arguments=[
                *singles, *[last] * absent, *(single.stride(0) for single in singles), *[0] * absent,
                last, last.stride(0), added, added.stride(0), stored, stored.stride(0),
                score_norm.contiguous(), score_proj.reshape(-1),
                score_norm if norm_weight is None else norm_weight.contiguous(),
                out, columns, float(score_eps), float(norm_eps),
            ],
        )  # fmt: skip
    return out


@cache
def _function(defines: tuple[tuple[str, str], ...], device: torch.device) -> Any:
    """The kernel for these sizes, compiled and loaded on `device`, the current one."""
    from k3rewrite.emit.compiler import Missing, defines_text, find_compiler
    from k3rewrite.emit.launch import load_function
    from k3rewrite.emit.source import unit_source

    target, wanted = load_target("auto"), HipUnit(PATH, SYMBOL, dict(defines))
    compiler = find_compiler(wanted, target)
    if isinstance(compiler, Missing):
        raise EmitError(compiler.reason, place=f"kernel {SYMBOL}", remedy="install the compiler, or bind Triton")
    return load_function(compiler.compile(wanted, target, defines_text(wanted) + unit_source(wanted)).object, SYMBOL)
