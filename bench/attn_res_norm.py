"""AttnRes with its output norm on one GPU: ours against eager, Inductor and vLLM's Triton kernels.

    python bench/attn_res_norm.py --peers .peers/vllm33      all figures, to bench/results/attn_res_norm-<gpu>.json
    python bench/attn_res_norm.py --sweep                    every schedule, to choose the table in schedule.py

What is timed, for everyone: prefix + delta (rounded to bf16, stored), depth mix of the stored blocks and the new
prefix, output norm; bf16 in, bf16 out, 7168 columns. Without delta the prefix is only read. Protocol: _harness.py.
Eager and Inductor run the vendor's chain with its roundings as written in the model code.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import _harness as harness
import _vllm_attn_res as vllm
import torch
from torch import Tensor

from k3rewrite.kernels.attn_res_norm import KERNELS, hip_kernel, launch
from k3rewrite.kernels.attn_res_norm.op import attn_res_norm as reference
from k3rewrite.kernels.attn_res_norm.schedule import Schedule, schedule_for
from k3rewrite.pipeline.pass_base import PassContext
from k3rewrite.targets import load_target

COLUMNS = 7168
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 4096)
EPS = 1e-5
FEWEST = dict.fromkeys(("compute_dtype", "mix_dtype", "scale_dtype"), torch.float32) | {"out_dtype": torch.bfloat16}
EXACT = FEWEST | {"mix_dtype": torch.bfloat16, "scale_dtype": torch.bfloat16}
IN_FP64 = dict.fromkeys(FEWEST, torch.float64)

Call = Callable[[int], Any]
"""runs on input set i"""


@dataclass
class Inputs:
    """`sets` independent input sets. `blocks` is a slice of a bank of eight slots, as in the model."""

    bank: Tensor
    prefix: Tensor
    delta: Tensor | None
    score_norm: Tensor
    score_proj: Tensor
    norm_weight: Tensor
    blocks: int

    @property
    def rows(self) -> int:
        return self.prefix.shape[1]

    def block_slice(self, i: int) -> Tensor:
        return self.bank[i, :, : self.blocks]


def make_inputs(rows: int, sources: int, with_delta: bool, sets: int) -> Inputs:
    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device="cuda") * scale).bfloat16()

    return Inputs(
        bank=normal(sets, rows, 8, COLUMNS),
        prefix=normal(sets, rows, COLUMNS),
        delta=normal(sets, rows, COLUMNS) if with_delta else None,
        score_norm=1 + normal(COLUMNS, scale=0.1),
        score_proj=normal(1, COLUMNS, scale=2 / COLUMNS**0.5),
        norm_weight=1 + normal(COLUMNS, scale=0.1),
        blocks=sources - 1,
    )


def moved_bytes(rows: int, sources: int, with_delta: bool) -> int:
    """What one fused launch must move: each source, delta and weight once; the result and the new prefix once."""
    row = COLUMNS * 2
    return rows * row * (sources + 1 + (2 if with_delta else 0)) + 3 * row


def vendor_chain(
    prefix: Tensor, delta: Tensor | None, blocks: Tensor, score_norm: Tensor, score_proj: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The model's own code: mix in fp32, rounded; RMSNorm in fp32, rounded; times the bf16 weight."""
    if delta is not None:
        prefix = prefix + delta
    values = torch.cat([blocks, prefix.unsqueeze(1)], dim=1).float()
    rstd = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + EPS)
    scores = (values * rstd * (score_norm.float() * score_proj.float())).sum(-1, keepdim=True)
    mix = (scores.softmax(1) * values).sum(1).bfloat16().float()
    return prefix, norm_weight * (mix * torch.rsqrt(mix.pow(2).mean(-1, keepdim=True) + EPS)).bfloat16()


def ours(data: Inputs, mix: launch.MixRows | None = None, dtypes: dict[str, torch.dtype] = FEWEST) -> Call:
    weights = (data.score_norm, data.score_proj, EPS, data.norm_weight, EPS)

    def call(i: int) -> tuple[Tensor, Tensor]:
        blocks = [data.block_slice(i)]
        if data.delta is None:
            return data.prefix[i], launch.attn_res_norm(data.prefix[i], blocks, *weights, **dtypes, mix=mix)
        result = launch.add_attn_res_norm(data.prefix[i], data.delta[i], blocks, *weights, **dtypes, mix=mix)
        assert isinstance(result, tuple)
        return result

    return call


def eager(data: Inputs, chain: Callable[..., Any] = vendor_chain) -> Call:
    weights = (data.score_norm, data.score_proj, data.norm_weight)
    return lambda i: chain(data.prefix[i], None if data.delta is None else data.delta[i], data.block_slice(i), *weights)


def inductor(data: Inputs) -> Call:
    torch._dynamo.reset()
    return eager(data, torch.compile(vendor_chain, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True))


def vllm_call(data: Inputs, attn_res: Any) -> Call:
    """vLLM updates the prefix in place, so it drifts over replays; the time does not depend on it."""
    weights = (data.score_norm, data.score_proj.reshape(-1), data.norm_weight)

    def call(i: int) -> tuple[Tensor, Tensor]:
        delta = None if data.delta is None else data.delta[i]
        normed = attn_res(data.prefix[i], delta, data.bank[i], *weights, data.blocks, -1, EPS, EPS)
        return data.prefix[i], normed

    return call


def check(data: Inputs, call: Call) -> dict[str, float | bool]:
    """Error of the result against fp64 on set 0, and whether the prefix is bit-equal to eager's addition."""
    before = data.prefix[0].clone()
    expected = before if data.delta is None else before + data.delta[0]
    exact = reference(
        expected.double(), [data.block_slice(0).double()], data.score_norm.double(), data.score_proj.double(), EPS,
        data.norm_weight.double(), EPS, **IN_FP64,
    )  # fmt: skip
    call(0)  # compile
    data.prefix[0].copy_(before)
    harness.poison((before.shape, torch.bfloat16), (before.shape, torch.bfloat16))
    prefix, normed = call(0)
    result = {"error": harness.relative_error(normed, exact), "prefix_equal": torch.equal(prefix, expected)}
    data.prefix[0].copy_(before)
    harness.demand(result["error"])
    if not result["prefix_equal"]:
        raise harness.WrongResult("the prefix is not what eager's addition gives")
    return result


def timed(data: Inputs, call: Call, sets: int, replays: int) -> harness.Timing:
    return harness.graph_time([functools.partial(call, i) for i in range(sets)], replays)


def selected(data: Inputs) -> launch.MixRows:
    """What `select` binds for a call with this number of rows: the cheapest kernel that takes it."""
    arguments: dict[str, Any] = {
        "prefix": data.prefix[0], "blocks": [data.block_slice(0)], "score_norm": data.score_norm,
        "score_proj": data.score_proj, "score_eps": EPS, "norm_weight": data.norm_weight, "norm_eps": EPS, **FEWEST,
    }  # fmt: skip
    name = "attn_res_norm" if data.delta is None else "add_attn_res_norm"
    if data.delta is not None:
        arguments["delta"] = data.delta[0]
    taking = PassContext(load_target("auto"), {}, tuple(KERNELS)).offers(name, arguments).taking
    best, _ = min(taking, key=lambda offer: offer[1])
    return hip_kernel.mix_rows if best.language == "hip" else launch.mix_rows


def make_call(name: str, data: Inputs, peers: dict[str, Any]) -> Call:
    if name == "eager":
        return eager(data)
    if name == "inductor":
        return inductor(data)
    if name in peers:
        return vllm_call(data, peers[name])
    mix = launch.mix_rows if "Triton" in name else selected(data)
    if "no dependent launch" in name:
        arch, _ = launch.device_facts(data.prefix.device)
        if mix is hip_kernel.mix_rows:
            layout = hip_kernel.layout_for(COLUMNS, arch, data.rows)
            assert layout is not None
            mix = functools.partial(mix, layout=replace(layout, dependent=False))
        else:
            chosen = schedule_for(arch, data.rows, data.blocks + 1, COLUMNS, torch.bfloat16)
            mix = functools.partial(mix, schedule=replace(chosen, dependent_launch=False))
    elif "one workgroup" in name:
        mix = functools.partial(hip_kernel.mix_rows, layout=hip_kernel.Layout(1, 448))
    return ours(data, mix, EXACT if "exact" in name else FEWEST)


OUR_KERNELS = ("attn_res_norm", "attn_res_resident", "attn_res_streamed")
ASSERTED = {"ours": OUR_KERNELS, "vllm, nvidia": ("_attn_res_kernel",)}
"""the kernels of a call of these variants: one, of such a name"""


def kernels_of(name: str, call: Call) -> list[str]:
    """Names of the kernels that a captured call runs; asserted for ours and vLLM's."""
    names = harness.kernel_names(functools.partial(call, 0))
    expected = ASSERTED.get(name)
    assert expected is None or (len(names) == 1 and names[0] in expected), f"{name} ran {names}"
    return names


def measure(
    rows: int, sources: int, with_delta: bool, variants: list[str], peers: dict[str, Any], replays: int, full: bool
) -> dict[str, Any]:
    """Every variant at one shape: cold time, error; with the ceiling of the same bytes. Full: warm time and kernels."""
    size, l2 = moved_bytes(rows, sources, with_delta), harness.l2_bytes()
    sets = harness.sets_for(size, True, l2)
    data = make_inputs(rows, sources, with_delta, sets)
    copy_us, copy_layout = harness.copy_ceiling(size, l2)
    entry: dict[str, Any] = {
        "rows": rows, "sources": sources, "delta": with_delta, "bytes": size, "sets": sets,
        "floor_us": size / load_target("auto").memory_bandwidth * 1e6, "copy_us": copy_us, "copy_layout": copy_layout,
        "variants": {},
    }  # fmt: skip
    for name in variants:
        with harness.only_warning(f"{name}, {rows} rows, {sources} sources"):
            call = make_call(name, data, peers)
            found: dict[str, Any] = check(data, call)
            cold = timed(data, call, sets, replays)
            found |= {"us": asdict(cold), "TB_s": size / cold.median / 1e6, "of_copy": copy_us / cold.median}
            if full:
                found["warm_us"] = harness.graph_time([functools.partial(call, 0)] * 64, replays).median
            if name in ASSERTED or name == "inductor":
                found["kernels"] = kernels_of(name, call)
            entry["variants"][name] = found
    show(entry)
    return entry


def show(entry: dict[str, Any]) -> None:
    print(
        f"rows {entry['rows']:5d}  sources {entry['sources']}  delta {entry['delta']!s:5}  "
        f"{entry['bytes'] / 1e6:9.3f} MB  floor {entry['floor_us']:7.2f}  copy {entry['copy_us']:7.2f}"
    )
    for name, found in entry["variants"].items():
        warm = f"warm {found['warm_us']:9.2f}" if "warm_us" in found else ""
        warm += f"  {len(found['kernels'])} kernels" if "kernels" in found else ""
        print(
            f"    {name:26s} {found['us']['median']:9.2f} us  {found['of_copy'] * 100:5.1f} % of copy  "
            f"error {found['error']:.2e}  prefix equal {found['prefix_equal']}  {warm}",
            flush=True,
        )


FEW_ROWS = [Schedule(True, warps, dependent_launch=pdl) for warps in (8, 16) for pdl in (False, True)] + [
    Schedule(False, 16, 3, dependent_launch=True)
]
MANY_ROWS = (
    [Schedule(False, 4, stages, max_registers=most) for stages, most in ((1, 0), (2, 0), (3, 0), (1, 168), (3, 168))]
    + [Schedule(False, 8, stages, max_registers=128) for stages in (1, 2, 3, 4)]
    + [Schedule(False, 16, stages, max_registers=64) for stages in (1, 3)]
    + [Schedule(False, warps, 3, programs_per_cu=programs) for warps, programs in ((4, 2), (8, 2))]
)
HIP_LAYOUTS = [hip_kernel.Layout(1, 448), hip_kernel.Layout(1, 896)] + [
    hip_kernel.Layout(split, threads, *options)
    for split, threads in ((2, 448), (4, 224), (7, 128), (8, 128))
    for options in ((False,), (True,), (True, True, False), (True, False, True), (True, True, True))
]


def sweep(rows_list: list[int], replays: int) -> list[dict[str, Any]]:
    """Every schedule at 9 sources with delta, fastest first."""
    results = []
    for rows in rows_list:
        size, l2 = moved_bytes(rows, 9, True), harness.l2_bytes()
        sets = min(harness.sets_for(size, True, l2), 128)
        data = make_inputs(rows, 9, True, sets)
        mixes: list[tuple[str, launch.MixRows]] = []
        for schedule in [*(FEW_ROWS if rows <= 512 else []), *(MANY_ROWS if rows >= 128 else [])]:
            mixes.append((str(schedule), functools.partial(launch.mix_rows, schedule=schedule)))
        for layout in HIP_LAYOUTS[: None if rows <= 128 else 1]:
            mixes.append((f"HIP source, {layout}", functools.partial(hip_kernel.mix_rows, layout=layout)))
        found: list[tuple[float, str, dict[str, Any]]] = []
        for name, mix in mixes:
            with harness.only_warning(name):
                call = ours(data, mix)
                checked = check(data, call)
                found.append((timed(data, call, sets, replays).median, name, checked))
        found.sort(key=lambda item: item[0])
        copy_us, _ = harness.copy_ceiling(size, l2, 20)
        print(f"rows {rows}: copy {copy_us:.2f} us")
        for us, name, checked in found:
            print(f"    {us:8.2f} us  {copy_us / us * 100:5.1f} % of copy  {checked}  {name}", flush=True)
            results.append({"rows": rows, "us": us, "copy_us": copy_us, **checked, "schedule": name})
    return results


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    options = parser.parse_args()
    torch.manual_seed(0)
    started = time.monotonic()
    results: dict[str, Any] = {"origin": harness.origin(options.commit)}
    print(json.dumps(results["origin"]))
    if options.sweep:
        results["sweep"] = sweep(options.rows, options.replays)
        print(harness.write_results("attn_res_norm-sweep", results, options.out))
        return
    peers: dict[str, Any] = {}
    for vendor in ("nvidia", "amd"):
        with harness.only_warning(f"vLLM's {vendor} kernel"):
            if options.peers is None:
                raise FileNotFoundError("--peers was not given")
            peers[f"vllm, {vendor}"] = vllm.load(options.peers, vendor)
    few = ["ours, Triton"]  # with more rows that is what is selected anyway
    results["entries"] = []

    def add(rows: int, sources: int, with_delta: bool, names: list[str], full: bool) -> None:
        if time.monotonic() - started > options.seconds:
            names = [name for name in names if name != "inductor"]
        entry = measure(rows, sources, with_delta, names, peers, options.replays, full)
        results["entries"].append(entry)
        harness.write_results("attn_res_norm", results, options.out)

    for rows in options.rows:
        names = ["ours", "ours, no dependent launch", "ours, exact", *(few if rows <= hip_kernel.FEW_ROWS else [])]
        if rows in (1, 32, 4096):
            names.append("ours, one workgroup")
        add(rows, 9, True, [*names, *peers, "inductor", "eager"], True)
    for rows in sorted({1, 32, 4096} & set(options.rows)):
        add(rows, 9, False, ["ours", *peers, "inductor"], False)
    for rows in sorted({1, 32, 4096} & set(options.rows)):
        for sources in range(8, 0, -1):
            add(rows, sources, True, ["ours", *list(peers)[:1], "inductor"], False)
    print(harness.write_results("attn_res_norm", results, options.out), f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
