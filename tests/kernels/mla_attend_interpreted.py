"""Run by test_mla_attend_triton.py in a process of its own with TRITON_INTERPRET=1. Prints one JSON object a case."""

from __future__ import annotations

import json
import sys

import torch
from interpreting import patch_once
from mla_cases import FP8, errors, make_call

from k3rewrite.kernels.mla_attend.launch import mla_attend

CASES = {
    "one key": (make_call([1], 1, 2), 1),
    "many keys, one part": (make_call([130, 64, 7], 1, 12, page=64), 1),
    "three parts": (make_call([200, 1, 129], 1, 12, page=64), 3),
    "more parts than keys": (make_call([3, 70], 1, 4, page=16), 5),
    "nothing to see": (make_call([0, 5, -3], 1, 3), 2),
    "nobody": (make_call([0, 0], 2, 2, pages=2), 3),
    "a window": (make_call([17, 60, 0], 4, 3, page=8), 2),
    "a window from nothing": (make_call([1, 64], 8, 2, page=8, ids=torch.int32), 3),
    "96 heads": (make_call([40], 1, 96, 16), 2),
    "more queries than a workgroup": (make_call([33], 3, 48, 16, page=16), 2),
    "pages that are not there": (make_call([40, 24], 1, 3, page=8, missing=[(0, 1), (0, 4), (1, 0)]), 2),
    "no page is there": (make_call([8, 8], 1, 3, page=8, missing=[(1, 0)]), 2),
    "one page a slot": (make_call([50, 21, 1], 1, 12, page=50), 2),
    "fp32": (make_call([100, 31], 2, 3, dtype=torch.float32, page=64), 2),
    "fp16": (make_call([100], 1, 3, dtype=torch.float16, out=torch.float32), 2),
    "fp8": (make_call([100, 3], 1, 12, cache_dtype=FP8, page=64), 2),
    "fp8, one part": (make_call([30], 2, 2, cache_dtype=FP8, page=64), 1),
    "no row": (make_call([], 1, 2), 2),
}

patch_once()
found = {}
for name, (call, parts) in CASES.items():
    found[name] = errors(mla_attend(**call, parts=parts), call)
sys.stdout.write(json.dumps(found) + "\n")
