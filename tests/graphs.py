"""Small graphs for tests, through the same door as a user's model: Dynamo and AOTAutograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from k3rewrite import _torch_private as private
from k3rewrite.capture import Captured, lower


def capture_with_inputs(
    function: Callable[..., Any], inputs: Sequence[Any], *, dynamic: bool = False
) -> tuple[Captured, list[Any]]:
    """The captured graph of `function`, and its real inputs in the graph's own order (that of first use)."""
    captured: list[Captured] = []
    real: list[Any] = []

    def compiler(graph: Captured) -> Callable[..., Any]:
        captured.append(graph.fresh())

        def run(*values: Any) -> Any:
            real.extend(v.clone() if isinstance(v, torch.Tensor) else v for v in values)
            return graph.module(*values)

        return private.make_boxed(run)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=lambda m, i: lower(m, i, compiler), fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        compiled(*inputs)
    return captured[0], real
