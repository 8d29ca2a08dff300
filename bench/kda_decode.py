"""One token of a KDA layer on a GPU: our kernels, flash-linear-attention's chain, the unfused reference.

    python bench/kda_decode.py --peers .peers        every number of heads and rows
    python bench/kda_decode.py --sweep               warps of the Triton kernel, layouts of the HIP one

Times are microseconds a call; "copy" is the fastest copy of as many bytes as the op reads and writes (states, lines of
the convolution, projections), of Triton's layouts and the driver's memcpy.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import _fla_kda as fla
import _harness as harness
import torch
from torch import Tensor

from k3rewrite.kernels.kda_decode import hip_kernel, launch
from k3rewrite.kernels.kda_decode.op import OP
from k3rewrite.kernels.kda_decode.op import kda_decode as reference

SIZE = 128
HEADS, ROWS = (12, 96), (1, 2, 4, 8, 16, 32, 64, 128)
MOST_SETS = 32
WARPS = (4, 8, 16)
LAYOUTS = [
    *(
        hip_kernel.Layout(split, waves, dependent=True, keys=keys, ahead=ahead)
        for split, waves, keys in [(1, 4, 16), (1, 8, 16), (2, 4, 16), (2, 8, 16), (4, 4, 16), (8, 4, 16)]
        for ahead in (False, True)
    ),
    *(
        hip_kernel.Layout(1, waves, dependent=True, keys=keys, bulk=True, once=once, ahead=ahead)
        for waves, keys in [(4, 16), (8, 16), (8, 8)]
        for once in (False, True)
        for ahead in (False, True)
    ),
]  # fmt: skip
Call = Callable[[int], Tensor]


def make_calls(heads: int, rows: int, sets: int) -> list[dict[str, Any]]:
    """Arguments of the op for each set: views of one projection, slots of one pool, each set its own."""
    width = heads * SIZE

    def normal(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device="cuda").to(of)

    shared = {
        "conv_weight": normal(3 * width, 4) * 0.5, "a_log": normal(heads) * 0.5, "dt_bias": normal(width),
        "norm_weight": normal(SIZE).abs() + 0.5, "conv_state": normal(sets * rows + 1, 3, 3 * width, of=torch.bfloat16),
        "state": normal(sets * rows + 1, heads, SIZE, SIZE) * 0.3, "null_slot": True, "columns": 3, "bound": -5.0,
        "q_scale": SIZE**-0.5, "l2_eps": 1e-6, "norm_eps": 1e-5, "activation": "sigmoid",
        "inner_dtype": torch.float32, "out_dtype": torch.bfloat16,
    }  # fmt: skip
    calls = []
    for i in range(sets):
        merged = normal(rows, 5 * width + heads + 12, of=torch.bfloat16)
        qkv, gate, f, b, _ = merged.split([3 * width, width, width, heads, 12], 1)
        slots = torch.randperm(rows, device="cuda") + 1 + i * rows
        calls.append(shared | {"qkv": qkv, "gate": gate.unflatten(1, (heads, SIZE)), "f": f, "b": b, "slots": slots})
    return calls


def ours(calls: list[dict[str, Any]], how: str, **options: Any) -> Call:
    run = hip_kernel.kda_decode if how == "hip" else launch.kda_decode

    def call(i: int) -> Tensor:
        result = run(**calls[i], in_place=True, **options)
        assert isinstance(result, Tensor)
        return result

    return call


def unfused(calls: list[dict[str, Any]]) -> Call:
    return lambda i: reference(**calls[i])[0]


def error_of(calls: list[dict[str, Any]], make: Callable[[list[dict[str, Any]]], Call]) -> dict[str, float]:
    """Of the output and the state after one step, against fp64. Runs on copies of the pools."""
    own = [calls[0] | {name: calls[0][name].clone() for name in ("conv_state", "state")}]
    wide = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in calls[0].items()}
    out, _, state = reference(**wide | {"inner_dtype": torch.float64, "out_dtype": torch.float64})
    harness.poison((calls[0]["gate"].shape, torch.bfloat16))
    result, slots = make(own)(0), calls[0]["slots"].long()
    found = {"error": harness.relative_error(result.view(out.shape), out)}
    if make is not unfused:
        found["state_error"] = harness.relative_error(own[0]["state"][slots], state[slots])
    for error in found.values():
        harness.demand(error)
    return found


def variants(peers: dict[str, Any], sweep: bool) -> Iterator[tuple[str, Callable[[list[dict[str, Any]]], Call]]]:
    if sweep:
        for warps in WARPS:
            yield f"Triton, {warps} warps", functools.partial(ours, how="triton", num_warps=warps)
        for layout in LAYOUTS:
            yield f"HIP source, {layout}", functools.partial(ours, how="hip", layout=layout)
        return
    yield "ours, Triton", functools.partial(ours, how="triton")
    yield "ours, HIP source", functools.partial(ours, how="hip")
    if peers:
        yield "FLA chain", functools.partial(fla.make_chain, peers)
    yield "unfused", unfused


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--heads", type=int, nargs="+", default=list(HEADS))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    options = parser.parse_args()
    torch.manual_seed(0)
    started = time.monotonic()
    results: dict[str, Any] = {"origin": harness.origin(options.commit), "entries": []}
    print(json.dumps(results["origin"]))
    peers: dict[str, Any] = {}
    if options.peers is not None:
        with harness.only_warning("flash-linear-attention"):
            peers = fla.load(options.peers)
    name = "kda_decode-sweep" if options.sweep else "kda_decode"
    for heads in options.heads:
        for rows in options.rows:
            l2 = harness.l2_bytes()
            sets = min(MOST_SETS, harness.sets_for(rows * heads * SIZE * SIZE * 8, True, l2))
            calls = make_calls(heads, rows, sets)
            size = OP.cost(**calls[0]).bytes
            copy_us, layout = harness.copy_ceiling(size, l2, 30)
            entry: dict[str, Any] = {"heads": heads, "rows": rows, "bytes": size, "copy_us": copy_us, "copy": layout,
                                     "sets": sets, "variants": {}}  # fmt: skip
            print(f"heads {heads}  rows {rows}: {size / 1e6:.2f} MB, copy {copy_us:.2f} us")
            for label, make in variants(peers, options.sweep):
                with harness.only_warning(label), torch.no_grad():
                    found = error_of(calls, make)
                    call = make(calls)
                    entry["variants"][label] = harness.timed(label, found, call, sets, copy_us, options.replays)
            results["entries"].append(entry)
            harness.write_results(name, results, options.out)
            del calls
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
