"""Faults seen elsewhere that concern ops of others and large pools, each with its right answer from both finalisers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from k3rewrite.backend import Backend
from k3rewrite.errors import ContractError
from k3rewrite.models.kimi_k3 import DecodeInputs, KimiK3, KimiK3Config, KimiK3State, initialise
from k3rewrite.ops.inplace_variant import ensure_registered
from k3rewrite.ops.vocabulary import Cost, Op

FINALISERS = pytest.mark.parametrize("finalise", ["eager", "inductor"])
Library = Callable[[str, Callable[..., Any], Callable[..., Any]], None]


@pytest.fixture(autouse=True)
def _fresh_compiler_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def define() -> Iterator[Library]:
    """`define("step(Tensor x) -> Tensor", function, fake)` in `k3_core_faults`; an earlier op of the name is gone."""
    libraries: dict[str, torch.library.Library] = {}

    def defined(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
        name = schema.partition("(")[0]
        if name in libraries:
            libraries.pop(name)._destroy()
        library = libraries[name] = torch.library.Library("k3_core_faults", "FRAGMENT")
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"k3_core_faults::{name}", fake, lib=library)

    yield defined
    for library in libraries.values():
        library._destroy()


def backend_of(finalise: str) -> Backend:
    return Backend({"finalise": finalise, "target": "mi355x"})


def _clones(x: Tensor) -> Tensor:
    return x.clone()


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _adds_one(x: Tensor) -> Tensor:
    x.add_(1)
    return x.clone()


@FINALISERS
@pytest.mark.parametrize("forget", [True, False], ids=["after a reset", "without a reset"])
def test_an_op_that_writes_from_now_on_is_not_served_from_a_cache(define: Library, finalise: str, forget: bool) -> None:
    """An op is registered as pure, compiled, and registered again as writing its argument: 1.5 + 1.5, then 2.5 + 2.5.

    Whatever is remembered about an op under its name alone would give the second compilation the facts of the first.
    """

    def model(x: Tensor) -> Tensor:
        y = x * 1.5
        z = torch.ops.k3_core_faults.changes(y)
        return y + z

    for schema, function, right in (
        ("changes(Tensor x) -> Tensor", _clones, 3.0),
        ("changes(Tensor(a!) x) -> Tensor", _adds_one, 5.0),
        ("changes(Tensor x) -> Tensor", _clones, 3.0),
    ):
        define(schema, function, _like)
        if forget:
            torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend_of(finalise), fullgraph=True)
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(compiled(torch.ones(2)), torch.full((2,), right)), schema


def test_what_an_op_of_ours_writes_is_part_of_its_hash_and_its_name_is_taken_once() -> None:
    def op(schema: str) -> Op:
        return Op("core_fault_step", schema, _clones, _like, lambda x: Cost(1, 0, 0))

    pure, writing = op("(Tensor x) -> Tensor"), op("(Tensor(a!) x) -> Tensor")
    assert pure.source_hash != writing.source_hash
    ensure_registered(pure)
    assert ensure_registered(op(pure.schema)).schema == pure.schema
    with pytest.raises(ContractError, match=r"is registered as k3::core_fault_step\(Tensor x\)"):
        ensure_registered(writing)


def _steps(x: Tensor) -> tuple[Tensor, Tensor]:
    x.add_(1)
    return x * 2, x * 3


@FINALISERS
@pytest.mark.parametrize("where", ["one graph", "a graph break", "an op that must not be captured"])
def test_what_an_op_has_written_is_carried_into_the_next_part(define: Library, finalise: str, where: str) -> None:
    """An op writes a value and returns two others; the graph is cut there; the next part reads all three.

    With 1 in x and 2 in y = 2x: the op leaves y = 3 and gives 6 and 9; 2 * (6 + 9 - 1) + 3 = 31.
    """
    define("steps(Tensor(a!) x) -> (Tensor, Tensor)", _steps, lambda x: (torch.empty_like(x), torch.empty_like(x)))
    ops = torch.ops.k3_core_faults
    less_one = (
        torch.compiler.disable(lambda v: v - 1) if where == "an op that must not be captured" else lambda v: v - 1
    )

    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        local = y * 2
        a, b = ops.steps(local)
        ops.steps(x)
        if where == "a graph break":
            torch._dynamo.graph_break()
        c = less_one(a + b)
        return c * 2 + local, x + b

    backend = backend_of(finalise)
    compiled = torch.compile(model, backend=backend)
    x, y = torch.ones(3), torch.ones(3)
    with torch.no_grad():
        for call in range(1, 4):
            first, second = compiled(x, y)
            assert torch.equal(first, torch.full((3,), 31.0))
            assert torch.equal(x, torch.full((3,), 1.0 + call)), "the write to the caller's tensor"
            assert torch.equal(second, x + 9)
    assert len(backend.reports) == (1 if where == "one graph" else 2)


# ------------------------------------------------------------------------------------------------ large pools

FAR = (10_924, 10_923, 2_731, 1)
"""slots of 12 heads of 128 x 128 fp32: the first two start behind 2^31 elements, the third behind 2^31 bytes"""


@pytest.fixture
def far_pool() -> Tensor:
    """A state pool of 8.6 GB of addresses, of which the slots that are used take memory."""
    wanted = (FAR[0] + 1) * 12 * 128 * 128 * 4
    if os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < wanted:
        pytest.skip("the machine has less memory than the pool has addresses")
    return torch.empty(FAR[0] + 1, 12, 128, 128)


@pytest.mark.parametrize("how", ["plain", "inductor"])
def test_slots_behind_2_to_the_31_are_read_and_written_where_they_are(far_pool: Tensor, how: str) -> None:
    """A decode step of KDA at the sizes of one of 8 ranks: slot 10,923 wraps to another one in 32 bits.

    A pool of five slots with the same states gives the right answer; slot 0 and the slots around stay as they are.
    """
    config = KimiK3Config.minimal(kda_num_heads=12, kda_head_dim=128).with_layers(1)
    model = initialise(KimiK3(config, dtype=torch.float32), 0)
    near = KimiK3State.zeros(config, slots=5, max_context=8, dtype=torch.float32)
    slots = torch.tensor(FAR)
    far_pool[[0, 2, 2_730, 2_732, 10_922]] = 0
    far = KimiK3State((torch.zeros(len(far_pool), *near.conv[0].shape[1:]),), (far_pool,), ())
    for pool, small in ((far.recurrent[0], near.recurrent[0]), (far.conv[0], near.conv[0])):
        small[1:] = torch.randn(small[1:].shape, generator=torch.Generator().manual_seed(1))
        pool[slots] = small[1:]
    tokens, positions = torch.tensor([3, 1, 4, 1, 5]), torch.tensor([4, 3, 2, 1, 0])
    step = model if how == "plain" else torch.compile(model, backend=backend_of(how), fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            right = model(DecodeInputs(tokens, torch.tensor([1, 2, 3, 4, 0]), positions), near)
            got = step(DecodeInputs(tokens, torch.tensor([*FAR, 0]), positions), far)
            torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(far_pool[slots], near.recurrent[0][1:], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(far.conv[0][slots], near.conv[0][1:], rtol=0, atol=0)
    assert not far_pool[[0, 2, 2_730, 2_732, 10_922]].any()
