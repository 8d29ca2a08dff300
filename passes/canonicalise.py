"""Remove what only spells the same value twice, so that later patterns see one form.

    x.float().to(bfloat16)           -> x            (x bf16: widened and narrowed back, exact)
    x.float().double()               -> x.double()   (two widenings are one)
    torch.ops.aten.copy(dst, src)    -> src          (functional copy that changes neither dtype, shape nor stride)
    x[:, 0] = y, of one slot         -> y[:, None]   (everything is written)
    x.masked_fill(mask, -inf)        -> x            (a mask that is known to be false everywhere)
    x.view(2, 4), x.view(2, 4)       -> one node     (equal views and casts of one value)

Nothing here changes a bit of any result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from k3rewrite.graph.dtypes import widens
from k3rewrite.graph.provenance import module_path, source_line
from k3rewrite.graph.purity import PurityIndex, is_view, writes
from k3rewrite.graph.shapes import metadata_difference, same_size, same_sizes
from k3rewrite.ops.vocabulary import size_hint
from k3rewrite.patterns import (
    OPERATORS,
    Anything,
    Builder,
    CounterExample,
    Example,
    Match,
    Number,
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

_aten = torch.ops.aten
_CAST_TARGETS = OPERATORS["cast"]
_SHOWN_AGAIN = frozenset({_aten.clone.default}).union(
    *(OPERATORS[name] for name in ("view", "expand", "unsqueeze", "squeeze", "cast"))
)
_NEGATING = frozenset({_aten.bitwise_not.default, _aten.logical_not.default})
_COMPARING = frozenset({_aten.eq.Scalar, _aten.ne.Scalar})


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
        return {"root": builder.call(_aten._to_copy.default, match["x"], dtype=dtype)}

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
    anchors = frozenset({_aten.copy.default})
    pattern = call(_aten.copy.default, Var("destination"), Var("source"), Anything(), name="anchor")
    reach = 0

    def check(self, match: Match) -> Refusal | None:
        difference = metadata_difference(match.value("anchor"), match.value("source"))
        return Refusal(f"the copy changes its source: {difference}", match["anchor"]) if difference else None

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        return {"root": match["source"]}

    def examples(self) -> Sequence[Example]:
        return (Example("same metadata", lambda x: _aten.copy(x, x * 2) + 1, _fp32),)

    def counterexamples(self) -> Sequence[CounterExample]:
        return (CounterExample("broadcast", lambda x: _aten.copy(x, x[:1] * 2) + 1, _fp32, "shape"),)


class FoldOpenMask(Rule):
    """A masked_fill whose mask is a number scattered to every place: the best one of one group excludes nobody."""

    name = "fold_open_mask"
    policy = Policy.EXACT
    anchors = frozenset({_aten.masked_fill.Scalar})
    pattern = call(_aten.masked_fill.Scalar, Var("values"), Var("mask"), Anything(), name="anchor")
    reach = 0

    def is_site(self, node: Node) -> bool:
        mask = node.args[1]
        return isinstance(mask, Node) and _scattered_into(mask) is not None

    def check(self, match: Match) -> Refusal | None:
        if _every_element(match["mask"]) is not False:
            return Refusal("the mask may be true somewhere", match["anchor"])
        return None

    def region_values(self, match: Match, seed: int) -> Mapping[Node, Tensor]:
        mask = match.value("mask")
        return {match["mask"]: torch.zeros([size_hint(s) for s in mask.shape], dtype=mask.dtype, device=mask.device)}

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        return {"root": match["values"]}

    def examples(self) -> Sequence[Example]:
        return (
            Example("one group of experts", lambda x: _best_groups(x, 1, lambda m: ~m.bool()), _fp32),
            Example("compared with zero", lambda x: _best_groups(x, 1, lambda m: m == 0), _fp32),
        )

    def counterexamples(self) -> Sequence[CounterExample]:
        some = "may be true somewhere"
        return (
            CounterExample("four groups", lambda x: _best_groups(x, 4, lambda m: ~m.bool()), _fp32, some),
            CounterExample("the best group left out", lambda x: _best_groups(x, 1, lambda m: m.bool()), _fp32, some),
            CounterExample("~1 is -2", lambda x: _best_groups(x, 1, lambda m: (~m.int()).bool()), _fp32, some),
            CounterExample("a half, cast", lambda x: _best_groups(x, 1, lambda m: ~m.int().bool(), 0.5), _fp32, some),
        )


class FoldScatteredCopy(Rule):
    """A functional copy that only lends its strides to a value which is then written into a slot."""

    name = "fold_scattered_copy"
    policy = Policy.EXACT
    anchors = OPERATORS["select_scatter"]
    pattern = call(
        "select_scatter",
        Var("base"),
        call(_aten.copy.default, Var("destination"), Var("source"), Anything(), name="copy"),
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
        return {"root": builder.call(_aten.select_scatter.default, *arguments)}

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


class FoldWholeSlice(Rule):
    """A slice from the begin to the end, which a symbolic size leaves in the graph: x[:, 1:] of a batch."""

    name = "fold_whole_slice"
    policy = Policy.EXACT
    anchors = OPERATORS["slice"]
    pattern = call("slice", Var("x"), Anything(), 0, Anything("end"), name="anchor")
    reach = 0

    def is_site(self, node: Node) -> bool:
        value = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
        return isinstance(value, Tensor) and same_sizes(value.shape, node.meta["val"].shape)

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        return {"root": match["x"]}

    def examples(self) -> Sequence[Example]:
        return (Example("all of it", lambda x: _aten.slice(x + 1, 0, 0, 2**63 - 1) * 2, _fp32),)

    def counterexamples(self) -> Sequence[CounterExample]:
        def stepped(x: Tensor) -> Tensor:
            return _aten.slice(x[:1] + 1, 0, 0, 2**63 - 1, 2) * 2

        return (CounterExample("a step, of one row", stepped, _fp32, "expected"),)


class FoldWholeScatter(Rule):
    """A value that is written into the only slot there is: nothing is left of what was there."""

    name = "fold_whole_scatter"
    policy = Policy.EXACT
    anchors = OPERATORS["select_scatter"]
    pattern = call("select_scatter", Var("base"), Var("source"), Number("dim"), Anything("index"), name="anchor")
    reach = 0

    def is_site(self, node: Node) -> bool:
        dim = node.args[2] if len(node.args) > 2 else None
        return isinstance(dim, int) and same_size(node.meta["val"].shape[dim], 1)

    def check(self, match: Match) -> Refusal | None:
        if match.value("source").dtype != match.value("base").dtype:
            return Refusal("it is cast on the way", match["anchor"])
        return None

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        return {"root": builder.call(_aten.unsqueeze.default, match["source"], match["dim"])}

    def examples(self) -> Sequence[Example]:
        def stored(x: Tensor) -> Tensor:
            out = torch.zeros(x.shape[0], 1, x.shape[1])
            out[:, 0] = x * 2
            return out + 1

        return (Example("a sequence of one token", stored, _fp32),)

    def counterexamples(self) -> Sequence[CounterExample]:
        def cast(x: Tensor) -> Tensor:
            return torch.select_scatter(x.unsqueeze(1), (x * 2).double(), 1, 0) + 1

        return (CounterExample("a cast on the way", cast, _fp32, "cast on the way"),)


def _best_groups(x: Tensor, groups: int, excluded: Callable[[Tensor], Tensor], value: float = 1) -> Tensor:
    """The better half of the groups of columns of x, -inf in the others, and exp of it."""
    totals = x.view(x.shape[0], groups, -1).sum(-1)
    best = totals.topk(max(1, groups // 2), dim=-1)[1]
    mask = torch.zeros_like(totals).scatter(1, best, value).unsqueeze(-1).expand(-1, -1, x.shape[1] // groups)
    return x.masked_fill(excluded(mask.reshape(x.shape)), float("-inf")).exp()


def _scattered_into(mask: Node) -> Node | None:
    """The scatter of a number of which a mask shows the elements, as they are or negated."""
    while mask.target in (*_SHOWN_AGAIN, *_NEGATING, *_COMPARING):
        mask = mask.args[0]  # type: ignore[assignment]
    return mask if mask.target is _aten.scatter.value else None


def _every_element(mask: Node) -> bool | None:
    """What every element is, or None if that is not known."""
    target, value = mask.target, mask.meta["val"]
    if target is _aten.scatter.value:
        base, dim, index, number = mask.args[:4]
        assert isinstance(base, Node) and isinstance(index, Node) and isinstance(dim, int)
        covered = same_sizes(index.meta["val"].shape, value.shape) and same_size(value.shape[dim], 1)
        return bool(number) if covered and number in (0, 1) else None  # 0 and 1 are what they are in every dtype
    if target in _SHOWN_AGAIN:
        return _every_element(mask.args[0])  # type: ignore[arg-type]
    inner = None
    if (target in _COMPARING and mask.args[1] == 0) or (target in _NEGATING and value.dtype is torch.bool):
        inner = _every_element(mask.args[0])  # type: ignore[arg-type]
    return inner if inner is None or target is _aten.ne.Scalar else not inner


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
    """Fold casts that lose nothing, copies and masks that change nothing; make equal views and casts one node."""

    name: ClassVar[str] = "canonicalise"

    def run(self, module: GraphModule, context: PassContext, report: PassReport) -> None:
        super().run(module, context, report)
        merge_equal(module.graph, report)

    def rules(self) -> tuple[Rule, ...]:
        return (FoldCasts(), FoldCopy(), FoldOpenMask(), FoldScatteredCopy(), FoldWholeSlice(), FoldWholeScatter())
