"""Run by test_experts_triton.py in a process of its own with TRITON_INTERPRET=1: the kernels on the CPU.

Prints one JSON object: for each case and path the error against fp64. x and the result are fp32 here, which makes the
comparison sharp, and the interpreter multiplies bf16 matrices as if their bits were integers. Roundings to bf16 are cut
off instead of rounded by it, so errors of the modes with roundings are about twice those of a GPU.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch
from experts_cases import ALL_BF16, FEWEST, MODEL, Case, make_case, relative_error
from interpreting import patch_once

from k3rewrite.kernels.experts import launch
from k3rewrite.kernels.experts.schedule import Schedule, Tiles

PATHS = {
    "routes": Schedule("routes", Tiles(16, 32, 4, 1), Tiles(16, 16, 4, 1, group=2)),
    "experts": Schedule("experts", Tiles(16, 32, 4, 1), Tiles(16, 16, 4, 1)),
    "sorted": Schedule("sorted", Tiles(16, 32, 4, 1, tokens=16), Tiles(16, 16, 4, 1, tokens=16)),
}
SHAPE = {"experts": 8, "inner": 64, "width": 32, "outer": 48}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"tokens": 5, "top_k": 3},
    "silu": {"tokens": 3, "top_k": 2, "activation": "silu"},
    "one token": {"tokens": 1, "top_k": 8},
    "every token to one expert": {"tokens": 19, "top_k": 1, "ids": [[3]] * 19},
    "the same expert twice": {"tokens": 2, "top_k": 3, "ids": [[5, 5, 1], [0, 7, 7]]},
    "a window": {"tokens": 6, "top_k": 4, "first": 8, "global_experts": 24},
    "none local": {"tokens": 2, "top_k": 2, "ids": [[-1, -1], [-1, 99]]},
    "rows apart": {"tokens": 2, "top_k": 2, "pad": 8},
    "odd sizes": {"tokens": 3, "top_k": 3, "experts": 5, "inner": 48, "width": 80, "outer": 37},
    "mxfp4": {"tokens": 3, "top_k": 3, "format": "mxfp4"},
    "mxfp8": {"tokens": 3, "top_k": 3, "format": "mxfp8"},
    "no token": {"tokens": 0, "top_k": 2},
}


MODES = {"fewest": FEWEST, "model": MODEL, "bf16": ALL_BF16}
REPEATED = ("silu", "the same expert twice", "mxfp4")
"""called twice; what is left in memory by the call before: test_faults_experts.py"""


def main() -> None:
    patch_once()
    results = []
    for index, (name, settings) in enumerate(CASES.items()):
        case = make_case(**{**SHAPE, **settings}, seed=index)
        case.x = case.x.float()
        exact = case.exact()
        modes = {"plain": ("fewest", "model"), "silu": ("fewest", "model", "bf16")}.get(name, ("fewest",))
        for path, schedule in PATHS.items():
            for mode in modes:
                arguments = case.arguments({**MODES[mode], "out_dtype": torch.float32})
                calls = 2 if name in REPEATED else 1
                first, *again = (launch.experts(**arguments, schedule=fitted(schedule, case)) for _ in range(calls))
                results.append(
                    {
                        "name": name,
                        "path": path,
                        "mode": mode,
                        "error": relative_error(first, exact),
                        "finite": bool(first.isfinite().all()),
                        "largest": float(first.abs().max()) if first.numel() else 0.0,
                        "repeats": [torch.equal(first, each) for each in again],
                        "shape": list(first.shape),
                    }
                )
    sys.stdout.write(json.dumps(results) + "\n")


def fitted(schedule: Schedule, case: Case) -> Schedule:
    """Columns that divide the case's matrices."""
    inner = case.x.shape[1]
    return replace(schedule, gate_up=replace(schedule.gate_up, columns=min(schedule.gate_up.columns, inner & -inner)))


if __name__ == "__main__":
    main()
