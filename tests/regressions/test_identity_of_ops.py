"""Which op a node calls is known from what was registered, not read off its name: bound, in place, or both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from against_eager import check
from finalised import compile_and_run
from graphs import capture_with_inputs
from small_graphs import traced
from torch import Tensor
from torch.fx import GraphModule

from k3rewrite import _torch_private as private
from k3rewrite.checks.contract import GraphContract
from k3rewrite.checks.precise import is_route
from k3rewrite.errors import ContractError
from k3rewrite.graph.cost import node_cost
from k3rewrite.kernels import KERNELS, OPS
from k3rewrite.ops.binding import KERNEL_KEY, REASON_KEY, Binding, bind
from k3rewrite.ops.inplace_variant import ensure_registered, inplace_variant
from k3rewrite.ops.kernel import Kernel
from k3rewrite.ops.vocabulary import Cost, Op, op_of
from k3rewrite.passes.reuse_storage import ReuseStoragePass
from k3rewrite.pipeline.pass_base import PassContext
from k3rewrite.report.schema import PassReport
from k3rewrite.targets import load_target

STEP = Op(
    name="test_identity_step__of_state",
    schema="(Tensor x, Tensor conv, Tensor state) -> (Tensor out, Tensor conv, Tensor state)",
    reference=lambda x, conv, state: (x * 2, conv + x, state - x),
    fake=lambda x, conv, state: (torch.empty_like(x), torch.empty_like(conv), torch.empty_like(state)),
    cost=lambda x, conv, state: Cost(7, 0, 0),
    inplace={"conv": 1, "state": 2},
).register()
KERNEL = Kernel(
    name="step_kernel",
    op=STEP.name,
    language="triton",
    accepts=lambda arguments, target: None,
    launch=STEP.reference,
    units=lambda arguments, target: (),
    cost_us=lambda arguments, target: 1.0,
    sources=(),
)
TARGET = load_target("h200")
BOUND, BINDING = bind(STEP, KERNEL, TARGET, False, (0, 1))
FORMS = [STEP, *(inplace_variant(STEP, names) for names in (["conv", "state"], ["state"])),
         BOUND, *(replace(inplace_variant(BOUND, names), namespace=BOUND.namespace)
                  for names in (["conv", "state"], ["state"]))]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name.replace(BINDING.name, "BOUND"))
def test_every_form_of_an_op_is_known_as_the_op(form: Op) -> None:
    target = ensure_registered(form).overload
    assert op_of(target) is STEP
    graph = torch.fx.Graph()
    node = graph.call_function(target, tuple(graph.placeholder(name) for name in ("x", "conv", "state")))
    assert node_cost(node, {STEP.name: STEP.cost}.get).launches == 7
    assert not is_route(target)


def test_other_ops_are_none_of_the_vocabulary() -> None:
    assert op_of(torch.ops.aten.sin.default) is None and op_of(torch.sin) is None and op_of("placeholder") is None
    assert is_route(torch.ops.k3.route.default)


def test_an_in_place_form_is_announced_by_the_name_of_its_op() -> None:
    inputs = [torch.randn(3) for _ in range(3)]
    variant = ensure_registered(inplace_variant(STEP, ["state"])).overload
    contract = GraphContract.of(traced(lambda x, conv, state: (x + conv, state + 0), inputs))

    def function(x: Tensor, conv: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        own = state + 0
        return variant(x, conv, own)[0], own

    module = _traced_as_it_is(function, inputs)
    contract.check(module, "a_pass", frozenset({STEP.name}))
    with pytest.raises(ContractError, match=f"name '{STEP.name}' in `provides`"):
        contract.check(module, "a_pass", frozenset({"test_identity_step"}))


def _traced_as_it_is(function: Any, inputs: list[Tensor]) -> GraphModule:
    mode = private.FakeTensorMode()
    return private.trace(function, [mode.from_tensor(v) for v in inputs], {}, mode)


def _one_state_is_read_again(x: Tensor, conv: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    new_conv, new_state = conv + 1, state + 1
    out, written, last = torch.ops.k3.test_identity_step__of_state(x, new_conv, new_state)
    return out + new_conv + written, last * 2


def _bind_all(module: GraphModule) -> PassReport:
    for node in module.graph.nodes:
        if node.target is STEP.overload:
            node.target = BOUND.overload
            node.meta[KERNEL_KEY], node.meta[REASON_KEY] = BINDING, "the only one"
    report = PassReport("reuse_storage")
    ReuseStoragePass().run(module, PassContext(TARGET, OPS, KERNELS), report)
    return report


def test_a_kernel_stays_bound_where_one_of_two_states_is_written_in_place() -> None:
    """It is called <op>_state_, of which <op> cannot be told from the name: the kernel fell out of the report."""
    inputs = [torch.arange(3.0) + i for i in range(3)]
    captured, _ = capture_with_inputs(_one_state_is_read_again, inputs)
    report = _bind_all(captured.module)
    assert [miss.reason.split(":")[0] for miss in report.missed] == ["'conv'"] and report.matched == 1
    (node,) = (n for n in captured.module.graph.nodes if op_of(n.target) is STEP)
    assert node.target._opname == f"{BINDING.name}_state_"
    assert isinstance(node.meta[KERNEL_KEY], Binding) and node.meta[KERNEL_KEY] is BINDING
    assert node.meta[REASON_KEY] == "the only one"
    compile_and_run(_one_state_is_read_again, inputs, "eager", rewrite=_bind_all).assert_equal()


@pytest.mark.parametrize("finalise", ["eager", "inductor"])
def test_a_model_may_call_the_vocabulary_itself(finalise: str) -> None:
    """No pass made that op, and none was to be blamed for it."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.k3.rms_norm(x, w, 1e-5, torch.float32, torch.float32, x.dtype) * 2

    generator = torch.Generator().manual_seed(0)
    check(function, [torch.randn(3, 8, generator=generator), torch.ones(8)], options={"finalise": finalise})
