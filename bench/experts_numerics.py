"""How near routed experts come to fp64: ours, vLLM's, and an expert-centric path whose activations go through MXFP8.

    python bench/experts_numerics.py --peers .peers        to bench/results/experts_numerics-<gpu>.json

For each shape, number of tokens, routing and seed: relative error and 1 - cosine against fp64 from the same stored
weights, with poisoned memory, and the largest difference from an fp32 result of the same weights, relative to the
largest magnitude in it. The MXFP8 path is computed in fp32 from the stored weights; its x and its intermediate are
rounded to E4M3 with a power of two for each 32 columns, and that is all that is rounded before the result.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import _harness as harness
import torch
import torch.nn.functional as F
from _experts_inputs import BF16, FEWEST, FP32, MODEL, SHAPES, Inputs, make_inputs, make_weights
from _experts_variants import Peers, chosen
from torch import Tensor


def through_mxfp8(x: Tensor) -> Tensor:
    """x [..., N] as E4M3 with a power of two for each 32 columns, and back, in fp32."""
    groups = x.float().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    scale = torch.exp2(torch.floor(torch.log2(largest)) - 8)
    return ((groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def computed(data: Inputs, i: int, dtype: torch.dtype, mxfp8: bool = False) -> Tensor:
    """The mixture in `dtype`, a route at a time."""
    through = through_mxfp8 if mxfp8 else (lambda x: x)
    out = torch.zeros_like(data.x[i], dtype=dtype)
    for token, row in enumerate(data.ids[i].tolist()):
        x = through(data.x[i, token]).to(dtype)
        for slot, expert in enumerate(row):
            w13, w2 = (w.to(dtype) for w in data.weights.exact(expert))
            gate, up = (w13 @ x).chunk(2)
            hidden = through(F.silu(gate) * up).to(dtype)
            out[token] += data.shares[i, token, slot].to(dtype) * (w2 @ hidden)
    return out


def figures(result: Tensor, exact: Tensor, single: Tensor) -> dict[str, float]:
    cosine = F.cosine_similarity(result.double().flatten(), exact.flatten(), dim=0)
    return {
        "error": harness.relative_error(result, exact),
        "one_minus_cosine": float(1 - cosine),
        "largest_difference": float((result.float() - single).abs().max() / single.abs().max()),
    }


def measure(data: Inputs, peers: Peers) -> dict[str, dict[str, float]]:
    """Of set 0, by variant."""
    exact, single = computed(data, 0, torch.float64), computed(data, 0, FP32)
    calls: dict[str, Any] = {
        "ours": lambda: chosen(data, FEWEST, 0),
        "ours, model's roundings": lambda: chosen(data, MODEL, 0),
        "activations through MXFP8": lambda: computed(data, 0, FP32, mxfp8=True).to(BF16),
    }
    if "vLLM" in peers.loaded and data.weights.s13 is None:
        run, weights = peers.loaded["vLLM"].fused_experts_impl, (data.weights.w13, data.weights.w2)
        calls["vLLM"] = lambda: run(data.x[0], *weights, data.shares[0], data.ids[0].int())
    found = {}
    for name, call in calls.items():
        call()
        harness.poison((exact.shape, BF16), ((exact.shape[0] * 64, 4096), FP32))
        found[name] = figures(call(), exact, single)
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--format", choices=("bf16", "mxfp4"), nargs="+", default=["bf16", "mxfp4"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument(
        "--routing", choices=("uniform", "skewed", "repeated"), nargs="+", default=["uniform", "skewed"]
    )
    parser.add_argument("--seeds", type=int, default=8)
    options = parser.parse_args()
    results: dict[str, Any] = {"origin": harness.origin(options.commit), "entries": []}
    print(json.dumps(results["origin"]))
    started = time.monotonic()
    peers = Peers(options.peers, "bf16")
    for shape, format in itertools.product(options.shape, options.format):
        torch.manual_seed(0)
        weights = make_weights(shape, format)
        for tokens, routing in itertools.product(options.tokens, options.routing):
            each = []
            for seed in range(options.seeds):
                torch.manual_seed(seed)
                each.append(measure(make_inputs(weights, shape, tokens, routing), peers))
            worst = {
                name: {figure: max(found[name][figure] for found in each) for figure in each[0][name]}
                for name in each[0]
            }
            entry = {"shape": shape, "format": format, "tokens": tokens, "routing": routing, "seeds": each}
            results["entries"].append({**entry, "worst": worst})
            ours = worst["ours"]
            ratios = ", ".join(
                f"{n} {worst[n]['error'] / ours['error']:.2f}x" for n in worst if not n.startswith("ours")
            )
            print(
                f"{shape} {format} {tokens:3d} {routing:8s} error {ours['error']:.2e}  1 - cosine "
                f"{ours['one_minus_cosine']:.1e}  largest {ours['largest_difference']:.5f}  further away: {ratios}",
                flush=True,
            )
            harness.write_results("experts_numerics", results, options.out)
    print(harness.write_results("experts_numerics", results, options.out), f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
