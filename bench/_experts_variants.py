"""Everyone who computes the experts: ours by kernel, what users write, and the peers. A variant is a call on set i."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import _harness as harness
import _humming_moe as humming
import _marlin_moe as marlin
import _vllm_moe as vllm
import torch
import torch.nn.functional as F
from _experts_inputs import FEWEST, MODEL, Inputs, Weights
from torch import Tensor

from k3rewrite.kernels.experts import KERNELS, hip_kernel, launch
from k3rewrite.kernels.experts.mxfp4 import choose
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.kernels.experts.schedule import Schedule
from k3rewrite.pipeline.pass_base import PassContext
from k3rewrite.targets import load_target

Call = Callable[[int], Tensor]
"""runs on set i"""
TimeOf = Callable[[Call], float]
"""median microseconds of a call whose result is right"""
FEW = 8
"""tokens up to which forms are run that are for few, or that copy every route's weights"""

OURS = ("gate_up_routes", "down_tokens", "gate_up_experts", "down_experts", "combine_routes", "count_routes",
        "place_routes", "gate_up_sorted", "down_sorted", "warp_decode_gate_up", "warp_decode_down", "mxfp4_prepare",
        "mxfp4_gate_up", "mxfp4_down", "mxfp4_bulk_gate_up", "mxfp4_bulk_down", "mxfp4_shared_prepare",
        "mxfp4_shared_gate_up", "mxfp4_shared_down", "mxfp4_shared_combine")  # fmt: skip
"""kernels that a call of ours may run, and no others"""


def chosen(data: Inputs, dtypes: Mapping[str, torch.dtype], i: int) -> Tensor:
    """What `select` binds for this GPU and a batch of unknown size: of one token, which every kernel takes, as a kernel
    looks at the number of tokens when it is called."""
    arguments = data.arguments(i, dtypes)
    one = {name: arguments[name][:1] for name in ("x", "ids", "weights")}
    offers = PassContext(load_target("auto"), {}, tuple(KERNELS)).offers("experts", arguments | one)
    best, _ = min(offers.taking, key=lambda offer: offer[1])
    result: Tensor = best.launch(**arguments)
    return result


def hip(data: Inputs, layout: hip_kernel.Layout, i: int) -> Tensor:
    arguments = data.arguments(i, FEWEST)
    return hip_kernel.warp_decode(arguments, Facts.of(arguments, torch.version.hip is None), layout)


def mxfp4(data: Inputs, layout: choose.Layout, i: int) -> Tensor:
    arguments = data.arguments(i, FEWEST)
    return layout.run(arguments, Facts.of(arguments, True))


def scheduled(data: Inputs, schedule: Schedule, i: int) -> Tensor:
    return launch.experts(**data.arguments(i, FEWEST), schedule=schedule)


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


class Peers:
    """The peers that could be loaded, once; `prepare` gives those that keep weights in a form of their own theirs."""

    def __init__(self, folder: Path | None, format: str) -> None:
        self.loaded: dict[str, Any] = {}
        self.weights: dict[str, Any] = {}
        loaders: dict[str, Any] = {"vLLM": vllm.load}
        if format == "mxfp4":
            loaders |= {"Humming": humming.load, "Marlin": marlin.load}
        for name, load in loaders.items():
            with harness.only_warning(name):
                if folder is None:
                    raise FileNotFoundError("--peers was not given")
                self.loaded[name] = load(folder)

    def prepare(self, weights: Weights) -> None:
        """Repack the experts' weights, in place of those before."""
        self.weights.clear()
        pairs = ((weights.w13, weights.s13), (weights.w2, weights.s2))
        with harness.only_warning("Humming's weights"):
            if peer := self.loaded.get("Humming"):
                self.weights["Humming"] = humming.Experts(*(humming.repack(peer, w, s) for w, s in pairs))
        with harness.only_warning("Marlin's weights"):
            if "Marlin" in self.loaded:
                self.weights["Marlin"] = marlin.Experts(*(marlin.repack(w, s) for w, s in pairs))

    @property
    def align(self) -> Any:
        """vLLM's kernel that sorts routes by expert, for the peers that leave this to their caller."""
        return self.loaded["vLLM"].moe_align_block_size if "vLLM" in self.loaded else None


def variants(data: Inputs, peers: Peers, time_of: TimeOf, tuned: bool, inductor: bool) -> Iterator[tuple[str, Any]]:
    """Name and a function that makes the call; making it may compile, and tune."""
    tokens = data.x.shape[1]
    yield "ours", lambda: functools.partial(chosen, data, FEWEST)
    yield "ours, model's roundings", lambda: functools.partial(chosen, data, MODEL)
    if data.weights.s13 is not None:
        yield from _packed(data, peers, time_of, tuned)
        return
    if tokens <= FEW:
        yield "ours, published form", lambda: functools.partial(hip, data, hip_kernel.PUBLISHED)
    written = (data.weights.w13, data.weights.w2)
    if "vLLM" in peers.loaded:
        module, ids = peers.loaded["vLLM"], data.ids.int()

        def run(implementation: Any, i: int) -> Tensor:
            result: Tensor = implementation(data.x[i], *written, data.shares[i], ids[i])
            return result

        yield "vLLM", lambda: functools.partial(run, module.fused_experts_impl)
        if tuned:

            def tuned_apart() -> Call:
                one, other, _ = vllm.tune(module, run, time_of)
                return functools.partial(run, vllm.tuned(module, one, other))

            yield "vLLM, tuned apart", tuned_apart
    yield "grouped_mm", lambda: lambda i: grouped(data.x[i], data.ids[i], data.shares[i], *written)
    if tokens <= FEW:
        yield "eager gather", lambda: lambda i: gathered(data.x[i], data.ids[i], data.shares[i], *written)
    if inductor:

        def compiled() -> Call:
            torch._dynamo.reset()
            made = torch.compile(gathered, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True)
            return lambda i: made(data.x[i], data.ids[i], data.shares[i], *written)

        yield "Inductor", compiled


def _packed(data: Inputs, peers: Peers, time_of: TimeOf, tuned: bool) -> Iterator[tuple[str, Any]]:
    experts, top_k = data.weights.w2.shape[0], data.ids.shape[2]
    tokens = data.x.shape[1]
    rest = (data.x, data.ids, data.shares)
    if "Humming" in peers.weights:
        peer, own = peers.loaded["Humming"], peers.weights["Humming"]

        def of_humming(schedule: Any) -> Call:
            made: Call = humming.make_call(peer, own, *rest, schedule, peers.align)
            return made

        yield "Humming", lambda: of_humming(humming.stock(peer, own, tokens, top_k))
        if tuned:

            def tuned_humming() -> Call:
                return of_humming(humming.tune(peer, own, tokens, top_k, lambda s: time_of(of_humming(s)))[0])

            yield "Humming, tuned", tuned_humming
    if "Marlin" in peers.weights:
        ops, own_marlin = peers.loaded["Marlin"], peers.weights["Marlin"]

        def of_marlin(schedule: Any) -> Call:
            made: Call = marlin.make_call(ops, own_marlin, *rest, schedule, peers.align)
            return made

        yield "Marlin", lambda: of_marlin(marlin.stock(tokens, top_k, experts))
        if tuned:

            def tuned_marlin() -> Call:
                start = marlin.stock(tokens, top_k, experts)
                return of_marlin(marlin.tune(start, lambda s: time_of(of_marlin(s)))[0])

            yield "Marlin, tuned", tuned_marlin
