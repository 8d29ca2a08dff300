"""Every example of every rule with symbolic sizes: one compiled graph serves another size too, as without a rewrite.

All dimensions of one size are made dynamic together. Where torch's own `aot_eager` needs that size as a number (a
weight that is split, a top-k), there is nothing to hold the rewrite to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from k3rewrite.backend import Backend
from k3rewrite.passes import ALL_PASSES
from k3rewrite.patterns.rule import Example
from k3rewrite.pipeline.pass_base import RulePass

pytestmark = pytest.mark.slow

EXAMPLES = [
    (rule, example)
    for made in ALL_PASSES
    if issubclass(made, RulePass)
    for rule in made().rules()
    for example in rule.examples()
]


NUMBERS = {"state_slots": (4,), "kda_decode": (4,), "kda_verify": (5,)}
"""sizes of examples that are numbers to the ops: taps, and columns of a line, which a window is compared with"""


def _sizes(inputs: Sequence[Any]) -> list[int]:
    return sorted({size for value in inputs if isinstance(value, Tensor) for size in value.shape if size > 2})


CASES = [
    pytest.param(example, size, id=f"{rule.name}: {example.name}, {size}")
    for rule, example in EXAMPLES
    for size in _sizes(example.inputs())
    if size not in NUMBERS.get(rule.name, ())
]


def _marked(inputs: Sequence[Any], size: int) -> list[Any]:
    """Copies, with every dimension of that size dynamic: a compiler that makes it a number is refused by torch."""
    copies = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    for value in copies:
        for dim in range(value.dim() if isinstance(value, Tensor) else 0):
            if value.shape[dim] == size:
                torch._dynamo.mark_dynamic(value, dim)
    return copies


def _shorter(inputs: Sequence[Any], size: int) -> list[Any]:
    """Copies with every dimension of that size one shorter."""

    def cut(value: Tensor) -> Tensor:
        for dim in range(value.dim()):
            if value.shape[dim] == size:
                value = value.narrow(dim, 0, size - 1)
        return value.contiguous().clone()

    return [cut(value) if isinstance(value, Tensor) else value for value in inputs]


def _serves_both(function: Callable[..., Any], backend: Any, inputs: Sequence[Any], size: int) -> Any:
    """Results for the shorter inputs, of a function that was compiled for the given ones."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    compiled(*_marked(inputs, size))
    with torch.compiler.set_stance("fail_on_recompile"):
        return compiled(*_shorter(inputs, size))


def _is_dynamic(example: Example, size: int) -> bool:
    try:
        example.function(*_shorter(example.inputs(), size))
        _serves_both(example.function, "aot_eager", example.inputs(), size)
    except (RuntimeError, IndexError, ValueError):  # what torch itself, the model or an op cannot do with that size
        return False
    return True


@pytest.mark.parametrize(("example", "size"), CASES)
def test_a_size_that_torch_keeps_symbolic_stays_symbolic(example: Example, size: int) -> None:
    with torch.no_grad():
        if not _is_dynamic(example, size):
            pytest.skip(f"torch needs {size} as a number here")
        backend = Backend({"finalise": "eager", "target": "cpu"})
        got = _serves_both(example.function, backend, example.inputs(), size)
        expected = example.function(*_shorter(example.inputs(), size))
    assert len(backend.reports) == 1
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
