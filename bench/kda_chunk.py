"""The prompt of a KDA layer on a GPU: our kernels, flash-linear-attention's `chunk_kda`, the reference in chunks.

    python bench/kda_chunk.py --peers .peers        every number of sequences and tokens
    python bench/kda_chunk.py --sweep               plans: registers, tiles, loads ahead, groups

Times are microseconds a call, captured in a CUDA graph. Errors are those of 1,024 tokens against fp64, and of a whole
call against the reference in fp32.
"""

from __future__ import annotations

import functools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import _fla_chunk as fla
import _harness as harness
import torch
from torch import Tensor

from k3rewrite.kernels.devices import device_facts
from k3rewrite.kernels.kda_chunk.launch import kda_chunk
from k3rewrite.kernels.kda_chunk.op import kda_chunk as reference
from k3rewrite.kernels.kda_chunk.plan import Plan, plan_for

SIZE = 128
SEQUENCES, TOKENS = (1, 4), (4096, 16384)
STATE_LIMIT = 1e-2
MANY = 50
Run = Callable[[], tuple[Tensor, Tensor]]


def make_call(sequences: int, tokens: int, heads: int) -> dict[str, Any]:
    """Arguments of the op: views of one convolution's output, one projection's rates, slots of a pool."""
    width = heads * SIZE

    def normal(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device="cuda").to(of)

    qkv = normal(sequences, tokens, 3, heads, SIZE, of=torch.bfloat16)
    return {
        "q": qkv[:, :, 0], "k": qkv[:, :, 1], "v": qkv[:, :, 2],
        "f": normal(sequences, tokens, heads, SIZE, of=torch.bfloat16),
        "b": normal(sequences, tokens, heads, of=torch.bfloat16), "a_log": normal(heads) * 0.5,
        "dt_bias": normal(width) - 4.0, "state": normal(sequences + 1, heads, SIZE, SIZE) * 0.3,
        "slots": torch.randperm(sequences, device="cuda") + 1, "fresh": None, "lengths": None, "offsets": None,
        "checkpoints": None, "null_slot": True, "bound": -5.0, "q_scale": SIZE**-0.5, "l2_eps": 1e-6,
        "out_dtype": torch.bfloat16,
    }  # fmt: skip


def ours(call: dict[str, Any], plan: Plan | None = None) -> Run:
    """Writes its states into a pool of its own."""
    own = call | {"state": call["state"].clone()}

    def run() -> tuple[Tensor, Tensor]:
        out = kda_chunk(**own, in_place=True, plan=plan)
        assert isinstance(out, Tensor)
        return out, own["state"]

    return run


def unfused(call: dict[str, Any]) -> Run:
    return lambda: reference(**call)


def short(call: dict[str, Any], tokens: int = 1024) -> dict[str, Any]:
    return call | {name: call[name][:, :tokens] for name in ("q", "k", "v", "f", "b")}


def errors(call: dict[str, Any], make: Callable[[dict[str, Any]], Run], whole: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Of output and states: the first 1,024 tokens in fp64, then all of them in fp32."""
    part, found = short(call), {}
    wide = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in part.items()}
    slots = call["slots"].long()
    for what, arguments, expected in (
        ("", part, reference(**wide | {"out_dtype": torch.float64})),
        ("whole_", call, whole),
    ):
        harness.poison((call["v"].shape, torch.bfloat16))
        out, state = make(arguments)()
        state = state if len(state) == len(slots) else state[slots]  # FLA gives the rows' own
        found[f"{what}error"] = harness.relative_error(out, expected[0].double())
        found[f"{what}state_error"] = harness.relative_error(state, expected[1][slots].double())
        harness.demand(found[f"{what}error"])
        if not found[f"{what}state_error"] <= STATE_LIMIT:
            raise harness.WrongResult(f"relative error of its states: {found[f'{what}state_error']:.1e}")
    return found


def plans(chosen: Plan) -> Iterator[tuple[str, Plan]]:
    for warps, registers, slab in ((8, 0, 128), (8, 128, 128), (8, 168, 128), (4, 0, 64)):
        own = replace(chosen, prologue_warps=warps, prologue_registers=registers, slab=slab)
        yield f"prologue: {warps} warps, {registers} registers, {slab} channels", own
    for stages in (2,):
        yield f"scan: {stages} stages", replace(chosen, scan_stages=min(3, stages), group_stages=stages)
    for groups in (1, 4, 5, 8, 11):
        yield f"{groups} groups", replace(chosen, groups=groups)


def variants(call: dict[str, Any], chunk_kda: Any, sweep: bool) -> Iterator[tuple[str, Callable[..., Run]]]:
    if sweep:
        sequences, tokens, heads = call["b"].shape
        chosen = plan_for(sequences, heads, SIZE, SIZE, tokens // 64, *device_facts(call["q"].device))
        for label, plan in plans(chosen):
            yield label, functools.partial(ours, plan=plan)
        return
    yield "ours", ours
    if chunk_kda is not None:
        yield "FLA chunk_kda", functools.partial(fla.make_call, chunk_kda)
    yield "reference in chunks", unfused


def measure(label: str, make: Callable[..., Run], call: dict[str, Any], whole: Any, replays: int) -> dict[str, Any]:
    found = errors(call, make, whole)
    run = make(call)
    run()
    timing = harness.graph_time([run], replays)
    kernels = harness.kernel_names(run)
    if label.startswith("ours"):
        assert all("kda_chunk" in name for name in kernels), kernels
    found |= {"us": timing, "launches": len(kernels), "kernels": kernels}
    if len(kernels) > MANY:  # how often each
        found["kernels"] = dict(Counter(name[:80] for name in kernels))
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--heads", type=int, nargs="+", default=[12])
    parser.add_argument("--sequences", type=int, nargs="+", default=list(SEQUENCES))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--parts", action="store_true", help="also the time of every kernel")
    options = parser.parse_args()
    torch.manual_seed(0)
    started = time.monotonic()
    results: dict[str, Any] = {"origin": harness.origin(options.commit), "entries": []}
    print(json.dumps(results["origin"]))
    chunk_kda = None
    if options.peers is not None:
        with harness.only_warning("flash-linear-attention"):
            chunk_kda = fla.load(options.peers)
    name = "kda_chunk-sweep" if options.sweep else "kda_chunk"
    for heads in options.heads:
        for sequences in options.sequences:
            for tokens in options.tokens:
                call = make_call(sequences, tokens, heads)
                with torch.no_grad():
                    whole = reference(**call | {"out_dtype": torch.float32})
                entry: dict[str, Any] = {"heads": heads, "sequences": sequences, "tokens": tokens, "variants": {}}
                print(f"heads {heads}  sequences {sequences}  tokens {tokens}")
                for label, make in variants(call, chunk_kda, options.sweep):
                    with harness.only_warning(label), torch.no_grad():
                        found = measure(label, make, call, whole, options.replays)
                        if options.parts:
                            found["parts"] = parts_of(make(call))
                        entry["variants"][label] = found
                        print(
                            f"    {label:48s} {found['us'].median:9.1f} us  error {found['error']:.1e} "
                            f"{found['state_error']:.1e}  {found['launches']} kernels {found.get('parts', '')}",
                            flush=True,
                        )
                results["entries"].append(entry)
                harness.write_results(name, results, options.out)
                del call, whole
    print(f"{time.monotonic() - started:.0f} s")


def parts_of(run: Run) -> dict[str, float]:
    """Microseconds of every kernel of a call, by name; of several calls the least."""
    run()
    torch.cuda.synchronize()
    least: dict[str, float] = {}
    for _ in range(5):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        own: dict[str, float] = {}
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                name = event.name[:40]
                own[name] = own.get(name, 0.0) + event.time_range.elapsed_us()
        for name, took in own.items():
            least[name] = round(min(took, least.get(name, took)), 1)
    return least


if __name__ == "__main__":
    main()
