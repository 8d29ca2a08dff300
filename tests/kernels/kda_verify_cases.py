"""Calls of k3::kda_verify: views of one projection, tables of distinct slots, null rows that hold NaN."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.kda_verify.op import kda_verify

POOLS = ("conv_state", "state")


def make_call(
    accepted: list[int], tokens: int, heads: int, size: int, *, null: tuple[int, ...] = (), holes: bool = False,
    lengths: list[int] | None = None, null_slot: bool = True, spare: int = 1, by_tap: bool = True,
    inner: torch.dtype = torch.float32, dtype: torch.dtype = torch.bfloat16, ids: torch.dtype = torch.int64,
    activation: str = "sigmoid", seed: int = 0, device: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """`null`: rows of nobody; `holes`: one token's slot, and one start, that are null in a row of somebody."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(of).to(device)

    rows, width, lowest = len(accepted), heads * size, int(null_slot)
    merged = normal(rows * tokens, 5 * width + heads + 12, of=dtype)  # q | k | v | gate | f | b | padding
    parts = [part.unflatten(0, (rows, tokens)) for part in merged.split([3 * width, width, width, heads, 12], 1)]
    slots = lowest + torch.randperm(rows * tokens + 2, generator=generator)[: rows * tokens].view(rows, tokens)
    offset = torch.tensor(accepted, dtype=torch.int64).view(rows, 1) - 1
    start = slots.gather(1, offset).squeeze(1)
    history = offset + torch.arange(3)
    if holes:
        slots[0, -1], start[-1] = 0, 0
    for row in null:
        slots[row], start[row], history[row] = -row, 0, 77
        merged[row * tokens : (row + 1) * tokens] = math.nan
    pool = rows * tokens + 2 + lowest
    call: dict[str, Any] = {
        "qkv": parts[0], "f": parts[2], "b": parts[3], "gate": parts[1].unflatten(2, (heads, size)),
        "conv_weight": normal(3 * width, 4) * 0.5, "a_log": normal(heads) * 0.5, "dt_bias": normal(width),
        "norm_weight": normal(size), "conv_state": normal(pool, 2 + tokens + spare, 3 * width, of=dtype),
        "state": normal(pool, heads, size, size) * 0.3, "start": start.to(ids).to(device),
        "table": slots.to(ids).to(device), "history": history.to(ids).to(device), "lengths": None,
        "null_slot": null_slot, "bound": -5.0, "q_scale": size**-0.5, "l2_eps": 1e-6, "norm_eps": 1e-5,
        "activation": activation, "inner_dtype": inner, "out_dtype": dtype,
    }  # fmt: skip
    if by_tap:  # as the pass lays the taps out
        call["conv_weight"] = call["conv_weight"].t().contiguous().t()
    if lengths is not None:
        call["lengths"] = torch.tensor(lengths, dtype=ids, device=device)
        for row, length in enumerate(lengths):  # what is past the end goes nowhere
            merged[row * tokens + length : (row + 1) * tokens] = math.nan
            call["table"][row, max(1, length) :] = 10**6
    if null_slot:
        call["conv_state"][0], call["state"][0] = math.nan, math.nan
    return call


def in_one_buffer(call: dict[str, Any]) -> dict[str, Tensor]:
    """Lines and states as views of one buffer: of each slot its line, then its state."""
    pools = [call[name] for name in POOLS]
    sizes = [pool[0].numel() * pool.element_size() for pool in pools]
    raw = torch.zeros(len(pools[1]) * sum(sizes), dtype=torch.uint8, device=pools[0].device)
    views, begin = {}, 0
    for name, pool, size in zip(POOLS, pools, sizes, strict=True):
        item = pool.element_size()
        strides = (sum(sizes) // item, *pool.contiguous().stride()[1:])
        views[name] = raw.view(pool.dtype).as_strided(pool.shape, strides, begin // item).copy_(pool)
        begin += size
    return views


def plainly(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """In fp64, row by row and token by token, written again from the equations: (y, line, state)."""
    c = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in call.items()}
    conv, state = c["conv_state"].clone(), c["state"].clone()
    heads, size = state.shape[1], state.shape[3]
    y = torch.zeros(*c["table"].shape, heads, size, dtype=torch.float64, device=state.device)
    for row, slots in enumerate(c["table"].tolist()):
        length = len(slots) if c["lengths"] is None else int(c["lengths"][row])
        if (c["null_slot"] and slots[0] <= 0) or length == 0:
            continue
        window = torch.cat([conv[slots[0], c["history"][row]], c["qkv"][row, :length]])
        conv[slots[0], : 2 + length] = window[1:]
        begin = int(c["start"][row])
        S = torch.zeros_like(state[0]) if c["null_slot"] and begin <= 0 else state[begin].clone()
        for i in range(length):
            x = torch.nn.functional.silu((window[i : i + 4] * c["conv_weight"].T).sum(0))
            q, k, v = x.view(3, heads, size)
            q, k = (p / (p.square().sum(1, keepdim=True) + c["l2_eps"]).sqrt() for p in (q, k))
            f = (c["f"][row, i] + c["dt_bias"]).view(heads, size)
            S = S * torch.exp(c["bound"] * torch.sigmoid(c["a_log"].exp()[:, None] * f))[:, None, :]
            u = torch.sigmoid(c["b"][row, i])[:, None] * (v - torch.einsum("hvk,hk->hv", S, k))
            S = S + torch.einsum("hv,hk->hvk", u, k)
            o = torch.einsum("hvk,hk->hv", S, q * c["q_scale"])
            o = o / (o.square().mean(1, keepdim=True) + c["norm_eps"]).sqrt() * c["norm_weight"]
            z = c["gate"][row, i]
            y[row, i] = o * (torch.nn.functional.silu(z) if c["activation"] == "silu" else torch.sigmoid(z))
            if not c["null_slot"] or slots[i] > 0:
                state[slots[i]] = S
    return y, conv, state


def through_op(call: dict[str, Any]) -> tuple[Tensor, ...]:
    """The op's own meaning in fp64, without a rounding on the way."""
    wide = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in call.items()}
    return kda_verify(**wide | {"inner_dtype": torch.float64, "out_dtype": torch.float64})


def errors(results: tuple[Tensor, ...], call: dict[str, Any]) -> dict[str, float]:
    """Against `plainly`. Relative error (root mean square) of outputs and of states that were stored; `null`: outputs
    that should be zero; `line`: 0 if all lines are copies in the right places; `untouched`: cells of other slots that
    have changed."""
    y, conv, state = plainly(call)
    before = call["state"].double()
    stored = ~torch.isclose(state, before, 0, 0, equal_nan=True).flatten(1).all(1)
    silent = (y == 0).all(-1)
    kept = (results[2][~stored].double(), before[~stored])
    return {
        "out": _relative(results[0][~silent], y[~silent]),
        "state": _relative(results[2][stored], state[stored]),
        "null": float(results[0][silent].ne(0).sum()),
        "line": float(not torch.allclose(results[1].double(), conv, 0, 0, equal_nan=True)),
        "untouched": float((~torch.isclose(*kept, 0, 0, equal_nan=True)).sum()),
    }


def _relative(result: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    return float((result.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def waits_before_it_loads(assembly: str) -> bool:
    """True of PTX in which nothing is loaded, and no later kernel let in, before the kernel before has ended. Looks at
    slots (`ld.relaxed`), and what is brought into the L2, may come earlier: they decide no number."""
    places = [assembly.find(text) for text in ("griddepcontrol.wait", "griddepcontrol.launch_dependents", "ld.global")]
    return -1 not in places and places[0] == min(places)
