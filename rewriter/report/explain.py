"""`k3rewrite explain`: from a report alone, what each pass matched, what it missed, and why.

Misses are grouped by reason, expectation and finding, so that 93 equal ones are one line with examples. Passes without
a candidate are named in one line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from k3rewrite.errors import ConfigError, did_you_mean
from k3rewrite.report.schema import BROKEN_GRAPH, SUPERSEDED, Miss, PassReport, RunReport, Site
from k3rewrite.report.table import summary_lines

EXAMPLES = 3
MOST_RUNS = 20
"""how many runs of a folder are listed"""
_NODE_NUMBER = re.compile(r"\b([A-Za-z_]\w*?)[_.]\d+\b")
_QUOTED_NODE = re.compile(r"'([A-Za-z_]\w*?)_#'")
_SOURCE = re.compile(r" \([^()\s]+:\d+ in [^()]*\)")
_T = TypeVar("_T")


def explain(report: RunReport, pass_name: str | None = None) -> Group:
    """The explanation of one pass (all of its sites) or of every pass (a few sites of each), to be printed by rich."""
    names = [entry.name for entry in report.passes]
    if pass_name is not None and pass_name not in names:
        raise ConfigError(f"no pass '{pass_name}' in this run", place="--pass", remedy=did_you_mean(pass_name, names))
    parts: list[Text | Padding] = [_headline(report)]
    if report.error == SUPERSEDED:
        parts.append(Text(report.error, "bold"))
    elif report.error:
        parts.append(Text(f"ended by an error: {report.error}", "bold red"))
    chosen = [entry for entry in report.passes if pass_name == entry.name or (pass_name is None and _has_news(entry))]
    for entry in chosen:
        parts.append(Text(""))
        parts.extend(_explain_pass(entry, every_site=pass_name is not None))
    if pass_name is None:
        parts += _rest(report, [entry.name for entry in report.passes if not _has_news(entry)])
    return Group(*parts)


def list_runs(reports: Sequence[RunReport]) -> Group:
    """One line for each run of a folder, in their order, and that the last is explained. Nothing of a single one."""
    if len(reports) < 2:
        return Group()
    shown = reports[-MOST_RUNS:]
    more = f" (the last {MOST_RUNS} of them)" if len(shown) < len(reports) else ""
    lines = [Text(f"{len(reports)} runs{more}; the last is explained below", "bold")]
    for report in shown:
        nodes = f"{report.passes[0].nodes_before} nodes, " if report.passes else ""
        done = ", ".join(f"{entry.name} {entry.matched}" for entry in report.passes if entry.matched)
        verdict = "" if report.end_to_end is None else f"; end to end {_verdict(report.end_to_end.passed)}"
        error = "; ended by an error" if report.error else ""
        error = "; superseded by a restart of Dynamo" if report.error == SUPERSEDED else error
        error += "; ended early by Dynamo" if any(note.startswith(BROKEN_GRAPH) for note in report.notes) else ""
        name = report.folder.name if report.folder is not None else report.info.model
        lines.append(
            Text(f"  {name}  {nodes}{done or 'nothing matched'}{verdict}{error}", overflow="ellipsis", no_wrap=True)
        )
    return Group(*lines, Text(""))


def _verdict(passed: bool) -> str:
    return "passed" if passed else "FAILED"


def _has_news(entry: PassReport) -> bool:
    return bool(entry.candidates or entry.expect is not None or entry.skipped)


def _rest(report: RunReport, idle: Sequence[str]) -> Iterator[Text | Padding]:
    """What belongs to no pass."""
    if idle:
        yield Text("")
        yield Text(f"no candidates: {', '.join(idle)}", "dim")
    if report.decomposed:
        yield Text("")
        yield Text("left to the reference", "bold")
        for (op, reason), entries in group_by(report.decomposed, lambda d: (d.op, d.reason)):
            yield _indented(f"{len(entries)} x {op}: {reason}", 2)
            yield _indented("at " + _examples([f"{d.site} ({d.source})" for d in entries]), 6, "dim")
    if report.notes:
        yield Text("")
        yield Text("notes", "bold")
        yield from (_indented(note, 2) for note in report.notes)
    if lines := [line for line in summary_lines(report) if not line.startswith("reference: ")]:
        yield Text("")
        yield from (Text(line) for line in lines)


def _headline(report: RunReport) -> Text:
    info = report.info
    facts = [info.model, info.config, info.phase, info.dtype, f"target {info.target}", f"pipeline {info.pipeline}"]
    return Text("  ".join(fact for fact in facts if fact and not fact.endswith(" ")), "bold")


def _explain_pass(entry: PassReport, *, every_site: bool) -> Iterator[Text | Padding]:
    title = Text(entry.name, "bold cyan")
    if entry.options:
        title.append("  " + ", ".join(f"{key}={value}" for key, value in entry.options.items()), "dim")
    yield title
    if entry.skipped:
        yield _indented(f"skipped: {entry.skipped}", 2)
        return
    refused = f", {len(entry.refused)} refused" if entry.refused else ""
    yield _indented(f"{entry.candidates} candidates: {entry.matched} matched, {len(entry.missed)} missed{refused}", 2)
    if entry.expect is not None:
        verdict, style = ("holds", "green") if entry.expect_ok else ("does NOT hold", "bold red")
        yield _indented(f"expectation '{entry.expect}' {verdict}", 2, style)
    yield from _explain_sites(entry.sites, every_site)
    yield from _explain_misses("missed", entry.missed, every_site)
    yield from _explain_misses("refused", entry.refused, every_site)


def _explain_sites(sites: Sequence[Site], every_site: bool) -> Iterator[Padding]:
    for (policy,), entries in group_by(sites, lambda s: (s.policy,)):
        yield _indented(f"matched {len(entries)}" + (f" ({policy})" if policy else ""), 2, "green")
        if every_site:
            for s in entries:
                replaced = f" -> {s.replaced_by}" if s.replaced_by else ""
                yield _indented(f"{s.site}{replaced}  at {s.source}{_in(s.module)}", 6)
        else:
            yield _indented("at " + _examples([f"{s.source}{_in(s.module)}" for s in entries]), 6, "dim")


def _explain_misses(word: str, misses: Sequence[Miss], every_site: bool) -> Iterator[Padding]:
    for (reason, expected, found), entries in group_by(misses, lambda m: (m.reason, m.expected, m.found)):
        yield _indented(f"{word} {len(entries)}: {reason}", 2, "yellow")
        if (expected or found) and not (expected in reason and found in reason):
            yield _indented(f"expected {expected or 'nothing'}", 6)
            yield _indented(f"found    {found or 'nothing'}", 6)
        if every_site:
            for m in entries:
                yield _indented(f"{m.site}  at {m.source}{_in(m.module)}", 6, "dim")
        else:
            yield _indented("at " + _examples([f"{m.source}{_in(m.module)}" for m in entries]), 6, "dim")


def group_by(entries: Iterable[_T], key: Callable[[_T], tuple[str, ...]]) -> list[tuple[tuple[str, ...], list[_T]]]:
    """Entries with one key together, large groups first.

    The numbers at the end of node names (`add_37`) and in module paths (`layers.3`) do not tell groups apart, nor do
    source lines in parentheses; values (`eps 1e-05`) do. A group is shown with the key of its first entry, without
    source lines if they differ.
    """
    groups: dict[tuple[str, ...], tuple[tuple[str, ...], list[_T]]] = {}
    for entry in entries:
        exact = key(entry)
        shown, members = groups.setdefault(tuple(_without_numbers(text) for text in exact), (exact, []))
        members.append(entry)
        if [_SOURCE.findall(text) for text in shown] != [_SOURCE.findall(text) for text in exact]:
            bare = tuple(_SOURCE.sub("", text) for text in shown)
            groups[tuple(_without_numbers(text) for text in exact)] = (bare, members)
    return sorted(groups.values(), key=lambda group: -len(group[1]))


def _without_numbers(text: str) -> str:
    return _QUOTED_NODE.sub(r"'\1'", _NODE_NUMBER.sub(r"\1_#", _SOURCE.sub("", text)))


def _in(module: str) -> str:
    return f" in {module}" if module else ""


def _examples(texts: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(texts))
    more = f" and {len(distinct) - EXAMPLES} more" if len(distinct) > EXAMPLES else ""
    return ", ".join(distinct[:EXAMPLES]) + more


def _indented(text: str, columns: int, style: str = "") -> Padding:
    return Padding(Text(text, style), (0, 0, 0, columns), expand=False)
