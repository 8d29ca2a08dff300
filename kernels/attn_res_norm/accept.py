"""Why a kernel does not take a call: one reason, in words, or None. Adds no guard to a symbolic size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from k3rewrite.graph.shapes import same_size
from k3rewrite.kernels.attn_res_norm.schedule import MAX_COLUMNS, MAX_SOURCES
from k3rewrite.targets import Target

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def call_parts(arguments: Mapping[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Prefix and blocks of a call of any of the four ops."""
    if "sources" in arguments:
        *blocks, prefix = arguments["sources"]
        return prefix, blocks
    return arguments["prefix"], list(arguments["blocks"])


def named_tensors(arguments: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Every tensor of the call with the name by which a reason speaks of it."""
    named: list[tuple[str, Tensor]] = []
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            named.append((name, value))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            named += [(f"{name}[{i}]", item) for i, item in enumerate(value) if isinstance(item, Tensor)]
    return named


def objection(arguments: Mapping[str, Any]) -> str | None:
    """What the Triton kernels cannot do about the call, whatever the target."""
    prefix, blocks = call_parts(arguments)
    if (compute := arguments["compute_dtype"]) != torch.float32:
        return f"computes in float32, not {_short(compute)}"
    for name in ("mix_dtype", "scale_dtype", "out_dtype"):
        if (dtype := arguments.get(name, torch.float32)) not in KERNEL_DTYPES:
            return f"{name} is {_short(dtype)}; bfloat16, float16 and float32 are written"
    for name, tensor in named_tensors(arguments):
        if tensor.dtype not in KERNEL_DTYPES:
            return f"{name} is {_short(tensor.dtype)}; bfloat16, float16 and float32 are read"
        if not same_size(tensor.stride(-1), 1) and not same_size(tensor.shape[-1], 1):
            return f"{name} is not contiguous in its last dimension (stride {tensor.stride(-1)})"
    for index, block in enumerate(blocks):
        if block.dtype != prefix.dtype:
            return f"source {index} is {_short(block.dtype)}, the prefix {_short(prefix.dtype)}: one dtype for all"
    columns = prefix.shape[-1]
    if not isinstance(columns, int):
        return "the width of a row is symbolic"
    if not 0 < columns <= MAX_COLUMNS:
        return f"rows of {columns} elements; 1 to {MAX_COLUMNS} fit in registers"
    count = source_count(prefix, blocks)
    if count is None:
        return "the number of sources is symbolic"
    if count > MAX_SOURCES:
        return f"{count} sources; at most {MAX_SOURCES} are taken"
    return _rows_objection(arguments, prefix, blocks)


def source_count(prefix: Tensor, blocks: Sequence[Tensor]) -> int | None:
    """Sources of the call, the prefix included; None if a chunk has a symbolic number of them."""
    count = 1
    for block in blocks:
        size = 1 if block.dim() == prefix.dim() else block.shape[-2]
        if not isinstance(size, int):
            return None
        count += size
    return count


def row_count(prefix: Tensor) -> int | None:
    """Rows of the call; None if symbolic."""
    leading = prefix.shape[:-1]
    return math.prod(leading) if all(isinstance(size, int) for size in leading) else None


def _rows_objection(arguments: Mapping[str, Any], prefix: Tensor, blocks: Sequence[Tensor]) -> str | None:
    """Leading dimensions must lie one row stride apart, so that they can be walked as rows."""
    walked = [("prefix", prefix)] + [
        (f"source {i}", block if block.dim() == prefix.dim() else block.select(-2, 0))
        for i, block in enumerate(blocks)
        if block.dim() == prefix.dim() or not same_size(block.shape[-2], 0)
    ]
    if arguments.get("delta") is not None:
        walked.append(("delta", arguments["delta"]))
    if "bank" in arguments:
        walked.append(("bank", arguments["bank"].select(-2, arguments["slot"])))
    for name, tensor in walked:
        for i in range(tensor.dim() - 2):
            if same_size(tensor.shape[i], 1):
                continue
            if not same_size(tensor.stride(i), tensor.shape[i + 1] * tensor.stride(i + 1)):
                return f"the leading dimensions of {name} do not collapse into rows (strides {tuple(tensor.stride())})"
    return None


def target_objection(target: Target) -> str | None:
    return None if target.is_gpu else f"the target '{target.name}' has no kernels; it runs the references"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
