"""Running the Triton kernels of `k3::mla_attend` on tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.devices import device_facts
from k3rewrite.kernels.dtypes import NAMES
from k3rewrite.kernels.mla_attend.splits import parts_for
from k3rewrite.kernels.mla_attend.tiles import tile_for

PART_POINTERS = ("query", "cache", "table", "lengths", "cache_scale")
PART_STRIDES = {
    "query_row": ("query", 0), "query_token": ("query", 1), "query_head": ("query", 2), "cache_page": ("cache", 0),
    "cache_position": ("cache", 1), "table_row": ("table", 0),
}  # fmt: skip
"""the kernel's strides: of which tensor, and which"""
PART_SIZES = ("tokens", "heads", "page_size", "pages", "parts")
MERGE_WIDTH, MERGE_WARPS = 128, 1


def constants(arguments: Mapping[str, Any], whole: bool, arch: str) -> dict[str, Any]:
    """What a call's first kernel is compiled for."""
    query, cache, table = arguments["query"], arguments["cache"], arguments["table"]
    values = arguments["value_size"]
    fp8 = cache.element_size() == 1
    tile = tile_for(query.shape[1] * query.shape[2], arch, fp8=fp8)
    page, pages = cache.shape[1], table.shape[1]
    one = (isinstance(pages, int) and pages == 1) or (isinstance(page, int) and page % tile.keys == 0)
    return {"VALUES": values, "REST": query.shape[3] - values, "BLOCK_M": tile.queries, "BLOCK_N": tile.keys,
            "ONE_PAGE": one, "FP8": fp8, "WHOLE": whole,
            # Triton's interpreter has no bf16 products
            "MULTIPLY": "fp32" if arch == "cpu" else NAMES[query.dtype]}  # fmt: skip


def mla_attend(
    query: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, cache_scale: Tensor | None, scale: float,
    value_size: int, out_dtype: torch.dtype, *, parts: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the op takes. `parts` takes the place of the rule's own number."""
    from k3rewrite.kernels.mla_attend import triton as kernels

    arguments: dict[str, Any] = {
        "query": query, "cache": cache, "table": table, "lengths": lengths, "cache_scale": cache_scale,
        "value_size": value_size,
    }  # fmt: skip
    batch, tokens, heads = query.shape[:3]
    queries, pages, page = tokens * heads, table.shape[1], cache.shape[1]
    out = query.new_empty((batch, tokens, heads, value_size), dtype=out_dtype)
    lse = query.new_empty((batch, tokens, heads), dtype=torch.float32)
    if not batch * queries:
        return out, lse
    arch, compute_units = device_facts(query.device)
    tile = tile_for(queries, arch, fp8=cache.element_size() == 1)
    blocks = -(-queries // tile.queries)
    count = parts or parts_for(batch * blocks, pages * page, compute_units)
    whole = count == 1
    fixed = constants(arguments, whole, arch)
    to, logs = out, lse
    if not whole:
        to = query.new_empty((batch * queries, count, value_size), dtype=torch.float32)
        logs = query.new_empty((batch * queries, count), dtype=torch.float32)
    with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
        kernels.mla_attend_part[(batch, blocks, count)](
            *(arguments[name] for name in PART_POINTERS), to, logs, scale,
            *(arguments[name].stride(dim) for name, dim in PART_STRIDES.values()),
            tokens, heads, page, pages, count, **fixed, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if not whole:
            kernels.mla_attend_merge[(batch * queries, value_size // MERGE_WIDTH or 1)](
                to, logs, out, lse, count, VALUES=value_size, WIDTH=min(MERGE_WIDTH, value_size),
                PARTS=1 << (count - 1).bit_length(), num_warps=MERGE_WARPS,
            )  # fmt: skip
    return out, lse
