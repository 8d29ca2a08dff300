"""Faults of compilers on the same road, each through the whole default pipeline; the right answer is eager's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from small_graphs import Hand, aten, targets
from torch import Tensor

from k3rewrite.backend import Backend
from k3rewrite.capture import capture
from k3rewrite.kernels import KERNELS, OPS
from k3rewrite.passes import PASSES
from k3rewrite.pipeline.config import load_pipeline
from k3rewrite.pipeline.pass_base import PassContext
from k3rewrite.pipeline.runner import build_passes, run_pipeline
from k3rewrite.targets import load_target

LIBRARY = torch.library.Library("k3_fault_tests", "FRAGMENT")
LIBRARY.define("bump(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define("fill(Tensor(a!) x, float value) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


def _bump(x: Tensor) -> Tensor:
    """Writes its argument although its schema does not say so."""
    x.add_(1)
    return x.clone()


def _fill(x: Tensor, value: float) -> None:
    x.fill_(value)


LIBRARY.impl("bump", _bump, "CompositeExplicitAutograd")
LIBRARY.impl("fill", _fill, "CompositeExplicitAutograd")
torch.library.register_fake("k3_fault_tests::bump", torch.empty_like, lib=LIBRARY)
torch.library.register_fake("k3_fault_tests::fill", lambda x, value: None, lib=LIBRARY)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def both(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], *, calls: int = 1, fullgraph: bool = True, **options: Any
) -> Backend:
    """Results and inputs of the compiled function and of eager are equal bit for bit, in each of `calls` calls."""
    backend = Backend({"finalise": "eager", "target": "mi355x", **options})
    compiled = torch.compile(function, backend=backend, fullgraph=fullgraph)
    mine, theirs = (tuple(v.clone() for v in inputs) for _ in range(2))
    with torch.no_grad():
        for _ in range(calls):
            got, want = compiled(*mine), function(*theirs)
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    return backend


def slice_assigned_then_source_written(dst: Tensor, src: Tensor) -> Tensor:
    """Kind 64."""
    dst[0:] = src[0:]
    src += 1
    return dst


def divided_by_one(x: Tensor) -> Tensor:
    """Kind 65."""
    o = x / 1
    o += 5
    return o


def cast_to_what_it_is(x: Tensor) -> Tensor:
    """Kind 65, with a cast that is none after folding."""
    o = x.double().float() * 1
    o += 5
    return o


def written_and_returned(x: Tensor) -> Tensor:
    """Kind 66: the call has no user."""
    x.mul_(0)
    return x


def inner_value_used_outside(x: Tensor) -> Tensor:
    """Kind 68, with a norm: its root is read again."""
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x * rstd + rstd


def mean_used_outside(x: Tensor) -> tuple[Tensor, Tensor]:
    """Kind 68: the mean of the squares is returned as well."""
    mean = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(mean + 1e-6), mean * 2


def integers_and_floats(x: Tensor) -> tuple[Tensor, Tensor]:
    """Kind 73: x - 1 and x - 1.0 of integers."""
    return x - 1, x - 1.0


def two_factories(x: Tensor) -> tuple[Tensor, Tensor]:
    """Kind 74."""
    a, b = torch.zeros(3), torch.zeros(3)
    a += x[0]
    return a, b


def equal_casts_written(x: Tensor) -> tuple[Tensor, Tensor]:
    """Kind 74, with the nodes that canonicalisation would merge."""
    a, b = x.double(), x.double()
    a += 1
    return a, b


def copy_result_returned(x: Tensor, v: Tensor) -> Tensor:
    """Kind 79: the write has a reader."""
    return x.copy_(v) * 2


def filled_then_read(x: Tensor) -> Tensor:
    """Kind 84: the product reads what the op has written."""
    t = x * 0 + 1
    torch.ops.k3_fault_tests.fill(t, 3.0)
    return t * t


def filled_and_unused(x: Tensor) -> Tensor:
    """Kind 67: an op that returns nothing is there for its write."""
    torch.ops.k3_fault_tests.fill(x, 7.0)
    return x + 0


def written_between_statistic_and_use(x: Tensor) -> Tensor:
    """Kinds 17 and 99."""
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    x.add_(1)
    return x * rstd


def written_through_a_view_between(x: Tensor) -> Tensor:
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    x[:, :2].mul_(3)
    return x * rstd


def read_before_and_after_a_write(x: Tensor) -> Tensor:
    """Kind 99: the product is of the old value."""
    a = x * 2
    x += 1
    return x + a


def state_of_a_layer(x: Tensor, state: Tensor) -> Tensor:
    """Kind 83, functionally: the update must survive although only part of it is read."""
    new = torch.cat([state[1:], x[:1]])
    state.copy_(new)
    return x + new[0]


def exchanged(a: Tensor, b: Tensor) -> Tensor:
    kept = torch.empty_like(a)
    kept.copy_(a)
    a.copy_(b)
    b.copy_(kept)
    return a - b


FLOATS = (slice_assigned_then_source_written, copy_result_returned, state_of_a_layer, exchanged)
SINGLE = (
    divided_by_one, cast_to_what_it_is, written_and_returned, inner_value_used_outside, mean_used_outside,
    equal_casts_written, filled_then_read, filled_and_unused, written_between_statistic_and_use,
    written_through_a_view_between, read_before_and_after_a_write,
)  # fmt: skip


@pytest.mark.parametrize("function", [*SINGLE, *FLOATS], ids=lambda f: f.__name__)
def test_the_answer_is_eagers_in_every_call(function: Callable[..., Any]) -> None:
    inputs = tuple(torch.randn(3, 4) for _ in range(2 if function in FLOATS else 1))
    both(function, inputs, calls=3)


def test_types_of_numbers_are_kept() -> None:
    both(integers_and_floats, (torch.arange(4),))
    both(two_factories, (torch.randn(2),), calls=2)


def test_a_result_changed_by_the_caller_does_not_change_the_next() -> None:
    """Kinds 65 and 78: what is returned is nobody's buffer, and not an input."""
    for function in (divided_by_one, lambda x: (x.double().float() + 0) * 1, lambda x: torch.ops.aten.copy(x, x * 1)):
        x = torch.ones(3)
        compiled = torch.compile(function, backend=Backend({"finalise": "eager", "target": "cpu"}))
        with torch.no_grad():
            first = compiled(x)
            first += 100
            assert torch.equal(x, torch.ones(3))
            assert not (compiled(x) > 50).any()


def test_an_op_that_hides_its_write_is_never_deleted_or_moved() -> None:
    """Kinds 66, 67 and 83: somebody else's op with an incomplete schema, of which nobody reads the result.

    (Torch itself drops it while it traces; once it is in a graph, no pass may.)
    """
    hand = Hand()
    x = hand.input("x", torch.randn(3, 4))
    before = hand.call(aten.mul.Tensor, x, 2)
    hand.call(torch.ops.k3_fault_tests.bump.default, x)
    mean = hand.call(aten.mean.dim, hand.call(aten.pow.Tensor_Scalar, x, 2), [-1], True)
    rstd = hand.call(aten.rsqrt.default, hand.call(aten.add.Tensor, mean, 1e-6))
    normed = hand.call(aten.mul.Tensor, x, rstd)
    module = hand.returns(hand.call(aten.add.Tensor, normed, before))
    expected, expected_inputs = hand.run(module)
    config = load_pipeline("default", known_passes=PASSES)
    run_pipeline(module, build_passes(config, PASSES), PassContext(load_target("cpu"), OPS, KERNELS), {}, [])
    module.recompile()
    assert targets(module) == ["mul", "bump", "rms_norm", "add"]
    got, inputs = hand.run(module)
    torch.testing.assert_close(got, expected)
    assert torch.equal(inputs[0], expected_inputs[0])


def test_a_branch_on_the_batch_size_is_taken_for_each_batch() -> None:
    """Kind 76: traced at 32, run at 8."""

    def function(x: Tensor) -> Tensor:
        return x + 1 if x.shape[0] <= 16 else x - 1

    for dynamic in (True, False, None):
        torch._dynamo.reset()
        backend = Backend({"finalise": "eager", "target": "cpu"})
        compiled = torch.compile(function, backend=backend, dynamic=dynamic)
        for rows in (32, 8, 16, 17):
            assert torch.equal(compiled(torch.zeros(rows)), function(torch.zeros(rows)))


@pytest.mark.parametrize(("first", "second"), itertools.product(["pow", "square", "product"], repeat=2))
def test_spellings_side_by_side_do_not_disturb_each_other(first: str, second: str) -> None:
    """Kind 72, and two sites that share their input."""
    squares = {"pow": lambda v: v.pow(2), "square": torch.square, "product": lambda v: v * v}

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        a = x * torch.rsqrt(squares[first](x).mean(-1, keepdim=True) + 1e-6) * w
        return a, w * (torch.rsqrt(1e-5 + squares[second](x).mean(-1, keepdim=True)) * x)

    backend = both(function, (torch.randn(3, 8), torch.randn(8)))
    assert [p.matched for p in backend.reports[0].passes if p.name == "lift_rms_norm"] == [2]


def test_a_statistic_shared_by_two_norms() -> None:
    """One mean, two uses of its root: each use is a site of one anchor, and the other keeps its value."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * rstd * w, x * rstd * (w + 1)

    both(function, (torch.randn(3, 8), torch.randn(8)))


def test_a_constant_of_the_model_survives_a_rewrite() -> None:
    """Kind 77: a buffer of the graph keeps its name and value beside what a rewrite brings in."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("c", torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            table = torch.tensor([1.0, 5.0])
            normed = F.normalize(x, dim=-1) * self.c
            return normed * table + F.rms_norm(x, (2,)) * torch.tensor([7.0, 9.0])

    both(Model(), (torch.randn(3, 2),), calls=2)


# ------------------------------------------------------------------------------------------------ collectives


@pytest.fixture
def two_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _rewritten_ops(function: Callable[..., Any], *inputs: Tensor) -> list[str]:
    module = capture(function, inputs).fresh().module
    config = load_pipeline("default", known_passes=PASSES)
    run_pipeline(module, build_passes(config, PASSES), PassContext(load_target("cpu"), OPS, KERNELS), {}, [])
    return [n.target._opname for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]


def test_a_norm_stays_behind_the_sum_that_it_needs(two_ranks: None) -> None:
    """Kind 97: the norm of partial values is another value; kind 94: the wait stays between sum and norm."""

    def after(x: Tensor) -> Tensor:
        return _norm(collectives.all_reduce(x, "sum", dist.group.WORLD))

    def before(x: Tensor) -> Tensor:
        return collectives.all_reduce(_norm(x), "sum", dist.group.WORLD)

    assert _rewritten_ops(after, torch.randn(2, 4)) == ["all_reduce", "wait_tensor", "rms_norm"]
    assert _rewritten_ops(before, torch.randn(2, 4)) == ["rms_norm", "all_reduce", "wait_tensor"]


def test_no_match_across_a_collective(two_ranks: None) -> None:
    """The mean of the squares is summed over the ranks: no norm of this rank's vector."""

    def function(x: Tensor) -> Tensor:
        mean = collectives.all_reduce(x.pow(2).mean(-1, keepdim=True), "sum", dist.group.WORLD)
        return x * torch.rsqrt(mean + 1e-6)

    assert "rms_norm" not in _rewritten_ops(function, torch.randn(2, 4))


def test_a_sum_that_nobody_reads_is_still_taken_part_in(two_ranks: None) -> None:
    def function(x: Tensor) -> Tensor:
        collectives.all_reduce(x, "sum", dist.group.WORLD)
        return _norm(x)

    assert _rewritten_ops(function, torch.randn(2, 4)) == ["all_reduce", "wait_tensor", "rms_norm"]
