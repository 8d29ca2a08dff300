"""A large graph folded into a drawing's worth of blocks, by module path.

    93 decoder layers -> [layers.0, 7 x [layers.1 .. layers.12], layers.85 .. layers.92, norm, lm_head]

A block is a run of nodes of one layer (a path up to its first number) or of one top module. Inside a block, segments
are runs of nodes of one child module, so that every edge between segments goes forward. Blocks with equal signatures
(same segments, ops, edges and highlights) are folded, also where a sequence of up to `MAX_PERIOD` blocks repeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from k3rewrite.graph.provenance import module_path, source_line
from k3rewrite.report.dump_text import target_name

MAX_PERIOD = 16
OUTSIDE = "outside of modules"


@dataclass
class OpLine:
    """One op of a segment: how often it stands there, and whether the pass made it."""

    op: str
    changed: bool
    count: int = 0
    examples: list[str] = field(default_factory=list)
    """a few "node name, source line" for the tooltip"""


@dataclass
class Segment:
    """A run of nodes of one child module of a block; `path` is relative to the block, "" for the block itself."""

    path: str
    lines: dict[tuple[str, bool], OpLine] = field(default_factory=dict)

    def add(self, node: Node, changed: bool) -> None:
        op = target_name(node).removesuffix(".default")
        line = self.lines.setdefault((op, changed), OpLine(op, changed))
        line.count += 1
        if len(line.examples) < 3:
            line.examples.append(f"{node.name}, {source_line(node)}")


@dataclass
class Block:
    """One layer or top module. `edges` are pairs of segment numbers, always forward."""

    title: str
    segments: list[Segment] = field(default_factory=list)
    edges: set[tuple[int, int]] = field(default_factory=set)

    @property
    def signature(self) -> tuple[object, ...]:
        segments = tuple((s.path, tuple((k, line.count) for k, line in s.lines.items())) for s in self.segments)
        layer = self.title.rpartition(".")
        return (layer[0] if layer[2].isdigit() else self.title, segments, frozenset(self.edges))


@dataclass
class Repeat:
    """`items`, `count` times one after the other. `first` and `last` are the titles of the first and last block."""

    items: list[Block | Repeat]
    count: int
    first: str
    last: str


def blocks_of(graph: Graph, new: Set[str] = frozenset()) -> list[Block]:
    """The blocks of a graph in execution order; inputs, attributes and the output are left out.

    `new` are the names of the nodes that are marked as changed.
    """
    blocks: list[Block] = []
    place: dict[Node, tuple[Block, int]] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        title, child = _split(module_path(node))
        if not blocks or blocks[-1].title != title:
            blocks.append(Block(title))
        block = blocks[-1]
        if not block.segments or block.segments[-1].path != child:
            block.segments.append(Segment(child))
        at = len(block.segments) - 1
        block.segments[at].add(node, node.name in new)
        place[node] = (block, at)
        for source in node.all_input_nodes:
            home = place.get(source)
            if home is not None and home[0] is block and home[1] != at:
                block.edges.add((home[1], at))
    return blocks


def _split(path: str) -> tuple[str, str]:
    """(block, child): ("layers.3", "mlp") of "layers.3.mlp.act"; ("norm", "") of "norm"."""
    parts = path.split(".") if path else []
    cut = next((i + 1 for i, part in enumerate(parts) if part.isdigit()), min(1, len(parts)))
    return ".".join(parts[:cut]) or OUTSIDE, parts[cut] if len(parts) > cut else ""


def fold(blocks: Sequence[Block]) -> list[Block | Repeat]:
    """The same sequence with repetitions folded, the one that covers most blocks first."""
    numbers: dict[tuple[object, ...], int] = {}
    kinds = [numbers.setdefault(block.signature, len(numbers)) for block in blocks]
    return _fold(blocks, kinds, MAX_PERIOD)


def _fold(blocks: Sequence[Block], kinds: Sequence[int], max_period: int) -> list[Block | Repeat]:
    folded: list[Block | Repeat] = []
    at = 0
    while at < len(blocks):
        period, count = _best_repeat(kinds[at:], max_period)
        if count == 1:
            folded.append(blocks[at])
            at += 1
            continue
        items = _fold(blocks[at : at + period], kinds[at : at + period], period - 1)
        end = at + period * count
        folded.append(Repeat(items, count, blocks[at].title, blocks[end - 1].title))
        at = end
    return folded


def _best_repeat(kinds: Sequence[int], max_period: int) -> tuple[int, int]:
    """(period, count) of the repetition at the start that covers most, the shortest period among equals."""
    best = (1, 1)
    for period in range(1, min(max_period, len(kinds) // 2) + 1):
        count = 1
        while kinds[count * period : (count + 1) * period] == kinds[:period]:
            count += 1
        if count > 1 and period * count > best[0] * best[1]:
            best = (period, count)
    return best


def count_boxes(items: Iterable[Block | Repeat]) -> int:
    """Blocks that are drawn."""
    return sum(count_boxes(item.items) if isinstance(item, Repeat) else 1 for item in items)
