"""Run a graph, or a part of one, in fp64: the exact arithmetic that errors are measured against.

    y = _to_copy(mm(x, w), dtype=bfloat16)      run on x.double(), w.double() with dtype=float64

Every floating input becomes fp64 and every floating dtype in an argument too, so no rounding of the model remains.
Decisions must not flip between precisions: the expert ids of `top-k` and `k3::route` can be recorded in one run and
forced in another, and the margin by which a forced decision disagrees with the scores is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

TOPK = torch.ops.aten.topk.default
WIDE = torch.float64


@dataclass
class Routes:
    """Decisions of one run in graph order: ids per top-k. `margins` says how far below the best choice forced ones are,
    relative to the spread of the scores (0.0 where they agree)."""

    ids: list[Tensor] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)


class DecisionInterpreter(Interpreter):
    """Runs a graph as it is (`wide=False`) or in fp64, recording or forcing its decisions."""

    def __init__(self, module: GraphModule, *, wide: bool, forced: Sequence[Tensor] | None = None) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.wide, self.forced, self.routes = wide, forced, Routes()

    def run_on(self, inputs: Iterable[Any]) -> tuple[Any, ...]:
        """Outputs for real inputs; in-place updates go to the tensors given (clone them first)."""
        values = [widened(v) if self.wide else v for v in inputs]
        self.inputs = values
        with torch.no_grad():
            result = self.run(*values)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # type: ignore[override]
        if self.wide:
            args, kwargs = _wide_dtypes(args), _wide_dtypes(dict(kwargs))
            if target is torch.ops.aten._grouped_mm.default:
                return grouped_mm(*args, **kwargs)
        result = super().call_function(target, args, dict(kwargs))
        if target is TOPK:
            result = self._decide((result[0], result[1]), *args, **kwargs)
        elif is_route(target):
            weights, ids = result
            if self.forced is not None:
                weights, ids = _forced_route(target, args, self._take(ids))
            self.routes.ids.append(ids)
            result = (weights, ids)
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return widened(value) if self.wide else value

    def _take(self, own: Tensor) -> Tensor:
        assert self.forced is not None
        return self.forced[len(self.routes.ids)].to(own.device)

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
        if self.forced is not None and k > 0:
            chosen = self._take(ids)
            taken = scores.gather(dim, chosen)
            spread = (scores.amax(dim) - scores.amin(dim)).clamp_min(torch.finfo(torch.float32).tiny)
            lost = values.amin(dim) - taken.amin(dim) if largest else taken.amax(dim) - values.amax(dim)
            lost = lost.clamp_min(0) / spread
            self.routes.margins.append(float(lost.max()) if lost.numel() else 0.0)
            values, ids = taken, chosen
        self.routes.ids.append(ids)
        return values, ids


def is_route(target: Any) -> bool:
    """True for `k3::route` and for an op bound to a kernel of it."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and target._opname.split("__")[0] == "route"
        and (target.namespace in ("k3", "k3_kernels"))
    )


def decision_nodes(module: GraphModule) -> list[Node]:
    """The nodes whose ids a run records, in graph order."""
    return [n for n in module.graph.nodes if n.target is TOPK or (n.op == "call_function" and is_route(n.target))]


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
    """fp64 copy of a floating tensor; everything else as it is (integer tensors are cloned)."""
    if not isinstance(value, Tensor):
        return value
    return value.to(WIDE) if value.dtype.is_floating_point and value.dtype != WIDE else value.clone()


def _wide_dtypes(arguments: Any) -> Any:
    return map_aggregate(
        arguments,
        lambda a: WIDE if isinstance(a, torch.dtype) and a.is_floating_point else a,  # type: ignore[arg-type]
    )


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
