"""Lift the routed experts of a mixture to one op, however a model spells them.

    order = ids.flatten().argsort()                                     (or w13[ids] and a batched product, or every
    offsets = histc(ids, E, 0, E - 1).cumsum(0)                         expert for every token and a mask, or a loop
    g, u = grouped_mm(x[order // k], w13, offsets).chunk(2, -1)         over a few experts)
    y = grouped_mm(silu(g) * u, w2, offsets)[order.argsort()]
    y = (y.view(T, k, N) * weights.unsqueeze(-1)).sum(1)
    ->
    y = k3::experts(x, ids, weights, w13[:, :I], w13[:, I:], w2, ..., "dense", "silu", ...)

The forms are too many for a pattern: what stands below a weighted sum is read in index notation (`passes/moe`), where
sorting and unsorting, views and gathers cancel, and all of them read alike. The anchor is the down projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import k3rewrite.kernels  # noqa: F401  registers the op that is built
from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.passes.moe import examples
from k3rewrite.passes.moe.experts import Experts
from k3rewrite.passes.moe.index import Size, product_of
from k3rewrite.passes.moe.neighbourhood import PRODUCTS, is_down_projection
from k3rewrite.passes.moe.sites import Site, site_around
from k3rewrite.passes.moe.tables import region_values
from k3rewrite.patterns import Anything, Builder, CounterExample, Example, Match, Policy, Refusal, Rule
from k3rewrite.patterns.bindings import Attempt
from k3rewrite.patterns.rewrite import apply_rule
from k3rewrite.pipeline.pass_base import PassContext, RulePass
from k3rewrite.report.schema import PassReport

_EXPERTS = torch.ops.k3.experts.default
MAX_INNER = 96
"""how many inner integers of a site may have other users: each is computed anew for them"""


class LiftMoe(Rule):
    """See the module docstring. With a `context` only those sites are lifted that a kernel of the target takes."""

    name = "moe"
    policy = Policy.REASSOCIATES  # products and sums may be ordered otherwise
    pattern = Anything()
    exposable = frozenset(
        name for i in range(MAX_INNER) for name in (f"integer{i}", f"integer{i}[0]", f"integer{i}[1]")
    )

    def __init__(self, context: PassContext | None = None) -> None:
        super().__init__()
        self._context = context
        foreign = getattr(getattr(torch.ops, "transformers", None), "grouped_mm_fallback", None)
        self.anchors = PRODUCTS | ({foreign.default} if foreign is not None else set())  # type: ignore[misc]

    def is_site(self, node: Node) -> bool:
        return is_down_projection(node)

    def matches(self, anchor: Node) -> tuple[Iterator[Match], Attempt]:
        attempt = Attempt(anchor)
        found = []
        for outcome in site_around(anchor):
            if isinstance(outcome, Site):
                inner = [n for n in sorted(outcome.nodes) if not _is_float(n)]
                names: dict[str, Any] = {f"integer{i}": node for i, node in enumerate(inner[:MAX_INNER])}
                bindings = {"anchor": anchor, "site": outcome, **names}
                found.append(Match(outcome.root, bindings, outcome.nodes))
            elif not attempt.reason:
                attempt.node, attempt.reason = outcome.node, outcome.reason
        return iter(found), attempt

    def policy_of(self, match: Match) -> Policy:
        return self.policy if match["site"].experts.literal else Policy.CHANGES_ROUNDING

    def region_values(self, match: Match, seed: int) -> Mapping[Node, Tensor]:
        return region_values(match["site"], seed)

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        site: Site = match["site"]
        found: Experts = site.experts
        rows = product_of(tuple(axis for dim in found.tokens for axis in dim))
        wanted = ((site.x, found.inputs), (site.ids, found.slots), (site.weights, found.slots))
        x, ids, weights = (_as_rows(node, rows, product_of(axes), builder) for node, axes in wanted)
        stored = [weight.values.build(builder) for weight in (found.w_gate, found.w_up, found.w_down)]
        scales = [
            weight.scales.build(builder) if weight.scales is not None else None
            for weight in (found.w_gate, found.w_up, found.w_down)
        ]
        gated = found.gated
        node = builder.call(
            _EXPERTS, x, ids, weights, *stored, *scales, found.w_down.format, gated.name,
            gated.beta, gated.linear_beta, found.first, found.product_dtype, gated.dtype, found.hidden_dtype,
            found.route_dtype, found.combine_dtype, found.out_dtype,
        )  # fmt: skip
        shape = match.root.meta["val"].shape
        results = {"root": node if len(shape) == 2 else builder.call(torch.ops.aten.view.default, node, list(shape))}
        copies: dict[Node, Node] = {}
        for name in sorted(exposed):
            base, _, item = name.partition("[")
            copy = _computed_anew(match[base], match.nodes, builder, copies)
            results[name] = builder.item(copy, int(item[:-1])) if item else copy
        return results

    def accept(self, match: Match, new: Mapping[str, Node]) -> Refusal | None:
        node = new["root"] if new["root"].target is _EXPERTS else new["root"].all_input_nodes[0]  # behind a view
        offers = self._context.offers("experts", bound_arguments(node)) if self._context is not None else None
        if offers is None or offers.taking:
            return None
        why = "; ".join(offers.objections)
        return Refusal(f"no kernel takes k3::experts here ({why}); 'leave_without_kernel: false' lifts it all the same")

    def examples(self) -> Sequence[Example]:
        return examples.EXAMPLES

    def counterexamples(self) -> Sequence[CounterExample]:
        return examples.COUNTEREXAMPLES


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (list, tuple)) else value
    return isinstance(first, torch.Tensor) and first.dtype.is_floating_point


def _as_rows(node: Node, rows: Size, columns: Size, builder: Builder) -> Node:
    """Elements in the order of [rows, columns] with that shape: a view, or a copy where strides do not allow one."""
    value = node.meta["val"]
    if same_sizes(value.shape, (rows, columns)):
        return node
    if not _is_dense(value):
        node = builder.call(torch.ops.aten.clone.default, node, memory_format=torch.contiguous_format)
    return builder.call(torch.ops.aten.view.default, node, [rows, columns])


def _is_dense(value: torch.Tensor) -> bool:
    """True if the elements are known to lie one after another."""
    step: Size = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not same_size(size, 1) and not same_size(stride, step):
            return False
        step = step * size
    return True


def _computed_anew(node: Node, inside: frozenset[Node], builder: Builder, copies: dict[Node, Node]) -> Node:
    """A copy of an inner value for its other users, with what it is computed from."""
    if node not in inside:
        return node
    if node not in copies:

        def copied(argument: Node) -> Node:
            return _computed_anew(argument, inside, builder, copies)

        args = torch.fx.node.map_arg(node.args, copied)
        copies[node] = builder.call(node.target, *args, **torch.fx.node.map_arg(dict(node.kwargs), copied))  # type: ignore[arg-type]
    return copies[node]


@dataclass(frozen=True)
class LiftMoePass(RulePass):
    """Lift routed experts to k3::experts: grouped products, gathered matrices, masks, unrolled loops."""

    name: ClassVar[str] = "lift_moe"
    provides: ClassVar[frozenset[str]] = frozenset({"experts"})

    leave_without_kernel: bool = True
    """leave a site as it is where no kernel of the target takes the op: its reference is slower than most spellings"""

    def rules(self) -> tuple[Rule, ...]:
        return (LiftMoe(),)

    def run(self, module: GraphModule, context: PassContext, report: PassReport) -> None:
        rule = LiftMoe(context if self.leave_without_kernel else None)
        apply_rule(rule, module, report, allow_changes_rounding=self.allow_changes_rounding, verify=context.verify_site)
