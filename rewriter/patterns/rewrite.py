"""Apply one rule to every candidate site of a graph, and say what happened at each.

For every anchor, in graph order:

    match (largest first) -> users, the rule's guard, purity -> new nodes -> contract, storage -> replace   => a Site
                          \\-> any of them objects: the next match, and if there is none                    => a Miss

Everything is decided before the first user is redirected, and a refusal takes its new nodes back: after a miss the
graph reads exactly as before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from k3rewrite.errors import UnsupportedError, VerificationError
from k3rewrite.graph.provenance import UNKNOWN_SOURCE, module_path, source_line
from k3rewrite.graph.purity import PurityIndex, aliases_of, effect, is_view, writes
from k3rewrite.graph.shapes import metadata_difference
from k3rewrite.graph.storage import StorageMap
from k3rewrite.graph.strides import NeedsStrides, strides_unseen, with_strides
from k3rewrite.patterns.bindings import Match, describe
from k3rewrite.patterns.pattern import OPERATORS
from k3rewrite.patterns.rule import Builder, Policy, Refusal, Rule
from k3rewrite.report.schema import Miss, PassReport, Site

SiteCheck = Callable[["Rewrite"], "Refusal | None"]


@dataclass(frozen=True)
class Rewrite:
    """A replacement that is built and not yet in place: old nodes, new nodes, outputs by name."""

    rule: Rule
    match: Match
    made: tuple[Node, ...]
    old: Mapping[str, Node]
    new: Mapping[str, Node]
    views: dict[Node, Any] = field(default_factory=dict)
    """new values of views whose source is laid out in another way"""


def apply_rule(
    rule: Rule, module: GraphModule, report: PassReport, *, allow_changes_rounding: bool = False,
    verify: SiteCheck | None = None,
) -> None:  # fmt: skip
    """Rewrite every site of `rule` in `module`, adding candidates, sites, misses and refusals to `report`.

    `verify` runs a built replacement against the old nodes before it is put in place (see checks/regions.py); what it
    objects to is a defect of the rule and raises VerificationError.
    """
    graph = module.graph
    claimed: dict[Node, str] = {}
    writers = [n for n in graph.nodes if writes(n)]
    for anchor in list(_candidates(rule, graph)):
        report.candidates += 1
        where = {"site": anchor.name, "source": source_line(anchor), "module": module_path(anchor)}
        if anchor in claimed:
            report.refused.append(Miss(reason=f"already part of {claimed[anchor]}", **where))
            continue
        matches, attempt = rule.matches(anchor)
        objections: list[Refusal] = []
        for match in matches:
            outcome = _try(rule, match, graph, allow_changes_rounding, verify, writers)
            if isinstance(outcome, Rewrite):
                replaced_by = rule.describe(match, outcome.new)
                policy = rule.policy_of(match).value
                _replace(outcome, graph, claimed, f"the site at {where['site']}")
                writers.extend(n for n in outcome.made if writes(n))
                report.matched += 1
                report.sites.append(Site(replaced_by=replaced_by, policy=policy, verified=verify is not None, **where))
                break
            objections.append(outcome)
        else:
            if objections:
                first = objections[0]
                miss = Miss(reason=first.reason, **{**where, "source": _place_of(first.node, where["source"])})
                (report.refused if first.built else report.missed).append(miss)
                report.declined += first.declined
            else:
                place = _place_of(attempt.node, where["source"])
                report.missed.append(
                    Miss(reason=attempt.reason, expected=attempt.expected, found=attempt.found,
                         **{**where, "source": place})
                )  # fmt: skip


def _place_of(node: Node | None, fallback: str) -> str:
    """The line of the deciding node; an input of the graph has none, then that of the site."""
    line = source_line(node) if node is not None else UNKNOWN_SOURCE
    return fallback if line == UNKNOWN_SOURCE else line


def _candidates(rule: Rule, graph: Graph) -> Iterator[Node]:
    found = [n for target in rule.anchors for n in graph.find_nodes(op="call_function", target=target)]
    return iter(sorted(n for n in found if rule.is_site(n)))


def _try(
    rule: Rule,
    match: Match,
    graph: Graph,
    allow_changes_rounding: bool,
    verify: SiteCheck | None,
    writers: Sequence[Node],
) -> Rewrite | Refusal:
    exposed = _exposed(rule, match)
    if isinstance(exposed, Refusal):
        return exposed
    if refusal := rule.check(match):
        return refusal
    if rule.policy_of(match) is Policy.CHANGES_ROUNDING and not allow_changes_rounding:
        return Refusal("the rewrite changes a rounding; switch it on with 'allow_changes_rounding: true'", match.root)
    ordered = sorted(match.nodes)
    old = {"root": match.root, **exposed}
    before = _place(old, match, ordered)
    if isinstance(before, Refusal):
        return before
    if refusal := _impure(graph, match, ordered, before, writers):
        return refusal
    builder = Builder(graph, before, ordered, rule.name)
    kept = False
    try:
        rewrite = _build(rule, match, builder, old)
        if isinstance(rewrite, Refusal):
            return rewrite
        refusal = _contract(rewrite) or _reads(graph, rewrite, before, writers) or _aliases(graph, rewrite, writers)
        if refusal:
            return replace(refusal, built=True)
        if refusal := rule.accept(match, rewrite.new):
            return replace(refusal, built=True, declined=True)
        if verify is not None and (wrong := verify(rewrite)) is not None:
            raise VerificationError(
                f"rule {rule.name}: {wrong.reason}",
                place=f"{match.root.name} ({source_line(match.root)})",
                remedy="this is a defect of the rule: take its pass out of the pipeline, and report it",
            )
        kept = True
        return rewrite
    finally:
        if not kept:
            builder.discard()


def _build(rule: Rule, match: Match, builder: Builder, old: Mapping[str, Node]) -> Rewrite | Refusal:
    try:
        new = rule.build(match, builder, frozenset(old) - {"root"})
    except UnsupportedError as error:
        return Refusal(f"the replacement does not take these arguments: {error.message}", match.root)
    return Rewrite(rule, match, tuple(builder.made), old, new)


def _exposed(rule: Rule, match: Match) -> dict[str, Node] | Refusal:
    """Inner values with users outside, by name: exposable by the rule, or cheap enough to be computed twice, or a
    refusal. Result i of an inner call with several results is named "name[i]"."""
    names: dict[Node, list[str]] = {}
    for bound, value in match.bindings.items():
        if isinstance(value, Node):
            names.setdefault(value, []).append(bound)
    exposed: dict[str, Node] = {}
    for node in sorted(match.nodes):
        outside = [u for u in node.users if u not in match.nodes and not _is_dead(u)]
        if node is match.root or not outside:
            continue
        own = names.get(node, [""])
        name = next((n for n in own if n in rule.exposable), own[0])
        items = {f"{name}[{u.args[1]}]": u for u in outside if u.target is operator.getitem}
        if name in rule.exposable:
            exposed[name] = node
        elif len(items) == len(outside) and items.keys() <= rule.exposable:
            exposed.update(items)
        elif not _is_cheap(node, match):
            return Refusal(f"the inner value {describe(node)} is also used by {describe(outside[0])}", node)
    return exposed


def _is_dead(node: Node, levels: int = 3) -> bool:
    """True if nothing that can be seen depends on the node (as far as a few levels show): it waits to be removed."""
    return levels > 0 and effect(node) is None and all(_is_dead(user, levels - 1) for user in node.users)


def _is_cheap(node: Node, match: Match) -> bool:
    """A cast or view of the match's inputs: it may stay for its other users without keeping the rest alive."""
    plain = node.target in OPERATORS["cast"] or (is_view(node) and node.target is not operator.getitem)
    return plain and all(_is_cheap(i, match) for i in node.all_input_nodes if i in match.nodes)


def _place(old: Mapping[str, Node], match: Match, ordered: Sequence[Node]) -> Node | Refusal:
    """The node to insert before: after every input, before the first outside use of any output."""
    inputs: set[Node] = set()
    for node in ordered:
        map_arg((node.args, node.kwargs), lambda n: inputs.add(n) if n not in match.nodes else None)
    uses = [u for node in old.values() for u in node.users if u not in match.nodes and u not in old.values()]
    first = min([match.root, *uses])
    late = [n for n in inputs if not n < first]
    if late:
        return Refusal(f"no place: {describe(max(late))} is computed after the first use of a result", max(late))
    return first


def _impure(
    graph: Graph, match: Match, ordered: Sequence[Node], before: Node, writers: Sequence[Node]
) -> Refusal | None:
    """Every node a plain value, no write between them and the new place to anything that they read, and none to an
    inner value before it is read."""
    for node in ordered:
        if (reason := effect(node)) is not None:
            return Refusal(f"{describe(node)} {reason}", node)
    if _none_between(writers, ordered[0], max(before, ordered[-1])):
        return None
    index = PurityIndex(graph)
    if objection := index.region_objection(ordered, before):
        return Refusal(f"inside the match, {objection}", before)
    for node in ordered:
        inner = [user for user in node.users if user in match.nodes]
        writer = index.written_between(node, node, max(inner)) if inner else None
        if writer is not None:
            return Refusal(f"inside the match, {writer.name} writes {describe(node)} before it is read", writer)
    return None


def _reads(graph: Graph, rewrite: Rewrite, before: Node, writers: Sequence[Node]) -> Refusal | None:
    """What the new nodes read must be there at the new place, be no value that they replace, and, where a rule looks
    further up than its match (through a stack, a cast), still hold what was read there."""
    inside, made = rewrite.match.nodes, set(rewrite.made)
    inputs = {i for node in inside for i in node.all_input_nodes}
    for source in dict.fromkeys(i for node in rewrite.made for i in node.all_input_nodes):
        if source in made:
            continue
        if source in inside and not _is_cheap(source, rewrite.match):
            return Refusal(f"the replacement reads {describe(source)}, which it replaces", source)
        if not source < before:
            return Refusal(f"no place: {describe(source)} is computed after the first use of a result", source)
        if source not in inputs and source not in inside and not _none_between(writers, source, before):
            index = PurityIndex(graph)
            for value in [source, *_between(inputs, source)]:
                if (writer := index.written_between(value, value, before)) is not None:
                    return Refusal(
                        f"{describe(writer)} writes {describe(value)}, through which the replacement looks", writer
                    )
    return None


def _between(values: Iterable[Node], source: Node, levels: int = 4) -> set[Node]:
    """The values, and what they are computed from, down to `source`: what a rule has looked through to get there."""
    found: set[Node] = set()
    for value in values:
        if levels and value is not source:
            deeper = _between(value.all_input_nodes, source, levels - 1)
            if deeper or source in value.all_input_nodes:
                found |= {value, *deeper}
    return found


def _aliases(graph: Graph, rewrite: Rewrite, writers: Sequence[Node]) -> Refusal | None:
    """A replacement that is an existing value or a view of one: the old one must not be returned, nor either be
    written later, unless the old one was a view of the same."""
    made = set(rewrite.made)
    for name, old in rewrite.old.items():
        existing = _existing(rewrite.new[name], made)
        if existing is None:
            continue
        reading = readers(old)
        if any(reader.op == "output" for reader in reading):
            if not StorageMap(graph).same_storage(old, existing):
                return Refusal(f"the result is returned and would share storage with {describe(existing)}", old)
        last = max(reading, default=old)
        if any(existing < w <= last for w in writers):
            index = PurityIndex(graph)
            writer = index.written_between([existing, old], existing, last) or _writing(last, [existing, old], index)
            if writer is not None and not index.storage.same_storage(old, existing):
                return Refusal(f"{describe(writer)} writes while the result is read", writer)
    return None


def _writing(node: Node, values: Sequence[Node], index: PurityIndex) -> Node | None:
    """The node, if it writes storage of one of the values."""
    written = writes(node)
    return node if any(index.storage.same_storage(w, value) for w in written for value in values) else None


def _existing(value: Node, made: Collection[Node]) -> Node | None:
    """The value outside of the new nodes that `value` is or is a view of, if there is one."""
    while value in made:
        shared = aliases_of(value)
        if not shared:
            return None
        value = shared[0]
    return value


def readers(node: Node) -> list[Node]:
    """Users of a value and of its views."""
    found: dict[Node, None] = {}
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found[user] = None
                if user.op == "call_function" and (is_view(user) or user.target is operator.getitem):
                    stack.append(user)
    return list(found)


def _none_between(writers: Sequence[Node], first: Node, last: Node) -> bool:
    return not any(first < w < last for w in writers)


def _contract(rewrite: Rewrite) -> Refusal | None:
    """Every output keeps dtype, symbolic shape, device and, where anybody can tell, stride."""
    for name, old in rewrite.old.items():
        if name not in rewrite.new:
            return Refusal(f"the rule builds no replacement for '{name}'", old)
        before, after = old.meta["val"], rewrite.new[name].meta["val"]
        difference = metadata_difference(before, after)
        if difference is None and not rewrite.rule.may_move_strides:
            continue
        if difference and not difference.startswith("stride "):
            return Refusal(f"contract: output '{name}': {difference}", old)
        if rewrite.rule.may_move_strides:
            try:
                inside, objection = rewrite.match.nodes, rewrite.rule.reader_objection
                rewrite.views.update(with_strides(old, after, inside, objection))
            except NeedsStrides as reader:
                return Refusal(f"contract: output '{name}': {reader.reason}", reader.node)
        elif not strides_unseen(old, after, rewrite.match.nodes):
            return Refusal(f"contract: output '{name}': {difference}", old)
    return None


def _replace(rewrite: Rewrite, graph: Graph, claimed: dict[Node, str], label: str) -> None:
    made = set(rewrite.made)
    for view, value in rewrite.views.items():
        view.meta["val"] = value
    for name, old in rewrite.old.items():
        old.replace_all_uses_with(rewrite.new[name], delete_user_cb=lambda user: user not in made)
    for node in sorted({*rewrite.match.nodes, *rewrite.old.values()}, reverse=True):
        claimed[node] = label
        if not node.users:
            graph.erase_node(node)
