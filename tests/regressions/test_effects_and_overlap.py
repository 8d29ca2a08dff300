"""Ops with effects of their own (they check something, and hand a token on), and inputs that come to overlap."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from against_eager import check
from graphs import capture_with_inputs
from torch import Tensor

from k3rewrite.errors import UnsupportedError
from k3rewrite.finalise.overlap import OverlapCheck

BOTH = pytest.mark.parametrize("finalise", ["eager", "inductor"])


@BOTH
@pytest.mark.parametrize("verify", ["none", "all"])
def test_a_factorisation_that_checks_itself(finalise: str, verify: str) -> None:
    """Its token is a tensor in the graph and None when the graph is called."""

    def function(x: Tensor) -> Tensor:
        return torch.linalg.cholesky(x @ x.t() + torch.eye(4))

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    check(function, (x,), (x + 1,), options={"finalise": finalise, "verify": verify})


@BOTH
def test_an_assertion_still_fails(finalise: str) -> None:
    def function(x: Tensor) -> Tensor:
        torch._assert_async(x.sum() > 1e9, "too small")
        return x + 1

    compiled = torch.compile(function, backend="k3rewrite", options={"finalise": finalise})
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(RuntimeError, match="too small"):
        compiled(torch.ones(3))


def test_inputs_that_grow_into_each_other_are_seen_though_they_start_where_they_did() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    captured, _ = capture_with_inputs(function, [torch.zeros(4), torch.zeros(6)], dynamic=True)
    places = captured.module.graph.find_nodes(op="placeholder")
    overlap = OverlapCheck(captured.module.graph)
    storage = torch.zeros(20)

    def inputs(size: int) -> list[Tensor | int]:
        """The written one of this size from the start of the storage, the other behind its fifth element."""
        views = iter((storage[:size], storage[5:9]))
        return [next(views) if isinstance(node.meta["val"], Tensor) else 4 for node in places]

    overlap(inputs(4))
    overlap(inputs(4))
    with pytest.raises(UnsupportedError, match="overlap in memory"):
        overlap(inputs(7))


@BOTH
def test_inputs_whose_strides_grow_into_each_other_are_seen_though_sizes_and_addresses_stay(finalise: str) -> None:
    """Eight elements of every second place end before the other input, of every third they reach into it."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        y.mul_(2)
        return x.sum()

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="k3rewrite", options={"finalise": finalise}, dynamic=True)
    memory = np.arange(64, dtype=np.float32)

    def inputs(stride: int) -> tuple[Tensor, Tensor]:
        """Tensors made of the memory itself, so that torch does not see that they are views of one."""
        return torch.from_numpy(memory[: 8 * stride : stride]), torch.from_numpy(memory[16:24])

    with torch.no_grad():
        compiled(*inputs(2))
        before = memory.copy()
        with pytest.raises(UnsupportedError, match="overlap in memory"):
            compiled(*inputs(3))
    assert (memory == before).all()
