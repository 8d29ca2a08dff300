"""Draw what bench/experts.py measured: the share of the fastest read that each variant reaches, by number of tokens.

python bench/plot_experts.py bench/results/experts-h200.json docs/figures/experts-h200.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

STYLES = {
    "ours": ("#c0392b", "-", "k3rewrite"),
    "ours, published form": ("#c0392b", ":", "published form of warp decode"),
    "vLLM": ("#2c3e50", "-", "vLLM 0.26"),
    "vLLM, tuned apart": ("#2c3e50", ":", "vLLM, its two products tuned apart"),
    "Humming": ("#2c3e50", "-", "Humming"),
    "Humming, tuned": ("#2c3e50", ":", "Humming, tuned"),
    "Marlin": ("#7f8c8d", "-", "Marlin"),
    "Marlin, tuned": ("#7f8c8d", ":", "Marlin, tuned"),
    "Inductor": ("#2980b9", "-", "Inductor on gather + bmm"),
    "grouped_mm": ("#27ae60", "-", "torch grouped_mm"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("figure", type=Path)
    options = parser.parse_args()
    measured = json.loads(options.results.read_text())
    entries = [entry for entry in measured["entries"] if entry["routing"] == "uniform"]
    shapes = list(dict.fromkeys(entry["shape"] for entry in entries))
    plt.rcParams["svg.hashsalt"] = "k3rewrite"  # the same figures give the same file
    figure, axes = plt.subplots(1, len(shapes), figsize=(4.6 * len(shapes) + 1, 3.8), squeeze=False, sharey=True)
    for axis, shape in zip(axes[0], shapes, strict=True):
        for name, (colour, line, label) in STYLES.items():
            points = [
                (entry["tokens"], 100 * entry["variants"][name]["of_read"])
                for entry in entries
                if entry["shape"] == shape and name in entry["variants"]
            ]
            if points:
                axis.plot(*zip(*points, strict=True), color=colour, linestyle=line, marker="o", ms=3, label=label)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks := sorted({entry["tokens"] for entry in entries}), [str(tick) for tick in ticks])
        axis.set_ylim(0, 100)
        axis.set_title(f"{shape}, {measured['format']}", fontsize=10)
        axis.set_xlabel("tokens")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("% of the fastest read of the same bytes")
    axes[0][-1].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    options.figure.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.figure, metadata={"Date": None})


if __name__ == "__main__":
    main()
