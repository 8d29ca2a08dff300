"""What runs once: weights move into their stack, no write to one of them is missed, and nothing is done twice."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_graphs import Hand, aten
from torch import Tensor, nn

import k3rewrite.kernels  # noqa: F401  registers the op
from k3rewrite.backend import Backend
from k3rewrite.finalise import CompiledGraph, finalise_eager, prologue
from k3rewrite.finalise.prologue import Pack, Prologue, hoist

WIDTH, ROWS = 32, {"q": 24, "k": 8, "v": 5}
STACK = 48 * WIDTH * 4
"""bytes: 24 + 8 + 5 rows, and padding"""
PACK = torch.ops.k3.pack_rows.default


class Net(nn.Module):
    """Three projections, with weights as `nn.Linear` draws them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, rows, bias=False) for rows in ROWS.values())

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x).sum(-1) + self.k(x).sum(-1) * self.v(x).sum(-1)


def compiled(model: nn.Module, how: str = "eager") -> tuple[Callable[[Tensor], Tensor], Backend]:
    backend = Backend({"finalise": how, "target": "cpu", "pipeline": "base"})
    return torch.no_grad()(torch.compile(model, backend=backend, fullgraph=True)), backend


def assert_same(model: nn.Module, run: Callable[[Tensor], Tensor], rows: int = 3) -> None:
    x = torch.randn(rows, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)


def together(model: Net) -> bool:
    """All weights in one storage, that of a stack."""
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return len(storages) == 1 and model.q.weight.untyped_storage().nbytes() == STACK


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[Pack]:
    """The packs that were made, each time one was."""
    made: list[Pack] = []
    original = Pack._moved

    def counted(pack: Pack, weights: Any) -> Tensor:
        made.append(pack)
        return original(pack, weights)

    monkeypatch.setattr(Pack, "_moved", counted)
    return made


# ------------------------------------------------------------------------------------------------ once


@pytest.mark.parametrize("how", ["eager", "inductor"])
def test_it_is_done_once_and_the_old_memory_is_gone(how: str, moves: list[Pack]) -> None:
    model = Net()
    values = [p.detach().clone() for p in model.parameters()]
    objects = list(model.parameters())
    old = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
    run, backend = compiled(model, how)
    for _ in range(3):
        assert_same(model, run)
    assert len(moves) == 1 and together(model)
    gc.collect()
    assert [ref() for ref in old] == [None] * 3
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert all(map(torch.equal, model.parameters(), values))
    assert [p.is_contiguous() and p.requires_grad for p in model.parameters()] == [True] * 3
    assert next(p for p in backend.reports[0].passes if p.name == "merge_projections").matched == 1


def test_another_graph_of_the_model_finds_the_stack_of_the_first(moves: list[Pack]) -> None:
    model = Net()
    run, backend = compiled(model)
    for rows in (3, 5, 6, 1):
        assert_same(model, run, rows)
    assert len(backend.reports) == 3 and len(moves) == 1


def test_layers_that_share_one_graph_have_a_stack_each(moves: list[Pack]) -> None:
    """Their weights are inputs of one compiled function: none may land in the memory of another's."""
    layers = [Net() for _ in range(3)]
    values = [[p.detach().clone() for p in layer.parameters()] for layer in layers]
    backend = Backend({"finalise": "eager", "target": "cpu", "pipeline": "base"})
    runs = [torch.no_grad()(torch.compile(layer, backend=backend, fullgraph=True)) for layer in layers]
    for _ in range(2):
        for layer, run in zip(layers, runs, strict=True):
            assert_same(layer, run)
    assert len(backend.reports) == 1 and len(moves) == 3 and all(map(together, layers))
    for layer, before in zip(layers, values, strict=True):
        assert all(map(torch.equal, layer.parameters(), before))


def test_nothing_keeps_the_stack_of_a_model_that_is_gone() -> None:
    model = Net()
    run, _ = compiled(model)
    assert_same(model, run)
    stack = weakref.ref(model.q.weight.untyped_storage())
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)  # as `model.to(...)` leaves it
    gc.collect()
    assert stack() is None


# ------------------------------------------------------------------------------------------------ writes


def in_place(model: Net) -> None:
    with torch.no_grad():
        model.k.weight.mul_(2)


def through_data(model: Net) -> None:
    model.k.weight.data.add_(1)


def other_memory(model: Net) -> None:
    model.v.weight.data = torch.randn(5, WIDTH)


def exchanged(model: Net) -> None:
    """Two weights in each other's place of one stack: addresses that were seen before."""
    first, second = model.k.weight.data, model.k.weight.data.clone()
    model.q.weight.data, model.k.weight.data = torch.cat([first, second, first]), model.q.weight.data[:8]


def loaded(model: Net) -> None:
    model.load_state_dict(Net().state_dict())


def loaded_by_assignment(model: Net) -> None:
    model.load_state_dict(Net().state_dict(), assign=True)


def another_parameter(model: Net) -> None:
    model.q.weight = nn.Parameter(torch.randn(24, WIDTH))


WRITES = (in_place, through_data, other_memory, exchanged, loaded, loaded_by_assignment, another_parameter)


@pytest.mark.parametrize("how", ["eager", "inductor"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_no_write_to_a_weight_is_missed(write: Callable[[Net], None], how: str) -> None:
    model = Net()
    run, _ = compiled(model, how)
    assert_same(model, run)
    write(model)
    assert_same(model, run)
    assert_same(model, run)


def test_a_weight_that_somebody_else_holds_is_right_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays where it is, for its other holder writes to it there; the stack is made in each step."""
    model = Net()
    run, _ = compiled(model)
    assert_same(model, run)
    held = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(held, assign=True)
    said: list[str] = []
    monkeypatch.setattr(prologue._log, "warning", lambda text, *given: said.append(text % given))
    assert_same(model, run)
    held["k.weight"].mul_(3)
    assert_same(model, run)
    assert said == [
        "k3::pack_rows is made anew in every step, for a weight cannot live in it: 1 more tensor lives in its memory"
    ]
    assert not together(model)
    held.clear()
    assert_same(model, run)
    assert together(model)


def test_a_copy_of_the_model_has_memory_of_its_own() -> None:
    model = Net()
    run, _ = compiled(model)
    assert_same(model, run)
    twin = copy.deepcopy(model)
    through_data(twin)
    assert_same(model, run)
    assert together(model) and len({p.untyped_storage().data_ptr() for p in twin.parameters()}) == 3


def test_what_moves_in_inference_mode_stays_a_normal_parameter() -> None:
    model = Net()
    run, _ = compiled(model)
    x = torch.randn(3, WIDTH)
    with torch.inference_mode():
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    assert together(model) and not any(p.is_inference() for p in model.parameters())
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_checkpoint_of_the_moved_model_loads(tmp_path: Any) -> None:
    """`save_model` of safetensors refuses a weight that is not the whole of its storage, so it is given copies."""
    from safetensors.torch import load_file, save_file

    model = Net()
    run, _ = compiled(model)
    assert_same(model, run)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    save_file({name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    for saved in (torch.load(tmp_path / "model.pt"), load_file(tmp_path / "model.safetensors")):
        twin = Net()
        twin.load_state_dict(saved)
        assert all(map(torch.equal, twin.parameters(), model.parameters()))


# ------------------------------------------------------------------------------------------------ what is taken out


def graph(static: bool = True, written: bool = False) -> tuple[Hand, Any, list[int]]:
    hand = Hand()
    a, b = (hand.input(name, torch.randn(4, 8)) for name in "ab")
    stack = hand.call(PACK, [a, b], [0, 8], 16)
    doubled = hand.call(aten.mul.Tensor, stack, 2)
    if written:
        hand.call(aten.copy_.default, b, a)
    return hand, hand.returns(doubled), [0, 1] if static else [0]


def test_a_graph_gets_an_input_more() -> None:
    hand, module, static = graph()
    made, examples, now = hoist(module, hand.values, static)
    assert len(made.packs) == 1 and now == [0, 1, 2] and examples[2].shape == (16, 8)
    assert not any(node.target is PACK for node in module.graph.nodes)
    module.graph.lint()


@pytest.mark.parametrize(
    "graph_of", [lambda: graph(static=False), lambda: graph(written=True)], ids=["given", "written"]
)
def test_what_may_change_from_step_to_step_stays(graph_of: Callable[[], Any]) -> None:
    hand, module, static = graph_of()
    made, examples, now = hoist(module, hand.values, static)
    assert made == Prologue([]) and len(examples) == 2 and now == static
    assert any(node.target is PACK for node in module.graph.nodes)


def test_neighbours_by_chance_are_no_stack() -> None:
    """Two storages, one behind the other, as an allocator may place them: a view of the first is none of both."""
    hand, module, static = graph()
    final: CompiledGraph = finalise_eager(module, hand.values, static, ops={})
    memory = bytearray(torch.randn(16 * 8).numpy().tobytes())
    row = 8 * 4
    a = torch.frombuffer(memory, dtype=torch.float32, count=4 * 8).view(4, 8)
    b = torch.frombuffer(memory, dtype=torch.float32, count=4 * 8, offset=8 * row).view(4, 8)
    assert b.data_ptr() - a.data_ptr() == 8 * row
    expected = torch.cat([a, torch.zeros(4, 8), b, torch.zeros(4, 8)]) * 2
    (got,) = final([a, b])
    assert torch.equal(got, expected)
