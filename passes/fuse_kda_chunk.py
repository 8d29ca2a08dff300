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
from operator import getitem
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.fx import Node

import k3rewrite.kernels  # noqa: F401  registers the ops that are built
from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.layout import keeps_order
from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.patterns import OPERATORS, Anything, Builder, CounterExample, Example, Match, Policy, Refusal, Rule
from k3rewrite.patterns.bindings import Attempt, cast_source
from k3rewrite.pipeline.pass_base import RulePass

aten, k3 = torch.ops.aten, torch.ops.k3


class _Unlike(Exception):
    """What is not as expected, and where."""

    def __init__(self, reason: str, node: Node | None = None) -> None:
        super().__init__(reason)
        self.reason, self.node = reason, node


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
            return iter([_Reader(anchor).match()]), attempt
        except _Unlike as unlike:
            attempt.node, attempt.reason = unlike.node, unlike.reason
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

        a_log = match["a_log"]
        if not same_size(a_log.meta["val"].shape[0], heads):
            a_log = builder.call(aten.slice.Tensor, a_log, 0, 0, heads)
        fresh = match["fresh"]
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


class _Reader:
    """Reads the graph around an op as it was lifted."""

    def __init__(self, step: Node) -> None:
        self.step = step
        self.arguments = bound_arguments(step)
        self.inside: set[Node] = {step}
        self.found: dict[str, Any] = {"anchor": step}
        self.dtypes: list[torch.dtype] = []

    def match(self) -> Match:
        self._norms()
        dead_tokens = [self._decay(), self._rate()]
        self._state()
        out, mask = self._out()
        dead_tokens.append(mask)
        self._lengths(dead_tokens)
        self.found |= {"out": out, "dead_tokens": dead_tokens, "dtypes": self.dtypes}
        return Match(out, self.found, frozenset(self.inside))

    def _take(self, node: Any, targets: frozenset[Any], reason: str) -> Node:
        """The node, if it is one of these, as part of the match."""
        if not isinstance(node, Node) or node.target not in targets:
            raise _Unlike(reason, node if isinstance(node, Node) else self.step)
        self.inside.add(node)
        return node

    def _past(self, node: Any) -> Node:
        """What reshapes show, which become part of the match."""
        while isinstance(node, Node) and keeps_order(node):
            self.inside.add(node)
            node = node.args[0]
        return node if isinstance(node, Node) else _never(self.step)

    def _uncast(self, node: Node) -> Node:
        source = cast_source(node)
        if source is None:
            return node
        self.inside.add(node)
        self.dtypes.append(node.meta["val"].dtype)
        return source

    def _number(self, node: Node, reason: str) -> tuple[Node, float]:
        """(value, number) of a product."""
        values = [a for a in node.args if isinstance(a, Node)]
        numbers = [a for a in node.args if isinstance(a, (int, float))]
        if len(values) != 1 or len(numbers) != 1:
            raise _Unlike(reason, node)
        return values[0], float(numbers[0])

    def _norms(self) -> None:
        """q, k and v before their norms and casts."""
        q, scale = self.arguments["q"], float(self.arguments["q_scale"])
        if q.target in OPERATORS["mul"]:
            self.inside.add(q)
            q, factor = self._number(q, "q is multiplied with something else than a number")
            scale *= factor
        both = [
            self._take(n, frozenset({k3.l2_norm.default}), "q or k is not normalised") for n in (q, self.arguments["k"])
        ]
        norms = [bound_arguments(n) for n in both]
        if norms[0]["eps"] != norms[1]["eps"] or not all(n["eps_inside"] for n in norms):
            raise _Unlike("q and k are normalised differently, or with an epsilon outside of the sum", both[0])
        self.dtypes += [n[name] for n in norms for name in ("compute_dtype", "out_dtype")]
        self.found |= {"q": norms[0]["x"], "k": norms[1]["x"], "l2_eps": norms[0]["eps"], "q_scale": scale}
        self.found["v"] = self._uncast(self.arguments["v"])
        self.found["batch"], self.found["tokens"] = self.step.meta["val"][0].shape[:2]

    def _unmasked(self, node: Node, what: str) -> tuple[Node, Node]:
        masked = self._take(node, frozenset({aten.masked_fill.Scalar}), f"tokens behind a row's last have {what}")
        if masked.args[2] != 0:
            raise _Unlike(f"tokens behind a row's last have {what}", masked)
        return masked.args[0], masked.args[1]  # type: ignore[return-value]

    def _decay(self) -> Node:
        """f, a_log, dt_bias and the bound; the mask of dead tokens."""
        reason = "the decay is not a bound times a sigmoid of a rate times f plus a bias"
        gates, mask = self._unmasked(self.arguments["f"], "a decay")
        scaled, bound = self._number(self._take(gates, OPERATORS["mul"], reason), reason)
        inner = self._take(self._take(scaled, OPERATORS["sigmoid"], reason).args[0], OPERATORS["mul"], reason)
        rate, moved = (self._past(a) for a in inner.args)
        if rate.target is not aten.exp.default:
            rate, moved = moved, rate
        rate, moved = (
            self._take(rate, frozenset({aten.exp.default}), reason),
            self._take(moved, OPERATORS["add"], reason),
        )
        a_log = self._past(rate.args[0])
        heads = self.arguments["state"].meta["val"].shape[1]
        if a_log.target is aten.slice.Tensor and bound_arguments(a_log)["start"] in (None, 0):
            self.inside.add(a_log)
            a_log = a_log.args[0]  # type: ignore[assignment]
        if bound_arguments(moved).get("alpha", 1) != 1 or inner.meta["val"].shape[2] != heads:
            raise _Unlike(reason, moved)
        f, bias = moved.args[:2]
        if not isinstance(f, Node) or not isinstance(bias, Node) or bias.meta["val"].dim() != 1:
            raise _Unlike(reason, moved)
        self.found |= {"a_log": a_log, "dt_bias": bias, "f": self._uncast(f), "bound": bound}
        return mask

    def _rate(self) -> Node:
        """b; the mask of dead tokens."""
        beta, mask = self._unmasked(self.arguments["b"], "a rate of writing")
        rate = self._take(self._past(beta), OPERATORS["sigmoid"], "the rate of writing is not a sigmoid")
        self.found["b"] = self._uncast(self._past(rate.args[0]))
        return mask

    def _state(self) -> None:
        """Pool, slots, fresh and dead rows; the pool after it."""
        rows, fresh = self.arguments["state"], []
        if rows.target is aten.masked_fill.Scalar and rows.args[2] == 0:
            self.inside.add(rows)
            fresh = [rows.args[1]]
            rows = rows.args[0]
        self._take(rows, frozenset({aten.index.Tensor}), "the state is not gathered from a pool by slot")
        pool, indices = rows.args[0], bound_arguments(rows)["indices"]
        if len(indices) != 1 or not isinstance(indices[0], Node):
            raise _Unlike("the state is not gathered from a pool by slot", rows)
        put, written = self._put(pool, indices[0])
        dead, kept = written.args[0], written.args[1]
        own = isinstance(kept, Node) and kept.target is aten.select.int and kept.args == (pool, 0, 0)
        if not own:
            raise _Unlike("rows that are dead do not leave slot 0 as it is", written)
        self.inside.add(kept)
        self._dead(_source(dead), indices[0])
        self.found |= {"pool": pool, "slots": indices[0], "fresh": fresh, "dead": [dead], "put": put}

    def _put(self, pool: Node, slots: Node) -> tuple[Node, Node]:
        new = next((u for u in self.step.users if u.target is getitem and u.args[1] == 1), None)
        written = next((u for u in new.users if u.target is aten.where.self), None) if new is not None else None
        if new is not None and written is not None:
            views = [user for user in written.users if keeps_order(user)]  # torch writes a single row through one
            for value in (written, *views):
                for put in value.users:
                    own = put.target is aten.index_put.default and put.args[0] is pool and put.args[2] is value
                    if own and list(put.args[1]) == [slots] and not bound_arguments(put)["accumulate"]:
                        self.inside |= {new, written, value, put}
                        return put, written
        raise _Unlike("the new state is not written back to the slots that it was read from", new or self.step)

    def _dead(self, dead: Node, slots: Node) -> None:
        """Slots are 0 where rows are dead, and nowhere else."""
        reason = "slot 0 may be somebody's"
        raw = slots.args[0] if slots.target is aten.masked_fill.Scalar and slots.args[1:] == (dead, 0) else None
        terms = list(dead.args) if dead.target is aten.bitwise_or.Tensor else [dead]
        if raw is None or not any(
            isinstance(t, Node) and t.target is aten.le.Scalar and t.args == (raw, 0) for t in terms
        ):
            raise _Unlike(reason, slots)
        self.found["dead_rows"] = dead

    def _out(self) -> tuple[Node, Node]:
        """The result with zeros for dead tokens, rounded if it is right away; the mask."""
        out = next((u for u in self.step.users if u.target is getitem and u.args[1] == 0), self.step)
        users = list(out.users)
        if len(users) != 1 or users[0].target is not aten.masked_fill.Scalar or users[0].args[2] != 0:
            raise _Unlike("tokens behind a row's last do not give zeros", out)
        masked = users[0]
        self.inside |= {out, masked}
        last, seen = masked, set()
        while len(last.users) == 1 and (keeps_order(user := next(iter(last.users))) or cast_source(user) is last):
            last = user
            seen.add(last)
            if cast_source(last) is not None:
                self.inside |= seen
                return last, masked.args[1]  # type: ignore[return-value]
        return masked, masked.args[1]  # type: ignore[return-value]

    def _lengths(self, masks: list[Node]) -> None:
        """The number of tokens of a row, which is none where it is dead."""
        reason = "tokens that are masked are not those at and behind a row's length"
        (source, *others) = {_source(mask) for mask in masks}
        if others or source.target is not aten.ge.Tensor:
            raise _Unlike(reason, source)
        tokens, column = source.args
        lengths = _source(column)  # type: ignore[arg-type]
        first = isinstance(tokens, Node) and tokens.target is aten.arange.default
        if not first or not same_size(tokens.args[0], self.found["tokens"]):  # type: ignore[union-attr]
            raise _Unlike(reason, source)
        if not same_sizes(column.meta["val"].shape, (self.found["batch"], 1)):  # type: ignore[union-attr]
            raise _Unlike(reason, source)
        if lengths.target is not aten.masked_fill.Scalar or lengths.args[1:] != (self.found["dead_rows"], 0):
            raise _Unlike("rows that are dead may have tokens", lengths)
        self.found |= {"lengths": lengths, "places": tokens}


def _source(node: Any) -> Node:
    while isinstance(node, Node) and keeps_order(node):
        node = node.args[0]
    return node if isinstance(node, Node) else _never(node)


def _never(value: Any) -> NoReturn:
    raise _Unlike(f"{value} is no value of the graph")


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

    def rules(self) -> tuple[Rule, ...]:
        return (FuseKdaChunk(),)
