"""A verify window of a KDA layer on a GPU: our tiles, flash-linear-attention's speculative path, wide tiles.

    python bench/kda_verify.py --peers .peers        sequences and windows, the tile of the target's rule
    python bench/kda_verify.py --sweep               every tile, to tune that rule

Times are microseconds a call. "recurrence" is one launch, from what the projections give (for flash-linear-attention:
from what a convolution has given, contiguous, which is made beforehand) to what the recurrence reads out; "window" is
all of the op, with the output norm and the line that moves on. "copy" is the fastest copy of as many bytes as the op
reads and writes, of Triton's layouts and the driver's memcpy; "floor" that of a few bytes.
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

from k3rewrite.kernels.conv_verify.op import conv_verify
from k3rewrite.kernels.devices import device_facts
from k3rewrite.kernels.kda_verify import hip_kernel, launch
from k3rewrite.kernels.kda_verify.op import OP
from k3rewrite.kernels.kda_verify.op import kda_verify as reference
from k3rewrite.kernels.kda_verify.tiles import PUBLISHED, Tile, tile_for
from k3rewrite.kernels.kda_window.op import kda_window
from k3rewrite.kernels.l2_norm.op import l2_norm

SIZE, FLOOR_BYTES = 128, 64 * 1024
SEQUENCES, WINDOWS = (1, 2, 4, 8, 16, 32), (4, 2, 8)
MOST_SETS = 32
TILES = (
    Tile(4, 1, 8), Tile(4, 1), Tile(8, 1, 8), Tile(8, 1), Tile(8, 2, 8), Tile(8, 2), Tile(16, 2), Tile(16, 4, 8),
    Tile(16, 4), Tile(32, 4, 8), Tile(32, 4), Tile(32, 8),
)  # fmt: skip
LAYOUTS = [
    hip_kernel.Layout(split, waves, dependent=True, ahead=ahead)
    for split, waves in [(8, 4), (4, 4), (4, 8), (2, 8), (2, 16), (1, 8), (1, 16)]
    for ahead in (False, True)
]
Calls = list[dict[str, Any]]
Call = Callable[[int], Tensor]
Make = Callable[[Calls], Call]


def make_calls(heads: int, sequences: int, tokens: int, sets: int) -> Calls:
    """Arguments of the op for each set: views of one projection, tables of slots of one pool, each set its own."""
    width, rows = heads * SIZE, sequences * tokens

    def normal(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device="cuda").to(of)

    shared = {
        "conv_weight": normal(3 * width, 4) * 0.5, "a_log": normal(heads) * 0.5, "dt_bias": normal(width),
        "norm_weight": normal(SIZE).abs() + 0.5,
        "conv_state": normal(sets * rows + 1, 2 + tokens, 3 * width, of=torch.bfloat16),
        "state": normal(sets * rows + 1, heads, SIZE, SIZE) * 0.3, "lengths": None, "null_slot": True, "bound": -5.0,
        "q_scale": SIZE**-0.5, "l2_eps": 1e-6, "norm_eps": 1e-5, "activation": "sigmoid",
        "inner_dtype": torch.float32, "out_dtype": torch.bfloat16,
    }  # fmt: skip
    calls = []
    for i in range(sets):
        merged = normal(rows, 5 * width + heads + 12, of=torch.bfloat16).unflatten(0, (sequences, tokens))
        qkv, gate, f, b, _ = merged.split([3 * width, width, width, heads, 12], 2)
        table = (torch.randperm(rows, device="cuda") + 1 + i * rows).view(sequences, tokens)
        offset = torch.randint(0, tokens, (sequences, 1), device="cuda")
        calls.append(
            shared
            | {"qkv": qkv, "gate": gate.unflatten(2, (heads, SIZE)), "f": f, "b": b, "table": table}
            | {"start": table.gather(1, offset).squeeze(1), "history": offset + torch.arange(3, device="cuda")}
        )
    return calls


def whole(calls: Calls, tile: Tile | None = None) -> Call:
    def call(i: int) -> Tensor:
        result = launch.kda_verify(**calls[i], in_place=True, tile=tile)
        assert isinstance(result, Tensor)
        return result

    return call


def whole_by_hip(calls: Calls, layout: hip_kernel.Layout | None = None) -> Call:
    def call(i: int) -> Tensor:
        result = hip_kernel.kda_verify(**calls[i], in_place=True, layout=layout)
        assert isinstance(result, Tensor)
        return result

    return call


def recurrence(calls: Calls, tile: Tile | None = None) -> Call:
    read = torch.empty(calls[0]["gate"].shape, device="cuda")
    arch, compute_units = device_facts(read.device)
    head_sequences = read.shape[0] * read.shape[2]
    chosen = tile or tile_for(head_sequences, SIZE, arch, compute_units, 64 if torch.version.hip else 32)

    def call(i: int) -> Tensor:
        launch.recur(calls[i], read, chosen)
        return read

    return call


def fla_recurrence(peers: dict[str, Any], calls: Calls) -> Call:
    """Its inputs are contiguous, since its kernel takes them for that, and made beforehand."""
    given = []
    for call in calls:
        accepted = call["history"][:, 0].int() + 1
        q, k, v = (part.contiguous() for part in convolved(call, torch.bfloat16))
        f, b = call["f"].unflatten(2, (-1, SIZE)).contiguous(), call["b"].contiguous()
        given.append((q, k, v, f, b, call["a_log"], call["dt_bias"], call["state"], call["table"].int(), accepted))
    out = torch.empty_like(given[0][2])

    def step(i: int) -> Tensor:
        q, k, v, f, b, a_log, dt_bias, state, table, accepted = given[i]
        result: Tensor = peers["step"](
            q, k, v, f, b, a_log, dt_bias, state, inplace_final_state=True, state_v_first=True,
            ssm_state_indices=table, num_accepted_tokens=accepted, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=calls[i]["bound"], out=out,
        )[0]  # fmt: skip
        return result

    return step


def fla_with_norm(peers: dict[str, Any], calls: Calls) -> Call:
    step, first = fla_recurrence(peers, calls), calls[0]
    norm = peers["norm"](SIZE, eps=first["norm_eps"], activation="sigmoid", device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.copy_(first["norm_weight"])
    gates = [call["gate"].contiguous() for call in calls]
    return lambda i: norm(step(i), gates[i])


def convolved(call: dict[str, Any], inner: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v of a window behind its convolution, computed in fp64 and rounded to `inner`."""
    wide, heads = torch.float64, call["state"].shape[1]
    y, _ = conv_verify(
        call["qkv"].to(wide), call["conv_weight"].to(wide), call["conv_state"].to(wide), call["table"][:, 0],
        call["history"], None, True, True, wide, wide, inner,
    )  # fmt: skip
    parts: tuple[Tensor, ...] = y.unflatten(2, (3, heads, SIZE)).unbind(2)
    return parts


def exact(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """(what the recurrence reads, the op's output, the new states of the table), in fp64."""
    pool = torch.cat([torch.zeros_like(call["state"][:1]), call["state"][call["table"].flatten()]]).double()
    lines = torch.cat([torch.zeros_like(call["conv_state"][:1]), call["conv_state"][call["table"].flatten()]])
    table = torch.arange(1, len(pool), device="cuda").view(call["table"].shape)
    start = table.gather(1, call["history"][:, :1]).squeeze(1)
    wide = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in call.items()}
    wide |= {"state": pool, "conv_state": lines.double(), "table": table, "start": start}
    q, k, v = convolved(wide, torch.float64)
    decay = (wide["f"] + wide["dt_bias"]).unflatten(2, (-1, SIZE))
    g = torch.sigmoid(wide["a_log"].exp().unsqueeze(1) * decay) * call["bound"]
    double = torch.float64
    unit_q, unit_k = (l2_norm(x, call["l2_eps"], True, double, double) for x in (q, k))
    read, _ = kda_window(unit_q * call["q_scale"], unit_k, v, g, wide["b"].sigmoid(), pool, start, table, None, True)
    out, _, state = reference(**wide | {"inner_dtype": double, "out_dtype": double})
    return read, out, state[table]


def error_of(calls: Calls, make: Make, normed: bool) -> dict[str, float]:
    """Of the output and the states after one window, against fp64. Runs on copies of the pools."""
    own = [calls[0] | {name: calls[0][name].clone() for name in ("conv_state", "state")}]
    read, out, state = exact(calls[0])
    harness.poison((calls[0]["gate"].shape, torch.bfloat16), (calls[0]["gate"].shape, torch.float32))
    result = make(own)(0)
    found = {"error": harness.relative_error(result.view(out.shape), out if normed else read)}
    found["state_error"] = harness.relative_error(own[0]["state"][calls[0]["table"]], state)
    for error in found.values():
        harness.demand(error)
    return found


def variants(peers: dict[str, Any], sweep: bool) -> Iterator[tuple[str, bool, Make]]:
    """(what it is, whether the norm is in it, how it is made)."""
    if sweep:
        for tile in TILES:
            yield f"recurrence, {tile}", False, functools.partial(recurrence, tile=tile)
        for layout in LAYOUTS:
            yield f"window, {layout}", True, functools.partial(whole_by_hip, layout=layout)
        return
    yield "ours: recurrence", False, recurrence
    if peers:
        yield "FLA: recurrence", False, functools.partial(fla_recurrence, peers)
    yield "ours, wide tiles: recurrence", False, functools.partial(recurrence, tile=PUBLISHED.wide)
    yield "ours: window", True, whole
    yield "ours, HIP source: window", True, whole_by_hip
    if peers:
        yield "FLA: recurrence, norm", True, functools.partial(fla_with_norm, peers)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--sequences", type=int, nargs="+", default=list(SEQUENCES))
    parser.add_argument("--windows", type=int, nargs="+", default=list(WINDOWS))
    options = parser.parse_args()
    torch.manual_seed(0)
    started, l2 = time.monotonic(), harness.l2_bytes()
    results: dict[str, Any] = {"origin": harness.origin(options.commit), "entries": []}
    results["floor_us"], _ = harness.copy_ceiling(FLOOR_BYTES, l2, 30)
    print(json.dumps(results["origin"]), f"floor {results['floor_us']:.2f} us")
    peers: dict[str, Any] = {}
    if options.peers is not None:
        with harness.only_warning("flash-linear-attention"):
            peers = fla.load(options.peers)
    name = "kda_verify-sweep" if options.sweep else "kda_verify"
    for tokens in options.windows:
        for sequences in options.sequences:
            if time.monotonic() - started > options.seconds:
                print(f"{tokens} tokens of {sequences} sequences: left out, the time is up")
                continue
            states = sequences * options.heads * SIZE * SIZE * 4 * (tokens + 1)
            sets = min(MOST_SETS, harness.sets_for(states, True, l2))
            calls = make_calls(options.heads, sequences, tokens, sets)
            size = OP.cost(**calls[0]).bytes
            copy_us, layout = harness.copy_ceiling(size, l2, 30)
            entry: dict[str, Any] = {
                "heads": options.heads, "sequences": sequences, "tokens": tokens, "bytes": size, "copy_us": copy_us,
                "copy": layout, "sets": sets, "variants": {},
            }  # fmt: skip
            print(f"{tokens} tokens of {sequences} sequences: {size / 1e6:.2f} MB, copy {copy_us:.2f} us")
            for label, normed, make in variants(peers, options.sweep):
                with harness.only_warning(label), torch.no_grad():
                    found = error_of(calls, make, normed)
                    call = make(calls)
                    entry["variants"][label] = harness.timed(label, found, call, sets, copy_us, options.replays)
            results["entries"].append(entry)
            harness.write_results(name, results, options.out)
            del calls
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
