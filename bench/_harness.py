"""What every benchmark shares: graph timing, ceilings, poisoned memory, kernel names, results with their origin.

Protocol: everything inside CUDA graphs; one graph runs the call once on each of several input sets, so that inputs are
cold (together larger than the L2) unless a warm measurement is asked for; median, p10 and p90 over replays of that
graph; ceilings measured in the same process; outputs compared with fp64 in the same process.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import hashlib
import json
import math
import platform
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

import k3rewrite.kernels

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    """Microseconds a call."""

    median: float
    p10: float
    p90: float


def graph_time(calls: Sequence[Callable[[], Any]], replays: int = 200, warmup: int = 5, seconds: float = 0.2) -> Timing:
    """Time a CUDA graph that makes each of `calls` once, in order. They must have run before (compilation).

    `replays` of it, fewer if they took more than `seconds`, but at least 30.
    """
    graph = captured(calls)
    began = time.perf_counter()
    for _ in range(warmup):
        graph.replay()
    torch.cuda.synchronize()
    fitting = int(seconds * warmup / (time.perf_counter() - began))
    replays = min(replays, max(30, fitting))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) * 1e3 / len(calls) for start, end in events)
    return Timing(times[len(times) // 2], times[len(times) // 10], times[len(times) * 9 // 10])


def captured(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """A graph of `calls`. One of them runs eagerly first on a side stream, as capture wants."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def kernel_names(call: Callable[[], Any]) -> list[str]:
    """Names of the kernels that a captured graph of `call` runs, in order: what really ran, not what was meant to."""
    graph = captured([call])
    graph.replay()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graph.replay()
            torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


def sets_for(bytes_of_one: int, cold: bool, l2_bytes: int, most: int = 512) -> int:
    """How many input sets one graph walks through: together over twice the L2 if cold, at most `most`."""
    return max(4, min(most, math.ceil(2 * l2_bytes / max(1, bytes_of_one)))) if cold else 1


def poison(*shapes_and_dtypes: tuple[Sequence[int], torch.dtype]) -> None:
    """Fill freed memory with NaN, so that an output which is not written shows: the next allocations reuse it."""
    held = [torch.full(tuple(shape), math.nan, dtype=dtype, device="cuda") for shape, dtype in shapes_and_dtypes]
    del held


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """|result - reference| / |reference| in fp64; NaN where anything is."""
    return float((result.double() - reference).norm() / reference.norm())


LIMIT = 2e-2
"""relative error of a bf16 result up to which a variant is taken for right: ten times that of one rounding"""


class WrongResult(RuntimeError):
    """What a variant computes is something else, and so would its figure be."""


def demand(error: float) -> None:
    """Raises WrongResult for an error beyond `LIMIT`, or none at all."""
    if not error <= LIMIT:
        raise WrongResult(f"its relative error is {error:.1e}, and {LIMIT:g} is the most that is timed")


def timed(
    label: str, found: dict[str, Any], call: Callable[[int], Any], sets: int, copy_us: float, replays: int
) -> dict[str, Any]:
    """`found`, the errors of a variant that was looked at, with the time of `call` on `sets` input sets, its share of
    what a copy of as many bytes takes, and the kernels it runs; a line on it is printed."""
    call(0)
    timing = graph_time([functools.partial(call, i) for i in range(sets)], replays)
    kernels = kernel_names(functools.partial(call, 0))
    errors = " ".join(f"{error:.1e}" for error in found.values())
    print(
        f"    {label:48s} {timing.median:8.2f} us  {copy_us / timing.median * 100:5.1f} % of copy  error {errors}  "
        f"{len(kernels)} kernels",
        flush=True,
    )
    return found | {"us": timing, "of_copy": copy_us / timing.median, "kernels": kernels}


@triton.jit
def _copy(source, target, count, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    for step in tl.static_range(STEPS):
        index = start + step * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + index, tl.load(source + index, mask=index < count), mask=index < count)


@triton.jit
def _read(source, target, count, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in tl.static_range(STEPS):
        index = start + step * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(source + index, mask=index < count, other=0.0)
    tl.store(target + tl.program_id(0), tl.sum(total, axis=0))


COPY_SWEEP = ((1024, 1, 4), (2048, 1, 8), (4096, 1, 8), (2048, 2, 4), (4096, 2, 8), (8192, 1, 8), (4096, 4, 8))
"""(block, steps a program, warps)"""


ALIGNED = 128
"""elements: sets that do not begin at such a multiple are copied more slowly than they need be"""


def copy_ceiling(total_bytes: int, l2_bytes: int, replays: int = 60) -> tuple[float, str]:
    """Microseconds of the fastest copy that moves `total_bytes`, half read, half written, cold; its layout. Of
    Triton's, and the driver's memcpy."""
    count = total_bytes // 8 // ALIGNED * ALIGNED
    swept = _swept(_copy, count, count, total_bytes, l2_bytes, replays)
    return min(swept, (_memcpy(count, total_bytes, l2_bytes, replays), "memcpy"))


def _memcpy(count: int, total_bytes: int, l2_bytes: int, replays: int) -> float:
    sets = sets_for(total_bytes, True, l2_bytes)
    source, target = (torch.zeros(sets, count, device="cuda") for _ in range(2))
    return graph_time([lambda i=i: target[i].copy_(source[i]) for i in range(sets)], replays).median


def read_ceiling(total_bytes: int, l2_bytes: int, replays: int = 60) -> tuple[float, str]:
    """Microseconds of the fastest Triton read of `total_bytes`, cold; its layout."""
    return _swept(_read, total_bytes // 4 // ALIGNED * ALIGNED, total_bytes // 4096, total_bytes, l2_bytes, replays)


def _swept(kernel: Any, count: int, out_count: int, total_bytes: int, l2_bytes: int, replays: int) -> tuple[float, str]:
    sets = sets_for(total_bytes, True, l2_bytes)
    source = torch.randn(sets, count, device="cuda")
    target = torch.empty(sets, max(1, out_count), device="cuda")
    best = (math.inf, "")
    for block, steps, warps in COPY_SWEEP:
        grid = (triton.cdiv(count, block * steps),)
        calls = [
            lambda i=i, grid=grid, block=block, steps=steps, warps=warps: kernel[grid](
                source[i], target[i], count, block, steps, num_warps=warps
            )
            for i in range(sets)
        ]
        best = min(best, (graph_time(calls, replays).median, f"block {block} x {steps}, {warps} warps"))
    return best


def l2_bytes() -> int:
    return int(torch.cuda.get_device_properties(0).L2_cache_size)


def origin(commit: str = "") -> dict[str, Any]:
    """Machine, versions, date, commit and kernels of a measurement."""
    return {
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": commit or _commit(),
        "kernels": _kernels(),
    }


def _commit() -> str:
    """The checked-out commit, with "+" if files differ from it; "unknown" outside of a checkout."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


def _kernels() -> str:
    """A digest of the kernels' sources: of a copy without its commit, or a changed one, it says what was measured."""
    folder, digest = Path(next(iter(k3rewrite.kernels.__path__))), hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".h", ".hip"):
            digest.update(path.relative_to(folder).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def gpu_slug() -> str:
    """`h200` for "NVIDIA H200": the end of a result file's name."""
    return (
        torch.cuda.get_device_name(0)
        .lower()
        .replace("nvidia", "")
        .replace("amd instinct", "")
        .strip()
        .replace(" ", "-")
    )


def write_results(name: str, results: dict[str, Any], folder: Path = RESULTS) -> Path:
    """`<folder>/<name>-<gpu>.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{gpu_slug()}.json"
    path.write_text(json.dumps(results, indent=1, default=_plain) + "\n")
    return path


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark of a kernel has."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--peers", type=Path, help="folder with vLLM's files")
    made.add_argument("--out", type=Path, default=RESULTS)
    made.add_argument("--commit", default="", help="what to record where git is not at hand")
    made.add_argument("--replays", type=int, default=200)
    made.add_argument("--sweep", action="store_true")
    made.add_argument("--seconds", type=float, default=3600, help="after so long Inductor is left out")
    return made


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, Timing) else str(value)


@contextlib.contextmanager
def only_warning(what: str) -> Iterator[None]:
    """A variant that cannot run here, or is wrong, must not end the benchmark: its error is printed, and its figures
    are missing."""
    try:
        yield
    except (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        ImportError,
        OSError,
        AssertionError,
        TritonError,
    ) as error:
        print(f"{what} could not be measured: {type(error).__name__}: {str(error)[:300]}", flush=True)
