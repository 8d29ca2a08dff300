"""Calls of k3::kda_decode: row-strided views of one projection, pools with free slots, null rows that hold NaN."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.kda_decode.op import kda_decode

POOLS = ("conv_state", "state")


def make_call(
    slots: list[int] | None, heads: int, size: int, *, rows: int = 0, spare: int = 0, null_slot: bool = True,
    inner: torch.dtype = torch.float32, dtype: torch.dtype = torch.bfloat16, ids: torch.dtype = torch.int64,
    activation: str = "sigmoid", bound: float | None = -5.0, per_head: bool = False, foreign: bool = False,
    strided: bool = False, seed: int = 0, device: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """`foreign`: weights in `dtype`, states of keys by values and lines of channels by columns, as transformers has.
    `strided`: pools are every second part of larger ones."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(of).to(device)

    rows = len(slots) if slots is not None else rows
    width, pool = heads * size, (max(slots, default=0) + 3 if slots is not None else rows)
    merged = normal(rows, 5 * width + heads + 12, of=dtype)  # q | k | v | gate | f | b | padding
    parts = merged.split([3 * width, width, width, heads, 12], 1)
    decays = heads if per_head else width
    call: dict[str, Any] = {
        "qkv": parts[0], "f": parts[2][:, :decays], "b": parts[3], "gate": parts[1].unflatten(1, (heads, size)),
        "conv_weight": normal(3 * width, 4) * 0.5, "a_log": normal(heads) * 0.5,
        "dt_bias": normal(decays) * (4 if bound is None else 1),
        "norm_weight": normal(size), "conv_state": normal(pool, 3 + spare, 3 * width, of=dtype),
        "state": normal(pool, heads, size, size) * 0.3, "slots": None, "null_slot": null_slot, "columns": 3,
        "bound": bound, "q_scale": size**-0.5, "l2_eps": 1e-6, "norm_eps": 1e-5, "activation": activation,
        "inner_dtype": inner, "out_dtype": dtype,
    }  # fmt: skip
    if foreign:
        call |= {name: call[name].to(dtype) for name in ("conv_weight", "a_log", "dt_bias", "norm_weight")}
        call |= {name: call[name].mT.contiguous().mT for name in POOLS}
    if strided:
        call |= {name: torch.stack([call[name], call[name]], 1)[:, 0] for name in POOLS}
    if slots is not None:
        call["slots"] = torch.tensor(slots, dtype=ids, device=device)
        if null_slot:  # what a null row and slot 0 hold goes nowhere
            merged[call["slots"] <= 0] = math.nan
            call["conv_state"][0], call["state"][0] = math.nan, math.nan
    return call


def exact(call: dict[str, Any]) -> tuple[Tensor, ...]:
    """Computed in fp64 from the same values, without a rounding on the way."""
    wide = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in call.items()}
    return kda_decode(**wide | {"inner_dtype": torch.float64, "out_dtype": torch.float64})


def errors(results: tuple[Tensor, ...], call: dict[str, Any]) -> dict[str, float]:
    """Relative error (root mean square) of the output and the new state; 0 or 1 for the lines, which are copies; how
    many cells of slots that no row has, and of slot 0, have changed."""
    expected = exact(call)
    live = call["slots"] > 0 if call["null_slot"] and call["slots"] is not None else torch.ones(len(results[0])) > 0
    used = call["slots"][live].long() if call["slots"] is not None else torch.arange(len(results[0]))
    unused = torch.ones(len(call["state"]), dtype=torch.bool)
    unused[used.cpu()] = False
    untouched = [(results[1 + i][unused].cpu(), call[name][unused].cpu()) for i, name in enumerate(POOLS)]
    return {
        "out": _relative(results[0][live], expected[0][live]),
        "state": _relative(results[2][used], expected[2][used]),
        "null": float(results[0][~live].ne(0).sum()),
        "line": float(not torch.equal(results[1][used].double(), expected[1][used])),
        "untouched": float(sum(int((~torch.isclose(a, b, 0, 0, equal_nan=True)).sum()) for a, b in untouched)),
    }


def _relative(result: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    return float((result.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())
