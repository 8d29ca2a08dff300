"""Run by test_attn_res_triton.py in a process of its own with TRITON_INTERPRET=1: the kernels on the CPU.

Prints one JSON object: for each case and schedule the error against fp64, and what else was checked. The interpreter
cuts bf16 off instead of rounding it, so bit-equality of the stored prefix is checked in fp16 and fp32 here, and in
bf16 on a GPU.
"""

from __future__ import annotations

import functools
import json
import sys

import torch
from attn_res_cases import FEWEST, Case, make_case, relative_error, row_by_row
from interpreting import patch_once

from k3rewrite.kernels.attn_res_norm import launch
from k3rewrite.kernels.attn_res_norm.schedule import Schedule

SHAPES = [((2,), 0, 128, 0), ((1, 2), 8, 200, 24), ((3,), 3, 64, 16), ((1,), 15, 96, 0)]
SCHEDULES = [Schedule(True, 4), Schedule(False, 4, 2), Schedule(False, 2, 3, programs_per_cu=1)]


def run(case: Case, schedule: Schedule, dtype: torch.dtype) -> dict[str, object]:
    mix = functools.partial(launch.mix_rows, schedule=schedule)
    dtypes = FEWEST | {"out_dtype": dtype}
    lists = [[case.chunk], list(case.chunk.unbind(-2))]
    new = case.prefix + case.delta
    bank_before, prefix_before = case.bank.clone(), case.prefix.clone()
    errors = []

    def took(result: torch.Tensor, prefix: torch.Tensor, *, norm: bool = True) -> None:
        weight = case.norm_weight if norm else None
        errors.append(relative_error(result, row_by_row(prefix, case.chunk, case.score_norm, case.score_proj, weight)))

    for blocks in lists:
        updated, normed = launch.add_attn_res_norm(case.prefix, case.delta, blocks, *case.weights, **dtypes, mix=mix)
        took(normed, new)
        took(launch.attn_res_norm(case.prefix, blocks, *case.weights, **dtypes, mix=mix), case.prefix)
        options = {"compute_dtype": torch.float32, "out_dtype": dtype}
        took(launch.attn_res([*blocks, case.prefix], *case.weights[:3], **options, mix=mix), case.prefix, norm=False)
    bank, normed = launch.write_attn_res_norm(
        case.prefix, case.delta, lists[0], case.bank, case.count, *case.weights, **dtypes, mix=mix
    )
    took(normed, new)
    inputs_kept = torch.equal(case.prefix, prefix_before) and torch.equal(
        case.bank.nan_to_num(9.0), bank_before.nan_to_num(9.0)
    )
    others_kept = torch.equal(bank[..., : case.count, :], case.chunk) and bool(
        bank[..., case.count + 1, :].isnan().all()
    )
    prefix, filled = case.prefix.clone(), case.bank.clone()
    in_place = launch.add_attn_res_norm(prefix, case.delta, lists[0], *case.weights, **dtypes, mix=mix, in_place=True)
    also = launch.write_attn_res_norm(
        case.prefix, case.delta, [filled[..., : case.count, :]], filled, case.count, *case.weights, **dtypes,
        mix=mix, in_place=True,
    )  # fmt: skip
    return {
        "errors": errors,
        "prefix_equal": torch.equal(updated, new) and torch.equal(bank[..., case.count, :], new),
        "prefix_close": float((updated.float() - new.float()).abs().max()),
        "inputs_kept": inputs_kept,
        "others_kept": others_kept,
        "in_place_same": torch.equal(in_place, normed)
        and torch.equal(also, normed)
        and torch.equal(prefix, updated)
        and torch.equal(filled.nan_to_num(9.0), bank.nan_to_num(9.0)),
    }


def main() -> None:
    patch_once()
    results = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for index, (rows, count, columns, pad) in enumerate(SHAPES):
            case = make_case(rows, count, columns, dtype, pad=pad, seed=index)
            for schedule in SCHEDULES[: 3 if index == 2 else 2]:
                name = f"{dtype} {rows} {count} {columns} {schedule}"
                results.append({"name": name, "dtype": str(dtype), **run(case, schedule, dtype)})
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
