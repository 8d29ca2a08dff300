"""Read the graph around a lifted prompt of a KDA layer: its norms, gates, masks and states, for `fuse_kda_chunk`.

q, k, v, f, b      before norms, casts and gates              lengths     of whose tokens the masks tell
a_log, dt_bias     of the decay, and its bound                slots       of the pool that is read and written
"""

from __future__ import annotations

from operator import getitem
from typing import Any, NoReturn

import torch
from torch.fx import Node

from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.layout import keeps_order
from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.patterns import OPERATORS, Match, Unlike
from k3rewrite.patterns.bindings import cast_source

aten, k3 = torch.ops.aten, torch.ops.k3


class Reader:
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
            raise Unlike(reason, node if isinstance(node, Node) else self.step)
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
            raise Unlike(reason, node)
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
            raise Unlike("q and k are normalised differently, or with an epsilon outside of the sum", both[0])
        self.dtypes += [n[name] for n in norms for name in ("compute_dtype", "out_dtype")]
        self.found |= {"q": norms[0]["x"], "k": norms[1]["x"], "l2_eps": norms[0]["eps"], "q_scale": scale}
        self.found["v"] = self._uncast(self.arguments["v"])
        self.found["batch"], self.found["tokens"] = self.step.meta["val"][0].shape[:2]

    def _unmasked(self, node: Node, what: str) -> tuple[Node, Node]:
        masked = self._take(node, frozenset({aten.masked_fill.Scalar}), f"tokens behind a row's last have {what}")
        if masked.args[2] != 0:
            raise Unlike(f"tokens behind a row's last have {what}", masked)
        return masked.args[0], masked.args[1]  # type: ignore[return-value]

    def _decay(self) -> Node:
        """f, a_log, dt_bias and the bound; the mask of dead tokens."""
        reason = "the decay is not a bound times a sigmoid of a rate times f plus a bias"
        gates, mask = self._unmasked(self.arguments["f"], "a decay")
        scaled, bound = self._number(self._take(gates, OPERATORS["mul"], reason), reason)
        inner = self._take(self._take(scaled, OPERATORS["sigmoid"], reason).args[0], OPERATORS["mul"], reason)
        sizes = self.found["batch"], self.found["tokens"]
        shown = list(inner.args)
        rate, moved = (self._past(a) for a in shown)
        if rate.target is not aten.exp.default:
            rate, moved, shown = moved, rate, shown[::-1]
        rate, moved = (
            self._take(rate, frozenset({aten.exp.default}), reason),
            self._take(moved, OPERATORS["add"], reason),
        )
        a_log = self._past(rate.args[0])
        heads = self.arguments["state"].meta["val"].shape[1]
        if a_log.target is aten.slice.Tensor and bound_arguments(a_log)["start"] in (None, 0):
            self.inside.add(a_log)
            a_log = a_log.args[0]  # type: ignore[assignment]
        keys = self.arguments["q"].meta["val"].shape[3]
        of_a_head = same_sizes(_trailing(shown[0]), (heads, 1))
        if not of_a_head or not same_sizes(shown[1].meta["val"].shape, (*sizes, heads, keys)):  # type: ignore[union-attr]
            raise Unlike("the rates of the decay are not one for each head", inner)
        if bound_arguments(moved).get("alpha", 1) != 1:
            raise Unlike(reason, moved)
        f, bias = moved.args[:2]
        if not isinstance(f, Node) or not isinstance(bias, Node):
            raise Unlike(reason, moved)
        channels = (bias.meta["val"].shape[-1:], moved.meta["val"].shape[-1:])
        if bias.meta["val"].dim() != 1 or not all(same_sizes(shape, (heads * keys,)) for shape in channels):
            raise Unlike("the bias of the decay is not one for each channel", moved)
        self.found |= {"a_log": a_log, "dt_bias": bias, "f": self._uncast(f), "bound": bound}
        self._of_tokens(mask, 4)
        return mask

    def _of_tokens(self, mask: Node, rank: int) -> None:
        """A mask has one entry for each token of a row, and nothing else."""
        wanted = (self.found["batch"], self.found["tokens"], *[1] * (rank - 2))
        if not same_sizes(mask.meta["val"].shape, wanted[:rank]):
            raise Unlike("a mask is not one of tokens", mask)

    def _of_rows(self, mask: Node) -> None:
        if not same_sizes(mask.meta["val"].shape, (self.found["batch"], 1, 1, 1)):
            raise Unlike("a mask is not one of rows", mask)

    def _rate(self) -> Node:
        """b; the mask of dead tokens."""
        beta, mask = self._unmasked(self.arguments["b"], "a rate of writing")
        rate = self._take(self._past(beta), OPERATORS["sigmoid"], "the rate of writing is not a sigmoid")
        self.found["b"] = self._uncast(self._past(rate.args[0]))
        self._of_tokens(mask, 3)
        return mask

    def _state(self) -> None:
        """Pool, slots, fresh and dead rows; the pool after it."""
        rows, fresh = self.arguments["state"], []
        if rows.target is aten.masked_fill.Scalar and rows.args[2] == 0:
            self.inside.add(rows)
            fresh = [rows.args[1]]
            self._of_rows(rows.args[1])  # type: ignore[arg-type]
            rows = rows.args[0]
        self._take(rows, frozenset({aten.index.Tensor}), "the state is not gathered from a pool by slot")
        pool, indices = rows.args[0], bound_arguments(rows)["indices"]
        if len(indices) != 1 or not isinstance(indices[0], Node):
            raise Unlike("the state is not gathered from a pool by slot", rows)
        put, written = self._put(pool, indices[0])
        dead, kept = written.args[0], written.args[1]
        self._of_rows(dead)  # type: ignore[arg-type]
        own = isinstance(kept, Node) and kept.target is aten.select.int and kept.args == (pool, 0, 0)
        if not own:
            raise Unlike("rows that are dead do not leave slot 0 as it is", written)
        assert isinstance(kept, Node)
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
                    arguments = bound_arguments(put) if own else {}
                    if own and list(arguments["indices"]) == [slots] and not arguments["accumulate"]:
                        self.inside |= {new, written, value, put}
                        return put, written
        raise Unlike("the new state is not written back to the slots that it was read from", new or self.step)

    def _dead(self, dead: Node, slots: Node) -> None:
        """Slots are 0 where rows are dead, and nowhere else."""
        reason = "slot 0 may be somebody's"
        raw = slots.args[0] if slots.target is aten.masked_fill.Scalar and slots.args[1:] == (dead, 0) else None
        terms = list(dead.args) if dead.target is aten.bitwise_or.Tensor else [dead]
        if raw is None or not any(
            isinstance(t, Node) and t.target is aten.le.Scalar and t.args == (raw, 0) for t in terms
        ):
            raise Unlike(reason, slots)
        self.found |= {"dead_rows": dead, "dead_terms": terms}

    def _out(self) -> tuple[Node, Node]:
        """The result with zeros for dead tokens, rounded if it is right away; the mask."""
        out = next((u for u in self.step.users if u.target is getitem and u.args[1] == 0), self.step)
        users = list(out.users)
        if len(users) != 1 or users[0].target is not aten.masked_fill.Scalar or users[0].args[2] != 0:
            raise Unlike("tokens behind a row's last do not give zeros", out)
        masked = users[0]
        self.inside |= {out, masked}
        self._of_tokens(masked.args[1], 4)  # type: ignore[arg-type]
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
            raise Unlike(reason, source)
        tokens, column = source.args
        lengths = _source(column)  # type: ignore[arg-type]
        first = isinstance(tokens, Node) and tokens.target is aten.arange.default
        if not first or not same_size(tokens.args[0], self.found["tokens"]):  # type: ignore[union-attr]
            raise Unlike(reason, source)
        if not same_sizes(column.meta["val"].shape, (self.found["batch"], 1)):  # type: ignore[union-attr]
            raise Unlike(reason, source)
        if lengths.target is not aten.masked_fill.Scalar or lengths.args[1:] != (self.found["dead_rows"], 0):
            raise Unlike("rows that are dead may have tokens", lengths)
        none = [t for t in self.found["dead_terms"] if isinstance(t, Node) and t.target is aten.le.Scalar]
        if self.found["fresh"] and not any(t.args == (lengths.args[0], 0) for t in none):
            raise Unlike("a row without tokens that starts afresh is emptied, and not left alone", lengths)
        self.found |= {"lengths": lengths, "places": tokens}


def _trailing(node: Any) -> tuple[Any, ...]:
    """The sizes of a value behind leading ones."""
    shape = list(node.meta["val"].shape) if isinstance(node, Node) else []
    while len(shape) > 2 and same_size(shape[0], 1):
        shape.pop(0)
    return tuple(shape)


def _source(node: Any) -> Node:
    while isinstance(node, Node) and keeps_order(node):
        node = node.args[0]
    return node if isinstance(node, Node) else _never(node)


def _never(value: Any) -> NoReturn:
    raise Unlike(f"{value} is no value of the graph")
