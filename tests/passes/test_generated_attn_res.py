"""The depth mix in many spellings, from the stack of its sources to the norm behind it; and what looks like one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import reasons, rewritten
from spelling_checks import assert_lifted, assert_not_lifted, graph_of, random_tensors
from torch import Tensor

from k3rewrite.checks.regions import region_check
from k3rewrite.graph.purity import eliminate_dead_code
from k3rewrite.passes.fuse_attn_res_norm import FuseAttnResNorm
from k3rewrite.passes.lift_attn_res import LiftAttnRes
from k3rewrite.passes.lift_rms_norm import LiftRmsNorm

D, N = 8, 3
BF16, FP32 = torch.bfloat16, torch.float32
Join = Callable[[Sequence[Tensor]], Tensor]
STACK: dict[str, Join] = {
    "stack": lambda rows: torch.stack(list(rows), dim=-2),
    "stack from the front": lambda rows: torch.stack(list(rows), dim=rows[0].dim() - 1),
    "cat": lambda rows: torch.cat([r.unsqueeze(-2) for r in rows], dim=-2),
    "bank and prefix": lambda rows: torch.cat([torch.stack(list(rows[:-1]), -2), rows[-1].unsqueeze(-2)], dim=-2),
}


def _score(kind: str, values: Tensor, norm: Tensor, proj: Tensor) -> Tensor:
    """Scores [..., n] of values [..., n, d]."""
    rstd = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-5)
    wide_norm, wide_proj = norm.to(values.dtype), proj.to(values.dtype)
    if kind == "folded":
        return (values * rstd * (wide_norm * wide_proj)).sum(-1)
    if kind == "folded row":
        return (values * rstd * (wide_norm * wide_proj.view(1, -1))).sum(-1, keepdim=True).squeeze(-1)
    normed = values * rstd * wide_norm
    if kind == "product":
        return (normed * wide_proj).sum(-1)
    if kind == "kept product":
        return (wide_proj.unsqueeze(0) * normed).sum(-1, keepdim=True)[..., 0]
    if kind == "mv":
        return normed @ wide_proj
    return torch.nn.functional.linear(normed, wide_proj.view(1, -1)).squeeze(-1)


def _mix(kind: str, weights: Tensor, values: Tensor) -> Tensor:
    if kind == "sum":
        return (weights.unsqueeze(-1) * values).sum(-2)
    if kind == "sum from the front":
        return (values * weights[..., None]).sum(values.dim() - 2)
    return (weights.unsqueeze(-2) @ values).squeeze(-2)


@st.composite
def mixes(draw: Any) -> Any:
    join = STACK[draw(st.sampled_from(list(STACK)))]
    score = draw(st.sampled_from(["folded", "folded row", "product", "kept product", "mv", "linear"]))
    mix = draw(st.sampled_from(["sum", "sum from the front", "matmul"]))
    dtype = draw(st.sampled_from([FP32, BF16]))
    rows = draw(st.sampled_from([(5,), (1,), (N,), (D,), (2, 3)]))
    last_dim = draw(st.booleans())

    def function(p: Tensor, b0: Tensor, b1: Tensor, norm: Tensor, proj: Tensor) -> Tensor:
        values = join([b0, b1, p]).float()
        scores = _score(score, values, norm, proj)
        weights = scores.softmax(-1 if last_dim else scores.dim() - 1)
        return _mix(mix, weights, values).to(p.dtype)

    return function, dtype, [(*rows, D)] * 3 + [(D,), (D,)]


@given(case=mixes(), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_every_spelling_of_the_depth_mix_is_lifted(case: Any, seed: int) -> None:
    function, dtype, shapes = case
    inputs = random_tensors(shapes, [dtype] * 5, seed)
    module = assert_lifted(
        function, inputs, [LiftRmsNorm(), LiftAttnRes()], leaves=("stack", "unsqueeze", "cat", "view")
    )
    (lifted,) = (n for n in module.graph.nodes if "k3.attn_res" in str(n.target))
    assert {n.op for n in lifted.args[0]} <= {"placeholder", "call_function"}
    assert lifted.args[0][-1].op == "placeholder", "the prefix is read where it lies, not out of the stack"


def _vendor(p: Tensor, b0: Tensor, b1: Tensor, norm: Tensor, proj: Tensor, **change: Any) -> Tensor:
    """The mix with one step replaced."""
    step = {
        "values": lambda rows: torch.stack(rows, dim=1).float(),
        "normed": lambda v: torch.ops.k3.rms_norm(v, norm, 1e-5, FP32, FP32, FP32),
        "scores": lambda normed: (normed * proj.float()).sum(-1),
        "softmax": lambda s: s.softmax(-1),
        "laid": lambda w: w.unsqueeze(-1),
        "summed": lambda weighted: weighted.sum(1),
        "used": lambda v: v,
    } | change
    values = step["values"]([b0, b1, p])
    weights = step["softmax"](step["scores"](step["normed"](values)))
    return step["summed"](step["laid"](weights) * step["used"](values)).to(p.dtype)


# three sources, three tokens, three columns: shapes betray nothing
NEAR: dict[str, dict[str, Any]] = {
    "softmax over the tokens": {"softmax": lambda s: s.softmax(0)},
    "scaled scores": {"softmax": lambda s: (s * 2).softmax(-1)},
    "weights of another token": {"softmax": lambda s: s.softmax(-1).t()},
    "scores of another token": {"softmax": lambda s: s.t().softmax(-1)},
    "weights along the width": {"laid": lambda w: w.unsqueeze(1)},
    "weights along the sources": {"laid": lambda w: w},
    "weights exchanged when laid": {"laid": lambda w: w.unsqueeze(-1).transpose(0, 1)},
    "summed over the tokens": {"summed": lambda y: y.sum(0)},
    "summed over the width": {"summed": lambda y: y.sum(2)},
    "mean instead of a sum": {"summed": lambda y: y.mean(1)},
    "the normed sources are mixed": {"used": lambda v: torch.ops.k3.rms_norm(v, None, 1e-5, FP32, FP32, FP32)},
    "shifted sources are mixed": {"used": lambda v: v + 1},
    "sources exchanged with tokens": {"used": lambda v: v.transpose(0, 1)},
    "scores over the sources": {"scores": lambda n: n.sum(1)},
    "no weights in the scores": {"normed": lambda v: torch.ops.k3.rms_norm(v, None, 1e-5, FP32, FP32, FP32),
                                 "scores": lambda n: n.sum(-1)},
    "scores in fp64": {"scores": lambda n: (n.double()).sum(-1)},
    "rounded scores": {"softmax": lambda s: s.bfloat16().float().softmax(-1)},
    "rounded weights": {"softmax": lambda s: s.softmax(-1).bfloat16().float()},
    "a bf16 norm": {"normed": lambda v: torch.ops.k3.rms_norm(v, None, 1e-5, FP32, BF16, BF16)},
}  # fmt: skip


@pytest.mark.parametrize("how", NEAR)
def test_what_is_nearly_a_depth_mix_is_not_lifted(how: str) -> None:
    inputs = random_tensors([(3, 3)] * 3 + [(3,), (3,)], [BF16] * 3 + [FP32] * 2, 0)
    assert_not_lifted(lambda *a: _vendor(*a, **NEAR[how]), inputs, LiftAttnRes())


@pytest.mark.parametrize("laid", ["along the width", "along the sources", "along the tokens"])
def test_the_projection_lies_along_the_width(laid: str) -> None:
    def scores(normed: Tensor, proj: Tensor) -> Tensor:
        row = {"along the width": proj, "along the sources": proj[:, None], "along the tokens": proj[:, None, None]}
        return (normed * row[laid]).sum(-1)

    def function(p: Tensor, b0: Tensor, b1: Tensor, norm: Tensor, proj: Tensor) -> Tensor:
        return _vendor(p, b0, b1, norm, proj, scores=lambda normed: scores(normed, proj))

    inputs = random_tensors([(3, 3)] * 3 + [(3,), (3,)], [BF16] * 3 + [FP32] * 2, 0)
    if laid == "along the width":
        assert_lifted(function, inputs, [LiftAttnRes()], leaves=("stack",))
    else:
        assert "projection" in assert_not_lifted(function, inputs, LiftAttnRes())[0]


def test_a_projection_that_is_rounded_keeps_its_rounding() -> None:
    """The op reads the rounded one: stripping the cast would make the scores too exact, silently."""
    inputs = random_tensors([(5, D)] * 3 + [(D,), (D,)], [BF16] * 3 + [FP32] * 2, 0)

    def function(p: Tensor, b0: Tensor, b1: Tensor, norm: Tensor, proj: Tensor) -> Tensor:
        return _vendor(p, b0, b1, norm, proj, scores=lambda normed: (normed * proj.bfloat16()).sum(-1))

    module = assert_lifted(function, inputs, [LiftAttnRes()], leaves=("stack",))
    (lifted,) = (n for n in module.graph.nodes if "k3.attn_res" in str(n.target))
    assert lifted.args[2].meta["val"].dtype is BF16
    assert torch.equal(module(*inputs)[0], function(*inputs))


def test_a_product_of_the_score_weights_that_is_rounded_is_no_pair() -> None:
    inputs = random_tensors([(5, D)] * 3 + [(D,), (D,)], [BF16] * 5, 0)

    def function(p: Tensor, b0: Tensor, b1: Tensor, norm: Tensor, proj: Tensor) -> Tensor:
        values = torch.stack([b0, b1, p], dim=1).float()
        scores = torch.ops.k3.rms_norm(values, norm * proj, 1e-5, FP32, FP32, FP32).sum(-1)
        return (scores.softmax(-1).unsqueeze(-1) * values).sum(1).to(p.dtype)

    assert "score weights" in assert_not_lifted(function, inputs, LiftAttnRes())[0]


# ------------------------------------------------------------------------------------------------ fusion

ADDS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], torch.dtype, torch.dtype, str]] = {
    # spelling, dtype of the prefix, dtype of the delta, op that is made
    "sum": (lambda p, a: p + a, BF16, BF16, "add_attn_res_norm"),
    "commuted": (lambda p, a: a + p, BF16, BF16, "add_attn_res_norm"),
    "in place": (lambda p, a: p.clone().add_(a), BF16, BF16, "add_attn_res_norm"),
    "wide and rounded": (lambda p, a: (p.float() + a.float()).to(BF16), BF16, BF16, "add_attn_res_norm"),
    "a wide delta": (lambda p, a: (p.float() + a).to(BF16), BF16, FP32, "add_attn_res_norm"),
    "fp32": (lambda p, a: p + a, FP32, FP32, "add_attn_res_norm"),
    "twice the delta": (lambda p, a: torch.add(p, a, alpha=2), BF16, BF16, "attn_res_norm"),
    "a number": (lambda p, a: p + 1, BF16, BF16, "attn_res_norm"),
    "broadcast": (lambda p, a: p + a[:1], BF16, BF16, "attn_res_norm"),
    "the wider operand is the prefix": (lambda p, a: p + a, BF16, FP32, "add_attn_res_norm"),
    "rounded before": (lambda p, a: (p.to(BF16) + a.to(BF16)).float(), FP32, BF16, "attn_res_norm"),
    "delta rounded before": (lambda p, a: (p + a.to(BF16)).to(BF16), BF16, FP32, "add_attn_res_norm"),
    "no sum": (lambda p, a: p * a, BF16, BF16, "attn_res_norm"),
}


def _fused(add: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def function(p: Tensor, a: Tensor, b: Tensor, n: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        p = add(p, a)
        mix = torch.ops.k3.attn_res([b, p], n, w, 1e-5, compute_dtype=FP32, out_dtype=p.dtype)
        return p, torch.ops.k3.rms_norm(mix, n, 1e-5, FP32, p.dtype, p.dtype)

    return function


@pytest.mark.parametrize("roundings", ["fewest", "model"])
@pytest.mark.parametrize("how", ADDS)
def test_the_prefix_update_is_fused_where_it_is_one(how: str, roundings: Any) -> None:
    """The stored prefix is bit-equal to the spelled sum in every case; what is no update stays in front."""
    add, prefix_dtype, delta_dtype, op = ADDS[how]
    dtypes = [prefix_dtype, delta_dtype, prefix_dtype, prefix_dtype, prefix_dtype]
    inputs = random_tensors([(5, D)] * 3 + [(D,), (D,)], dtypes, 3)
    function = _fused(add)
    module = graph_of(function, inputs)
    report = rewritten(FuseAttnResNorm(roundings), module, allow=roundings == "fewest", verify=region_check())
    assert report.matched == 1, reasons(report)
    eliminate_dead_code(module.graph)
    module.recompile()
    ops = [n.target._opname for n in module.graph.nodes if "k3" in str(n.target)]
    assert ops == [op]
    prefix, normed = module(*inputs)
    expected_prefix, expected = function(*inputs)
    assert torch.equal(prefix, expected_prefix)
    if roundings == "model":
        assert torch.equal(normed, expected), "the model's own roundings, bit for bit"
    else:
        torch.testing.assert_close(normed.float(), expected.float(), rtol=0.02, atol=0.02)


def test_in_one_dtype_throughout_nothing_is_rounded_and_nothing_must_be_allowed() -> None:
    inputs = random_tensors([(5, D)] * 3 + [(D,), (D,)], [FP32] * 5, 3)
    report = rewritten(FuseAttnResNorm("fewest"), graph_of(_fused(lambda p, a: p + a), inputs))
    assert [s.policy for s in report.sites] == ["reassociates"]
    narrow = [v.bfloat16() for v in inputs]
    report = rewritten(FuseAttnResNorm("fewest"), graph_of(_fused(lambda p, a: p + a), narrow))
    assert report.matched == 0 and "allow_changes_rounding" in reasons(report)[0]


@pytest.mark.parametrize("use", ["returned", "read by another op", "read by two norms"])
def test_a_mix_that_is_read_beside_its_norm_is_left(use: str) -> None:
    def function(p: Tensor, b: Tensor, n: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        mix = torch.ops.k3.attn_res([b, p], n, w, 1e-5, compute_dtype=FP32, out_dtype=p.dtype)
        normed = torch.ops.k3.rms_norm(mix, n, 1e-5, FP32, p.dtype, p.dtype)
        if use == "returned":
            return normed, mix
        if use == "read by another op":
            return normed, mix * 2
        return normed, torch.ops.k3.rms_norm(mix, w, 1e-5, FP32, p.dtype, p.dtype)

    inputs = random_tensors([(5, D)] * 2 + [(D,), (D,)], [BF16] * 4, 0)
    module = graph_of(function, inputs)
    before = str(module.graph)
    report = rewritten(FuseAttnResNorm(), module, allow=True)
    assert report.matched == 0 and "is also used by" in reasons(report)[0]
    assert str(module.graph) == before
