"""Lift Kimi Delta Attention over a prompt, hundreds of nodes in chunks, to one op.

    G    = g.cumsum(chunk)                             -> o, S = k3::kda_chunk(q, k, v, g, beta, None, None, S, ...)
    A, Q = scores of keys and queries, decayed
    T    = (I + A)⁻¹, by whatever means
    for each chunk: o, S = ...

It is found by its module and its inputs (`chunk_region.py`), and by running it (`chunk_roles.py`): how the inverse is
spelled does not matter. The decay must be bounded below, as Kimi K3's is: kernels split it within blocks of 16 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

import k3rewrite.kernels  # noqa: F401  registers the op that is built
from k3rewrite.graph.layout import keeps_order
from k3rewrite.kernels.kda_chunk.op import LOWEST_BOUND
from k3rewrite.passes.chunk_region import Region, find_region, is_site
from k3rewrite.passes.chunk_roles import Roles, constants, draw, find_roles, signature
from k3rewrite.patterns import (
    OPERATORS,
    Anything,
    Attempt,
    Builder,
    CounterExample,
    Example,
    Match,
    Policy,
    Refusal,
    Rule,
    Unlike,
)
from k3rewrite.pipeline.pass_base import RulePass

aten = torch.ops.aten


class LiftKdaChunk(Rule):
    """See the module docstring. Regions that are alike are run once."""

    name = "kda_chunk"
    policy = Policy.CHANGES_ROUNDING
    anchors = frozenset({aten.cumsum.default})
    pattern = Anything()
    exposable = frozenset({"new_state"})
    may_move_strides = True

    def __init__(self) -> None:
        self._roles: dict[str, Roles | None] = {}
        super().__init__()

    def is_site(self, node: Node) -> bool:
        return is_site(node)

    def matches(self, anchor: Node) -> tuple[Iterator[Match], Attempt]:
        attempt = Attempt(anchor)
        try:
            region = find_region(anchor)
            roles = self._roles_of(region)
            if roles is None:
                raise Unlike("run on small inputs, it does not compute the gated delta rule", region.out)
        except Unlike as unlike:
            attempt.because(unlike)
            return iter([]), attempt
        bindings: dict[str, Any] = {"anchor": anchor, "region": region, "roles": roles, "out": region.out}
        if region.new_state is not None:
            bindings["new_state"] = region.new_state
        return iter([Match(region.out, bindings, frozenset(region.nodes))]), attempt

    def _roles_of(self, region: Region) -> Roles | None:
        key = signature(region)
        if key not in self._roles:
            self._roles[key] = find_roles(region)
        return self._roles[key]

    def check(self, match: Match) -> Refusal | None:
        region: Region = match["region"]
        bound = lowest(region.gates)
        if bound is None or not LOWEST_BOUND <= bound <= 0:
            said = "is not known to be bounded below" if bound is None else f"may be as low as {bound}"
            return Refusal(f"the decay {said}; in chunks {LOWEST_BOUND} a token is held", region.gates)
        dtypes = {node.meta["val"].dtype for node in (*region.inputs, region.out)}
        if len(dtypes) != 1:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            return Refusal(f"the rule is computed in several dtypes: {names}", region.out)
        return None

    def region_values(self, match: Match, seed: int) -> Mapping[Node, Tensor]:
        region: Region = match["region"]
        values = draw(region, seed)
        drawn = {n: v.to(n.meta["val"].dtype) for n, v in zip(region.inputs, values, strict=True)}
        return drawn | constants(region)

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        region: Region = match["region"]
        roles: Roles = match["roles"]
        q, k, v = (region.rows[place] for place in (roles.q, roles.k, roles.v))
        value = v.meta["val"]
        state = region.state
        if state is None:
            sizes = [*value.shape[:1], value.shape[2], value.shape[3], region.sizes.keys]
            state = builder.call(aten.full.default, sizes, 0.0, dtype=value.dtype, device=value.device)
        elif not roles.keys_last:
            state = builder.call(aten.transpose.int, state, 2, 3)
        node = builder.call(
            torch.ops.k3.kda_chunk.default, q, k, v, region.gates, region.rates, None, None, state, None, None, None,
            None, None, False, float(lowest(region.gates) or 0.0), roles.q_scale, None, value.dtype,
        )  # fmt: skip
        new = {"root": builder.item(node, 0)}
        if exposed:
            left = builder.item(node, 1)
            new["new_state"] = left if roles.keys_last else builder.call(aten.transpose.int, left, 2, 3)
        return new

    def examples(self) -> Sequence[Example]:
        return (
            Example("Kimi K3's chunks", _bounded, _inputs),
            Example("another inverse, and states that are not kept", lambda *a: _bounded(*a, by_rows=True)[0], _inputs),
        )

    def counterexamples(self) -> Sequence[CounterExample]:
        def unbounded(q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, ...]:
            return _chunks(q, k, v, -torch.nn.functional.softplus(f), torch.sigmoid(b), state)

        def lower(q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, ...]:
            return _chunks(q, k, v, torch.sigmoid(f) * -8.0, torch.sigmoid(b), state)

        def growing(q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, ...]:
            return _chunks(q, k, v, torch.sigmoid(f) * 5.0, torch.sigmoid(b), state)

        def held(*inputs: Tensor) -> tuple[Tensor, ...]:
            return _bounded(*inputs, of_gates=lambda g: g.clamp(min=-1.0))

        def of_a_head(*inputs: Tensor) -> tuple[Tensor, ...]:
            return _bounded(*inputs, of_rates=lambda beta: beta.masked_fill(_only(1, 3, 1), 0))

        def of_a_row(*inputs: Tensor) -> tuple[Tensor, ...]:
            return _bounded(*inputs, of_rates=lambda beta: beta.masked_fill(_only(1, 2, 0), 0))

        def undecayed(*inputs: Tensor) -> tuple[Tensor, ...]:
            return _bounded(*inputs, decayed_keys=False)

        def kept(*inputs: Tensor) -> tuple[Tensor, ...]:
            return _bounded(*inputs, between=True)

        return (
            CounterExample("a decay without bound", unbounded, _inputs, "not known to be bounded below"),
            CounterExample("a decay below what a block holds", lower, _inputs, "may be as low as -8"),
            CounterExample("gates above zero", growing, _inputs, "not known to be bounded below"),
            CounterExample("gates that are held", held, _inputs, "is no part of the rule"),
            CounterExample("a head that does not write", of_a_head, _inputs, "does not compute the gated delta rule"),
            CounterExample("a row that does not write", of_a_row, _inputs, "does not compute the gated delta rule"),
            CounterExample("keys that are not decayed", undecayed, _inputs, "does not compute the gated delta rule"),
            CounterExample("scores that are used elsewhere", kept, _inputs, "is also used outside"),
        )


def lowest(gates: Node) -> float | None:
    """A number that the gates are not below, read off the graph; None if it shows none, or gates may be above zero."""
    node, least = gates, 0.0
    while True:
        if keeps_order(node) or node.target is aten.clone.default:
            node = node.args[0]  # type: ignore[assignment]
        elif node.target is aten.masked_fill.Scalar:
            if not (value := float(node.args[2])) <= 0:  # type: ignore[arg-type]
                return None
            least, node = min(least, value), node.args[0]  # type: ignore[assignment]
        else:
            break
    if node.target not in OPERATORS["mul"]:
        return None
    values = [a for a in node.args if isinstance(a, Node)]
    numbers = [a for a in node.args if isinstance(a, (int, float))]
    sigmoid = len(values) == len(numbers) == 1 and values[0].target is aten.sigmoid.default
    if sigmoid and numbers[0] <= 0:
        return min(least, float(numbers[0]))
    return None


# ------------------------------------------------------------------ examples


def _only(place: int, count: int, dim: int) -> Tensor:
    """True for one of `count`, along a dimension of [B, H, 1, 1, 1]."""
    return (torch.arange(count) == place).view([-1 if d == dim else 1 for d in range(5)])


def _bounded(q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, state: Tensor, **how: Any) -> tuple[Tensor, ...]:
    return _chunks(q, k, v, torch.sigmoid(f) * -5.0, torch.sigmoid(b), state, **how)


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, by_rows: bool = False,
    decayed_keys: bool = True, between: bool = False, of_gates: Any = None,
    of_rates: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Two chunks of 4 tokens in the plainest form: exponents of differences, each pair by itself."""
    size = 4

    def chunked(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, size)).permute(0, 3, 1, 2, 4)

    q, k, v, g, beta = (chunked(x) for x in (q, k, v, g, beta.unsqueeze(3)))
    g, beta = g if of_gates is None else of_gates(g), beta if of_rates is None else of_rates(beta)
    total = g.cumsum(3)
    later = torch.ones(size, size, dtype=torch.bool).triu(1).unsqueeze(2)
    pairs = torch.exp((total.unsqueeze(4) - total.unsqueeze(3)).masked_fill(later, float("-inf")))
    scores = (k.unsqueeze(4) * k.unsqueeze(3) * pairs).sum(-1)
    reads = (q.unsqueeze(4) * k.unsqueeze(3) * pairs).sum(-1).tril()
    lower = (beta * scores).tril(-1)
    eye = torch.eye(size, dtype=q.dtype)
    if by_rows:  # the inverse of a nilpotent part: a finite series
        power, inverse = eye - lower, eye - lower
        for _ in range(size - 2):
            power = -(lower @ power) + eye
            inverse = power
    else:
        inverse = torch.linalg.solve_triangular(eye + lower, eye.expand_as(lower), upper=False, unitriangular=True)
    decay = torch.exp(total)
    u, w = inverse @ (beta * v), inverse @ (beta * k * (decay if decayed_keys else 1.0))
    outputs = []
    for n in range(q.shape[2]):
        fresh = u[:, :, n] - w[:, :, n] @ state.transpose(2, 3)
        outputs.append((q * decay)[:, :, n] @ state.transpose(2, 3) + reads[:, :, n] @ fresh)
        left = torch.exp(total[:, :, n, -1:] - total[:, :, n])
        state = state * decay[:, :, n, -1:] + fresh.transpose(2, 3) @ (k[:, :, n] * left)
    out = torch.cat(outputs, dim=2).transpose(1, 2).flatten(2)
    return (out, state.sum(-1), scores) if between else (out, state.sum(-1))


def _inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    batch, tokens, heads, keys, values = 2, 8, 3, 5, 6
    return (
        normal(batch, tokens, heads, keys) * 0.3, normal(batch, tokens, heads, keys) * 0.3,
        normal(batch, tokens, heads, values), normal(batch, tokens, heads, keys), normal(batch, tokens, heads),
        normal(batch, heads, values, keys),
    )  # fmt: skip


@dataclass(frozen=True)
class LiftKdaChunkPass(RulePass):
    """Lift Kimi Delta Attention over a prompt to k3::kda_chunk."""

    name: ClassVar[str] = "lift_kda_chunk"
    provides: ClassVar[frozenset[str]] = frozenset({"kda_chunk"})

    def rules(self) -> tuple[Rule, ...]:
        return (LiftKdaChunk(),)
