"""Humming as a peer: routed experts with MXFP4 weights and bf16 activations on Hopper.

It comes from the wheel `humming_kernels` (0.1.20), which is not part of this repository. `load` unpacks it into a
folder of its own below the system's temporary folder, and its cache too (HUMMING_CACHE_DIR, HUMMING_TMP_DIR).

What it needs, and no network:

    Python packages  torch >= 2.11 (for its compiled launcher), triton, cuda-bindings (major version as torch's CUDA),
                     jinja2, filelock, numpy, safetensors, tqdm, tabulate, packaging
    a compiler       nvcc of torch's major CUDA version, below /usr/local/cuda, /usr/local/cuda-* or CUDA_HOME (else
                     next to the nvcc on PATH), with the toolkit's own headers (cuda.h, CCCL) and a host compiler;
                     HUMMING_COMPILER=nvrtc takes NVRTC instead, which needs libnvrtc and nvrtc.h in the same toolkit

Every layout is a kernel of its own, compiled at its first use in two to three seconds, and kept in the cache.

A call is: routes to blocks, gate|up, SiLU product, down, weighted sum over a token's routes. Both GEMMs are Humming's
"indexed" ones, which take rows by number, as vLLM runs them; they share one assignment of routes to blocks, so that the
number of rows in a block is the same. The SiLU product and the sum are a Triton kernel each: Humming has no such sum.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _vllm_moe as vllm
import torch
import triton
import triton.language as tl
from torch import Tensor

Call = Callable[[int], Tensor]
"""runs on routing i"""
Align = Callable[[Tensor, int, int], tuple[Tensor, Tensor, Tensor]]
"""int32 ids `[tokens, routes a token]`, rows of a block, experts -> routes by expert, each expert's padded to whole
blocks with the number of routes; expert of each block; padded routes in all"""

INDEXED = json.dumps({"gemm_type": "indexed"})
LOCKS = 1 << 14  # int32, zero between launches, for tiles that several blocks sum


@triton.jit
def _weighted_sum(routes, shares, out, COLUMNS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP_K):
        route = token * TOP_K + slot
        row = tl.load(routes + route * COLUMNS + column, mask=inside, other=0.0)
        total += tl.load(shares + route).to(tl.float32) * row.to(tl.float32)
    tl.store(out + token * COLUMNS + column, total, mask=inside)


@dataclass(frozen=True)
class Gemm:
    """One projection of all experts, as Humming wants it."""

    config: Any
    tensors: dict[str, Tensor]
    experts: int
    rows: int
    columns: int


@dataclass(frozen=True)
class Experts:
    gate_up: Gemm
    down: Gemm


@dataclass(frozen=True)
class Schedule:
    """Humming's tuning configurations as JSON; whether routes of one expert share blocks, or have one each."""

    gate_up: str
    down: str
    sort: bool


def load(root: Path) -> Any:
    """The package `humming` of the wheel in `root`, with its modules as attributes. `OSError` if there is no wheel."""
    wheel = next(iter(sorted(root.glob("humming_kernels-*.whl"))), None)
    if wheel is None:
        raise FileNotFoundError(f"{root} has no wheel humming_kernels")
    folder = Path(tempfile.gettempdir()) / wheel.name.rpartition("-cp")[0]
    if not (folder / "complete").is_file():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        for program in folder.glob("humming/_native/*/*"):  # an archive is unpacked without the right to execute
            program.chmod(0o755)
        (folder / "complete").touch()
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is not None:
        os.environ.setdefault("HUMMING_COMPILER", "nvcc")
        if not Path("/usr/local/cuda/bin/nvcc").exists():
            os.environ.setdefault("CUDA_HOME", str(Path(nvcc).resolve().parents[1]))
    os.environ.setdefault("HUMMING_CACHE_DIR", str(folder / "cache"))
    os.environ.setdefault("HUMMING_TMP_DIR", str(folder / "tmp"))
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    package = importlib.import_module("humming")
    for name in ("dtypes", "ops", "schema", "transform", "tune", "tune.sm90_policies", "kernel.humming"):
        importlib.import_module(f"humming.{name}")
    return package


def repack(peer: Any, packed: Tensor, scale: Tensor) -> Gemm:
    """MXFP4 as the checkpoint stores it, `[experts, rows, columns / 2]` and `[experts, rows, columns / 32]` uint8.

    Humming takes the same bytes, as words of eight columns, and puts them into the order of its tensor-core operands.
    """
    experts, rows, half = packed.shape
    schema = peer.schema.HummingWeightSchema(
        b_dtype=peer.dtypes.float4e2m1, bs_dtype=peer.dtypes.float8e8m0, weight_scale_group_size=32
    )
    words, exponents = packed.contiguous().view(torch.int32), scale.contiguous().view(torch.float8_e8m0fnu)
    with _refusals():
        config, tensors = peer.transform.prepare_and_transform_humming_tensors(
            {"weight": words, "weight_scale": exponents}, shape_n=rows, shape_k=half * 2, weight_schema=schema,
            num_experts=experts, torch_dtype=torch.bfloat16, device=packed.device,
        )  # fmt: skip
    return Gemm(config, tensors, experts, rows, half * 2)


def stock(peer: Any, experts: Experts, tokens: int, top_k: int) -> Schedule:
    """Humming's own choice. Routes are sorted unless they are few, as vLLM's fused_moe does it."""
    chosen = [
        peer.tune.get_heuristics_config(gemm.config, shape_m=tokens * top_k, gemm_type="indexed")
        for gemm in (experts.gate_up, experts.down)
    ]
    if len({config["block_shape"][0] for config in chosen}) > 1:
        raise ValueError("Humming chooses blocks of different rows for the two GEMMs")
    return Schedule(json.dumps(chosen[0]), json.dumps(chosen[1]), tokens * top_k * 4 > experts.down.experts)


LAYOUTS = [
    # columns and depth of a block, columns and depth of a warp, stages, blocks a multiprocessor
    ("wgmma", 256, 128, 64, 64, 4, 2), ("wgmma", 128, 256, 32, 64, 4, 1), ("wgmma", 512, 64, 64, 64, 4, 3),
    ("wgmma", 128, 128, 32, 64, 4, 3), ("wgmma", 128, 64, 32, 64, 6, 4), ("mma", 128, 64, 64, 32, 4, 4),
    ("mma", 128, 128, 64, 32, 4, 2),
]  # fmt: skip


def candidates(peer: Any, gemm: Gemm, rows: int) -> list[str]:
    """Tuning configurations to try, `rows` in a block: those that fit the shape and compile."""
    found: dict[str, None] = {}
    for kind, columns, depth, warp_columns, warp_depth, stages, blocks in LAYOUTS:
        for split in (False, True):  # blocks share the sum over a tile's depth, which pays where that is long
            if gemm.rows % columns or gemm.columns % depth or (split and gemm.columns < 1024):
                continue
            tiles = {
                "mma_type": kind, "block_shape": (rows, columns, depth), "warp_shape": (rows, warp_columns, warp_depth),
                "num_stages": stages, "num_ctas_per_sm": blocks, "use_stream_k": split,
                "use_warp_spec": False, "use_tma": False,
            }  # fmt: skip
            with contextlib.suppress(ValueError), _refusals():
                fitted = peer.tune.sm90_policies.fit_sm90_tile(gemm.config, tiles)
                if fitted["block_shape"][0] == rows:
                    found[json.dumps(fitted)] = None

    def compiles(config: str) -> bool:
        try:
            _prepare(peer, gemm, config)
        except (RuntimeError, ValueError, TypeError, OSError):
            return False
        return True

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return [config for config, good in zip(found, pool.map(compiles, found), strict=True) if good]


def tune(
    peer: Any, experts: Experts, tokens: int, top_k: int, time_of: Callable[[Schedule], float]
) -> tuple[Schedule, float]:
    """The fastest schedule and its time: gate|up first, then down, then sorting, then the overlap of launches.

    time_of: microseconds of a schedule; it may raise for one that cannot run or is wrong.
    """

    def timed(schedule: Schedule) -> float:
        try:
            return time_of(schedule)
        except (RuntimeError, ValueError, TypeError):
            return math.inf

    best = stock(peer, experts, tokens, top_k)
    best_us = timed(best)
    rows = _rows(best.gate_up)
    tries: list[Callable[[Schedule], Schedule]] = [
        *(lambda s, c=c: replace(s, gate_up=c) for c in candidates(peer, experts.gate_up, rows)),
        *(lambda s, c=c: replace(s, down=c) for c in candidates(peer, experts.down, rows)),
        lambda s: replace(s, sort=not s.sort),
        lambda s: replace(s, down=_overlapping(s.down)),
        # its blocks read the assignment before they wait, so that no kernel just before may write it
        lambda s: s if s.sort else replace(s, gate_up=_overlapping(s.gate_up)),
    ]
    for change in tries:
        schedule = change(best)
        if schedule != best and (us := timed(schedule)) < best_us:
            best, best_us = schedule, us
    return best, best_us


def make_call(
    peer: Any, experts: Experts, x: Tensor, ids: Tensor, shares: Tensor, schedule: Schedule, align: Align | None = None
) -> Call:  # fmt: skip
    """x `[routings, tokens, columns]` bf16, ids and shares `[routings, tokens, routes a token]`. Compiles both GEMMs.

    align: vLLM's `moe_align_block_size`, one kernel or two; `align_routes`, torch operations, if there is none.
    """
    with torch.cuda.device(x.device):
        for gemm, config in ((experts.gate_up, schedule.gate_up), (experts.down, schedule.down)):
            _prepare(peer, gemm, config)
    _, tokens, top_k = ids.shape
    routes, rows = tokens * top_k, _rows(schedule.gate_up)
    ids, shares, width = ids.int().contiguous(), shares.contiguous(), experts.gate_up.rows // 2
    locks = torch.zeros(2, LOCKS, dtype=torch.int32, device=x.device)
    alone = single_blocks(routes, rows, x.device)
    align = align or align_routes

    def project(gemm: Gemm, config: str, rows_in: Tensor, per_row: int, blocks: tuple[Tensor, ...], k: int) -> Tensor:
        return peer.ops.humming_gemm(
            layer_config=gemm.config.to_str(), compute_config=INDEXED, tuning_config=config, inputs=rows_in,
            outputs=rows_in.new_empty(routes, gemm.rows), sorted_ids=blocks[0], expert_ids=blocks[1],
            num_tokens_padded=blocks[2], locks=locks[k], top_k=per_row, **gemm.tensors,
        )  # fmt: skip

    def call(i: int) -> Tensor:
        if schedule.sort:
            blocks = align(ids[i], rows, experts.down.experts)
        else:
            blocks = (alone[0], ids[i].view(-1), alone[1])
        both = project(experts.gate_up, schedule.gate_up, x[i], top_k, blocks, 0)
        hidden = x.new_empty(routes, width)
        vllm._activate(None, hidden, both)
        out = project(experts.down, schedule.down, hidden, 1, blocks, 1)
        result, columns = torch.empty_like(x[i]), experts.down.rows
        _weighted_sum[(tokens, triton.cdiv(columns, 256))](out, shares[i], result, columns, top_k, 256)
        return result

    return call


def single_blocks(routes: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Every route in a block of its own, and the padded routes in all: what does not depend on ids."""
    order = torch.full((routes, rows), routes, dtype=torch.int32, device=device)
    order[:, 0] = torch.arange(routes, device=device)
    return order.view(-1), torch.full((1,), routes * rows, dtype=torch.int32, device=device)


def align_routes(ids: Tensor, rows: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """`Align` in torch operations, about a dozen kernels, none of which waits for the device."""
    flat = ids.reshape(-1).long()
    routes = flat.numel()
    count = torch.zeros(experts, dtype=torch.long, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat))
    padded = (count + rows - 1) // rows * rows
    ends = padded.cumsum(0)
    ordered, order = torch.sort(flat, stable=True)
    place = torch.arange(routes, device=ids.device) + (ends - padded - count.cumsum(0) + count)[ordered]
    size = triton.cdiv(min(routes * rows, routes + experts * (rows - 1)), rows) * rows
    blocks = torch.searchsorted(ends, torch.arange(0, size, rows, device=ids.device), right=True)
    sorted_ids = torch.full((size,), routes, dtype=torch.int32, device=ids.device).scatter_(0, place, order.int())
    return sorted_ids, blocks.clamp(max=experts - 1).int(), ends[-1:].int()


def _prepare(peer: Any, gemm: Gemm, config: str) -> None:
    """Compiles the kernel and registers it."""
    with _refusals():
        peer.kernel.humming.HummingKernel.prepare_kernels(gemm.config.to_str(), INDEXED, config)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Humming refuses by assertion."""
    try:
        yield
    except AssertionError as error:
        raise ValueError(f"Humming refuses it: {error}") from error


def _rows(config: str) -> int:
    return int(json.loads(config)["block_shape"][0])


def _overlapping(config: str) -> str:
    return json.dumps(json.loads(config) | {"use_pdl": True})
