"""Run by test_kda_verify_triton.py in a process of its own with TRITON_INTERPRET=1. Prints one JSON object a case."""

from __future__ import annotations

import json
import sys

import torch
from interpreting import patch_once
from kda_verify_cases import errors, in_one_buffer, make_call

from k3rewrite.kernels.kda_verify.launch import kda_verify
from k3rewrite.kernels.kda_verify.tiles import Tile

CASES = {
    "four tokens": (make_call([3, 1], 4, 2, 16), Tile(4, 1, ready=8)),
    "one token": (make_call([1, 1, 1], 1, 2, 16, ids=torch.int32, by_tap=False), Tile(8, 1)),
    "eight tokens": (make_call([8], 8, 1, 32, by_tap=False), Tile(4, 1, ready=8)),
    "null rows": (make_call([2, 1, 2], 2, 2, 16, null=(1,), ids=torch.int32), Tile(16, 4)),
    "null slots in live rows": (make_call([2, 1, 3], 3, 2, 16, holes=True, spare=0), Tile(8, 1, ready=8)),
    "windows of several lengths": (make_call([2, 4, 1, 3], 4, 2, 16, lengths=[3, 0, 4, 1]), Tile(4, 1)),
    "lengths beyond 32 bits": (make_call([2, 1, 1], 2, 1, 16, lengths=[2, 1, 0]), Tile(4, 1)),
    "several lengths, null rows": (make_call([1, 1, 2], 3, 1, 16, lengths=[2, 3, 3], null=(1,)), Tile(16, 4)),
    "slot 0 is a slot": (make_call([2, 1], 2, 2, 16, null_slot=False, activation="silu"), Tile(4, 1, ready=8)),
    "several lengths, slot 0 is a slot": (make_call([2, 1], 2, 2, 16, null_slot=False, lengths=[1, 2]), Tile(4, 1)),
    "fp32": (make_call([2, 4, 1], 4, 2, 16, dtype=torch.float32, null=(2,)), Tile(4, 1, ready=8)),
    "nobody": (make_call([1, 1], 2, 1, 16, null=(0, 1)), Tile(4, 1)),
    "no row": (make_call([], 2, 2, 16), Tile(4, 1)),
}

FAR = {"lengths beyond 32 bits": [2**33, 1, -(2**32) + 1]}
"""what stands for lengths in a call, and comes to the same"""

patch_once()
found = {}
for name, (call, tile) in CASES.items():
    before = {n: v.clone() for n, v in call.items() if isinstance(v, torch.Tensor)}
    far = {"lengths": torch.tensor(FAR[name])} if name in FAR else {}
    results = kda_verify(**call | far, tile=tile)
    kept = all(torch.equal(call[n].nan_to_num(7.0), v.nan_to_num(7.0)) for n, v in before.items())
    own = call | {n: call[n].clone() for n in ("conv_state", "state")}
    out = kda_verify(**own, in_place=True, tile=tile)
    pairs = [(out, results[0]), (own["conv_state"], results[1]), (own["state"], results[2])]
    same = all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs)
    found[name] = errors(results, call) | {"inputs_kept": kept, "in_place_same": same}

# Pools that are every second slot of something larger: what is written is there, and nothing between.
call = make_call([2, 1], 2, 2, 16)
expected = kda_verify(**call, tile=Tile(4, 1, ready=8))
wide = {
    n: torch.full((2 * len(call[n]), *call[n].shape[1:]), 7.0, dtype=call[n].dtype) for n in ("conv_state", "state")
}
own = {n: value[::2].copy_(call[n]) for n, value in wide.items()}
out = kda_verify(**call | own, in_place=True, tile=Tile(4, 1, ready=8))
pairs = [(out, expected[0]), (own["conv_state"], expected[1]), (own["state"], expected[2])]
found["strided pools"] = {
    "same": all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs),
    "between": all(bool((value[1::2] == 7).all()) for value in wide.values()),
}

# Both pools are views of one buffer.
call = make_call([2, 1, 2], 2, 2, 16, null=(1,))
own = in_one_buffer(call)
out = kda_verify(**call | own, in_place=True, tile=Tile(4, 1, ready=8))
found["one buffer"] = errors((out, own["conv_state"], own["state"]), call)

# Fewer slots than rows: rows of nobody need none.
call = make_call([2, 1, 1, 2], 2, 2, 16, null=(1, 2, 3))
call["table"][0], call["start"][0] = torch.tensor([2, 1]), 1
call |= {n: call[n][:3].clone() for n in ("conv_state", "state")}
found["three slots for four rows"] = errors(kda_verify(**call, tile=Tile(4, 1)), call)
sys.stdout.write(json.dumps(found) + "\n")
