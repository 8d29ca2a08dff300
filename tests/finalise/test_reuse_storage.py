"""State written in place where nobody can tell, refused with a reason everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives  # registers the collectives
from finalised import compile_and_run
from torch.fx import GraphModule, Node

from k3rewrite import _torch_private as private
from k3rewrite.capture import capture
from k3rewrite.finalise import ReuseRecord, reuse_storage
from k3rewrite.graph.purity import eliminate_dead_code
from k3rewrite.ops.inplace_variant import ensure_registered
from k3rewrite.ops.vocabulary import Cost, Op

aten = torch.ops.aten
Tensor = torch.Tensor
NAN = float("nan")


def _op(name: str, schema: str, reference: Callable[..., Any], fake: Callable[..., Any], **extra: Any) -> Op:
    op = Op(f"test_reuse_{name}", schema, reference, fake, cost=lambda *a, **k: Cost(1, 0, 0), **extra)
    ensure_registered(op)
    return op


def _step(x: Tensor, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """One step of a slot-indexed state: rows are gathered, advanced and put back; other slots keep what they hold."""
    rows = pool[slots] + x
    return rows * 2, pool.index_put((slots,), rows)


STEP = _op(
    "step",
    "(Tensor x, Tensor pool, Tensor slots) -> (Tensor out, Tensor pool)",
    _step,
    lambda x, pool, slots: (torch.empty_like(x), torch.empty_like(pool)),
    inplace={"pool": 1},
)
GROW = _op(
    "grow", "(Tensor x, Tensor s) -> Tensor", lambda x, s: s * 2 + x, lambda x, s: torch.empty_like(s), inplace={"s": 0}
)
TWO = _op(
    "two",
    "(Tensor x, Tensor conv, Tensor state) -> (Tensor conv, Tensor out, Tensor state)",
    lambda x, conv, state: (conv + x, x * 2, state - x),
    lambda x, conv, state: (torch.empty_like(conv), torch.empty_like(x), torch.empty_like(state)),
    inplace={"conv": 0, "state": 2},
)


def _bank_reads(arguments: Mapping[str, Any]) -> str | None:
    """Slots below `slot` are read, slot `slot` is written."""
    bank, slot = arguments["bank"], arguments["slot"]
    for block in arguments["blocks"]:
        if block.stride() != bank.stride() or block.storage_offset() != bank.storage_offset():
            return "a block is not a slice of the bank from its first slot on"
        if block.shape[1] > slot:
            return f"slot {slot} is read and written"
    return None


WRITE = _op(
    "write",
    "(Tensor x, Tensor[] blocks, Tensor bank, int slot) -> (Tensor bank, Tensor mix)",
    lambda x, blocks, bank, slot: (
        torch.select_scatter(bank, x, 1, slot),
        x + sum((b.sum(1) for b in blocks), torch.zeros_like(x)),
    ),
    lambda x, blocks, bank, slot: (torch.empty_like(bank), torch.empty_like(x)),
    inplace={"bank": 0},
    inplace_reads=_bank_reads,
)
OPS = {op.overload: op for op in (STEP, GROW, TWO, WRITE)}
step, grow, two, write = (op.overload for op in OPS.values())


def reuse(module: GraphModule) -> list[ReuseRecord]:
    return reuse_storage(module, OPS)


def decide(function: Callable[..., Any], *inputs: Any) -> tuple[GraphModule, dict[str, str]]:
    """Rewritten graph, and for each "node.argument" the reason why it is not written in place ("" if it is)."""
    module = capture(function, inputs).module
    before = str(module.graph)
    records = reuse(module)
    if not any(r.done for r in records):
        assert str(module.graph) == before  # fault kind 93: a refusal changes nothing
    return module, {f"{r.node}.{r.argument}": r.reason for r in records}


def op_names(module: GraphModule) -> list[str]:
    return [n.target._opname for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]


def poisoned_pool() -> Tensor:
    pool = torch.full((6, 4), NAN)
    pool[torch.tensor([1, 3])] = torch.tensor([[1.0], [3.0]])
    return pool


# --------------------------------------------------------------------------------------------- into an input


def pool_step(x: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
    out, new = step(x, pool, slots)
    pool.copy_(new)
    return out


@pytest.mark.parametrize("how", ["eager", "inductor"])
def test_a_pool_is_updated_where_it_is_and_other_slots_are_untouched(how: str) -> None:
    x, slots, pool = torch.arange(8.0).view(2, 4), torch.tensor([3, 1]), poisoned_pool()
    address, records = pool.data_ptr(), []
    run = compile_and_run(pool_step, (x, pool, slots), how, rewrite=lambda m: records.extend(reuse(m)))
    run.assert_equal()
    assert pool.data_ptr() == address and pool[[0, 2, 4, 5]].isnan().all()
    assert [(r.op, r.argument, r.done) for r in records] == [(STEP.name, "pool", True)]
    again = x.clone()
    run.function(again, pool, slots)  # a second step goes on from the first
    assert torch.equal(pool[3], 3 + 2 * x[0]) and torch.equal(pool[1], 1 + 2 * x[1])


def test_no_copy_is_left_and_the_write_survives_dead_code_elimination() -> None:
    module = capture(lambda x, p, s: p.copy_(step(x, p, s)[1]) * 0 + 1, (torch.ones(1, 4), poisoned_pool(),
                                                                           torch.tensor([1]))).module  # fmt: skip
    reuse(module)
    assert "test_reuse_step_" in op_names(module) and "copy_" not in op_names(module)
    assert all(n.args[0].op == "placeholder" for n in module.graph.nodes if n.target is aten.mul.Tensor)
    module = capture(lambda p, s: p.copy_(grow(s, p)), (torch.ones(3), torch.ones(3))).module
    reuse(module)
    eliminate_dead_code(module.graph)
    assert op_names(module) == ["test_reuse_grow_"]


def test_a_chain_of_steps_is_one_place_and_reads_between_see_their_own_version() -> None:
    def model(x: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
        first, new = step(x, pool, slots)
        seen = new.sum(1)
        second, new = step(x + 1, new, slots)
        third, new = step(first + second, new, slots)
        pool.copy_(new)
        return third + seen[:2, None]

    x, slots = torch.arange(8.0).view(2, 4), torch.tensor([3, 1])
    for how in ("eager", "inductor"):
        records: list[ReuseRecord] = []
        run = compile_and_run(model, (x, torch.ones(6, 4), slots), how, rewrite=lambda m: records.extend(reuse(m)))  # noqa: B023
        run.assert_equal()
        assert [r.done for r in records] == [True, True, True]


def test_a_state_that_the_op_sees_through_a_view() -> None:
    def model(x: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
        out, new = step(x, pool.view(6, 4), slots)
        pool.copy_(new.view(6, 2, 2))
        return out

    pool = torch.arange(24.0).view(6, 2, 2)
    records: list[ReuseRecord] = []
    run = compile_and_run(model, (torch.ones(2, 4), pool, torch.tensor([4, 0])), "eager",
                          rewrite=lambda m: records.extend(reuse(m)))  # fmt: skip
    run.assert_equal()
    assert records[0].done


def test_elements_that_come_back_in_another_order_are_copied() -> None:
    def model(x: Tensor, s: Tensor) -> Tensor:
        s.copy_(grow(x, s).t())
        return x + 1

    _, decided = decide(model, torch.ones(3, 3), torch.arange(9.0).view(3, 3))
    assert "in another order" in decided["test_reuse_grow.s"]
    compile_and_run(model, (torch.ones(3, 3), torch.arange(9.0).view(3, 3)), "eager", rewrite=reuse).assert_equal()


def test_a_reader_of_the_copy_reads_the_place() -> None:
    """Fault kind 79: the copy_ node has a reader of its own; it must not break the rewrite."""
    module = capture(lambda x, p: p.copy_(grow(x, p)), (torch.ones(3), torch.ones(3))).module
    (copy,) = (n for n in module.graph.nodes if n.target is aten.copy_.default)
    assert copy.users  # it is what the graph returns
    assert [r.done for r in reuse(module)] == [True]
    (returned,) = module.graph.output_node().args[0]
    assert isinstance(returned, Node) and returned.op == "placeholder"
    held = {n.name: torch.full((3,), 5.0) for n in module.graph.nodes if n.op == "placeholder"}
    (result,) = module(*held.values())
    assert torch.equal(result, torch.full((3,), 15.0)) and result is held[returned.name]


def test_two_states_of_one_call_are_decided_one_by_one() -> None:
    def both(x: Tensor, conv: Tensor, state: Tensor) -> Tensor:
        new_conv, out, new_state = two(x, conv, state)
        conv.copy_(new_conv)
        state.copy_(new_state)
        return out

    def one(x: Tensor, conv: Tensor, state: Tensor) -> Tensor:
        new_conv, out, new_state = two(x, conv, state)
        late = conv.sum()
        conv.copy_(new_conv)
        state.copy_(new_state)
        return out + late

    inputs = (torch.arange(3.0), torch.ones(3), torch.full((3,), 7.0))
    module, decided = decide(both, *inputs)
    assert decided == {"test_reuse_two.conv": "", "test_reuse_two.state": ""}
    assert op_names(module) == ["test_reuse_two_"]
    module, decided = decide(one, *inputs)
    assert decided["test_reuse_two.state"] == "" and "reads the old value" in decided["test_reuse_two.conv"]
    assert "test_reuse_two_state_" in op_names(module)
    for function in (both, one):
        compile_and_run(function, inputs, "eager", rewrite=reuse).assert_equal()


# --------------------------------------------------------------------------------------------- temporaries


def test_a_temporary_is_taken_over_and_an_equal_one_stays_what_it_was() -> None:
    """Fault kind 74: a = zeros; b = zeros; an op writes into a; b stays 0."""

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = torch.zeros(3), torch.zeros(3)
        return grow(x, a), b * 1

    for how in ("eager", "inductor"):
        records: list[ReuseRecord] = []
        run = compile_and_run(model, (torch.ones(3),), how, rewrite=lambda m: records.extend(reuse(m)))  # noqa: B023
        run.assert_equal()
        assert records[0].done and torch.equal(run.outputs[1], torch.zeros(3))


@pytest.mark.parametrize("how", ["eager", "inductor"])
def test_a_consumer_reads_after_the_write(how: str) -> None:
    """Fault kind 84: t = ones; an op fills t with 3; return t * t."""

    def model(x: Tensor) -> Tensor:
        t = torch.ones(3)
        t = grow(x, t)  # 2 * 1 + 1
        return t * t

    run = compile_and_run(model, (torch.ones(3),), how, rewrite=reuse)
    run.assert_equal()
    assert torch.equal(run.outputs, torch.full((3,), 9.0))


# --------------------------------------------------------------------------------------------- refusals

X = torch.arange(1.0, 4.0)


def late_reader(x: Tensor, p: Tensor) -> Tensor:
    new = grow(x, p)
    old = p.exp()
    p.copy_(new)
    return old


def late_reader_of_an_alias(x: Tensor, p: Tensor) -> Tensor:
    part = p[1:]
    new = grow(x, p)
    old = part.exp()
    p.copy_(new)
    return old


def view_of_another_dtype(x: Tensor, p: Tensor) -> Tensor:
    bits = p.view(torch.int32) + 1
    p.copy_(grow(x, p))
    return bits


def result_is_returned(x: Tensor, p: Tensor) -> Tensor:
    new = grow(x, p)
    p.copy_(new)
    return new


def old_value_is_returned(x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    t = p + 1
    return grow(x, t), t


def input_of_the_caller(x: Tensor, p: Tensor) -> Tensor:
    return grow(x, p)


def argument_given_twice(x: Tensor, p: Tensor) -> Tensor:
    t = p + 1
    return grow(t, t)


def argument_is_a_view_of_it(x: Tensor, p: Tensor) -> Tensor:
    t = p + 1
    return grow(t.view(3, 1).view(3), t)


def expanded(x: Tensor, p: Tensor) -> Tensor:
    return grow(x, torch.ops.aten.expand(p.sum() + 1, [3]))


def copied_into_another_input(x: Tensor, p: Tensor) -> Tensor:
    x.copy_(grow(x + 1, p))
    return p + 1


def unused(x: Tensor, p: Tensor) -> Tensor:
    return two(x, p + 1, p + 2)[1]


def other_layout(x: Tensor, p: Tensor) -> Tensor:
    wide = torch.ops.aten.t((p[None] + x[:, None]).sin())
    return grow(x, torch.ops.aten.clone(wide, memory_format=torch.preserve_format)[:2])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (late_reader, "exp reads the old value of"),
        (late_reader_of_an_alias, "exp reads the old value of"),
        (view_of_another_dtype, "views the same memory as torch.int32"),
        (result_is_returned, "is returned, and would share storage with the input"),
        (old_value_is_returned, "the old value of add is returned"),
        (input_of_the_caller, "belongs to the caller"),
        (argument_given_twice, "add, another argument, is in the same storage"),
        (argument_is_a_view_of_it, "another argument, is in the same storage"),
        (expanded, "its elements share memory"),
        (copied_into_another_input, "belongs to the caller"),
        (unused, "the result is not used"),
        (other_layout, "the result is not laid out as"),
    ],
)
def test_what_somebody_could_notice_is_refused(function: Callable[..., Any], reason: str) -> None:
    _, decided = decide(function, X.clone(), X * 2)
    assert decided and all(reason in r for r in decided.values()), decided
    compile_and_run(function, (X.clone(), X * 2), "eager", rewrite=reuse).assert_equal()


def _graph(build: Callable[[torch.fx.Graph, Node, Node], Any]) -> GraphModule:
    """A graph on two inputs [3], built by hand; `build` returns the output."""
    mode = private.FakeTensorMode()
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in ("x", "p")]
    root = torch.nn.Module()
    root.register_buffer("constant", torch.ones(3))
    output = graph.output((build(graph, *nodes),))
    for node in graph.nodes:
        if node is not output:
            node.meta["val"] = mode.from_tensor(torch.ones(3))
    return GraphModule(root, graph)


def test_constants_foreign_results_and_transfers_in_flight_are_refused() -> None:
    def constant(graph: torch.fx.Graph, x: Node, p: Node) -> Node:
        return graph.call_function(grow, (x, graph.get_attr("constant")))

    def unknown(graph: torch.fx.Graph, x: Node, p: Node) -> Node:
        return graph.call_function(grow, (x, graph.call_function(torch.relu, (p,))))

    def in_flight(graph: torch.fx.Graph, x: Node, p: Node) -> Node:
        temporary = graph.call_function(aten.sin.default, (p,))
        gathered = graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default, (temporary, 1, "0"))
        new = graph.call_function(grow, (x, temporary))
        waited = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (gathered,))
        return graph.call_function(aten.add.Tensor, (new, waited))

    for build, reason in (
        (constant, "is a constant of the graph"),
        (unknown, "may share storage with several values"),
        (in_flight, "is still in flight and reads"),
    ):
        (record,) = reuse(_graph(build))
        assert not record.done and reason in record.reason


def test_what_lives_in_an_input_already_is_not_taken_over_again() -> None:
    def build(graph: torch.fx.Graph, x: Node, p: Node) -> Node:
        new = graph.call_function(grow, (x, p))
        graph.call_function(aten.copy_.default, (p, new))
        return graph.call_function(grow, (x, new))  # behind the copy: the input must keep `new`

    module = _graph(build)
    records = reuse(module)
    assert [r.done for r in records] == [True, False] and "will live in the input p" in records[1].reason
    pool = torch.full((3,), 5.0)
    (result,) = module(torch.ones(3), pool)
    assert torch.equal(pool, torch.full((3,), 11.0)) and torch.equal(result, torch.full((3,), 23.0))


def test_synthetic_bases_are_refused() -> None:
    """Two overlapping views of one buffer, one of them written: AOTAutograd makes one input of both."""

    def model(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        a.copy_(grow(x, a))
        return b + 1

    base = torch.arange(4.0)
    module, decided = decide(model, X.clone(), base[:3], base[1:])
    assert all("several overlapping inputs" in r or "strides of its own" in r for r in decided.values()), decided
    assert "test_reuse_grow_" not in op_names(module)
    base, other = torch.arange(4.0), torch.arange(4.0)
    run = compile_and_run(model, (X.clone(), base[:3], base[1:]), "eager", rewrite=reuse)
    expected = model(X.clone(), other[:3], other[1:])
    assert torch.equal(run.outputs, expected) and torch.equal(base, other)


# --------------------------------------------------------------------------------------------- reads that are apart


def bank_model(above: bool) -> Callable[[Tensor], Tensor]:
    def model(x: Tensor) -> Tensor:
        bank = torch.full((2, 3, 4), NAN)
        bank, a = write(x, [], bank, 0)
        bank, b = write(a, [bank[:, :1]], bank, 1)
        bank, c = write(b, [bank[:, :2] if not above else bank[:, :3]], bank, 2)
        return c + bank.nan_to_num().sum(1)

    return model


@pytest.mark.parametrize("how", ["eager", "inductor"])
def test_blocks_below_the_written_slot_of_the_same_bank_may_be_read(how: str) -> None:
    records: list[ReuseRecord] = []
    run = compile_and_run(bank_model(False), (torch.randn(2, 4),), how, rewrite=lambda m: records.extend(reuse(m)))
    run.assert_equal()
    assert [r.reason for r in records] == ["", "", ""]


def test_a_block_that_holds_the_written_slot_may_not() -> None:
    module, decided = decide(bank_model(True), torch.randn(2, 4))
    assert list(decided.values()) == ["", "", "slot 2 is read and written"]
    assert op_names(module).count("test_reuse_write_") == 2
