"""Which input of a region over chunks is what, found by running it: what it computes is compared with `k3::kda_chunk`.

    region(a, b, c, g, beta, state) in fp64, on small random inputs
    k3::kda_chunk(q, k, v, g, beta, state) in fp64, for each order of a, b, c     -> the one that gives the same

The scale of q is a factor of the result, so it is read off. A region that is nothing of this kind agrees with no order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from k3rewrite._torch_private import no_modes
from k3rewrite.checks.precise import DecisionInterpreter
from k3rewrite.kernels.kda_chunk.op import LOWEST_BOUND, kda_chunk
from k3rewrite.passes.chunk_region import Region
from k3rewrite.patterns import Unlike

CLOSE = 1e-8
"""relative difference of fp64 results in another order of summation; a wrong order of inputs is off by about 1"""
FEW_HEADS = 4
MOST_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 28}
"""of q, by device: beyond, running a region takes more memory than a compilation should, and it is left alone"""
MILD, STRONG = (-0.2, -0.01, 1.0), (-5.0, -2.0, 4.0)
"""gates from and to, and lengths of rows: long ones only where states fade, or the rule itself overflows"""


@dataclass(frozen=True)
class Roles:
    """Places of q, k and v among the rows of a region, what q is multiplied with inside, and whether states are values
    by keys."""

    q: int
    k: int
    v: int
    q_scale: float
    keys_last: bool


def find_roles(region: Region) -> Roles | None:
    """None if the region computes something else. Raises Unlike if it is too large to be run.

    It is run twice: with data of its own in every head, and with the same in all, which must all come out alike.
    """
    gates = region.gates.meta["val"]
    if gates.numel() > MOST_ELEMENTS.get(gates.device.type, MOST_ELEMENTS["cpu"]):
        raise Unlike(f"{gates.numel()} gates are too many to find out by running what they are for", region.gates)
    with no_modes():  # the backend works under AOTAutograd's fake mode
        kept = [region.out, *([] if region.new_state is None else [region.new_state])]
        module = _module(region.inputs, region.nodes, kept)

        def run(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return DecisionInterpreter(module, wide=True).run_on([value.clone() for value in values])

        values = draw(region)
        roles = _agreeing(region, values, run(values), FEW_HEADS)
        if roles is None:
            return None
        alike = [_of_one_head(value, i) for i, value in enumerate(draw(region, 1, STRONG))]
        results = run(alike)
        same = all(_close(result, _of_one_head(result, 5 * i)) for i, result in enumerate(results))
        return roles if same and _agreeing(region, alike, results, 1) == roles else None


def _of_one_head(value: Tensor, place: int) -> Tensor:
    """What the first head of the first row has, for all; `place` is that among the inputs: states come last."""
    first = value[:1, :, :1] if place < 5 else value[:1, :1]
    return first.expand_as(value)


def _agreeing(region: Region, values: Sequence[Tensor], results: Sequence[Tensor], heads: int) -> Roles | None:
    """Compared are a few heads of the first and the last row, spread over all: the op's reference takes its time."""
    row = max(1, region.sizes.batch - 1) if heads > 1 else region.sizes.batch
    head = max(1, (region.sizes.heads - 1) // (heads - 1)) if heads > 1 else region.sizes.heads
    tokens = (slice(None, None, row), slice(None), slice(None, None, head))
    states = (tokens[0], tokens[2])
    given = [value[tokens if i < 5 else states] for i, value in enumerate(values)]
    there = [results[0][tokens], *(state[states] for state in results[1:])]
    for roles in _orders(region, given):
        if (scale := _scale_of(roles, region, given, there)) is not None:
            return Roles(*roles[:3], scale, roles[3])
    return None


def _orders(region: Region, values: Sequence[Tensor]) -> Iterator[tuple[int, int, int, bool]]:
    """Which rows q, k and v may be, and whether a state is values by keys, as far as shapes leave it open."""
    keys, rows = region.sizes.keys, values[1:4]
    for q, k, v in itertools.permutations(range(3)):
        width = rows[v].shape[3]
        if rows[q].shape[3] == keys == rows[k].shape[3]:
            for keys_last in (True, False):
                if region.state is None or values[5].shape[2:] == ((width, keys) if keys_last else (keys, width)):
                    yield q, k, v, keys_last


def _scale_of(
    roles: tuple[int, int, int, bool], region: Region, values: Sequence[Tensor], results: Sequence[Tensor]
) -> float | None:
    """What the op's result is to be multiplied with, if in this order it is the region's."""
    q, k, v, keys_last = roles
    gates, rows, rates = values[0], values[1:4], values[4]
    if region.state is None:
        start = gates.new_zeros((gates.shape[0], gates.shape[2], rows[v].shape[3], region.sizes.keys))
    else:
        start = values[5] if keys_last else values[5].transpose(2, 3)
    out, state = kda_chunk(
        rows[q], rows[k], rows[v], gates, rates, None, None, start, None, None, None, None, None, False, LOWEST_BOUND,
        1.0, None, torch.float64,
    )  # fmt: skip
    scale = _factor(results[0], out)
    if scale is not None and region.new_state is not None:
        same = _close(results[1], state if keys_last else state.transpose(2, 3))
        return scale if same else None
    return scale


def draw(region: Region, seed: int = 0, how: tuple[float, float, float] = MILD) -> list[Tensor]:
    """Values that any input may have: gates below zero, rows of about the length asked for, rates between 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    lowest, highest, length = how
    each = length * (3 / region.sizes.keys) ** 0.5

    def uniform(node: Node, low: float, high: float) -> Tensor:
        value = torch.rand(node.meta["val"].shape, generator=generator, dtype=torch.float64)
        return (value * (high - low) + low).to(node.meta["val"].device)

    drawn = [uniform(region.gates, lowest, highest)]
    drawn += [uniform(row, -0.7 * each, each) for row in region.rows]
    drawn.append(uniform(region.rates, 0.02, 0.98))
    if region.state is not None:
        drawn.append(uniform(region.state, -length, length))
    return drawn


def constants(region: Region) -> dict[Node, Tensor]:
    """Values of what the region reads beside its inputs."""
    known = {*region.inputs, *region.nodes}
    read = dict.fromkeys(i for node in region.nodes for i in node.all_input_nodes if i not in known)
    with no_modes():
        return dict(zip(read, _module((), (), read)(), strict=True))


def _module(inputs: Iterable[Node], nodes: Iterable[Node], results: Iterable[Node]) -> GraphModule:
    """The nodes, with constants that they and others read, as a module of the inputs."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["val"] = node.meta["val"]

    def copied(node: Node) -> Node:
        if node not in copies:
            for above in node.all_input_nodes:
                copied(above)
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        return copies[node]

    for node in nodes:
        copied(node)
    graph.output(tuple(copied(node) for node in results))
    return GraphModule({}, graph)


def _factor(result: Tensor, expected: Tensor) -> float | None:
    """f with result = f times expected; None if there is none."""
    if result.shape != expected.shape:
        return None
    norm = float(expected.square().sum())
    factor = float((result * expected).sum()) / norm if norm else 0.0
    # what differs in the last places is the order of summation
    return float(f"{factor:.12g}") if factor and _close(result, expected * factor) else None


def _close(result: Tensor, expected: Tensor) -> bool:
    if result.shape != expected.shape:
        return False
    return float((result - expected).norm()) <= CLOSE * float(expected.norm())


def signature(region: Region) -> str:
    """Equal for regions that compute the same of their inputs: nodes in order, by target and arguments."""
    numbers = {node: i for i, node in enumerate((*region.inputs, *region.nodes))}

    def told(node: Node) -> Any:
        if node in numbers:
            return f"%{numbers[node]}"
        return str(node.target), map_arg((node.args, node.kwargs), told)

    shapes = [tuple(node.meta["val"].shape) for node in region.inputs]
    calls = [(str(node.target), map_arg((node.args, node.kwargs), told)) for node in region.nodes]
    return repr((shapes, calls, told(region.out), None if region.new_state is None else told(region.new_state)))
