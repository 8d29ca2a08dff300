"""Routed experts at decode sizes on one GPU: ours against vLLM, Humming, Marlin, Inductor, grouped_mm and eager.

    python bench/experts.py --peers .peers                     all figures, to bench/results/experts-<gpu>.json
    python bench/experts.py --peers .peers --format mxfp4      the same for packed weights
    python bench/experts.py --sweep --shape k3-tp8             every layout, to choose the tables in schedule.py

What is timed, for everyone: x, ids and routing weights -> output, SiLU, everything captured; each graph runs the call
on 16 routings, so that weights are cold; bytes are those of the experts that the ids really name, each read once. The
ceiling is the fastest read of as many bytes in the same run. Outputs are compared with fp64 from the same weights.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from dataclasses import asdict
from typing import Any

import _harness as harness
import torch
from _experts_inputs import BF16, FP32, ROUTINGS, SHAPES, Inputs, Weights, make_inputs, make_weights
from _experts_sweep import candidates
from _experts_variants import OURS, Call, Peers, variants
from torch import Tensor

from k3rewrite.targets import load_target

TOKENS = (1, 2, 4, 8, 16, 32, 64)


def check(call: Call, reference: Tensor) -> dict[str, float]:
    call(0)  # compile
    harness.poison((reference.shape, BF16), ((reference.shape[0] * 64, 4096), FP32))
    result = call(0).double()
    cosine = torch.nn.functional.cosine_similarity(result.flatten(), reference.flatten(), dim=0)
    harness.demand(error := harness.relative_error(result, reference))
    return {
        "error": error,
        "one_minus_cosine": float(1 - cosine),
        "largest_difference": float((result - reference).abs().max()),
    }


def time_of(reference: Tensor, call: Call) -> float:
    """A quick figure, for tuning."""
    check(call, reference)
    return harness.graph_time([functools.partial(call, i) for i in range(ROUTINGS)], 60, 2, 0.05).median


def entry_for(data: Inputs, shape: str, routing: str) -> tuple[dict[str, Any], Tensor]:
    """What is known before anybody runs: bytes, floor, ceiling; and the exact result of set 0."""
    size = int(data.distinct() * data.weights.expert_bytes)
    read_us, read_layout = harness.read_ceiling(size, harness.l2_bytes(), 30)
    tokens = data.x.shape[1]
    print(f"{shape}, {tokens} tokens, {routing}: {size / 1e6:.0f} MB, read {read_us:.1f} us", flush=True)
    entry = {
        "shape": shape, "tokens": tokens, "routing": routing, "distinct": data.distinct(), "bytes": size,
        "floor_us": size / load_target("auto").memory_bandwidth * 1e6, "read_us": read_us, "read_layout": read_layout,
    }  # fmt: skip
    return entry, data.exact(0)


def measure(
    shape: str, weights: Weights, tokens: int, routing: str, peers: Peers, replays: int, tuned: bool, inductor: bool,
    only: list[str],
) -> dict[str, Any]:  # fmt: skip
    data = make_inputs(weights, shape, tokens, routing)
    entry, reference = entry_for(data, shape, routing)
    entry["variants"] = {}
    for name, make in variants(data, peers, functools.partial(time_of, reference), tuned, inductor):
        if only and not any(name.startswith(each) for each in only):
            continue
        with harness.only_warning(name):
            call = make()
            found: dict[str, Any] = dict(check(call, reference))
            timing = harness.graph_time([functools.partial(call, i) for i in range(ROUTINGS)], replays)
            of_read = entry["read_us"] / timing.median
            found |= {"us": asdict(timing), "of_read": of_read, "TB_s": entry["bytes"] / timing.median / 1e6}
            if name.startswith("ours"):
                found["kernels"] = harness.kernel_names(functools.partial(call, 0))
                assert found["kernels"] and set(found["kernels"]) <= set(OURS), f"{name} ran {found['kernels']}"
            entry["variants"][name] = found
            print(
                f"    {name:24s} {timing.median:9.2f} us  {of_read * 100:5.1f} % of read  error {found['error']:.2e}  "
                f"1 - cosine {found['one_minus_cosine']:.1e}",
                flush=True,
            )
    return entry


def sweep(shape: str, weights: Weights, tokens: int, replays: int) -> list[dict[str, Any]]:
    """Every layout at uniform routing, fastest first."""
    data = make_inputs(weights, shape, tokens, "uniform")
    entry, reference = entry_for(data, shape, "uniform")
    found: list[dict[str, Any]] = []
    for name, call in candidates(data):
        with harness.only_warning(name):
            checked = check(call, reference)
            timing = harness.graph_time([functools.partial(call, i) for i in range(ROUTINGS)], replays, 2, 0.05)
            found.append({**entry, "us": timing.median, **checked, "layout": name})
    found.sort(key=lambda item: item["us"])
    for item in found[:8]:
        print(f"    {item['us']:9.2f} us  {entry['read_us'] / item['us'] * 100:5.1f} % of read  {item['layout']}")
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--format", choices=("bf16", "mxfp4"), default="bf16")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--routing", choices=("uniform", "skewed", "repeated"), nargs="+", default=["uniform"])
    parser.add_argument("--tuned", type=int, nargs="+", default=list(TOKENS), help="tokens for which peers are tuned")
    parser.add_argument("--inductor", type=int, nargs="+", default=[1, 8, 32], help="tokens for which Inductor runs")
    parser.add_argument("--only", nargs="+", default=[], help="variants whose names begin so")
    options = parser.parse_args()
    torch.manual_seed(0)
    started = time.monotonic()
    results: dict[str, Any] = {"origin": harness.origin(options.commit), "format": options.format}
    print(json.dumps(results["origin"]))
    kind = "sweep" if options.sweep else "entries"
    name = "-".join(["experts", *(["mxfp4"] if options.format == "mxfp4" else []), *(["sweep"] * options.sweep)])
    results[kind] = []
    peers = Peers(options.peers, options.format) if not options.sweep else None
    for shape in options.shape:
        weights = make_weights(shape, options.format)
        if peers is not None:
            peers.prepare(weights)
        for tokens, routing in itertools.product(options.tokens, options.routing):
            if peers is None:
                results[kind] += sweep(shape, weights, tokens, options.replays)
            else:
                late = time.monotonic() - started > options.seconds
                tuned, inductor = tokens in options.tuned and not late, tokens in options.inductor and not late
                results[kind].append(
                    measure(shape, weights, tokens, routing, peers, options.replays, tuned, inductor, options.only)
                )
            harness.write_results(name, results, options.out)
        del weights
        torch.cuda.empty_cache()
    print(harness.write_results(name, results, options.out), f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
