"""Let projections of one value be one GEMM over stacked weights.

    q, k, v = mm(x, t(w_q)), mm(x, t(w_k)), mm(x, t(w_v));  qkv = cat([q, k, v], 1);  b = mm(x, t(w_b))
    ->
    y = mm(x, t(k3::pack_rows([w_q, w_k, w_v, w_b], ...)));  qkv = y[:, :3 * n];  b = y[:, 3 * n : 3 * n + 12]

The results are views of one tensor, whose rows lie further apart than before; a projection of which a reader cannot do
with that keeps its own GEMM. A `k3::mlp` that no kernel takes is opened: gate and up join, and a `k3::mlp_tail` follows
them. Wide weights come first; each begins at a multiple of 16 bytes of a row of `y`, and the rows are filled up to a
multiple of `multiple`: Kimi K3's q, k, v, g, f_a and b at 8 ranks are 6288 rows.

The stack is made once, before the first step, and the weights move into it (`finalise/prologue.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from k3rewrite import _torch_private as private
from k3rewrite.errors import ConfigError
from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.weights import lie_together
from k3rewrite.ops.vocabulary import op_of
from k3rewrite.passes import projection_examples as shown
from k3rewrite.passes.projection_groups import MOST, Group, Grouping, Limits, Part, stacks_of
from k3rewrite.passes.projections import ANCHORS, MLP, aten, count, family_of, projection_of, source_of
from k3rewrite.patterns import Builder, CounterExample, Example, Match, Policy, Refusal, Rule
from k3rewrite.patterns.bindings import Attempt
from k3rewrite.patterns.rewrite import apply_rule
from k3rewrite.pipeline.pass_base import PassContext, RulePass
from k3rewrite.report.schema import PassReport

_PACK, _TAIL = torch.ops.k3.pack_rows.default, torch.ops.k3.mlp_tail.default


class MergeProjections(Rule):
    """See the module docstring. Without a `context` no kernel is asked for."""

    name = "merge_projections"
    policy = Policy.REASSOCIATES  # a GEMM library may sum a wider product in another order
    anchors = ANCHORS
    exposable = frozenset(f"{kind}{i}" for kind in ("result", "joined") for i in range(MOST))
    may_move_strides = True

    def __init__(self, limits: Limits | None = None, context: PassContext | None = None) -> None:
        self._context = context
        self._grouping = Grouping(limits or Limits(), self.reader_objection)
        self._state: Any = None
        self._groups: dict[Node, Group] = {}
        self._seen: set[Node] = set()
        super().__init__()

    # ---------------------------------------------------------------- which groups

    def is_site(self, node: Node) -> bool:
        """The first projection of each group, and each that is alone with a reason.

        All sites are asked for before the first one is rewritten: what is found then holds until the graph is another.
        """
        state = (node.graph, len(node.graph.nodes), private.names_used(node.graph))
        if self._state != state:
            self._state, self._groups, self._seen = state, {}, set()
        projection = projection_of(node, self._taken_whole)
        if projection is None:
            return False
        source = source_of(projection.x)
        if source not in self._seen:
            self._seen.add(source)
            for group in self._grouping.groups_of(family_of(source, self._taken_whole)):
                self._groups[group.leader] = group
        return node in self._groups

    def matches(self, anchor: Node) -> tuple[Iterator[Match], Attempt]:
        attempt, group = Attempt(anchor), self._groups[anchor]
        if group.reason and not group.declined:
            attempt.node, attempt.reason = group.place or anchor, group.reason
            return iter([]), attempt
        joined = [cat for cat, _, _ in group.joined]
        nodes = {n for member in group.members for n in (member.node, *member.views)} | set(joined)
        bindings = {"anchor": anchor, "group": group}
        bindings |= {f"result{i}": member.node for i, member in enumerate(group.members)}
        bindings |= {f"joined{i}": cat for i, cat in enumerate(joined)}
        return iter([Match(anchor, bindings, frozenset(nodes))]), attempt

    def check(self, match: Match) -> Refusal | None:
        group: Group = match["group"]
        # A pipeline may expect that every group is found, whatever the batch is and whoever holds the weights.
        return Refusal(group.reason, group.place, built=True, declined=True) if group.declined else None

    def _taken_whole(self, mlp: Node) -> bool:
        return self._context is not None and bool(self._context.offers("mlp", bound_arguments(mlp)).taking)

    def reader_objection(self, reader: Node, value_of: Callable[[Node], Any]) -> str | None:
        """A `k3::` op must not lose a kernel."""
        word = op_of(reader.target)
        if word is None or self._context is None:
            return None
        arguments = bound_arguments(reader)
        before = self._context.offers(word.name, arguments)
        after = self._context.offers(word.name, map_arg(arguments, value_of))
        if len(after.taking) == len(before.taking):
            return None
        return (
            f"{reader.name} would lose a kernel: {'; '.join(o for o in after.objections if o not in before.objections)}"
        )

    # ---------------------------------------------------------------- the replacement

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        group: Group = match["group"]
        starts = [part.start for part in group.parts]
        weights = [part.weight for part in group.parts]
        turned = builder.call(aten.t.default, builder.call(_PACK, weights, starts, group.rows))
        x = group.members[0].x
        if group.members[0].bias is None:
            merged = builder.call(aten.mm.default, x, turned)
        else:
            biases = [part.projection.bias for part in group.parts]
            merged = builder.call(aten.addmm.default, builder.call(_PACK, biases, starts, group.rows), x, turned)

        def columns(first: Part, last: Part) -> Node:
            return builder.call(aten.slice.Tensor, merged, 1, first.start, last.start + last.rows)

        new = {}
        for name in ("root", *sorted(exposed)):
            node = match.root if name == "root" else match[name]
            if (joined := next((j for j in group.joined if j[0] is node), None)) is not None:
                new[name] = columns(*joined[1:])
                continue
            own = [part for part in group.parts if part.projection.node is node]
            if node.target is MLP:
                _, w_gate, w_up, *rest = bound_arguments(node).values()
                halves = {part.weight: columns(part, part) for part in own}
                new[name] = builder.call(_TAIL, halves[w_gate], halves[w_up], *rest)
            else:
                new[name] = columns(own[0], own[0])
        return new

    def describe(self, match: Match, new: Mapping[str, Node]) -> str:
        group: Group = match["group"]
        first = group.parts[0].weight.meta["val"]
        filled = group.rows - sum(part.rows for part in group.parts)
        size = group.rows * (first.shape[1] * first.element_size())
        there = all(lie_together(*stored) for stored in stacks_of(group))
        return (
            f"{count(group.members)} projections in one of {group.rows} rows ({filled} of them padding); the weights "
            f"{'lie' if there else 'move'} in{'' if there else 'to'} a stack of {size} bytes, "
            f"{filled * first.shape[1] * first.element_size()} more than their own"
        )

    def examples(self) -> Sequence[Example]:
        return shown.examples()

    def counterexamples(self) -> Sequence[CounterExample]:
        return shown.counterexamples()


@dataclass(frozen=True)
class MergeProjectionsPass(RulePass):
    """Merge projections of one value into one GEMM over stacked weights."""

    name: ClassVar[str] = "merge_projections"
    requires: ClassVar[frozenset[str]] = frozenset({"canonicalise"})
    provides: ClassVar[frozenset[str]] = frozenset({"pack_rows", "mlp_tail"})

    min_group: int = 2
    """how many projections are worth it"""
    max_rows: int = 131072
    """how many rows a stack may have"""
    max_tokens: int = 256
    """above so many rows of input (of the first call, where their number is symbolic) each GEMM is large enough"""
    multiple: int = 16
    """the rows of a stack are filled up to a multiple of it"""

    def __post_init__(self) -> None:
        for name, least in (("min_group", 2), ("max_rows", 1), ("max_tokens", 1), ("multiple", 1)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}", place=self.name, remedy=f"give a number from {least} on"
                )

    def rules(self) -> tuple[Rule, ...]:
        return (MergeProjections(self._limits()),)

    def _limits(self) -> Limits:
        return Limits(self.min_group, self.max_rows, self.max_tokens, self.multiple)

    def run(self, module: GraphModule, context: PassContext, report: PassReport) -> None:
        rule = MergeProjections(self._limits(), context)
        apply_rule(rule, module, report, allow_changes_rounding=self.allow_changes_rounding, verify=context.verify_site)
