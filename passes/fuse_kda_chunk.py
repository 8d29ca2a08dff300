"""Take gates, norms and states into `k3::kda_chunk`: a prompt of a KDA layer from its convolution to its output norm.

    q, k = k3::l2_norm(q) * scale, k3::l2_norm(k)              -> o, pool = k3::kda_chunk(q, k, v, f, b, a_log, dt_bias,
    g    = sigmoid(exp(a_log)[:, None] * (f + dt_bias)) * bound             pool, slots, fresh, lengths, ...)
    beta = sigmoid(b)
    dead_tokens = arange(L) >= lengths[:, None]
    o, S = k3::kda_chunk(q, k, v.float(), g.masked_fill(dead_tokens, 0), beta.masked_fill(dead_tokens, 0), None, None,
                         pool[slots].masked_fill(fresh, 0), None, ...)
    o    = o.masked_fill(dead_tokens, 0).bfloat16()
    pool = pool.index_put((slots,), torch.where(dead, pool[0], S))

Rows that are dead have slot 0 and no tokens, as `dead` shows. A prompt whose gates, masks or states are spelled
otherwise keeps the op as it was lifted, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

import k3rewrite.kernels  # noqa: F401  registers the ops that are built
from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.shapes import same_sizes
from k3rewrite.passes.chunk_reader import Reader
from k3rewrite.passes.kda_layer import rates
from k3rewrite.patterns import (
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

aten, k3 = torch.ops.aten, torch.ops.k3


class FuseKdaChunk(Rule):
    """See the module docstring."""

    name = "kda_chunk_layer"
    policy = Policy.REASSOCIATES
    anchors = frozenset({k3.kda_chunk.default})
    pattern = Anything()
    exposable = frozenset({"put"})

    def is_site(self, node: Node) -> bool:
        return bound_arguments(node)["a_log"] is None

    def matches(self, anchor: Node) -> tuple[Iterator[Match], Attempt]:
        attempt = Attempt(anchor)
        try:
            return iter([Reader(anchor).match()]), attempt
        except Unlike as unlike:
            attempt.because(unlike)
            return iter([]), attempt

    def check(self, match: Match) -> Refusal | None:
        wide = match.value("pool").dtype
        if any(dtype != wide for dtype in match["dtypes"]):
            return Refusal(f"gates or norms are not computed in {wide}, as states are", match["anchor"])
        return None

    def region_values(self, match: Match, seed: int) -> Mapping[Node, Tensor]:
        """Slots, lengths and masks that belong together."""
        generator = torch.Generator().manual_seed(seed)
        rows, tokens, count = match["batch"], match["tokens"], match.value("pool").shape[0]
        slots = torch.zeros(rows, dtype=torch.int64)
        free = torch.randperm(count - 1, generator=generator)[:rows] + 1
        slots[: len(free)] = free
        slots[seed :: rows + 1] = 0  # one row is nobody's
        lengths = torch.randint(1, tokens + 1, (rows,), generator=generator).masked_fill(slots == 0, 0)
        fresh = torch.rand(rows, generator=generator) < 0.5
        dead_tokens = torch.arange(tokens) >= lengths.unsqueeze(1)
        given = {match["slots"]: slots, match["lengths"]: lengths, match["places"]: torch.arange(tokens)}
        for name, value in (("dead", slots == 0), ("fresh", fresh), ("dead_tokens", dead_tokens)):
            given |= dict.fromkeys(match[name], value)
        return {n: v.view(n.meta["val"].shape).to(n.meta["val"].dtype) for n, v in given.items()}

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        batch, tokens = match["batch"], match["tokens"]
        heads, keys = match.value("pool").shape[1], match.value("pool").shape[3]

        def seen_as(node: Node, sizes: list[Any]) -> Node:
            return node if same_sizes(node.meta["val"].shape, sizes) else builder.call(aten.view.default, node, sizes)

        a_log, fresh = rates(match["a_log"], heads, builder), match["fresh"]
        node = builder.call(
            k3.kda_chunk.default, match["q"], match["k"], match["v"], seen_as(match["f"], [batch, tokens, heads, keys]),
            seen_as(match["b"], [batch, tokens, heads]), a_log, match["dt_bias"], match["pool"], match["slots"],
            seen_as(fresh[0], [batch]) if fresh else None, match["lengths"], None, None, True, match["bound"],
            match["q_scale"], match["l2_eps"], match.value("out").dtype,
        )  # fmt: skip
        out = seen_as(builder.item(node, 0), list(match.value("out").shape))
        return {"root": out, "put": builder.item(node, 1)} if exposed else {"root": out}

    def examples(self) -> Sequence[Example]:
        return (Example("Kimi K3", _layer, _inputs),)

    def counterexamples(self) -> Sequence[CounterExample]:
        def unmasked(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            return _layer(*inputs, masked=False)

        def other_slots(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            return _layer(*inputs, moved=1)

        def by_step(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            return _layer(*inputs, power=2.0)

        def living(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            return _layer(*inputs, lowest=-1)

        return (
            CounterExample(
                "padding gives what it holds", unmasked, _inputs, "tokens behind a row's last do not give zeros"
            ),
            CounterExample("written elsewhere", other_slots, _inputs, "not written back to the slots"),
            CounterExample("another gate", by_step, _inputs, "the decay is not a bound times a sigmoid"),
            CounterExample("another null slot", living, _inputs, "slot 0 may be somebody's"),
        )


# ------------------------------------------------------------------ examples


def _layer(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, pool: Tensor, slots: Tensor,
    starts: Tensor, lengths: Tensor, *, masked: bool = True, moved: int = 0, power: float = 1.0, lowest: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, tokens, heads, keys = q.shape
    dead = (slots <= lowest) | (lengths <= 0)
    at, lengths = slots.masked_fill(dead, 0), lengths.masked_fill(dead, 0).unsqueeze(1)
    dead_tokens = (torch.arange(tokens) >= lengths)[:, :, None, None]
    wide = torch.float32
    rate = torch.exp(a_log[:heads]).unsqueeze(1)
    moved_f = (f.to(wide) + dt_bias).view(batch, tokens, heads, keys)
    g = (torch.sigmoid(rate * moved_f) if power == 1 else torch.sigmoid(rate * moved_f) ** power) * -5.0
    beta = torch.sigmoid(b.to(wide)).view(batch, tokens, heads)
    rows = pool[at].masked_fill((starts <= 0).view(-1, 1, 1, 1), 0)
    unit_q, unit_k = k3.l2_norm(q, 1e-6, True, wide, wide) * 0.5, k3.l2_norm(k, 1e-6, True, wide, wide)
    out, state = k3.kda_chunk(
        unit_q, unit_k, v.to(wide), g.masked_fill(dead_tokens, 0), beta.masked_fill(dead_tokens.squeeze(3), 0), None,
        None, rows, None, None, None, None, None, False, -5.0, 1.0, None, wide,
    )  # fmt: skip
    after = pool.index_put((at + moved if moved else at,), torch.where(dead.view(-1, 1, 1, 1), pool[0], state))
    return (out.masked_fill(dead_tokens, 0) if masked else out).to(q.dtype), after


def _inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    batch, tokens, heads, size = 4, 6, 2, 4
    q, k, v = (normal(batch, tokens, heads, size).bfloat16() for _ in range(3))
    return (
        q, k, v, normal(batch * tokens, heads * size).bfloat16(), normal(batch * tokens, heads).bfloat16(),
        normal(size) * 0.3, normal(heads * size), normal(7, heads, size, size), torch.tensor([3, 0, 5, 1]),
        torch.tensor([0, 0, 64, 0]), torch.tensor([6, 2, 4, 0]),
    )  # fmt: skip


@dataclass(frozen=True)
class FuseKdaChunkPass(RulePass):
    """Take gates, norms and states by slot of a KDA prompt into k3::kda_chunk."""

    name: ClassVar[str] = "fuse_kda_chunk"
    requires: ClassVar[frozenset[str]] = frozenset({"lift_kda_chunk", "lift_l2_norm"})
    provides: ClassVar[frozenset[str]] = frozenset({"kda_chunk"})

    def rules(self) -> tuple[Rule, ...]:
        return (FuseKdaChunk(),)
