"""Calls of k3::kda_chunk: ragged rows, null rows and unused tokens that hold NaN, and what they must give in fp64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.kda_chunk.op import kda_chunk
from k3rewrite.kernels.kda_step.op import kda_step
from k3rewrite.kernels.l2_norm.op import l2_norm

BY_TOKEN = ("q", "k", "v", "f", "b")


def make_call(
    lengths: list[int], heads: int, size: int, *, values: int = 0, slots: list[int] | None = None,
    fresh: list[bool] | None = None, packed: bool = False, width: int = 0, null_slot: bool = True, raw: bool = True,
    normed: bool = False, dtype: torch.dtype = torch.bfloat16, out_dtype: torch.dtype = torch.bfloat16,
    bias: float | None = None, seed: int = 0, device: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """`width`: tokens of a line, with those of nobody; `bias`: of all decays; `fresh` rows have NaN in their slot."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(of).to(device)

    rows, values = len(lengths), values or size
    shape = (1, max(width, sum(lengths))) if packed else (rows, max(width, max(lengths, default=0)))
    qkv = normal(*shape, heads * (2 * size + values), of=dtype)
    q, k, v = qkv.split([heads * size, heads * size, heads * values], 2)
    f, b = normal(*shape, heads, size, of=dtype), normal(*shape, heads + 4, of=dtype)[..., :heads]
    call: dict[str, Any] = {
        "q": q.unflatten(2, (heads, size)), "k": k.unflatten(2, (heads, size)), "v": v.unflatten(2, (heads, values)),
        "f": f, "b": b, "a_log": normal(heads) * 0.5, "dt_bias": normal(heads * size),
        "state": normal(max(slots or [rows]) + 3, heads, values, size) * 0.3, "slots": None, "fresh": None,
        "lengths": None, "offsets": None, "checkpoints": None, "null_slot": null_slot, "bound": -5.0,
        "q_scale": size**-0.5, "l2_eps": 1e-6, "out_dtype": out_dtype,
    }  # fmt: skip
    if bias is not None:
        call["dt_bias"] = torch.full_like(call["dt_bias"], bias)
    if normed:
        call |= {name: l2_norm(call[name], 1e-6, True, torch.float32, dtype) for name in ("q", "k")} | {"l2_eps": None}
    if not raw:
        call |= {"f": (-5 * torch.sigmoid(f.float())).to(dtype), "b": torch.sigmoid(b.float()).to(dtype)}
        call |= {"a_log": None, "dt_bias": None}
    ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    if packed:
        call["offsets"] = ends.to(torch.int32).to(device)
        dead = torch.arange(shape[1]) >= int(ends[-1])
    else:
        call["lengths"] = torch.tensor(lengths, dtype=torch.int64, device=device)
        dead = torch.arange(shape[1]) >= torch.tensor(lengths, dtype=torch.int64).unsqueeze(1)
    if slots is not None:
        call["slots"] = torch.tensor(slots, dtype=torch.int64, device=device)
        if null_slot:
            call["state"][0] = math.nan
            null = torch.tensor(slots) <= 0
            if packed:
                dead[: int(ends[-1])] |= null.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
            else:
                dead = dead | null.unsqueeze(1)
    else:
        call["state"] = call["state"][:rows].clone()
    if fresh is not None:
        call["fresh"] = torch.tensor(fresh, device=device)
        for row, new in enumerate(fresh):
            if new:
                call["state"][row if slots is None else slots[row]] = math.nan
    dead = dead.view(shape).to(device)
    for name in BY_TOKEN:  # what nobody has goes nowhere
        call[name][dead] = math.nan
    return call


def near_parallel(call: dict[str, Any], noise: float = 0.02, seed: int = 1) -> dict[str, Any]:
    """All keys of a head are one direction and a little noise; beta is 0.95."""
    generator = torch.Generator().manual_seed(seed)
    k = call["k"]
    way = torch.randn(*k.shape[2:], generator=generator).to(k.device)
    k = (way + noise * torch.randn(k.shape, generator=generator).to(k.device) * way.norm() / k.shape[-1] ** 0.5).to(k)
    return call | {"k": k, "b": torch.full_like(call["b"], math.log(0.95 / 0.05))}


def exact(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Computed in fp64 from the same values."""
    wide = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in call.items()}
    return kda_chunk(**wide | {"out_dtype": torch.float64})


def token_by_token(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """In fp64, each row of a padded batch by itself through k3::kda_step."""
    state = call["state"].double()
    out = torch.zeros(call["v"].shape, dtype=torch.float64)
    rows = range(len(call["q"]))
    for row in rows:
        slot = row if call["slots"] is None else int(call["slots"][row])
        length = call["q"].shape[1] if call["lengths"] is None else int(call["lengths"][row])
        if not length or (slot <= 0 and call["null_slot"] and call["slots"] is not None):
            continue
        own = state[slot : slot + 1].clone()
        if call["fresh"] is not None and call["fresh"][row]:
            own.zero_()
        for t in range(length):
            q, k, v, f, b = (call[name][row, t].double().unsqueeze(0) for name in BY_TOKEN)
            if call["l2_eps"] is not None:
                q, k = (l2_norm(x, call["l2_eps"], True, torch.float64, torch.float64) for x in (q, k))
            if call["a_log"] is not None:
                rate = call["a_log"].double().exp().unsqueeze(1)
                f = torch.sigmoid(rate * (f + call["dt_bias"].double().view(f.shape[1:]))) * call["bound"]
                b = torch.sigmoid(b)
            o, own = kda_step(q * call["q_scale"], k, v, f, b, own, None, False, True)
            out[row, t] = o[0]
        state[slot] = own[0]
    return out, state


def used_slots(call: dict[str, Any]) -> list[int]:
    """Slots that a call writes."""
    offsets = call["offsets"]
    lengths = (offsets[1:] - offsets[:-1] if offsets is not None else call["lengths"]).tolist()
    slots = list(range(len(lengths))) if call["slots"] is None else call["slots"].tolist()
    used = [s for s, n in zip(slots, lengths, strict=True) if n and (s > 0 or not call["null_slot"] or slots is None)]
    if call["slots"] is None:
        used = [s for s, n in zip(slots, lengths, strict=True) if n]
    if call["checkpoints"] is not None:
        for row, table in enumerate(call["checkpoints"].tolist()):
            used += [s for j, s in enumerate(table) if s > 0 and 64 * (j + 1) <= lengths[row] and slots[row] in used]
    return sorted(set(used))


def errors(results: tuple[Tensor, Tensor], call: dict[str, Any]) -> dict[str, float]:
    """Relative error (root mean square) of output and states; outputs of nobody that are not zero; cells that changed
    in slots that are nobody's."""
    out, state = (x.double().cpu() for x in results)
    expected, states = (x.cpu() for x in exact(call))
    used = torch.tensor(used_slots(call), dtype=torch.int64)
    others = torch.ones(len(state), dtype=torch.bool).index_fill(0, used, False)
    same = torch.isclose(state[others], call["state"][others].double().cpu(), 0, 0, equal_nan=True)
    return {
        "out": relative(out, expected),
        "state": relative(state[used], states[used]),
        "worst": float((out - expected).abs().max()) if out.numel() else 0.0,
        "dead": float(out[expected == 0].ne(0).sum()),
        "untouched": float((~same).sum()),
    }


def relative(result: Tensor, expected: Tensor) -> float:
    if not expected.numel() or not expected.any():
        return float(result.abs().sum())
    return float((result - expected).square().mean().sqrt() / expected.square().mean().sqrt())
