"""Find a gated delta rule over a prompt, in chunks, by the module that it is traced in and by the shapes of its inputs.

    q, k, v, g [B, L, H, ·], beta [B, L, H], state [B, H, ·, ·]      inputs, wherever they come from
    ...  hundreds of nodes: padding, chunks, scores, an inverse, a loop over chunks ...
    o [B, L, H, V], new state [B, H, ·, ·]                           what is used outside

Nothing in between is matched. The region starts at the cumulative sum of gates over a chunk, goes up to values of whole
tokens, and down as long as everything that a node reads is inside, one of those, or a constant. Which input is q, and
whether all of it is the delta rule, is found by running it (`chunk_roles.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from operator import getitem

import torch
from torch import Tensor
from torch.fx import Node

from k3rewrite.graph.effects import effect
from k3rewrite.graph.provenance import module_path
from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.patterns import Unlike, describe

aten = torch.ops.aten
_MOVES = frozenset(
    {aten.transpose.int, aten.permute.default, aten.expand.default, aten.clone.default, aten.view.default,
     aten.slice.Tensor, aten.constant_pad_nd.default}
)  # fmt: skip
_ARITHMETIC = _MOVES | frozenset(
    {aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.mul.Tensor, aten.mul.Scalar,
     aten.neg.default, aten.exp.default, aten.exp2.default, aten.cumsum.default, aten.sum.dim_IntList,
     aten.mm.default, aten.bmm.default,
     aten.baddbmm.default, aten.tril.default, aten.triu.default, aten.linalg_solve_triangular.default,
     aten.diagonal.default, aten.cat.default, aten.stack.default, aten.select.int, aten.unbind.int, aten.split.Tensor,
     aten.split_with_sizes.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.t.default,
     aten._unsafe_view.default, aten.reshape.default, aten.alias.default, aten.unfold.default, aten._to_copy.default,
     aten.select_scatter.default, aten.slice_scatter.default, aten.zeros_like.default, aten.full_like.default, getitem}
)  # fmt: skip
"""what the rule is made of: no bound, no comparison, nothing that is another function for other values"""
_CHOOSES = {aten.masked_fill.Scalar: 1, aten.where.self: 0}
"""operators whose mask, the argument of this number, must be a constant"""
MOST_CONSTANT = 8
"""levels that a constant is looked for: arange, comparison, view"""


@dataclass(frozen=True)
class Sizes:
    """Of a cumulative sum over chunks [B, H, chunks, tokens, K]."""

    batch: int
    heads: int
    chunks: int
    tokens: int
    keys: int

    def length(self, shape: torch.Size) -> bool:
        """Whether [B, L, H, ...] has as many tokens L as these chunks hold."""
        if len(shape) < 3 or not all(isinstance(s, int) for s in shape[:3]):
            return False
        fits = self.tokens * (self.chunks - 1) < shape[1] <= self.tokens * self.chunks
        return shape[0] == self.batch and shape[2] == self.heads and fits

    def is_state(self, value: Tensor) -> bool:
        shape = tuple(value.shape)
        floats = value.dtype.is_floating_point
        own = len(shape) == 4 and same_sizes(shape[:2], (self.batch, self.heads))
        return floats and own and any(same_size(size, self.keys) for size in shape[2:])


@dataclass(frozen=True)
class Region:
    """`gates`: g. `rows`: q, k and v in any order. `rates`: beta. `state`: what the first chunk starts from, if any.
    `new_state`: what the last leaves, if it is used. `nodes` are what they replace, without inputs, in graph order."""

    sizes: Sizes
    gates: Node
    rows: tuple[Node, ...]
    rates: Node
    state: Node | None
    out: Node
    new_state: Node | None
    nodes: tuple[Node, ...]

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (self.gates, *self.rows, self.rates, *(() if self.state is None else (self.state,)))


@dataclass
class _Growing:
    sizes: Sizes
    module: str
    inside: dict[Node, None] = field(default_factory=dict)
    inputs: dict[Node, None] = field(default_factory=dict)

    def takes(self, node: Node) -> bool:
        """Take in a node with what leads to it from whole tokens, states and constants; False if anything else does."""
        found: dict[Node, None] = {}
        inputs: dict[Node, None] = {}
        if not self._climb(node, found, inputs):
            return False
        self.inside.update(found)
        self.inputs.update(inputs)
        return True

    def _climb(self, first: Node, found: dict[Node, None], inputs: dict[Node, None]) -> bool:
        todo = [first]
        while todo:
            node = todo.pop()
            if node in self.inside or node in found or node in self.inputs:
                continue
            value = node.meta.get("val")
            if node is not first and isinstance(value, Tensor) and self._is_input(value) and not self._is_moved(node):
                inputs[node] = None
            elif _is_constant(node) or (module_path(node) == self.module and _is_plain(node)):
                found[node] = None
                todo.extend(node.all_input_nodes)
            else:
                return False
        return True

    def _is_moved(self, node: Node) -> bool:
        """A view or copy of what is an input itself: padding by nothing, a transposed state."""
        source = node.args[0] if node.target in _MOVES else None
        return isinstance(source, Node) and module_path(node) == self.module and self._is_input(source.meta["val"])

    def _is_input(self, value: Tensor) -> bool:
        shape = value.shape
        tokens = self.sizes.length(shape) and (len(shape) == 3 or (len(shape) == 4 and not same_size(shape[3], 1)))
        return (tokens and value.dtype.is_floating_point) or self.sizes.is_state(value)


def is_site(node: Node) -> bool:
    """A cumulative sum over the tokens of chunks."""
    value = node.meta.get("val")
    return (
        isinstance(value, Tensor)
        and value.dim() == 5
        and value.dtype.is_floating_point
        and all(isinstance(s, int) for s in value.shape)
        and node.args[1] in (3, -2)
    )


def find_region(anchor: Node) -> Region:
    """The region around a cumulative sum of gates. Raises Unlike."""
    sizes = Sizes(*anchor.meta["val"].shape)
    if sizes.heads == sizes.tokens * sizes.chunks:
        raise Unlike("there are as many heads as tokens, and shapes do not tell one from the other", anchor)
    grown = _Growing(sizes, module_path(anchor))
    if not grown.takes(anchor) or len(grown.inputs) != 1:
        raise Unlike("the gates do not come from one value [batch, tokens, heads, keys] of the same module", anchor)
    (gates,) = grown.inputs
    out = _grow_down(grown, anchor)
    if out is None:
        raise Unlike("no value of whole tokens [batch, tokens, heads, values] comes out of the chunks", anchor)
    inside = _without_users_of(out, grown.inside)
    while others := [n for n in _used_outside(inside, out) if not sizes.is_state(n.meta["val"])]:
        last = max(others)
        source = last.args[0]
        of_state = isinstance(source, Node) and source in inside and sizes.is_state(source.meta["val"])
        if not of_state or any(user in inside for user in last.users):
            raise Unlike(f"the inner value {describe(last)} is also used outside", last)
        inside.discard(last)  # what is made of the last state
    states = _used_outside(inside, out)
    if len(states) > 1:
        raise Unlike("more than one state is used outside: what stands between chunks is not kept", states[0])
    nodes = tuple(sorted(n for n in inside if not _is_constant(n)))
    for node in nodes:
        if not _is_arithmetic(node):
            raise Unlike(f"{describe(node)} is no part of the rule: for other values it may do something else", node)
    return _region(sizes, gates, grown, out, states[0] if states else None, nodes)


def _region(
    sizes: Sizes, gates: Node, grown: _Growing, out: Node, new_state: Node | None, nodes: tuple[Node, ...]
) -> Region:
    read = {i for n in nodes for i in n.all_input_nodes}
    inputs = [n for n in grown.inputs if n in read]
    state = [n for n in inputs if sizes.is_state(n.meta["val"])]
    rates = [n for n in inputs if n.meta["val"].dim() == 3]
    rows = [n for n in inputs if n not in state and n not in rates and n is not gates]
    if symbolic := [n for n in inputs if not all(isinstance(size, int) for size in n.meta["val"].shape)]:
        raise Unlike("a size is symbolic, and a region is found out by running it", symbolic[0])
    if len(rows) != 3 or len(rates) != 1 or len(state) > 1:
        raise Unlike(
            f"besides gates the chunks read {len(rows)} values [batch, tokens, heads, ·], {len(rates)} [batch, tokens, "
            f"heads] and {len(state)} states; expected 3, 1 and at most 1",
            out,
        )
    return Region(sizes, gates, tuple(sorted(rows)), rates[0], state[0] if state else None, out, new_state, nodes)


def _grow_down(grown: _Growing, anchor: Node) -> Node | None:
    """Take in what follows from the region, in graph order; the value of whole tokens that comes out first."""
    out: Node | None = None
    seen = {anchor}
    todo = list(anchor.users)
    heapify(todo)
    while todo:
        node = heappop(todo)
        if node in seen:
            continue
        seen.add(node)
        before = len(grown.inside)
        if module_path(node) != grown.module or not _is_plain(node) or not grown.takes(node):
            continue
        value = node.meta.get("val")
        if (
            isinstance(value, Tensor)
            and value.dim() == 4
            and grown.sizes.length(value.shape)
            and not same_size(value.shape[3], 1)
        ):
            out = node if out is None else min(out, node)
            continue
        # what came in together with it, from k and v say, has users of its own
        for taken in islice(grown.inside, before, None):
            for user in taken.users:
                heappush(todo, user)
    return out


def _used_outside(inside: set[Node], out: Node) -> list[Node]:
    """Values of the region beside its result that something else reads."""
    return [n for n in inside if n is not out and any(u not in inside for u in n.users) and not _is_constant(n)]


def _without_users_of(out: Node, inside: Iterable[Node]) -> set[Node]:
    """The region up to its result."""
    after: set[Node] = set()
    for node in sorted(inside):
        if node is not out and any(i is out or i in after for i in node.all_input_nodes):
            after.add(node)
    return set(inside) - after


def _is_arithmetic(node: Node) -> bool:
    mask = node.args[_CHOOSES[node.target]] if node.target in _CHOOSES else None
    return node.target in _ARITHMETIC or (isinstance(mask, Node) and _is_constant(mask))


def _is_plain(node: Node) -> bool:
    return node.op == "call_function" and effect(node) is None


def _is_constant(node: Node, levels: int = MOST_CONSTANT) -> bool:
    """Computed from no tensor of the model."""
    if not _is_plain(node) or levels == 0:
        return False
    return all(_is_constant(i, levels - 1) for i in node.all_input_nodes)
