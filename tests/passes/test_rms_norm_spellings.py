"""Fourteen spellings of RMSNorm that trip literal matchers, and three look-alikes, each with its verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import capture_with_inputs
from torch import Tensor
from torch.fx import Graph, GraphModule

from k3rewrite import _torch_private as private
from k3rewrite.checks.contract import GraphContract
from k3rewrite.checks.errors import acceptable, measure
from k3rewrite.checks.precise import DecisionInterpreter
from k3rewrite.graph.purity import eliminate_dead_code
from k3rewrite.graph.shapes import metadata_difference
from k3rewrite.passes.lift_rms_norm import LiftRmsNorm
from k3rewrite.patterns.rewrite import apply_rule
from k3rewrite.report.schema import PassReport

BF16, FP32 = torch.bfloat16, torch.float32
K3 = torch.ops.k3


def _pow(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def _square(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return (v * torch.rsqrt(torch.square(v).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def _product(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return (v * torch.rsqrt((v * v).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def _weight_first(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return w * (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _rsqrt_first(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return (torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6) * v).to(x.dtype) * w


def _one_over_sqrt(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return (v * (1 / torch.sqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype) * w


def _other_eps(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * w


def _weight_before_downcast(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)


def _no_cast(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def _statistic_returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    v = x.float()
    variance = v.pow(2).mean(-1, keepdim=True)
    return (v * torch.rsqrt(variance + 1e-6)).to(x.dtype) * w, variance


def _functional(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (64,), w, 1e-6)


def _inputs(
    dtype: torch.dtype = BF16, weight: torch.dtype = BF16, shape: tuple[int, ...] = (5, 64)
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator).to(dtype), torch.randn(64, generator=generator).to(weight)


# number, function, inputs, dynamic batch, op, (eps, compute dtype, scale dtype, out dtype)
SPELLINGS: list[tuple[int, Callable[..., Any], tuple[Tensor, ...], bool, str, tuple[Any, ...]]] = [
    (1, _pow, _inputs(), False, "rms_norm", (1e-6, FP32, BF16, BF16)),
    (2, _square, _inputs(), False, "rms_norm", (1e-6, FP32, BF16, BF16)),
    (3, _product, _inputs(), False, "rms_norm", (1e-6, FP32, BF16, BF16)),
    (4, _pow, _inputs(shape=(2, 5, 64)), False, "rms_norm", (1e-6, FP32, BF16, BF16)),
    (5, _pow, _inputs(), True, "rms_norm", (1e-6, FP32, BF16, BF16)),
    (6, _weight_first, _inputs(), False, "rms_norm", (1e-6, FP32, BF16, BF16)),
    (7, _rsqrt_first, _inputs(), False, "rms_norm", (1e-6, FP32, BF16, BF16)),
    (8, _one_over_sqrt, _inputs(), False, "rms_norm", (1e-6, FP32, BF16, BF16)),
    (9, _other_eps, _inputs(), False, "rms_norm", (1e-5, FP32, BF16, BF16)),
    (10, _weight_before_downcast, _inputs(), False, "rms_norm", (1e-6, FP32, FP32, BF16)),
    (11, _no_cast, _inputs(FP32, FP32), False, "rms_norm", (1e-6, FP32, FP32, FP32)),
    (12, _statistic_returned, _inputs(), False, "rms_norm_stat", (1e-6, FP32, BF16, BF16)),
    (13, _pow, _inputs(BF16, FP32), False, "rms_norm", (1e-6, FP32, BF16, FP32)),
    (14, _functional, _inputs(), False, "rms_norm", (1e-6, FP32, FP32, BF16)),
]


@pytest.mark.parametrize(
    ("number", "function", "inputs", "dynamic", "op", "carried"), SPELLINGS, ids=[str(s[0]) for s in SPELLINGS]
)
def test_spelling_matches(
    number: int, function: Callable[..., Any], inputs: tuple[Tensor, ...], dynamic: bool, op: str,
    carried: tuple[Any, ...],
) -> None:  # fmt: skip
    captured, real = capture_with_inputs(function, inputs, dynamic=dynamic)
    module = captured.fresh().module
    contract = GraphContract.of(module)
    mode = private.graph_fake_mode(module.graph)
    guards = private.guard_count(mode)
    report = PassReport("lift_rms_norm")
    apply_rule(LiftRmsNorm(), module, report)
    eliminate_dead_code(module.graph)
    assert (report.candidates, report.matched) == (1, 1), [m.reason for m in report.missed]
    assert private.guard_count(mode) == guards, "matching assumed something about a size"
    contract.check(module, "lift_rms_norm", frozenset({"rms_norm", "rms_norm_stat"}))

    lifted = [n for n in module.graph.nodes if n.op == "call_function" and "k3" in str(n.target)]
    assert [n.target._opname for n in lifted] == [op]
    eps, *dtypes = lifted[0].args[2:]
    assert eps == pytest.approx(carried[0], rel=1e-6)
    assert tuple(dtypes) == carried[1:]
    assert len([n for n in module.graph.nodes if n.op == "call_function"]) == (1 if op == "rms_norm" else 3)
    outputs = captured.module.graph.output_node().args[0]
    assert [metadata_difference(a.meta["val"], b.meta["val"]) for a, b in
            zip(outputs, module.graph.output_node().args[0], strict=True)] == [None] * len(outputs)  # fmt: skip

    old = DecisionInterpreter(captured.module, wide=False).run_on(real)
    exact = DecisionInterpreter(captured.module, wide=True).run_on(real)
    new = DecisionInterpreter(module, wide=False).run_on(real)
    eager = function(*inputs)
    for a, b, e, y in zip(old, new, exact, eager if isinstance(eager, tuple) else (eager,), strict=True):
        assert (b.dtype, b.shape, b.stride()) == (y.dtype, y.shape, y.stride())
        if isinstance(b, Tensor):
            assert acceptable(measure(b, e), measure(a, e), b.dtype)


def _other_dim(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6) * w


def _mean_subtracted(x: Tensor, w: Tensor) -> Tensor:
    c = x - x.mean(-1, keepdim=True)
    return c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def _written_between(x: Tensor, w: Tensor) -> Tensor:
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    x.add_(1)
    return x * rstd * w


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        pytest.param(_other_dim, "expected a reduction over dim -1", id="15 another dim"),
        pytest.param(_mean_subtracted, "LayerNorm", id="16 mean subtracted"),
        pytest.param(_written_between, "'x' is", id="17 write between statistic and use"),
    ],
)
def test_look_alike_does_not_match(function: Callable[..., Any], reason: str) -> None:
    captured, _ = capture_with_inputs(function, _inputs(FP32, FP32))
    report = PassReport("lift_rms_norm")
    apply_rule(LiftRmsNorm(), captured.module, report)
    assert report.matched == 0
    assert [reason in m.reason for m in report.missed] == [True], [m.reason for m in report.missed]
    assert "test_rms_norm_spellings.py" in report.missed[0].source


def test_write_in_a_graph_that_is_not_functional() -> None:
    """The same node x before and after an in-place write is not the same value."""
    graph = Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    aten = torch.ops.aten
    squares = graph.call_function(aten.pow.Tensor_Scalar, (x, 2))
    mean = graph.call_function(aten.mean.dim, (squares, [-1], True))
    rstd = graph.call_function(aten.rsqrt.default, (graph.call_function(aten.add.Tensor, (mean, 1e-6)),))
    write = graph.call_function(aten.add_.Tensor, (x, 1))
    result = graph.call_function(aten.mul.Tensor, (graph.call_function(aten.mul.Tensor, (x, rstd)), w))
    graph.output((result,))
    values = {"x": torch.randn(3, 8), "w": torch.randn(8)}
    with private.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for node in graph.nodes:
            if node.op == "placeholder":
                node.meta["val"] = mode.from_tensor(values[node.name])
            elif node.op == "call_function":
                args = torch.fx.node.map_arg(node.args, lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args)
    module = GraphModule({}, graph)
    text = str(graph)
    report = PassReport("lift_rms_norm")
    apply_rule(LiftRmsNorm(), module, report)
    assert report.matched == 0
    assert write.name in report.missed[0].reason and "writes" in report.missed[0].reason
    assert str(graph) == text
