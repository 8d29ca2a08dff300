"""Routed experts at decode sizes on one GPU: ours against vLLM, Inductor, torch's grouped product and eager.

    python bench/experts.py --peers .peers             all figures, to bench/results/experts-<gpu>.json
    python bench/experts.py --sweep --shape k3-tp8     every layout, to choose the tables in schedule.py

What is timed, for everyone: x, ids and routing weights -> output, bf16, SiLU, everything captured; each graph runs the
call on 16 routings, so that weights are cold; bytes are those of the experts that the ids really name, each read once.
The ceiling is the fastest read of as many bytes in the same run. Outputs are compared with fp64 from the same weights.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import _harness as harness
import _vllm_moe as vllm
import torch
import torch.nn.functional as F
from torch import Tensor

from k3rewrite.kernels.experts import hip_kernel, launch
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.kernels.experts.schedule import Schedule, Tiles
from k3rewrite.targets import load_target

SHAPES = {"qwen3-30b": (128, 8, 2048, 768), "k3-tp8": (896, 16, 3584, 384)}
"""experts, experts a token, width of x and of the result, width of an expert"""
TOKENS = (1, 2, 4, 8, 16, 32, 64)
ROUTINGS = 16
FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = ("product_dtype", "compute_dtype", "hidden_dtype", "route_dtype", "combine_dtype", "out_dtype")
FEWEST = dict(zip(DTYPES, (FP32, FP32, BF16, FP32, FP32, BF16), strict=True))
MODEL = dict(zip(DTYPES, (BF16, BF16, BF16, BF16, FP32, BF16), strict=True))

Call = Callable[[int], Tensor]
"""runs on routing i"""


@dataclass
class Inputs:
    """Stacked weights, and `ROUTINGS` sets of x, ids and routing weights."""

    w13: Tensor
    w2: Tensor
    x: Tensor
    ids: Tensor
    weights: Tensor

    @property
    def width(self) -> int:
        return self.w2.shape[2]

    def arguments(self, i: int, dtypes: dict[str, torch.dtype]) -> dict[str, Any]:
        return {
            "x": self.x[i], "ids": self.ids[i], "weights": self.weights[i], "w_gate": self.w13[:, : self.width],
            "w_up": self.w13[:, self.width :], "w_down": self.w2, "s_gate": None, "s_up": None, "s_down": None,
            "format": "dense", "activation": "silu", "beta": 0.0, "linear_beta": 0.0, "first": 0, **dtypes,
        }  # fmt: skip

    def distinct(self) -> float:
        """Experts that one call names, on average."""
        return sum(len(torch.unique(ids)) for ids in self.ids) / len(self.ids)


def stacks(shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    experts, _, outer, width = shape
    w13 = torch.randn(experts, 2 * width, outer, device="cuda", dtype=BF16) / outer**0.5
    return w13, torch.randn(experts, outer, width, device="cuda", dtype=BF16) / width**0.5


def make_inputs(weights: tuple[Tensor, Tensor], shape: tuple[int, int, int, int], tokens: int, routing: str) -> Inputs:
    """`uniform`: any expert alike; `skewed`: expert n with a share of 1 / (n + 1); `repeated`: one row for all."""
    experts, top_k, outer, _ = shape
    noise = -torch.rand(ROUTINGS, tokens, experts, device="cuda").log()
    if routing == "skewed":
        noise *= torch.arange(1, experts + 1, device="cuda")
    elif routing == "repeated":
        noise = noise[:, :1].expand(-1, tokens, -1)
    ids = noise.topk(top_k, -1, largest=False).indices
    shares = torch.rand(ROUTINGS, tokens, top_k, device="cuda")
    return Inputs(
        *weights,
        x=torch.randn(ROUTINGS, tokens, outer, device="cuda", dtype=BF16),
        ids=ids.contiguous(),
        weights=shares / shares.sum(-1, keepdim=True),
    )


def gathered(x: Tensor, ids: Tensor, shares: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """What users write: the matrices of every route, batched products."""
    tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    rows = x.repeat_interleave(top_k, 0)
    gate, up = torch.bmm(w13[flat], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    out = torch.bmm(w2[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    return (out * shares.reshape(-1, 1)).view(tokens, top_k, -1).sum(1).to(x.dtype)


def grouped(x: Tensor, ids: Tensor, shares: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """What users write: routes sorted by expert, grouped products."""
    tokens, top_k = ids.shape
    ordered, order = torch.sort(ids.reshape(-1))
    ends = torch.histc(ordered.int(), bins=w2.shape[0], min=0, max=w2.shape[0] - 1).cumsum(0).to(torch.int32)
    gate, up = torch._grouped_mm(x[order // top_k], w13.transpose(1, 2), offs=ends).chunk(2, -1)
    out = torch._grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=ends) * shares.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(out)
    back[order] = out
    return back.view(tokens, top_k, -1).sum(1).to(x.dtype)


def exact(data: Inputs, i: int) -> Tensor:
    """fp64, a route at a time, from the stored weights."""
    out = torch.zeros(data.x.shape[1], data.w2.shape[1], dtype=torch.float64, device="cuda")
    for token, row in enumerate(data.ids[i].tolist()):
        for slot, expert in enumerate(row):
            gate, up = (data.w13[expert].double() @ data.x[i, token].double()).chunk(2)
            out[token] += data.weights[i, token, slot].double() * (data.w2[expert].double() @ (F.silu(gate) * up))
    return out


def make_call(name: str, data: Inputs, peers: dict[str, Any]) -> Call:
    written = {"eager gather": gathered, "grouped_mm": grouped}
    if name in written:
        return lambda i: written[name](data.x[i], data.ids[i], data.weights[i], data.w13, data.w2)
    if name == "inductor":
        torch._dynamo.reset()
        compiled = torch.compile(gathered, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True)
        return lambda i: compiled(data.x[i], data.ids[i], data.weights[i], data.w13, data.w2)
    if name.startswith("vllm"):
        module, ids = peers["vllm"], data.ids.int()
        return lambda i: module.fused_experts_impl(data.x[i], data.w13, data.w2, data.weights[i], ids[i])
    dtypes = MODEL if "roundings" in name else FEWEST
    if "published" in name:
        return functools.partial(hip, data, hip_kernel.PUBLISHED)
    if "HIP" in name:
        return functools.partial(hip, data, hip_kernel.CHOSEN)
    return lambda i: launch.experts(**data.arguments(i, dtypes))


def hip(data: Inputs, layout: hip_kernel.Layout, i: int) -> Tensor:
    arguments = data.arguments(i, FEWEST)
    return hip_kernel.warp_decode(arguments, Facts.of(arguments, torch.version.hip is None), layout)


def scheduled(data: Inputs, schedule: Schedule, i: int) -> Tensor:
    return launch.experts(**data.arguments(i, FEWEST), schedule=schedule)


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


OURS = ("gate_up_routes", "down_tokens", "gate_up_experts", "down_experts", "combine_routes", "count_routes",
        "place_routes", "gate_up_sorted", "down_sorted", "warp_decode_gate_up", "warp_decode_down")  # fmt: skip
"""kernels that a call of ours may run, and no others"""


def measure(
    shape_name: str, weights: tuple[Tensor, Tensor], tokens: int, routing: str, names: list[str],
    peers: dict[str, Any], replays: int,
) -> dict[str, Any]:  # fmt: skip
    shape = SHAPES[shape_name]
    data = make_inputs(weights, shape, tokens, routing)
    size = int(data.distinct() * (data.w13[0].numel() + data.w2[0].numel()) * 2)
    read_us, read_layout = harness.read_ceiling(size, harness.l2_bytes(), 30)
    entry: dict[str, Any] = {
        "shape": shape_name, "tokens": tokens, "routing": routing, "distinct": data.distinct(), "bytes": size,
        "floor_us": size / load_target("auto").memory_bandwidth * 1e6, "read_us": read_us, "read_layout": read_layout,
        "variants": {},
    }  # fmt: skip
    reference = exact(data, 0)
    print(f"{shape_name}, {tokens} tokens, {routing}: {size / 1e6:.0f} MB, read {read_us:.1f} us", flush=True)
    for name in names:
        with harness.only_warning(name):
            call = make_call(name, data, peers)
            found: dict[str, Any] = dict(check(call, reference))
            timing = harness.graph_time([functools.partial(call, i) for i in range(ROUTINGS)], replays)
            found |= {"us": asdict(timing), "of_read": read_us / timing.median, "TB_s": size / timing.median / 1e6}
            if name.startswith("ours"):
                found["kernels"] = harness.kernel_names(functools.partial(call, 0))
                assert set(found["kernels"]) <= set(OURS), f"{name} ran {found['kernels']}"
            entry["variants"][name] = found
            print(
                f"    {name:22s} {timing.median:9.2f} us  {found['of_read'] * 100:5.1f} % of read  "
                f"error {found['error']:.2e}  1 - cosine {found['one_minus_cosine']:.1e}",
                flush=True,
            )
    return entry


ROUTE_TILES = [
    Schedule("routes", Tiles(rows, columns, warps, stages), Tiles(d_rows, d_columns, d_warps, d_stages, group=group))
    for (rows, columns, warps, stages), (d_rows, d_columns, d_warps, d_stages, group) in itertools.product(
        [(2, 512, 2, 3), (4, 512, 4, 3), (4, 512, 4, 4), (8, 512, 8, 3), (8, 256, 4, 4), (4, 256, 2, 4)],
        [
            (8, 128, 4, 2, 4),
            (4, 128, 4, 2, 8),
            (16, 128, 4, 2, 2),
            (8, 128, 2, 2, 2),
            (4, 128, 2, 3, 4),
            (2, 128, 2, 2, 16),
        ],
    )
]
EXPERT_TILES = [
    Schedule("experts", Tiles(rows, columns, warps, stages), Tiles(d_rows, 128, d_warps, d_stages))
    for (rows, columns, warps, stages), (d_rows, d_warps, d_stages) in itertools.product(
        [(64, 128, 4, 3), (32, 128, 4, 3), (32, 128, 4, 4), (64, 64, 4, 4), (32, 256, 4, 2), (128, 64, 4, 3)],
        [(64, 4, 3), (128, 4, 3), (64, 4, 2), (32, 4, 3)],
    )
]
HIP_LAYOUTS = [
    hip_kernel.Layout(waves, rows, group, unroll)
    for waves, rows, group, unroll in itertools.product((4, 8), (1, 2), (1, 2, 4, 8), (1, 2, 4))
]


def sweep(shape_name: str, tokens_list: list[int], replays: int) -> list[dict[str, Any]]:
    """Every layout at uniform routing, fastest first."""
    results = []
    shape = SHAPES[shape_name]
    weights = stacks(shape)
    for tokens in tokens_list:
        data = make_inputs(weights, shape, tokens, "uniform")
        size = int(data.distinct() * (data.w13[0].numel() + data.w2[0].numel()) * 2)
        read_us, _ = harness.read_ceiling(size, harness.l2_bytes(), 30)
        reference = exact(data, 0)
        found: list[tuple[float, str, dict[str, float]]] = []
        candidates: list[tuple[str, Call]] = [
            (str(s), functools.partial(scheduled, data, s))
            for s in [*(ROUTE_TILES if tokens <= 16 else []), *(EXPERT_TILES if tokens >= 4 else [])]
        ]
        if tokens <= 8:
            candidates += [(str(layout), functools.partial(hip, data, layout)) for layout in HIP_LAYOUTS]
        for name, call in candidates:
            with harness.only_warning(name):
                checked = check(call, reference)
                timing = harness.graph_time([functools.partial(call, i) for i in range(ROUTINGS)], replays, 2, 0.05)
                found.append((timing.median, name, checked))
        found.sort(key=lambda item: item[0])
        print(f"{shape_name}, {tokens} tokens: read {read_us:.1f} us")
        for us, name, checked in found:
            results.append(
                {"shape": shape_name, "tokens": tokens, "us": us, "read_us": read_us, **checked, "layout": name}
            )
        for us, name, checked in found[:8]:
            print(
                f"    {us:9.2f} us  {read_us / us * 100:5.1f} % of read  error {checked['error']:.1e}  {name}",
                flush=True,
            )
    return results


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--routing", choices=("uniform", "skewed", "repeated"), nargs="+", default=["uniform"])
    options = parser.parse_args()
    torch.manual_seed(0)
    started = time.monotonic()
    results: dict[str, Any] = {"origin": harness.origin(options.commit)}
    print(json.dumps(results["origin"]))
    if options.sweep:
        results["sweep"] = []
        for shape in options.shape:
            results["sweep"] += sweep(shape, options.tokens, options.replays)
            print(harness.write_results("experts-sweep", results, options.out))
        return
    peers: dict[str, Any] = {}
    with harness.only_warning("vLLM's fused_moe"):
        if options.peers is None:
            raise FileNotFoundError("--peers was not given")
        peers["vllm"] = vllm.load(options.peers)
    results["entries"] = []
    for shape in options.shape:
        weights = stacks(SHAPES[shape])
        for tokens, routing in itertools.product(options.tokens, options.routing):
            late = time.monotonic() - started > options.seconds
            names = ["ours", "ours, model's roundings", *peers, "grouped_mm", *([] if late else ["inductor"])]
            if tokens <= 8:
                names += ["ours, HIP", "ours, published", "eager gather"]
            results["entries"].append(measure(shape, weights, tokens, routing, names, peers, options.replays))
            harness.write_results("experts", results, options.out)
        del weights
        torch.cuda.empty_cache()
    print(harness.write_results("experts", results, options.out), f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
