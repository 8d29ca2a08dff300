"""Run by test_kda_chunk_triton.py in a process of its own with TRITON_INTERPRET=1. Prints one JSON object.

Between the launches everything is fp32 here: the interpreter multiplies bf16 matrices as if their bits were integers.
"""

from __future__ import annotations

import json
import mmap
import sys
from dataclasses import replace
from typing import Any

import torch
from interpreting import patch_once
from kda_chunk_cases import errors, make_call, near_parallel

from k3rewrite.kernels.kda_chunk.checkpoint import checkpoint_table
from k3rewrite.kernels.kda_chunk.launch import kda_chunk
from k3rewrite.kernels.kda_chunk.op import LOWEST_BOUND
from k3rewrite.kernels.kda_chunk.plan import Plan, plan_for

FP32: dict[str, Any] = {"out_dtype": torch.float32}
WEAK = FP32 | {"bias": -6.0}
"""decays that leave something of a state after hundreds of tokens"""
ONE = Plan(tile=32)


def with_checkpoints(packed: bool) -> dict[str, Any]:
    lengths, slots = [130, 64], [3, 1]
    call = make_call(lengths, 1, 32, slots=slots, packed=packed, **FP32)
    return call | {"checkpoints": checkpoint_table([(0, 64, 4), (1, 64, 5), (0, 128, 2)], slots, lengths)}


def saturated() -> dict[str, Any]:
    """All gates at the lowest bound, exp(86) in a block, and raw keys of length 500."""
    call = make_call([66], 1, 32, bias=30.0, **FP32)
    return call | {"bound": LOWEST_BOUND, "k": call["k"] * 100}


def stray(name: str, values: list[int], **settings: Any) -> dict[str, Any]:
    """Lengths or offsets outside of the tokens: the nearest inside counts."""
    call = make_call([64, 64], 1, 32, slots=[3, 1], packed=name == "offsets", **settings, **FP32)
    return call | {name: torch.tensor(values)}


CASES: dict[str, tuple[dict[str, Any], Plan]] = {
    "ragged rows": (make_call([70, 1, 0, 64, 66], 1, 32, slots=[4, 2, 1, 0, 3], **FP32), ONE),
    "one line": (make_call([65, 1, 0, 66, 3], 1, 32, slots=[4, 2, 6, 1, 0], packed=True, width=150, **WEAK), ONE),
    "no slots, wider values": (make_call([66], 2, 32, values=64, width=68, **FP32), Plan(tile=32)),
    "slot 0 is a slot": (make_call([3, 64], 1, 32, slots=[0, 2], null_slot=False, **FP32), ONE),
    "fresh": (make_call([66, 1], 1, 32, slots=[2, 1], fresh=[True, True], **WEAK), Plan(tile=16)),
    "normalised, not raw": (make_call([50, 1], 1, 32, raw=False, normed=True, **FP32), ONE),
    "bf16 out": (make_call([50, 1], 1, 32), ONE),
    "nearly parallel keys": (near_parallel(make_call([64], 1, 64, bias=-40.0, **FP32)), Plan(tile=64)),
    "nearly parallel, strong decay": (near_parallel(make_call([64], 1, 64, bias=1.4, **FP32)), Plan(tile=64)),
    # Groups of 5, 5 and 3 chunks; all else here has groups of 4, which is the least.
    "three groups": (make_call([770, 1], 1, 32, slots=[2, 1], packed=True, **WEAK), Plan(tile=16, groups=3)),
    "groups, wider values": (
        make_call([258], 1, 32, values=64, **WEAK),
        replace(plan_for(1, 1, 32, 64, 6, "cpu", 1), groups=2),
    ),
    "groups, wider keys": (
        make_call([258], 1, 64, values=32, **WEAK),
        replace(plan_for(1, 1, 64, 32, 6, "cpu", 1), groups=2),
    ),
    "saturated gates, long keys": (saturated(), ONE),
    "a length above and one below": (stray("lengths", [70, -40]), ONE),
    "a length below and one above": (stray("lengths", [-1, 1 << 33]), ONE),
    "offsets outside": (stray("offsets", [-3, 64, 300]), ONE),
    "empty groups": (
        make_call([70, 300], 1, 32, slots=[2, 1], fresh=[False, True], **WEAK),
        Plan(tile=32, groups=4),
    ),
    "checkpoints": (with_checkpoints(False), ONE),
    "checkpoints in a line": (with_checkpoints(True), Plan(tile=32, groups=2)),
    "tokens one by one": (make_call([1, 1, 1], 2, 32, slots=[3, 0, 1], **FP32), ONE),
    "nobody": (make_call([5], 1, 32, slots=[0], **FP32), ONE),
    "no row": (make_call([], 1, 32, slots=[], width=4, **FP32), ONE),
}

patch_once()
found: dict[str, Any] = {}
for name, (call, plan) in CASES.items():
    before = {n: v.clone() for n, v in call.items() if isinstance(v, torch.Tensor)}
    results = kda_chunk(**call, plan=plan)
    kept = all(torch.equal(call[n].nan_to_num(7), v.nan_to_num(7)) for n, v in before.items())
    found[name] = errors(results, call) | {"inputs_kept": kept}
    if name in ("tokens one by one", "checkpoints"):
        own = call | {"state": call["state"].clone()}
        out = kda_chunk(**own, in_place=True, plan=plan)
        found[name]["in_place_same"] = torch.equal(out, results[0]) and torch.equal(
            own["state"].nan_to_num(7), results[1].nan_to_num(7)
        )


def far_pool(heads: int, strides: tuple[int, int]) -> bool:
    """A pool of more than 2^31 elements, of which only what is used has memory, against one that is small."""
    call = make_call([64, 1, 3], heads, 32, slots=[2, 3, 1], **FP32)
    near = call["state"][:5].clone()
    call["checkpoints"] = checkpoint_table([(0, 64, 4)], [2, 3, 1], [64, 1, 3])
    cells = 4 * strides[0] + (heads - 1) * strides[1] + 32 * 32
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # Linux: nothing is set aside for it
    room = torch.frombuffer(mmap.mmap(-1, 4 * cells, flags=private), dtype=torch.float32)
    far = room.as_strided(near.shape, (*strides, 32, 1)).copy_(near)
    results = [kda_chunk(**call | {"state": state}, in_place=True, plan=Plan(32, 2)) for state in (near, far)]
    return torch.equal(*results) and torch.equal(near.nan_to_num(7), far.nan_to_num(7))


found["far"] = {"slots": far_pool(1, ((1 << 30) + 64, 1024)), "heads": far_pool(3, (1024, (1 << 30) + 64))}

call = make_call([100], 1, 32, **FP32)
out, _ = kda_chunk(**call, plan=ONE)
prefixes = {}
for t in (20, 47, 64, 80):  # from t on other gates, and keys a thousand times as long
    f, k = call["f"].clone(), call["k"].clone()
    f[:, t:] = 3.0
    k[:, t:] *= 1000
    edited, _ = kda_chunk(**call | {"f": f, "k": k}, plan=ONE)
    prefixes[t] = torch.equal(edited[:, :t], out[:, :t]) and not torch.equal(edited[:, t:], out[:, t:])
found["prefixes"] = prefixes
sys.stdout.write(json.dumps(found) + "\n")
