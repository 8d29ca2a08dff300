"""End-to-end check: the compiled model against eager, both against an fp64 run, on the inputs of the first real call.

    eager      the captured graph, op by op in the model's dtypes        -> outputs and updated states
    compiled   what the pipeline made                                    -> outputs and updated states
    exact      the captured graph in fp64, with the expert choices of the run that it is compared with

Expert choices flip between precisions where two scores are nearly tied, and then two correct runs differ in every
digit. So the compiled graph also returns its choices, each run is measured against exact arithmetic with its own
choices, and a choice that is not nearly tied in exact arithmetic is an error by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from k3rewrite._torch_private import make_boxed
from k3rewrite.capture import Captured
from k3rewrite.checks.errors import acceptable, relative_error
from k3rewrite.checks.precise import DecisionInterpreter, decision_nodes
from k3rewrite.errors import VerificationError
from k3rewrite.report.schema import EndToEnd

MAX_MARGIN = 0.05
"""how far a choice may lie below the best one, as a share of the spread of the scores, and count as a near tie"""


@dataclass
class EndToEndCheck:
    """Checks a compiled graph on its first call; `result` is filled then, and `done` called with it.

    `original` is the captured graph before any pass; `outputs` the number of its outputs.
    """

    original: Captured
    done: Callable[[EndToEnd], None]
    result: EndToEnd | None = None

    def expose_choices(self, module: GraphModule) -> None:
        """Append the expert choices of the rewritten graph to its outputs."""
        graph = module.graph
        output = graph.output_node()
        choices = [_ids(n) for n in decision_nodes(module)]
        output.args = ((*output.args[0], *choices),)  # type: ignore[misc]
        module.recompile()

    def wrap(self, compiled: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """A boxed function that checks the first call and drops the choices from the outputs of every call."""
        count = len(self.original.module.graph.output_node().args[0])  # type: ignore[arg-type]

        def run(*inputs: Any) -> Any:
            if self.result is not None:
                return tuple(compiled(list(inputs))[:count])
            return self._first(compiled, inputs, count)

        return make_boxed(run)

    def _first(self, compiled: Callable[[list[Any]], Any], inputs: Sequence[Any], count: int) -> Any:
        module = self.original.module
        mutated = _mutated(module)
        before = [v.clone() if i in mutated and isinstance(v, Tensor) else v for i, v in enumerate(inputs)]
        eager_inputs = [v.clone() if i in mutated else v for i, v in enumerate(before)]
        eager = DecisionInterpreter(module, wide=False)
        eager_outputs = eager.run_on(eager_inputs)[:count]
        outputs = tuple(compiled(list(inputs)))
        outputs, choices = outputs[:count], list(outputs[count:])
        exact_eager, _ = self._exact(before, mutated, eager.routes.ids, count)
        exact, margin = self._exact(before, mutated, choices, count)
        old = _values(eager_outputs, eager_inputs, mutated)
        new = _values(outputs, inputs, mutated)
        self.result = _judge(old, new, exact_eager, exact, margin)
        self.done(self.result)
        if not self.result.passed:
            raise VerificationError(
                f"the compiled model's error against fp64 is {self.result.max_rel_error_vs_fp64:.3e}, eager's is "
                f"{self.result.eager_rel_error_vs_fp64:.3e}; expert choices lie {margin:.3f} of the spread apart at most",
                place="end-to-end check",
                remedy="run with --verify regions to find the rewrite, or take passes out of the pipeline",
            )
        return outputs

    def _exact(
        self, before: Sequence[Any], mutated: frozenset[int], choices: Sequence[Tensor], count: int
    ) -> tuple[list[Any], float]:
        exact = DecisionInterpreter(self.original.module, wide=True, forced=choices)
        inputs = list(before)
        outputs = exact.run_on(inputs)[:count]
        margin = max(exact.routes.margins, default=0.0)
        return _values(outputs, exact.inputs, mutated), margin


def _judge(
    old: Sequence[Any], new: Sequence[Any], exact_old: Sequence[Any], exact_new: Sequence[Any], margin: float
) -> EndToEnd:
    passed, worst_old, worst_new, device = margin <= MAX_MARGIN, 0.0, 0.0, "cpu"
    for a, b, exact_a, exact_b in zip(old, new, exact_old, exact_new, strict=True):
        if not isinstance(a, Tensor):
            continue
        device = torch.cuda.get_device_name(b.device) if b.is_cuda else device
        if not a.dtype.is_floating_point:
            passed &= torch.equal(a, b)
            continue
        error_old, error_new = relative_error(a, exact_a), relative_error(b, exact_b)
        passed &= acceptable(error_new, error_old, b.dtype) and (a.dtype, a.shape) == (b.dtype, b.shape)
        worst_old, worst_new = max(worst_old, error_old), max(worst_new, error_new)
    return EndToEnd(bool(passed), worst_new, worst_old, device)


def _values(outputs: Sequence[Any], inputs: Sequence[Any], mutated: frozenset[int]) -> list[Any]:
    return [*outputs, *(inputs[i] for i in sorted(mutated))]


def _mutated(module: GraphModule) -> frozenset[int]:
    """Positions of the inputs that the graph writes at its end."""
    placeholders = {n: i for i, n in enumerate(module.graph.find_nodes(op="placeholder"))}
    written = [n.args[0] for n in module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)]
    return frozenset(placeholders[n] for n in written if n in placeholders)  # type: ignore[index]


def _ids(node: Node) -> Node:
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == 1:
            return user
    graph = node.graph
    with graph.inserting_after(node):
        item = graph.call_function(operator.getitem, (node, 1))
    item.meta["val"] = node.meta["val"][1]
    return item
