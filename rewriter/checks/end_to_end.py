"""End-to-end check: the compiled model against eager, both against an fp64 run, on the inputs of the first real call.

    eager      the captured graph, op by op in the model's dtypes        -> outputs and updated states
    compiled   what the pipeline made                                    -> outputs and updated states
    exact      the captured graph in fp64, with the expert choices of the run that it is compared with

Expert choices flip between precisions where two scores are nearly tied, and then two correct runs differ in every
digit. So the compiled graph also returns its choices, each run is measured against exact arithmetic with its own
choices, and choices that are further from the best ones of exact arithmetic than eager's are an error by itself, as is
an expert chosen twice or one that does not exist. A model that draws random numbers gets the same ones in every run.

Each output must satisfy the rule of `errors.py`. Of the updated states there are dozens, and the ratio of two correct
runs' errors scatters from one to the next: together they must satisfy it, and each one twice the ratio.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from k3rewrite._torch_private import make_boxed
from k3rewrite.capture import Captured
from k3rewrite.checks.errors import (
    FACTOR,
    MAX_UNSOUND,
    Error,
    acceptable,
    floor_of,
    is_inexact,
    is_vacuous,
    measure_both,
    pooled,
    unsound_share,
)
from k3rewrite.checks.precise import DecisionInterpreter, Routes, decision_nodes
from k3rewrite.errors import VerificationError
from k3rewrite.graph.provenance import origin_names
from k3rewrite.report.schema import EndToEnd

STATE = "updated input"
MAX_EAGER_ERROR = 0.5
"""relative rms error of eager beyond which a comparison says nothing"""
SHOWN = 3
"""how many values an error names"""
NEAR_TIE_FLOORS = 25.0
"""how many error floors of the outputs' dtype a choice may lie below the best one in exact arithmetic, as a share of
the spread of the scores, beside 1.5 times what eager's choices do: 5 % in bf16, the size of the error of its states"""


@dataclass
class EndToEndCheck:
    """Checks a compiled graph on its first call; `result` is filled then, and `done` called with it. A graph that has
    failed is never run again: every later call raises the same error, which `failed` is told once.

    `original` is the captured graph before any pass; `notes` gets what is to be known about the check.
    """

    original: Captured
    done: Callable[[EndToEnd], None]
    failed: Callable[[VerificationError], None] = lambda error: None
    notes: list[str] = field(default_factory=list)
    result: EndToEnd | None = None
    failure: VerificationError | None = None
    _exposed: list[bool] | None = field(default=None, init=False)
    """for each choice of the original, whether the compiled graph returns it; all, in order, if nothing is known"""

    def expose_choices(self, module: GraphModule) -> None:
        """Append the expert choices of the rewritten graph to its outputs, in the order of the original's: a router
        that was rewritten may stand elsewhere than its top-k stood."""
        graph = module.graph
        output = graph.output_node()
        made = {name: node for node in decision_nodes(module) for name in (*origin_names(node), node.name)}
        found = [made.get(node.name) for node in decision_nodes(self.original.module)]
        self._exposed = [node is not None for node in found]
        choices = [_ids(node) for node in found if node is not None]
        output.args = ((*output.args[0], *choices),)  # type: ignore[misc]
        module.recompile()

    def wrap(self, compiled: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """A boxed function that checks the first call and drops the choices from the outputs of every call."""
        count = len(self.original.module.graph.output_node().args[0])  # type: ignore[arg-type]

        def run(*inputs: Any) -> Any:
            if self.failure is not None:
                raise self.failure
            if self.result is not None:
                return tuple(compiled(list(inputs))[:count])
            return self._first(compiled, inputs, count)

        return make_boxed(run)

    def _first(self, compiled: Callable[[list[Any]], Any], inputs: Sequence[Any], count: int) -> Any:
        module = self.original.module
        mutated = _mutated(module)
        before = [v.clone() if i in mutated and isinstance(v, Tensor) else v for i, v in enumerate(inputs)]
        eager_inputs = [v.clone() if i in mutated else v for i, v in enumerate(before)]
        draws = _generator_states(inputs)
        eager = DecisionInterpreter(module, wide=False)
        eager_outputs = eager.run_on(eager_inputs)[:count]
        _set_generators(draws)
        outputs = tuple(compiled(list(inputs)))
        outputs, choices = outputs[:count], self._choices(outputs[count:])
        drawn = _generator_states(inputs)
        _set_generators(draws)
        exact_eager, eager_routes = self._exact(before, mutated, eager.routes.ids, count)
        _set_generators(draws)
        exact, routes = self._exact(before, mutated, choices, count)
        _set_generators(drawn)
        old = _values(eager_outputs, eager_inputs, mutated)
        new = _values(outputs, inputs, mutated)
        labels = [f"output {i}" for i in range(count)] + [f"{STATE} {i}" for i in sorted(mutated)]
        self.result, problems = _judge(labels, old, new, exact_eager, exact)
        if vacuous := _vacuous(labels, old, exact_eager, exact):
            more = f" and {len(vacuous) - SHOWN} more" if len(vacuous) > SHOWN else ""
            self.notes.append(
                f"the end-to-end check had nothing finite to compare in {', '.join(vacuous[:SHOWN])}{more}: no element "
                "is finite both in eager and in fp64, and an error of 0 says nothing of them"
            )
        floor = max((floor_of(v.dtype) for v in outputs if isinstance(v, Tensor)), default=0.0)
        problems = _judge_choices(routes, eager_routes, floor) + problems
        self.result.passed = not problems
        self.done(self.result)
        if problems:
            more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            self.failure = VerificationError(
                f"the compiled model is not as near to fp64 as eager is: {'; '.join(problems[:SHOWN])}{more}",
                place="end-to-end check",
                remedy="run with --verify regions to find the rewrite, or take passes out of the pipeline",
            )
            self.failed(self.failure)
            raise self.failure
        return outputs

    def _choices(self, returned: Sequence[Tensor]) -> list[Tensor | None]:
        """What the compiled graph chose at each decision of the original; None where it no longer says."""
        if self._exposed is None:
            return list(returned)
        each = iter(returned)
        return [next(each) if exposed else None for exposed in self._exposed]

    def _exact(
        self, before: Sequence[Any], mutated: frozenset[int], choices: Sequence[Tensor | None], count: int
    ) -> tuple[list[Any], Routes]:
        exact = DecisionInterpreter(self.original.module, wide=True, forced=choices)
        inputs = list(before)
        outputs = exact.run_on(inputs)[:count]
        for op in exact.not_wide:
            note = f"the fp64 run of the end-to-end check ran {op}, which takes no fp64, in the model's dtype"
            if note not in self.notes:
                self.notes.append(note)
        return _values(outputs, exact.inputs, mutated), exact.routes


def _judge_choices(routes: Routes, eager: Routes, floor: float) -> list[str]:
    """What is wrong with the experts that were chosen."""
    margin, eager_margin = max(routes.margins, default=0.0), max(eager.margins, default=0.0)
    if margin <= FACTOR * eager_margin + NEAR_TIE_FLOORS * floor:
        return routes.faults
    return [
        *routes.faults,
        f"experts were chosen whose scores lie {margin:.3f} of the spread below the best; eager's choices lie "
        f"{eager_margin:.3f} below at most",
    ]


def _judge(
    labels: Sequence[str], old: Sequence[Any], new: Sequence[Any], exact_old: Sequence[Any], exact_new: Sequence[Any]
) -> tuple[EndToEnd, list[str]]:
    """The result, and what is wrong with which value."""
    problems: list[str] = []
    states: list[tuple[Error, Error, torch.dtype]] = []
    largest_old, largest_new, device = 0.0, 0.0, "cpu"
    for label, a, b, exact_a, exact_b in zip(labels, old, new, exact_old, exact_new, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            is_token = b is None and isinstance(a, Tensor) and a.numel() == 0  # of an op with a side effect
            if not is_token and (isinstance(a, Tensor) or isinstance(b, Tensor) or a != b):
                problems.append(f"{label} is {_described(b)}, eager gives {_described(a)}")
            continue
        device = torch.cuda.get_device_name(b.device) if b.is_cuda else device
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            problems.append(f"{label} is {_described(b)}, eager gives {_described(a)}")
        elif not is_inexact(a.dtype):
            if not torch.equal(a, b):
                problems.append(f"{label} (integers) differs from eager")
        else:
            if (unsound := unsound_share(a, exact_a, b)) > MAX_UNSOUND:
                problems.append(
                    f"{label} cannot be judged: {unsound:.0%} of eager's elements overflow, or are NaN, where fp64's "
                    "do not (or the other way round), and the compiled model's differ from them"
                )
                continue
            error_old, error_new = measure_both(a, exact_a, b, exact_b)
            if not error_old.rms <= MAX_EAGER_ERROR and not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True):
                problems.append(
                    f"{label} cannot be judged: eager itself is {error_old.rms:.2e} from fp64 (values that overflow, "
                    "vanish or cancel)"
                )
                continue
            largest_old, largest_new = max(largest_old, error_old.rms), max(largest_new, error_new.rms)
            is_state = label.startswith(STATE)
            if is_state:
                states.append((error_old, error_new, b.dtype))
            if not acceptable(error_new, error_old, b.dtype, 2 * FACTOR if is_state else FACTOR):
                problems.append(
                    f"{label} has error {error_new.rms:.2e} (worst element {error_new.worst:.2e}), eager "
                    f"{error_old.rms:.2e} ({error_old.worst:.2e})"
                )
    all_old, all_new = pooled([s[0] for s in states]), pooled([s[1] for s in states])
    if states and not acceptable(all_new, all_old, max((s[2] for s in states), key=floor_of)):
        problems.append(f"the updated inputs together have error {all_new.rms:.2e}, eager {all_old.rms:.2e}")
    return EndToEnd(not problems, largest_new, largest_old, device), problems


def _vacuous(
    labels: Sequence[str], old: Sequence[Any], exact_old: Sequence[Any], exact_new: Sequence[Any]
) -> list[str]:
    """The results of which a comparison says nothing."""
    return [
        label
        for label, value, *exact in zip(labels, old, exact_old, exact_new, strict=True)
        if isinstance(value, Tensor)
        and is_inexact(value.dtype)
        and all(isinstance(v, Tensor) for v in exact)
        and is_vacuous(value, *exact)
    ]


def _described(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _values(outputs: Sequence[Any], inputs: Sequence[Any], mutated: frozenset[int]) -> list[Any]:
    return [*outputs, *(inputs[i] for i in sorted(mutated))]


def _mutated(module: GraphModule) -> frozenset[int]:
    """Positions of the inputs that the graph writes at its end."""
    placeholders = {n: i for i, n in enumerate(module.graph.find_nodes(op="placeholder"))}
    written = [n.args[0] for n in module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)]
    return frozenset(placeholders[n] for n in written if n in placeholders)  # type: ignore[index]


def _generator_states(inputs: Sequence[Any]) -> dict[str, Tensor]:
    """State of the random generator of the CPU and of each GPU that holds an input."""
    devices = {str(v.device) for v in inputs if isinstance(v, Tensor) and v.is_cuda}
    return {"cpu": torch.get_rng_state(), **{d: torch.cuda.get_rng_state(d) for d in sorted(devices)}}


def _set_generators(states: Mapping[str, Tensor]) -> None:
    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)


def _ids(node: Node) -> Node:
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == 1:
            return user
    graph = node.graph
    with graph.inserting_after(node):
        item = graph.call_function(operator.getitem, (node, 1))
    item.meta["val"] = node.meta["val"][1]
    return item
