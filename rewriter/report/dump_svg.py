"""A graph as an SVG picture, folded by module path so that 93 layers stay readable.

Top to bottom: the blocks of `fold.py`, repeated ones once in a frame that says how often. Inside a block: one box for
each segment, placed in layers by data flow, with its ops and how often they stand there. Ops that the pass made are
marked by colour and by a leading `+`; the tooltip of an op names nodes and source lines. No program and no font is
needed: every size is computed from the text (a fixed-width font).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from html import escape
from typing import Protocol

from torch.fx import GraphModule

from k3rewrite.report.fold import Block, OpLine, Repeat, Segment, blocks_of, fold

CHAR, LINE = 6.7, 15.0
"""width of a character and height of a line at 11 px"""
PAD, GAP, ROW_GAP = 8.0, 14.0, 28.0
MAX_LINES = 16
"""ops listed in a segment; the others are counted"""

STYLE = """
 text { font: 11px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: #1f2933; }
 .title { font-weight: bold; } .head { font-size: 15px; font-weight: bold; } .dim { fill: #7b8794; }
 .block { fill: #f5f7fa; stroke: #9aa5b1; } .repeat { fill: none; stroke: #486581; stroke-dasharray: 5 3; }
 .segment { fill: #ffffff; stroke: #9aa5b1; } .changed { fill: #fff3d6; stroke: #de911d; }
 .own { fill: #0b69a3; } .new { fill: #b44d12; font-weight: bold; } .edge { fill: none; stroke: #9aa5b1; }
"""

_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def graph_svg(module: GraphModule, *, title: str, subtitle: str = "", new: Set[str] | None = None) -> str:
    """The picture as one SVG text. `new` are the names of the nodes that the pass made; they are highlighted."""
    blocks = blocks_of(module.graph, new or frozenset())
    column = _Column([_figure(item) for item in fold(blocks)], arrows=True)
    made = sum(line.count for block in blocks for s in block.segments for line in s.lines.values() if line.changed)
    legend = f"+ {made} nodes made by this pass" if new is not None else ""
    heads = [(title, "head"), (subtitle, "dim"), (legend, "new")]
    width = max(
        [column.w + 2 * PAD, *(len(text) * (9.2 if kind == "head" else CHAR) + 2 * PAD for text, kind in heads)]
    )
    parts = []
    y = PAD
    for text, kind in heads:
        if text:
            y += 20 if kind == "head" else LINE
            parts.append(_text(PAD, y, text, kind))
    y += GAP
    parts.extend(column.draw((width - column.w) / 2, y))
    height = y + column.h + PAD
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0L8 4L0 8z" fill="#9aa5b1"/></marker></defs>',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


class _Figure(Protocol):
    """Something with a size that can be drawn at a place."""

    w: float
    h: float

    def draw(self, x: float, y: float) -> Iterator[str]: ...


def _figure(item: Block | Repeat) -> _Figure:
    if isinstance(item, Repeat):
        title = f"{item.count} \u00d7   {item.first} \u2026 {item.last}"
        return _Frame(_Row([_figure(inner) for inner in item.items]), title, "repeat")
    return _Frame(_Flow(item), item.title, "block")


class _Frame:
    """A titled rectangle around a figure."""

    def __init__(self, inside: _Figure, title: str, kind: str) -> None:
        self.inside, self.title, self.kind = inside, title, kind
        self.w = max(inside.w, len(title) * CHAR) + 2 * PAD
        self.h = inside.h + LINE + 3 * PAD

    def draw(self, x: float, y: float) -> Iterator[str]:
        yield _rect(x, y, self.w, self.h, self.kind)
        yield _text(x + PAD, y + LINE + 2, self.title, "title")
        yield from self.inside.draw(x + (self.w - self.inside.w) / 2, y + LINE + 2 * PAD)


class _Row:
    """Figures side by side, tops aligned, an arrow from each to the next."""

    def __init__(self, figures: Sequence[_Figure]) -> None:
        self.figures = figures
        self.w = sum(f.w for f in figures) + ROW_GAP * (len(figures) - 1)
        self.h = max(f.h for f in figures)

    def draw(self, x: float, y: float) -> Iterator[str]:
        for at, figure in enumerate(self.figures):
            if at:
                yield _edge(x - ROW_GAP, y + LINE, x, y + LINE)
            yield from figure.draw(x, y)
            x += figure.w + ROW_GAP


class _Column:
    """Figures below each other, centred."""

    def __init__(self, figures: Sequence[_Figure], arrows: bool) -> None:
        self.figures, self.arrows = figures, arrows
        self.w = max((f.w for f in figures), default=0.0)
        self.h = sum(f.h for f in figures) + ROW_GAP * max(len(figures) - 1, 0)

    def draw(self, x: float, y: float) -> Iterator[str]:
        middle = x + self.w / 2
        for at, figure in enumerate(self.figures):
            if at and self.arrows:
                yield _edge(middle, y - ROW_GAP, middle, y)
            yield from figure.draw(middle - figure.w / 2, y)
            y += figure.h + ROW_GAP


@dataclass
class _Card:
    """One segment: its module and its ops."""

    segment: Segment

    def __post_init__(self) -> None:
        # What the pass made comes first, so that it is never among the ops that are only counted.
        lines = sorted(self.segment.lines.values(), key=lambda line: not line.changed)
        self.shown = lines if len(lines) <= MAX_LINES else lines[: MAX_LINES - 1]
        self.rest = sum(line.count for line in lines[len(self.shown) :])
        self.title = self.segment.path or "(itself)"
        texts = [self.title, *(_line_text(line) for line in self.shown)]
        self.w = max(len(text) for text in texts) * CHAR + 2 * PAD
        self.h = (1 + len(self.shown) + bool(self.rest)) * LINE + 2 * PAD - 3

    @property
    def changed(self) -> bool:
        return any(line.changed for line in self.segment.lines.values())

    def draw(self, x: float, y: float) -> Iterator[str]:
        yield _rect(x, y, self.w, self.h, "changed" if self.changed else "segment")
        y += LINE
        yield _text(x + PAD, y, self.title, "title" if self.segment.path else "dim")
        for line in self.shown:
            y += LINE
            kind = "new" if line.changed else "own" if line.op.startswith("k3.") else ""
            yield _text(x + PAD, y, _line_text(line), kind, tooltip="\n".join(line.examples))
        if self.rest:
            yield _text(x + PAD, y + LINE, f"and {self.rest} more", "dim")


class _Flow:
    """The segments of a block in layers: a segment stands below everything that it reads."""

    def __init__(self, block: Block) -> None:
        self.cards = [_Card(segment) for segment in block.segments]
        self.edges = sorted(block.edges)
        depth = [0] * len(self.cards)
        for source, sink in self.edges:  # sorted and always forward, so a source's depth is final when it is read
            depth[sink] = max(depth[sink], depth[source] + 1)
        rows: list[list[int]] = [[] for _ in range(max(depth, default=-1) + 1)]
        for number, row_number in enumerate(depth):
            rows[row_number].append(number)
        self.place: dict[int, tuple[float, float]] = {}
        self.w = max((self._row_width(row) for row in rows), default=0.0)
        y = 0.0
        for row in rows:
            row.sort(key=self._pull)
            x = (self.w - self._row_width(row)) / 2
            for number in row:
                self.place[number] = (x, y)
                x += self.cards[number].w + GAP
            y += max(self.cards[number].h for number in row) + ROW_GAP
        self.h = max(y - ROW_GAP, 0.0)

    def _row_width(self, row: Sequence[int]) -> float:
        return sum(self.cards[number].w for number in row) + GAP * (len(row) - 1)

    def _pull(self, number: int) -> float:
        """Mean horizontal place of what a segment reads: rows ordered by it have few crossings."""
        sources = [self.place[a][0] + self.cards[a].w / 2 for a, b in self.edges if b == number and a in self.place]
        return sum(sources) / len(sources) if sources else self.w / 2

    def draw(self, x: float, y: float) -> Iterator[str]:
        for source, sink in self.edges:
            (ax, ay), (bx, by) = self.place[source], self.place[sink]
            a, b = self.cards[source], self.cards[sink]
            yield _edge(x + ax + a.w / 2, y + ay + a.h, x + bx + b.w / 2, y + by)
        for number, card in enumerate(self.cards):
            yield from card.draw(x + self.place[number][0], y + self.place[number][1])


def _line_text(line: OpLine) -> str:
    mark = "+ " if line.changed else ""
    times = f"  \u00d7{line.count}" if line.count > 1 else ""
    return mark + line.op + times


def _clean(text: str) -> str:
    """Text for XML: escaped, without characters that XML cannot hold."""
    return escape(_NOT_XML.sub("\ufffd", text), quote=True)


def _text(x: float, y: float, text: str, kind: str, tooltip: str = "") -> str:
    title = f"<title>{_clean(tooltip)}</title>" if tooltip else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" xml:space="preserve">{title}{_clean(text)}</text>'


def _rect(x: float, y: float, w: float, h: float, kind: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="4" class="{kind}"/>'


def _edge(ax: float, ay: float, bx: float, by: float) -> str:
    """A curve that leaves downwards and arrives from above; straight where it goes sideways or straight down."""
    if abs(ax - bx) < 1 or abs(ay - by) < 1:
        path = f"M{ax:.1f} {ay:.1f}L{bx:.1f} {by:.1f}"
    else:
        bend = (by - ay) / 2
        path = f"M{ax:.1f} {ay:.1f}C{ax:.1f} {ay + bend:.1f} {bx:.1f} {by - bend:.1f} {bx:.1f} {by:.1f}"
    return f'<path d="{path}" class="edge" marker-end="url(#tip)"/>'
