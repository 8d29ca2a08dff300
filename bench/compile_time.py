"""Compile time of full-width Kimi K3 (decode, fake tensors, no weights) over the number of layers.

    python bench/compile_time.py --layers 12 24 48 93 --inductor 12 24

For each depth, in a fresh process: seconds of tracing (Dynamo and AOTAutograd), of the passes, of emission; peak
memory; nodes before and after; sites. With --inductor also the seconds that Inductor itself takes on the captured graph
and on the rewritten one (code generation and the C++ compiler; nothing is run). Writes
bench/results/compile_time-<machine>.json and says how far growth is from linear.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _harness import RESULTS, origin


def measure(layers: int, target: str, inductor: bool) -> dict[str, Any]:
    """One depth, in this process."""
    import torch

    from k3rewrite._torch_private import FakeTensorMode
    from k3rewrite.capture import capture
    from k3rewrite.driver.compilation import Compilation, Rewritten
    from k3rewrite.finalise import finalise_inductor
    from k3rewrite.kernels import OPS
    from k3rewrite.models.kimi_k3 import KimiK3Config, build_kimi_k3
    from k3rewrite.passes import PASSES
    from k3rewrite.pipeline.config import load_pipeline
    from k3rewrite.report.run_folder import RunFolder
    from k3rewrite.report.schema import RunInfo, RunReport
    from k3rewrite.targets import load_target

    config = KimiK3Config().with_layers(layers)
    with FakeTensorMode():
        started = time.perf_counter()
        model, args, kwargs = build_kimi_k3(config, batch=4, context=64, dtype=torch.bfloat16)
        built = time.perf_counter()
        captured = capture(model, args, kwargs)
        traced = time.perf_counter()
    row: dict[str, Any] = {
        "layers": layers,
        "build_s": built - started,
        "trace_s": traced - built,
        "nodes": len(captured.module.graph.nodes),
    }
    original = captured.fresh() if inductor else None
    report = RunReport(info=RunInfo(model="kimi-k3"))
    pipeline = load_pipeline("kimi-k3-decode", known_passes=PASSES)
    with tempfile.TemporaryDirectory() as folder:
        compilation = Compilation(
            pipeline,
            load_target(target),
            report,
            config.counts() | {"target": target},
            RunFolder.create(folder),
            run=False,
        )
        started = time.perf_counter()
        with contextlib.suppress(Rewritten):
            compilation(captured)
        row["pipeline_s"] = time.perf_counter() - started
    row["passes_s"] = report.timings.passes_s
    row["emit_s"] = report.timings.emit_s
    row["total_s"] = row["build_s"] + row["trace_s"] + row["pipeline_s"]
    row["nodes_after"] = report.passes[-1].nodes_after
    row["fused"] = next(p.matched for p in report.passes if p.name == "fuse_attn_res_norm")
    row["launches_before"], row["launches_after"] = report.passes[0].launches_before, report.passes[-1].launches_after
    row["peak_GiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if original is not None:
        ops = {op.overload: op for op in OPS.values()}
        torch.compile(lambda x: x.sin() + 1, dynamic=False)(torch.ones(64))  # finds the compiler, builds its headers
        for name, graph in (("inductor_original_s", original), ("inductor_rewritten_s", captured)):
            with tempfile.TemporaryDirectory() as cache:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
                started = time.perf_counter()
                finalise_inductor(graph.module, graph.inputs, graph.static_inputs, ops=ops)
                row[name] = time.perf_counter() - started
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 93])
    parser.add_argument("--inductor", type=int, nargs="*", default=[], help="depths at which Inductor is timed as well")
    parser.add_argument("--target", default="mi355x")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(measure(given.one, given.target, bool(given.inductor))))
        return
    rows = []
    for layers in given.layers:
        command = [sys.executable, __file__, "--one", str(layers), "--target", given.target]
        command += ["--inductor", "1"] if layers in given.inductor else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(
            "  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()), flush=True
        )
    first, last = rows[0], rows[-1]
    growth = {
        key: (last[key] / first[key]) / (last["layers"] / first["layers"]) for key in ("trace_s", "passes_s", "total_s")
    }
    print("growth over linear (1 is linear): " + ", ".join(f"{k} {v:.2f}" for k, v in growth.items()))
    path = given.out / f"compile_time-{platform.machine()}-{os.cpu_count()}cores.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({**origin(), "cpu": _cpu(), "rows": rows, "growth_over_linear": growth}, indent=1) + "\n"
    )
    print(f"written: {path}")


def _cpu() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{len(names)} x {names[0].split(':', 1)[1].strip()}" if names else platform.processor()


if __name__ == "__main__":
    main()
