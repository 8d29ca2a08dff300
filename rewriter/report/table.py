"""The table at the end of a run, and a one-line summary of each other part of a report."""

from __future__ import annotations

from collections import Counter

from rich import box
from rich.table import Table
from rich.text import Text

from k3rewrite.report.schema import PassReport, RunReport

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def pass_table(report: RunReport) -> Table:
    """Per pass: candidate sites, matched, missed (refused sites included), nodes, launches and bytes, seconds.

    A mark says whether an expectation on the matches holds. Launches and bytes are what the graph would cost node by
    node, before and after the pass.
    """
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    # In a narrow terminal the cells wrap, but no name and no number is cut.
    table.add_column("pass", no_wrap=True, min_width=max((len(entry.name) for entry in report.passes), default=4))
    for name in ("sites", "matched", "missed", "nodes", "launches", "bytes", "seconds"):
        table.add_column(name, justify="right", overflow="fold", min_width=len(name))
    for entry in report.passes:
        table.add_row(*_row(entry), style="dim" if entry.skipped else None)
    return table


def _row(entry: PassReport) -> tuple[Text, ...]:
    if entry.skipped:
        return (Text(entry.name), Text(""), Text("skipped"), *(Text("") for _ in range(5)))
    matched = Text(str(entry.matched))
    if entry.expect is not None:
        matched.append(" ✓" if entry.expect_ok else " ✗", "green" if entry.expect_ok else "bold red")
    missed = len(entry.missed) + len(entry.refused)
    return (
        Text(entry.name),
        Text(str(entry.candidates)),
        matched,
        Text(str(missed), "yellow" if missed else ""),
        _change(str(entry.nodes_before), str(entry.nodes_after)),
        _change(str(entry.launches_before), str(entry.launches_after)),
        _change(human_bytes(entry.bytes_before), human_bytes(entry.bytes_after)),
        Text(f"{entry.seconds:.2f}"),
    )


def _change(before: str, after: str) -> Text:
    return Text(before) if before == after else Text(f"{before} → {after}")


def human_bytes(count: int) -> str:
    """Bytes in powers of 1000, three significant figures: 1234567 -> "1.23 MB"."""
    value = float(count)
    for unit in _UNITS:
        if abs(value) < 999.5 or unit == _UNITS[-1]:
            return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("the last unit ends the loop")


def summary_lines(report: RunReport) -> list[str]:
    """Kernels, what went to the reference and why, the end-to-end check, the timings; one line each, if there."""
    lines = []
    if report.kernels:
        executed = Counter(kernel.executed for kernel in report.kernels)
        where = ", ".join(
            f"{count} on {place}" if place != "no" else f"{count} not run" for place, count in executed.items()
        )
        lines.append(f"kernels: {len(report.kernels)} for {report.info.target} (executed: {where})")
    reasons = Counter((entry.op, entry.reason) for entry in report.decomposed)
    lines += [f"reference: {op} x {count}: {reason}" for (op, reason), count in sorted(reasons.items())]
    if report.end_to_end is not None:
        check = report.end_to_end
        lines.append(
            f"end to end: {'passed' if check.passed else 'FAILED'} on {check.executed_on}; relative error against fp64 "
            f"{check.max_rel_error_vs_fp64:.3g}, eager {check.eager_rel_error_vs_fp64:.3g}"
        )
    stages = [
        (name, getattr(report.timings, f"{name}_s"))
        for name in ("capture", "passes", "emit", "finalise", "run", "total")
    ]
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stages if seconds is not None)
    if spent:
        lines.append(f"time: {spent}")
    return lines
