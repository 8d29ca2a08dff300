"""The HIP C++ kernel (`hip/attn_res_norm.hip`): bf16, compiled for each shape.

    AMD       one workgroup a row, any number of rows
    NVIDIA    few rows (sm_90 and later): a cluster of workgroups shares a row, because with few rows most of the chip
              is idle and one compute unit's arithmetic is what takes the time. Where the number of rows is symbolic,
              the launch looks at the real one and hands more rows to the Triton kernels.

The same source runs with one workgroup a row on NVIDIA, which is how the AMD layout is tested without an AMD GPU.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3rewrite.errors import UnsupportedError
from k3rewrite.graph.shapes import same_size
from k3rewrite.kernels.attn_res.op import single_sources
from k3rewrite.kernels.attn_res_norm import launch
from k3rewrite.kernels.attn_res_norm.accept import (
    call_parts,
    named_tensors,
    objection,
    row_count,
    source_count,
    target_objection,
)
from k3rewrite.kernels.attn_res_norm.schedule import MAX_SOURCES
from k3rewrite.kernels.devices import CLUSTER_ARCHS, loaded_function
from k3rewrite.ops.kernel import HipUnit
from k3rewrite.ops.runs import hand_over
from k3rewrite.targets import Target

PATH = Path(__file__).parent / "hip" / "attn_res_norm.hip"
SYMBOL = "attn_res_norm"
VECTOR = 8
"""bf16 elements of a 16-byte access"""
FEW_ROWS = 64
"""up to so many rows a cluster a row is faster than the Triton kernels on an H200; at 128 rows it is slower"""
SPLITS = ((8, (7,)), (24, (4,)), (32, (8,)), (FEW_ROWS, (2,)))
"""up to so many rows, the workgroups of a cluster that are tried first, then any from 8 down. Measured on an H200, 7168
columns, in sweeps that were not kept: clusters of 4 leave no compute unit with two workgroups up to 24 rows, and of
2 up to 64"""
ARITHMETIC_REGISTERS = {"amd": 140, "nvidia": 64}
"""what a thread needs beside the sources that it holds, two vectors of each or one: read from the compiled objects of 1
to 16 sources"""


@dataclass(frozen=True)
class Layout:
    """Workgroups that share a row, threads of each, and whether the launch overlaps the kernel before it."""

    split: int
    threads: int
    dependent: bool = False
    asynchronous: bool = False
    """wait for the bytes of the other workgroups, not for them"""
    early: bool = False
    """write the new prefix before the sums are exchanged"""


def layout_for(columns: int, arch: str, rows: int = 1) -> Layout | None:
    """The layout on a target: clusters on `CLUSTER_ARCHS` (None where they do not come out even), else one workgroup.

    7168 columns are 896 vectors: 7 workgroups of 128 threads with one vector each, or one of 448 with two.
    """
    vectors = columns // VECTOR
    if arch in CLUSTER_ARCHS:
        preferred = next(splits for most, splits in SPLITS if rows <= most or most == FEW_ROWS)
        for split in (*preferred, *range(8, 1, -1)):
            each = vectors // split
            if vectors % split == 0 and each <= 512 and (each % 32 == 0 or each > 96):  # few idle lanes
                return Layout(split, -(-each // 32) * 32, dependent=True, asynchronous=True, early=True)
        return None
    for each in (2, 1, 4):
        if vectors % (64 * each) == 0 and vectors // each <= 1024:
            return Layout(1, vectors // each)
    return Layout(1, min(1024, -(-vectors // 64) * 64))


def accepts(arguments: Mapping[str, Any], target: Target) -> str | None:
    if reason := target_objection(target) or objection(arguments) or _data_objection(arguments):
        return reason
    prefix, blocks = call_parts(arguments)
    columns, count = prefix.shape[-1], source_count(prefix, blocks)
    if target.vendor == "nvidia":
        if target.arch not in CLUSTER_ARCHS:
            return f"{target.arch} has no clusters of workgroups"
        rows = row_count(prefix)
        if rows is not None and rows > FEW_ROWS:
            return f"for up to {FEW_ROWS} rows; there are {rows}"
        if rows is None and importlib.util.find_spec("triton") is None:
            return "the number of rows is symbolic, and Triton, which takes many rows, is not installed"
    for layout in _layouts(columns, target.arch, row_count(prefix)):
        if layout is None:
            return f"rows of {columns} elements do not come out even over a cluster of workgroups"
        registers = (count or 1) * -(-columns // VECTOR // (layout.split * layout.threads)) * 4
        if registers + ARITHMETIC_REGISTERS[target.vendor] > (available := _registers(target, layout.threads)):
            return (
                f"{count} sources take {registers} registers a thread, of {available} beside what the arithmetic needs"
            )
    return None


def _layouts(columns: int, arch: str, rows: int | None) -> list[Layout | None]:
    """Of a number of rows; of all that are few, if it is symbolic."""
    if rows is not None:
        return [layout_for(columns, arch, rows)]
    return list(dict.fromkeys(layout_for(columns, arch, most) for most, _ in SPLITS))


def _data_objection(arguments: Mapping[str, Any]) -> str | None:
    """bf16 throughout, and 16-byte accesses."""
    for name in ("mix_dtype", "scale_dtype"):
        if arguments.get(name) == torch.float16:
            return f"{name} is float16; bfloat16 and float32 are offered"
    if arguments["out_dtype"] != torch.bfloat16:
        return "writes bfloat16"
    columns = call_parts(arguments)[0].shape[-1]
    if columns % VECTOR:
        return f"rows of {columns} elements; a multiple of {VECTOR} is needed for 16-byte accesses"
    for name, tensor in named_tensors(arguments):
        if tensor.dtype != torch.bfloat16:
            return f"{name} is {str(tensor.dtype).removeprefix('torch.')}; everything is bfloat16 in this kernel"
        steps = [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if not same_size(n, 1)][:-1]
        if any(not isinstance(step, int) or step % VECTOR for step in (*steps, tensor.storage_offset())):
            return f"rows of {name} do not begin at multiples of 16 bytes (strides {tuple(tensor.stride())})"
        if any(step >= 2**31 for step in steps):
            return f"rows of {name} lie further apart than 32 bits can say (strides {tuple(tensor.stride())})"
    return None


def _registers(target: Target, threads: int) -> int:
    """Vector registers a thread may use when one workgroup of that size fills a compute unit."""
    waves = -(-threads // target.wave_size // target.simds_per_cu)
    return min(target.max_registers_per_thread, target.registers_per_simd // waves)


def units(arguments: Mapping[str, Any], target: Target) -> Sequence[HipUnit]:
    prefix, blocks = call_parts(arguments)
    count, layouts = source_count(prefix, blocks), _layouts(prefix.shape[-1], target.arch, row_count(prefix))
    assert count is not None, "accepts has refused such a call"
    delta = arguments.get("delta") is not None
    return [
        unit(
            layout,
            prefix.shape[-1],
            count - 1,
            delta=delta,
            store=delta or "bank" in arguments,
            norm="norm_weight" in arguments,
            mix=arguments.get("mix_dtype", torch.float32),
            scale=arguments.get("scale_dtype", torch.float32),
        )
        for layout in layouts
        if layout is not None
    ]


def unit(
    layout: Layout,
    columns: int,
    blocks: int,
    *,
    delta: bool,
    store: bool,
    norm: bool,
    mix: torch.dtype,
    scale: torch.dtype,
) -> HipUnit:
    """What to compile for rows of `columns` elements and `blocks` sources beside the prefix."""
    values = {
        "D": columns,
        "BLOCKS": blocks,
        "SPLIT": layout.split,
        "DEPENDENT": int(layout.dependent),
        "ASYNC": int(layout.asynchronous),
        "EARLY": int(layout.early),
        "THREADS": layout.threads,
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
    layout: Layout | None = None,
) -> Tensor:
    """As `launch.mix_rows`, by the HIP kernel, compiled at the first call of each shape.

    A `layout` takes the place of the target's own: for benchmarks and tests.
    """
    out = prefix.new_empty(prefix.shape, dtype=out_dtype)
    if out.numel() == 0:
        return out
    columns = prefix.shape[-1]
    *singles, last = (launch.rows_of(source) for source in single_sources(prefix, blocks))
    chosen = layout or layout_for(columns, launch.device_facts(prefix.device)[0], last.shape[0])
    assert chosen is not None, "accepts has refused such a width"
    wanted = unit(
        chosen, columns, len(singles), delta=delta is not None, store=updated is not None,
        norm=norm_weight is not None, mix=mix_dtype, scale=scale_dtype,
    )  # fmt: skip
    stored = last if updated is None else launch.rows_view(updated)
    added = last if delta is None else launch.rows_of(delta)
    absent = MAX_SOURCES - 1 - len(singles)
    with torch.cuda.device(prefix.device):
        _function(tuple(wanted.defines.items()), prefix.device)(
            grid=(last.shape[0] * chosen.split,),
            threads=chosen.threads,
            dependent=chosen.dependent,
            arguments=[
                *singles, *[last] * absent, *(single.stride(0) for single in singles), *[0] * absent,
                last, last.stride(0), added, added.stride(0), stored, stored.stride(0),
                score_norm.contiguous(), score_proj.reshape(-1),
                score_norm if norm_weight is None else norm_weight.contiguous(),
                out, columns, float(score_eps), float(norm_eps),
            ],
        )  # fmt: skip
    return out


def mix_rows_by_call(prefix: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """`mix_rows` for what this kernel takes; `launch.mix_rows` for more rows than that on NVIDIA, and for tensors that
    do not begin at 16 bytes: where the graph was captured they did, but nothing guards the addresses of later calls."""
    nvidia = launch.device_facts(prefix.device)[0] in CLUSTER_ARCHS
    if nvidia and math.prod(prefix.shape[:-1]) > FEW_ROWS:
        hand_over("triton")
        return launch.mix_rows(prefix, *arguments, **options)
    if misaligned(prefix, *arguments):
        if importlib.util.find_spec("triton") is None:
            raise UnsupportedError(
                "a tensor does not begin at a multiple of 16 bytes, and Triton, which takes it, is not installed",
                place=f"kernel {SYMBOL}",
                remedy="install triton, or give tensors that are no slices at odd offsets",
            )
        hand_over("triton")
        return launch.mix_rows(prefix, *arguments, **options)
    return mix_rows(prefix, *arguments, **options)


def misaligned(*arguments: Any) -> bool:
    """Whether a tensor among the arguments (or in a list of them) does not begin at a multiple of 16 bytes."""
    tensors = (t for a in arguments for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, Tensor))
    return any(tensor.data_ptr() % (2 * VECTOR) for tensor in tensors)


@cache
def _function(defines: tuple[tuple[str, str], ...], device: torch.device) -> Any:
    """The kernel for these sizes, compiled and loaded on `device`, the current one."""
    return loaded_function(HipUnit(PATH, SYMBOL, dict(defines)))
