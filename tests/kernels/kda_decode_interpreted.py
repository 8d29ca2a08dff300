"""Run by test_kda_decode_triton.py in a process of its own with TRITON_INTERPRET=1. Prints one JSON object a case."""

from __future__ import annotations

import json
import sys

import torch
from interpreting import patch_once
from kda_decode_cases import POOLS, errors, make_call

from k3rewrite.kernels.kda_decode.launch import kda_decode

CASES = {
    "shuffled slots": make_call([4, 1, 2], 3, 16),
    "null rows": make_call([0, 3, -1, 2], 2, 16, ids=torch.int32),
    "columns of a verify window": make_call([2, 0, 1], 2, 32, spare=3),
    "no slots": make_call(None, 2, 16, rows=3, null_slot=False),
    "slot 0 is a slot": make_call([0, 2], 2, 16, null_slot=False, activation="silu"),
    "fp32": make_call([1, 0, 3], 2, 16, dtype=torch.float32),
    "no bound": make_call([2, 0, 1], 2, 16, bound=None),
    "a decay of each head, no bound": make_call([2, 0, 1], 2, 16, bound=None, per_head=True, activation="silu"),
    "a bounded decay of each head": make_call([2, 1], 2, 16, per_head=True, dtype=torch.float32),
    "as transformers lays it out": make_call(None, 2, 16, rows=3, null_slot=False, bound=None, foreign=True, spare=1),
    "by slot, keys by values": make_call([3, 0, 1], 2, 16, foreign=True),
    "strided pools": make_call([3, 0, 1], 2, 16, strided=True, spare=1),
    "fewer slots than rows": make_call([1, 0, 2, 0, 0, -1, 0], 1, 16),
    "nobody": make_call([0, 0], 1, 16),
    "no row": make_call([], 2, 16),
}

patch_once()
found = {}
for name, call in CASES.items():
    before = {n: v.clone() for n, v in call.items() if isinstance(v, torch.Tensor)}
    results = kda_decode(**call)
    kept = all(torch.equal(call[n].nan_to_num(7.0), v.nan_to_num(7.0)) for n, v in before.items())
    own = call | {n: torch.empty_strided(call[n].shape, call[n].stride(), dtype=call[n].dtype) for n in POOLS}
    for pool in POOLS:
        own[pool].copy_(call[pool])
    out = kda_decode(**own, in_place=True)
    pairs = [(out, results[0]), (own["conv_state"], results[1]), (own["state"], results[2])]
    same = all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs)
    found[name] = errors(results, call) | {"inputs_kept": kept, "in_place_same": same}
sys.stdout.write(json.dumps(found) + "\n")
