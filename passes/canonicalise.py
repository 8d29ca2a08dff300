"""Remove what only spells the same value twice, so that later patterns see one form.

    x.float().to(bfloat16)           -> x            (x bf16: widened and narrowed back, exact)
    x.float().double()               -> x.double()   (two widenings are one)
    torch.ops.aten.copy(dst, src)    -> src          (functional copy that changes neither dtype, shape nor stride)
    x.view(2, 4), x.view(2, 4)       -> one node     (equal views and casts of one value)

Nothing here changes a bit of any result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from k3rewrite.graph.dtypes import widens
from k3rewrite.graph.provenance import module_path, source_line
from k3rewrite.graph.purity import PurityIndex, is_view, writes
from k3rewrite.graph.shapes import metadata_difference, same_sizes
from k3rewrite.patterns import (
    OPERATORS,
    Anything,
    Builder,
    CounterExample,
    Example,
    Match,
    Policy,
    Refusal,
    Rule,
    Var,
    call,
)
from k3rewrite.patterns.bindings import cast_source
from k3rewrite.patterns.rewrite import readers
from k3rewrite.pipeline.pass_base import PassContext, RulePass
from k3rewrite.report.schema import Miss, PassReport, Site

_CAST_TARGETS = OPERATORS["cast"]


class FoldCasts(Rule):
    """A cast of a cast, where the first loses nothing."""

    name = "fold_casts"
    policy = Policy.EXACT
    anchors = _CAST_TARGETS
    pattern = call("cast", call("cast", Var("x"), open=True, name="first"), open=True, name="anchor")
    reach = 0

    def is_site(self, node: Node) -> bool:
        return isinstance(node.args[0], Node) and node.args[0].target in _CAST_TARGETS

    def check(self, match: Match) -> Refusal | None:
        if cast_source(match["first"]) is None or cast_source(match["anchor"]) is None:
            return Refusal("the cast also changes device or memory format", match["anchor"])
        if not widens(match.value("x").dtype, match.value("first").dtype):
            return Refusal(f"the cast to {match.value('first').dtype} rounds: it is part of the model", match["first"])
        return None

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        dtype = match.value("anchor").dtype
        if match.value("x").dtype == dtype:
            return {"root": match["x"]}
        return {"root": builder.call(torch.ops.aten._to_copy.default, match["x"], dtype=dtype)}

    def examples(self) -> Sequence[Example]:
        return (
            Example("widened and narrowed back", lambda x: x.float().bfloat16() + 1, _bf16),
            Example("widened twice", lambda x: x.float().double(), _bf16),
        )

    def counterexamples(self) -> Sequence[CounterExample]:
        return (
            CounterExample(
                "a rounding between two wide regions", lambda x: x.float().bfloat16().float(), _fp32, "rounds"
            ),
        )


class FoldCopy(Rule):
    """A functional copy whose result is its source, in every observable respect."""

    name = "fold_copy"
    policy = Policy.EXACT
    anchors = frozenset({torch.ops.aten.copy.default})
    pattern = call(torch.ops.aten.copy.default, Var("destination"), Var("source"), Anything(), name="anchor")
    reach = 0

    def check(self, match: Match) -> Refusal | None:
        difference = metadata_difference(match.value("anchor"), match.value("source"))
        return Refusal(f"the copy changes its source: {difference}", match["anchor"]) if difference else None

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        return {"root": match["source"]}

    def examples(self) -> Sequence[Example]:
        return (Example("same metadata", lambda x: torch.ops.aten.copy(x, x * 2) + 1, _fp32),)

    def counterexamples(self) -> Sequence[CounterExample]:
        return (CounterExample("broadcast", lambda x: torch.ops.aten.copy(x, x[:1] * 2) + 1, _fp32, "shape"),)


class FoldScatteredCopy(Rule):
    """A functional copy that only lends its strides to a value which is then written into a slot."""

    name = "fold_scattered_copy"
    policy = Policy.EXACT
    anchors = OPERATORS["select_scatter"]
    pattern = call(
        "select_scatter",
        Var("base"),
        call(torch.ops.aten.copy.default, Var("destination"), Var("source"), Anything(), name="copy"),
        Anything("dim"),
        Anything("index"),
        name="anchor",
    )
    reach = 0

    def check(self, match: Match) -> Refusal | None:
        copied, source = match.value("copy"), match.value("source")
        if (copied.dtype, copied.device) != (source.dtype, source.device) or not same_sizes(copied.shape, source.shape):
            return Refusal("the copy casts, moves or broadcasts its source", match["copy"])
        return None

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        arguments = (match["base"], match["source"], match["dim"], match["index"])
        return {"root": builder.call(torch.ops.aten.select_scatter.default, *arguments)}

    def examples(self) -> Sequence[Example]:
        def stored(x: Tensor) -> Tensor:
            bank = x.unsqueeze(1).repeat(1, 3, 1)
            bank[:, 1] = x * 2
            return bank

        return (Example("a slot of a bank", stored, _fp32),)

    def counterexamples(self) -> Sequence[CounterExample]:
        def cast(x: Tensor) -> Tensor:
            bank = x.unsqueeze(1).repeat(1, 3, 1)
            bank[:, 1] = (x * 2).double()
            return bank

        return (CounterExample("a cast on the way", cast, _fp32, "casts"),)


def _fp32() -> tuple[Tensor]:
    return (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)


def _bf16() -> tuple[Tensor]:
    return (_fp32()[0].bfloat16(),)


def merge_equal(graph: Graph, report: PassReport) -> None:
    """Let equal views and casts of one value be one node. Constants must be equal in type too (1 is not 1.0)."""
    writers = [n for n in graph.nodes if writes(n)]
    seen: dict[str, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not (node.target in _CAST_TARGETS or is_view(node)):
            continue
        key = repr((node.target, map_arg(node.args, id), map_arg(dict(node.kwargs), id)))
        kept = seen.setdefault(key, node)
        if kept is node:
            continue
        report.candidates += 1
        where = {"site": node.name, "source": source_line(node), "module": module_path(node)}
        if _is_returned(kept) and _is_returned(node):
            report.missed.append(Miss(reason="both are returned: they must stay two tensors", **where))
            continue
        if any(w < node or any(a.op != "placeholder" for a in writes(w)) for w in writers):
            if objection := PurityIndex(graph).merge_objection(kept, node):
                report.missed.append(Miss(reason=objection, **where))
                continue
        node.replace_all_uses_with(kept)
        graph.erase_node(node)
        report.matched += 1
        report.sites.append(Site(replaced_by=kept.name, policy=Policy.EXACT.value, **where))


def _is_returned(node: Node) -> bool:
    """True if the caller gets the value itself, or of a cast a view of it: views share storage anyway."""
    reading = readers(node) if node.target in _CAST_TARGETS else node.users
    return any(reader.op == "output" for reader in reading)


@dataclass(frozen=True)
class CanonicalisePass(RulePass):
    """Fold casts that lose nothing and copies that change nothing; make equal views and casts one node."""

    name: ClassVar[str] = "canonicalise"

    def run(self, module: GraphModule, context: PassContext, report: PassReport) -> None:
        super().run(module, context, report)
        merge_equal(module.graph, report)

    def rules(self) -> tuple[Rule, ...]:
        return (FoldCasts(), FoldCopy(), FoldScatteredCopy())
