"""Run a graph, or a part of one, in fp64: the exact arithmetic that errors are measured against.

    y = _to_copy(mm(x, w), dtype=bfloat16)      run on x.double(), w.double() with dtype=float64

Every floating input becomes fp64 and every floating dtype in an argument too, so no rounding of the model remains;
complex ones likewise. Three kinds of op run in the dtypes of the graph instead: one that looks at bits (`view` as
another dtype), one that draws random numbers (fp64 would draw others), and one that has no fp64 form.

Decisions must not flip between precisions: the expert ids of `top-k` and `k3::route` can be recorded in one run and
forced in another, and the margin by which a forced decision disagrees with the scores is reported. What is no decision
(an id twice, or out of range) is reported as a fault and not forced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate, map_arg

from k3rewrite.checks.choices import choice_fault, shortfall
from k3rewrite.ops.vocabulary import op_of

TOPK = torch.ops.aten.topk.default
BITS = torch.ops.aten.view.dtype
WIDE = torch.float64
WIDE_COMPLEX = torch.complex128


@dataclass
class Routes:
    """Decisions of one run in graph order: ids per decision. `margins` says how far below the best choice forced ones
    are, relative to the spread of the scores (0.0 where they agree), `faults` which were to be forced and are none."""

    ids: list[Tensor] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class DecisionInterpreter(Interpreter):
    """Runs a graph as it is (`wide=False`) or in fp64, recording or forcing its decisions.

    `forced` has one entry for each decision in graph order; None leaves that one to the run. `not_wide` are the ops
    that a wide run found no fp64 form of.
    """

    def __init__(self, module: GraphModule, *, wide: bool, forced: Sequence[Tensor | None] | None = None) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.wide, self.forced, self.routes = wide, forced, Routes()
        self.not_wide: dict[str, None] = {}

    def run_on(self, inputs: Iterable[Any]) -> tuple[Any, ...]:
        """Outputs for real inputs; in-place updates go to the tensors given (clone them first)."""
        values = [widened(v) if self.wide else v for v in inputs]
        self.inputs = values
        with torch.no_grad():
            result = self.run(*values)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    def run_node(self, n: Node) -> Any:
        self.node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # type: ignore[override]
        call = self._wide_call if self.wide else super().call_function
        result = call(target, args, dict(kwargs))
        if target is TOPK:
            result = self._decide((result[0], result[1]), *args, **kwargs)
        elif is_route(target):
            weights, ids = result
            if (chosen := self._take(ids, -1, args[0].shape[-1])) is not None:
                given = _wide_dtypes(args) if self.wide else args
                self.routes.margins.append(shortfall(_selectors(target, given), chosen))
                weights, ids = _forced_route(target, given, chosen)
            self.routes.ids.append(ids)
            result = (weights, ids)
        return result

    def _wide_call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.aten._grouped_mm.default:
            return grouped_mm(*_wide_dtypes(args), **_wide_dtypes(kwargs))
        if target is BITS or _draws(target):
            return self._call_as_captured(target)
        try:
            result = super().call_function(target, _wide_dtypes(args), _wide_dtypes(kwargs))
        except RuntimeError as error:  # "not implemented for 'Double'", or a kernel that takes some dtypes only
            writes = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
            if writes or isinstance(error, torch.OutOfMemoryError):
                raise
            result = self._call_as_captured(target)
            self.not_wide[str(target)] = None
        return map_aggregate(result, _widened_result)  # a factory without a dtype gives the default one

    def _call_as_captured(self, target: Any) -> Any:
        """The current node on values of the dtypes that the graph has there."""
        args, kwargs = map_arg((self.node.args, self.node.kwargs), lambda n: _narrowed(self.env[n], n.meta.get("val")))
        return map_aggregate(super().call_function(target, args, dict(kwargs)), _widened_result)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return widened(value) if self.wide else value

    def _take(self, own: Tensor, dim: int, experts: int) -> Tensor | None:
        """What is forced on the decision at hand, if anything is and it is a choice of some of `experts`."""
        place = len(self.routes.ids)
        chosen = self.forced[place] if self.forced is not None else None
        if chosen is None:
            return None
        chosen = chosen.to(own.device)
        if fault := choice_fault(chosen, own, dim, experts):
            self.routes.faults.append(f"choice {place} of experts: {fault}")
            return None
        return chosen

    def _decide(
        self,
        own: tuple[Tensor, Tensor],
        scores: Tensor,
        k: int,
        dim: int = -1,
        largest: bool = True,
        sorted: bool = True,
    ) -> tuple[Tensor, Tensor]:
        values, ids = own
        experts = scores.shape[dim] if scores.dim() else 1
        if (chosen := self._take(ids, dim, experts)) is not None and k > 0:
            self.routes.margins.append(shortfall(scores, chosen, dim, largest))
            values, ids = scores.gather(dim, chosen), chosen
        self.routes.ids.append(ids)
        return values, ids


def is_route(target: Any) -> bool:
    """True for `k3::route` and for an op bound to a kernel of it."""
    word = op_of(target)
    return word is not None and word.name == "route"


def decision_nodes(module: GraphModule) -> list[Node]:
    """The nodes whose ids a run records, in graph order."""
    return [n for n in module.graph.nodes if n.target is TOPK or (n.op == "call_function" and is_route(n.target))]


def _selectors(target: Any, args: tuple[Any, ...]) -> Tensor:
    """What a route chooses by, for every expert: its scores with the bias. They are read off a route that takes all of
    them, unweighed; `topk_softmax` scores by the logits themselves."""
    logits, bias, _, score, *_rest = args
    scores = logits
    if score != "topk_softmax":
        weights, ids = target(logits, None, logits.shape[-1], score, False, 0.0, 1.0, True, *args[-2:])
        scores = torch.empty_like(weights).scatter(-1, ids, weights)
    return scores if bias is None else scores + bias


def _forced_route(target: Any, args: tuple[Any, ...], ids: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of given ids: the route of logits in which only these are selectable."""
    logits, bias, *rest = args
    wall = torch.full_like(logits, -torch.inf, dtype=torch.promote_types(logits.dtype, torch.float32))
    wall = wall.scatter(-1, ids, 0.0)
    selector = wall if bias is None else wall + bias
    weights, chosen = target(logits, selector, *rest)
    order = ids.argsort(-1)
    back = chosen.argsort(-1)
    placed = torch.empty_like(weights).scatter(-1, order, weights.gather(-1, back))
    return placed, ids


def widened(value: Any) -> Any:
    """fp64 copy of a floating tensor, complex128 of a complex one; everything else as it is (integers are cloned)."""
    if not isinstance(value, Tensor):
        return value
    wide = _wide_dtype(value.dtype)
    return value.to(wide) if wide != value.dtype else value.clone()


def _widened_result(value: Any) -> Any:
    """As `widened`, but what is wide already stays the tensor that it is."""
    return value.to(_wide_dtype(value.dtype)) if isinstance(value, Tensor) else value


def _narrowed(value: Any, captured: Any) -> Any:
    if isinstance(value, (tuple, list)) and isinstance(captured, (tuple, list)):
        return type(value)([_narrowed(v, c) for v, c in zip(value, captured, strict=True)])
    both = isinstance(value, Tensor) and isinstance(captured, Tensor)
    return value.to(captured.dtype) if both else value


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return WIDE if dtype.is_floating_point else WIDE_COMPLEX if dtype.is_complex else dtype


def _wide_dtypes(arguments: Any) -> Any:
    return map_aggregate(arguments, lambda a: _wide_dtype(a) if isinstance(a, torch.dtype) else a)


def _draws(target: Any) -> bool:
    """True for an op that takes random numbers from the generator."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, *rest: Any, **kwargs: Any) -> Tensor:
    """Grouped matrix product by a loop over groups, for dtypes that the library's own does not take.

    a [T, K] with rows of group e ending at offs[e], b [E, K, N] -> [T, N].
    """
    assert offs is not None and a.dim() == 2 and b.dim() == 3, "only the 2-D times 3-D form is spelled in models"
    out = a.new_zeros((a.shape[0], b.shape[2]))
    start = 0
    for group, end in enumerate(offs.tolist()):
        out[start:end] = a[start:end] @ b[group]
        start = end
    return out
