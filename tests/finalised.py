"""Run a function through capture and one of the two finalisers, beside plain eager on a copy of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from k3rewrite import _torch_private as private
from k3rewrite.capture import Captured, lower
from k3rewrite.finalise import CompiledGraph, finalise_eager, finalise_inductor

FINALISERS = {"eager": finalise_eager, "inductor": finalise_inductor}


@dataclass
class Finalised:
    """What `compile_and_run` leaves: results and inputs as the compiled function left them, and as eager did."""

    outputs: Any
    inputs: tuple[Any, ...]
    expected: Any
    expected_inputs: tuple[Any, ...]
    graphs: list[CompiledGraph]
    added_guards: list[str]
    function: Callable[..., Any]

    @property
    def graph(self) -> CompiledGraph:
        assert len(self.graphs) == 1, f"{len(self.graphs)} graphs were compiled"
        return self.graphs[0]

    def assert_equal(self) -> None:
        """Bit-equal results, and inputs changed in the same way."""
        torch.testing.assert_close(self.outputs, self.expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(self.inputs, self.expected_inputs, rtol=0, atol=0, equal_nan=True)


def compile_and_run(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    how: str,
    *,
    rewrite: Callable[[GraphModule], Any] = lambda module: None,
    fullgraph: bool = True,
    dynamic: bool = False,
    **options: Any,
) -> Finalised:
    """Compile with `rewrite` applied to the ATen graph and the finaliser `how`; run it, and eager on clones."""
    copies = tuple(i.clone() if isinstance(i, torch.Tensor) else i for i in inputs)
    graphs: list[CompiledGraph] = []
    added: list[str] = []

    def compiler(captured: Captured) -> CompiledGraph:
        mode = private.graph_fake_mode(captured.module.graph)
        guards = private.guard_count(mode)
        rewrite(captured.module)
        graphs.append(FINALISERS[how](captured.module, captured.inputs, captured.static_inputs, **options))
        added.extend(private.guard_texts(mode, guards))
        return graphs[-1]

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=lambda m, i: lower(m, i, compiler), fullgraph=fullgraph, dynamic=dynamic)
    with torch.no_grad():
        expected = function(*copies)
        outputs = compiled(*inputs)
    return Finalised(outputs, tuple(inputs), expected, copies, graphs, added, torch.no_grad()(compiled))


def fake_inputs(*values: torch.Tensor) -> list[torch.Tensor]:
    """Fake tensors like `values`, all of one mode with a shape environment."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = private.FakeTensorMode(shape_env=ShapeEnv())
    return [mode.from_tensor(value, static_shapes=True) for value in values]
