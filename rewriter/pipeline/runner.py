"""Run a pipeline over a captured graph: each pass in order, the contract after each, a report of each.

    run_pipeline(captured.module, passes, context, names, reports)

Between two passes the graph is always well-formed and means the same; nothing is rolled back, because nothing wrong is
ever put in place (see patterns/rewrite.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from torch.fx import Graph, GraphModule, Node

from k3rewrite import _torch_private as private
from k3rewrite.checks.contract import GraphContract, check_guards
from k3rewrite.errors import ConfigError, ExpectationError, did_you_mean
from k3rewrite.graph.cost import FREE, node_cost, sum_costs
from k3rewrite.graph.provenance import module_path
from k3rewrite.graph.purity import eliminate_dead_code
from k3rewrite.ops.vocabulary import Cost, Op
from k3rewrite.pipeline.expressions import Value, parse_expect, parse_when
from k3rewrite.pipeline.layer import Problems
from k3rewrite.pipeline.pass_base import Level, Pass, PassContext
from k3rewrite.pipeline.settings import PassConfig, PipelineConfig
from k3rewrite.report.schema import PassReport

NEAR_MISSES = 5
"""how many misses an expectation error shows"""

AfterPass = Callable[[int, GraphModule, PassReport], None]


def build_passes(config: PipelineConfig, known: Mapping[str, type[Pass]]) -> list[tuple[Pass, PassConfig]]:
    """The passes of a pipeline, made from their options; their order is checked before anything runs.

    Raises ConfigError for an unknown pass, and for a pass that stands before one that it requires.
    """
    built: list[tuple[Pass, PassConfig]] = []
    seen: set[str] = set()
    missing: dict[str, list[PassConfig]] = {}
    for entry in config.passes:
        if entry.name not in known:
            raise ConfigError(
                f"unknown pass '{entry.name}'", place=entry.place or None, remedy=did_you_mean(entry.name, known)
            )
        made = known[entry.name](**entry.options)
        for needed in sorted(made.requires - seen):
            missing.setdefault(needed, []).append(entry)
        seen.add(entry.name)
        built.append((made, entry))
    problems = Problems()
    for needed, entries in missing.items():
        _tell(config, needed, entries, problems)
    problems.raise_if_any("the pipeline")
    return built


def _tell(config: PipelineConfig, needed: str, entries: Sequence[PassConfig], problems: Problems) -> None:
    """Of a pass that some require and do not have before them."""
    first, *rest = entries
    absent = needed not in {other.name for other in config.passes}
    also = f" (as {'does' if len(rest) == 1 else 'do'} {', '.join(repr(entry.name) for entry in rest)})" if rest else ""
    problems.add(
        f"pass '{first.name}' requires '{needed}' before it{also}{', and the pipeline has none' if absent else ''}",
        _cause(config, first, needed),
        f"set '{first.name}: off' too, or put '{needed}' before it"
        if absent
        else f"put '{needed}' earlier into the pipeline",
    )


def _cause(config: PipelineConfig, entry: PassConfig, needed: str) -> str:
    """Where the order became wrong: the line that took the needed pass out, or the one that moved one of the two last.
    The line that names the pass may be in a shipped file, which is not what is to be corrected."""
    present = {other.name for other in config.passes}
    suspects = (entry.name, needed) if needed in present else (needed,)
    return next((place for name, place in reversed(config.moves.items()) if name in suspects), entry.place)


def run_pipeline(
    module: GraphModule,
    passes: Sequence[tuple[Pass, PassConfig]],
    context: PassContext,
    names: Mapping[str, Value],
    reports: list[PassReport],
    *,
    level: Level = "aten",
    after_pass: AfterPass | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Rewrite `module` in place and append a report of each pass to `reports`, also of one that fails.

    `names` are the values that `expect` and `when` may use; `n_layers` is read off the graph when it is not among them.

    Raises ContractError if a pass breaks the contract, ExpectationError (after that pass was dumped) if the number of
    sites is not as expected.
    """
    contract = GraphContract.of(module) if level == "aten" else None
    layers = count_layers(module.graph)
    names = {**({"n_layers": layers} if layers else {}), **names}
    mode = private.graph_fake_mode(module.graph)
    costs = _GraphCost(context.ops)
    announced: set[str] = set()
    for index, (made, entry) in enumerate(passes):
        if made.level != level:
            continue
        options = {f.name: getattr(made, f.name) for f in fields(made)}
        report = PassReport(made.name, made.level, options, expect=entry.expect)
        reports.append(report)
        if entry.when is not None and not parse_when(entry.when, entry.place).holds(names):
            report.skipped = f"when: {entry.when}"
            continue
        progress(made.name)
        before = costs.of(module.graph)
        _note_costs(report, before, before)
        started, guards = time.perf_counter(), private.guard_count(mode)
        made.run(module, replace(context, on_miss=entry.on_miss), report)
        eliminate_dead_code(module.graph)
        announced |= made.provides
        if contract is not None:
            contract.check(module, made.name, frozenset(announced))
            check_guards(module.graph, guards, made.name)
        report.seconds = time.perf_counter() - started
        _note_costs(report, before, costs.of(module.graph))
        if after_pass is not None:
            after_pass(index, module, report)
        _check_expectation(report, entry, names)


def _note_costs(report: PassReport, before: tuple[int, Cost], after: tuple[int, Cost]) -> None:
    report.nodes_before, report.nodes_after = before[0], after[0]
    report.launches_before, report.launches_after = before[1].launches, after[1].launches
    report.bytes_before, report.bytes_after = before[1].bytes, after[1].bytes


def _check_expectation(report: PassReport, entry: PassConfig, names: Mapping[str, Value]) -> None:
    if entry.expect is None:
        return
    counts = {"matched": report.matched, "candidates": report.candidates, "declined": report.declined}
    expression = parse_expect(entry.expect, entry.place)
    report.expect_ok = expression.holds({**names, **counts})
    if report.expect_ok:
        return
    values = ", ".join(f"{name} = {names[name]}" for name in sorted(expression.names) if name in names)
    near = "\n".join(f"    {m.site} ({m.source}): {m.reason}" for m in [*report.missed, *report.refused][:NEAR_MISSES])
    rest = len(report.missed) + len(report.refused) - NEAR_MISSES
    near += f"\n    and {rest} more" if rest > 0 else ""
    none = "every candidate was rewritten" if report.candidates else "no candidate site was found"
    raise ExpectationError(
        f"pass {report.name} rewrote {report.matched} of {report.candidates} sites, and the pipeline expects "
        f"'{entry.expect}'{f' ({values})' if values else ''}; misses:\n{near or f'    none: {none}'}",
        place=entry.place or None,
        remedy="look at the reasons (k3rewrite explain RUN), or change the expectation",
    )


@dataclass
class _Known:
    """Cost of a node, valid while its target stays the same."""

    target: object
    cost: Cost


class _GraphCost:
    """Nodes, launches and bytes of a graph; the cost of a node that is still there is not computed again."""

    def __init__(self, ops: Mapping[str, Op]) -> None:
        self._costs: dict[Node, _Known] = {}
        self._by_name = {name: op.cost for name, op in ops.items()}

    def of(self, graph: Graph) -> tuple[int, Cost]:
        nodes = list(graph.nodes)
        return len(nodes), sum_costs(self._cost(node) for node in nodes)

    def _cost(self, node: Node) -> Cost:
        if node.op != "call_function":
            return FREE
        known = self._costs.get(node)
        if known is None or known.target is not node.target:
            known = self._costs[node] = _Known(node.target, node_cost(node, self._by_name.get))
        return known.cost


def count_layers(graph: Graph) -> int:
    """Number of distinct `layers.<i>` among the module paths of a graph; of layers inside of layers the outer ones."""
    found = set()
    for node in graph.nodes:
        parts = module_path(node).split(".")
        for position, (name, index) in enumerate(pairwise(parts)):
            if name == "layers" and index.isdigit():
                found.add(".".join(parts[: position + 2]))
                break
    return len(found)
