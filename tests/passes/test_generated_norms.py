"""RMSNorm and unit vectors in thousands of spellings: each is lifted; each spelling with one thing wrong is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graphs import rewritten
from spelling_checks import DTYPES, assert_lifted, assert_not_lifted, graph_of, random_tensors
from torch import Tensor

from k3rewrite.passes.lift_gated_rms_norm import LiftGatedRmsNorm
from k3rewrite.passes.lift_l2_norm import LiftL2Norm, LiftNormalize
from k3rewrite.passes.lift_rms_norm import LiftRmsNorm

Step = Callable[[Tensor], Tensor]
SHAPES = ((5, 16), (2, 3, 16), (16, 16), (1, 16), (0, 16))
EPS = (1e-6, 1e-5, 0.25)

UP: dict[str, Step] = {"float": lambda x: x.float(), "to": lambda x: x.to(torch.float32), "not at all": lambda x: x}
SQUARES: dict[str, Step] = {
    "pow": lambda v: v.pow(2),
    "pow 2.0": lambda v: torch.pow(v, 2.0),
    "**": lambda v: v**2,
    "square": torch.square,
    "product": lambda v: v * v,
}
KEEP: dict[str, Step] = {
    "unsqueeze": lambda s: s.unsqueeze(-1),
    "unsqueeze from the front": lambda s: s.unsqueeze(s.dim()),
    "None": lambda s: s[..., None],
    "view": lambda s: s.view(*s.shape, 1),
}
ROOTS: dict[str, Step] = {
    "rsqrt": torch.rsqrt,
    "1/sqrt": lambda s: 1 / torch.sqrt(s),
    "1.0/sqrt": lambda s: 1.0 / s.sqrt(),
    "reciprocal": lambda s: s.sqrt().reciprocal(),
    "** -1/2": lambda s: s**-0.5,
}
DIVISORS: dict[str, Step] = {"sqrt": torch.sqrt, "** 1/2": lambda s: s**0.5}
ADD_EPS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "s + eps": lambda s, e: s + e,
    "eps + s": lambda s, e: e + s,
    "add": lambda s, e: torch.add(s, e),
    "in place": lambda s, e: s.add_(e),
}


def _reductions(kind: str, keepdim: bool) -> dict[str, Step]:
    if kind == "sum":
        return {
            "sum(-1)": lambda q: q.sum(-1, keepdim=keepdim),
            "sum(dim)": lambda q: torch.sum(q, dim=q.dim() - 1, keepdim=keepdim),
        }
    return {
        "mean(-1)": lambda q: q.mean(-1, keepdim=keepdim),
        "mean(dim)": lambda q: torch.mean(q, dim=[q.dim() - 1], keepdim=keepdim),
        "sum / n": lambda q: q.sum(-1, keepdim=keepdim) / q.shape[-1],
        "sum * 1/n": lambda q: q.sum(-1, keepdim) * (1 / q.shape[-1]),
    }


@st.composite
def _unit(draw: Any, kind: str) -> tuple[Callable[[Tensor, Tensor], Tensor], bool]:
    """A function (v for the statistic, v that is scaled) -> scaled v; `kind` is "mean" or "sum".

    Beside it, whether it is spelled step by step as the op is: only then is it the same in a narrow dtype.
    """
    flat_until = draw(st.sampled_from(["kept", "reduced", "shifted", "rooted"]))
    square = SQUARES[draw(st.sampled_from(list(SQUARES)))]
    keep = KEEP[draw(st.sampled_from(list(KEEP)))]
    reductions = _reductions(kind, flat_until == "kept")
    reduction = draw(st.sampled_from(list(reductions)))
    reduce = reductions[reduction]
    add = ADD_EPS[draw(st.sampled_from(list(ADD_EPS)))]
    eps, divide, flipped = draw(st.sampled_from(EPS)), draw(st.booleans()), draw(st.booleans())
    roots = DIVISORS if divide else ROOTS
    rooted = draw(st.sampled_from(list(roots)))
    root = roots[rooted]

    def unit(v: Tensor, used: Tensor) -> Tensor:
        statistic = reduce(square(v))
        statistic = keep(statistic) if flat_until == "reduced" else statistic
        statistic = add(statistic, eps)
        statistic = keep(statistic) if flat_until == "shifted" else statistic
        scale = root(statistic)
        scale = keep(scale) if flat_until == "rooted" else scale
        if divide:
            return used / scale
        return scale * used if flipped else used * scale

    return unit, rooted == "rsqrt" and reduction.startswith((f"{kind}(",))


@st.composite
def rms_norms(draw: Any, weights: tuple[str, ...] = ("none", "before", "after", "inside")) -> Any:
    """(function of x and w, their dtypes, shape of x)"""
    dtype = DTYPES[draw(st.sampled_from(list(DTYPES)))]
    up = draw(st.sampled_from(list(UP)))
    only_statistic = up != "not at all" and draw(st.booleans())
    (unit, as_the_op), weight = draw(_unit("mean")), draw(st.sampled_from(weights))
    if dtype != torch.float32 and not (as_the_op and weight != "inside"):
        up = "float"
    weight_dtype = draw(st.sampled_from([dtype, torch.float32]))
    weight_first, narrow = draw(st.booleans()), draw(st.booleans())

    def function(x: Tensor, w: Tensor) -> Tensor:
        v = UP[up](x)
        wide_weight = UP[up](w)
        if weight == "inside" and v.dtype == torch.promote_types(v.dtype, wide_weight.dtype):
            return unit(v, wide_weight * v if weight_first else v * wide_weight).to(x.dtype)
        normed = unit(v, x if only_statistic else v)
        if weight == "after":
            normed = normed.to(x.dtype)
            return w * normed if weight_first else normed * w
        if weight != "none":
            normed = wide_weight * normed if weight_first else normed * wide_weight
        return normed.to(x.dtype) if narrow else normed

    return function, (dtype, weight_dtype), draw(st.sampled_from(SHAPES))


@given(case=rms_norms(), seed=st.integers(0, 99))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_every_spelling_of_rms_norm_is_lifted(case: Any, seed: int) -> None:
    function, dtypes, shape = case
    inputs = random_tensors([shape, shape[-1:]], dtypes, seed)
    assert_lifted(function, inputs, [LiftRmsNorm()], leaves=())


@st.composite
def unit_vectors(draw: Any) -> Any:
    dtype = DTYPES[draw(st.sampled_from(list(DTYPES)))]
    up = draw(st.sampled_from(list(UP)))
    only_statistic = up != "not at all" and draw(st.booleans())
    (unit, as_the_op), narrow = draw(_unit("sum")), draw(st.booleans())
    if dtype != torch.float32 and not as_the_op:
        up = "float"

    def function(x: Tensor) -> Tensor:
        v = UP[up](x)
        scaled = unit(v, x if only_statistic else v)
        return scaled.to(x.dtype) if narrow else scaled

    return function, dtype, draw(st.sampled_from(SHAPES))


@given(case=unit_vectors(), seed=st.integers(0, 99))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_every_spelling_of_unit_vectors_is_lifted(case: Any, seed: int) -> None:
    function, dtype, shape = case
    assert_lifted(function, random_tensors([shape], [dtype], seed), [LiftL2Norm()], leaves=())


@pytest.mark.parametrize("how", ["/ sqrt", "1 / sqrt", "sum / n", "weight first"])
def test_in_a_narrow_dtype_another_spelling_rounds_otherwise(how: str) -> None:
    """Each step of bf16 arithmetic rounds: merging two of them must be switched on."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        mean = x.pow(2).sum(-1, keepdim=True) / 16 if how == "sum / n" else x.pow(2).mean(-1, keepdim=True)
        shifted = mean + 1e-6
        if how == "/ sqrt":
            return x / shifted.sqrt() * w
        if how == "weight first":
            return x * w * shifted.rsqrt()
        return x * (1 / shifted.sqrt() if how == "1 / sqrt" else shifted.rsqrt()) * w

    inputs = random_tensors([(5, 16), (16,)], [torch.bfloat16] * 2, 0)
    (reason,) = assert_not_lifted(function, inputs, LiftRmsNorm())
    assert "changes a rounding" in reason
    report = rewritten(LiftRmsNorm(), graph_of(function, inputs), allow=True)
    assert [s.policy for s in report.sites] == ["changes_rounding"]
    assert_lifted(function, [v.float() for v in inputs], [LiftRmsNorm()], leaves=())


NORMALISED: dict[str, Step] = {
    "F.normalize": lambda v: F.normalize(v, dim=-1, eps=1e-6),
    "dim from the front": lambda v: F.normalize(v, dim=v.dim() - 1),
    "norm and clamp": lambda v: v / v.norm(dim=-1, keepdim=True).clamp_min(1e-5),
    "vector_norm": lambda v: v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp(min=1e-5),
    "unsqueezed": lambda v: v / v.norm(dim=-1).clamp_min(1e-5).unsqueeze(-1),
    "unsqueezed before": lambda v: v / v.norm(dim=-1)[..., None].clamp_min(1e-5),
    "expanded": lambda v: v / v.norm(dim=-1, keepdim=True).clamp_min(1e-5).expand_as(v),
}


@pytest.mark.parametrize("how", NORMALISED)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_spelling_of_normalize_is_lifted(how: str, shape: tuple[int, ...]) -> None:
    rule = LiftNormalize()
    for dtype in DTYPES.values():
        inputs = random_tensors([shape], [dtype], 1)
        module = assert_lifted(NORMALISED[how], inputs, [rule], leaves=("l2_norm",))
        assert "l2_norm" in str(module.graph)
        assert_lifted(lambda x: NORMALISED[how](x.float()).to(x.dtype), inputs, [rule], leaves=("l2_norm",))


# ------------------------------------------------------------------------------------------------ gates

ACTIVATIONS: dict[str, Step] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "g * sigmoid": lambda g: g * torch.sigmoid(g),
    "sigmoid * g": lambda g: torch.sigmoid(g) * g,
}


@st.composite
def gated_norms(draw: Any) -> Any:
    norm, dtypes, shape = draw(rms_norms(weights=("none", "before", "after")))
    how = draw(st.sampled_from(list(ACTIVATIONS)))
    activation = ACTIVATIONS[how]
    gate_dtype = DTYPES[draw(st.sampled_from(list(DTYPES)))]
    up, flipped, narrow = draw(st.sampled_from(list(UP))), draw(st.booleans()), draw(st.booleans())
    if gate_dtype != torch.float32 and "*" in how:
        up = "float"

    def function(x: Tensor, w: Tensor, z: Tensor) -> Tensor:
        normed, gate = norm(x, w), activation(UP[up](z))
        gated = gate * normed if flipped else normed * gate
        return gated.to(x.dtype) if narrow else gated

    return function, (*dtypes, gate_dtype), shape


@given(case=gated_norms(), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_spelling_of_a_gated_norm_is_lifted(case: Any, seed: int) -> None:
    function, dtypes, shape = case
    inputs = random_tensors([shape, shape[-1:], shape], dtypes, seed)
    module = assert_lifted(function, inputs, [LiftRmsNorm(), LiftGatedRmsNorm()], leaves=())
    assert "gated_rms_norm" in str(module.graph)


@pytest.mark.parametrize(("how", "policy"), [("silu", "exact"), ("g * sigmoid", "changes_rounding")])
def test_silu_as_a_product_rounds_twice_in_a_narrow_dtype(how: str, policy: str) -> None:
    def function(x: Tensor, w: Tensor, z: Tensor) -> Tensor:
        normed = torch.ops.k3.rms_norm(x, w, 1e-5, torch.float32, torch.bfloat16, torch.bfloat16)
        return normed * ACTIVATIONS[how](z)

    inputs = random_tensors([(5, 16), (16,), (5, 16)], [torch.bfloat16] * 3, 0)
    assert [s.policy for s in rewritten(LiftGatedRmsNorm(), graph_of(function, inputs), allow=True).sites] == [policy]
    if policy == "changes_rounding":
        assert "changes a rounding" in assert_not_lifted(function, inputs, LiftGatedRmsNorm())[0]


def test_a_norm_that_gates_itself_is_left_as_two_ops() -> None:
    """SiLU of a norm: the gate is the normed tensor itself, which the fused op would compute twice."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        normed = torch.ops.k3.rms_norm(x, w, 1e-5, torch.float32, torch.float32, torch.float32)
        return normed * torch.sigmoid(normed)

    (reason,) = assert_not_lifted(
        function, random_tensors([(5, 16), (16,)], [torch.float32] * 2, 0), LiftGatedRmsNorm()
    )
    assert "which it replaces" in reason


GATE_MISSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh": lambda n, z: n * torch.tanh(z),
    "relu": lambda n, z: n * torch.relu(z),
    "hard sigmoid": lambda n, z: n * (z + 3).clamp(0, 6) / 6,
    "sigmoid of another": lambda n, z: n * (z * torch.sigmoid(z + 1)),
    "added": lambda n, z: n + torch.sigmoid(z),
    "one gate a vector": lambda n, z: n * torch.sigmoid(z[..., :1]),
    "transposed gate": lambda n, z: n * torch.sigmoid(z.mT),
    "rounded norm": lambda n, z: n.bfloat16().float() * torch.sigmoid(z),
    "subtracted": lambda n, z: 1 - n * z,
}


@pytest.mark.parametrize("how", [k for k in GATE_MISSES if k != "transposed gate"])
def test_other_gates_are_not_lifted(how: str) -> None:
    def function(x: Tensor, w: Tensor, z: Tensor) -> Tensor:
        return GATE_MISSES[how](torch.ops.k3.rms_norm(x, w, 1e-5, *[torch.float32] * 3), z)

    inputs = random_tensors([(6, 6), (6,), (6, 6)], [torch.float32] * 3, 0)
    assert_not_lifted(function, inputs, LiftGatedRmsNorm())


# ------------------------------------------------------------------------------------------------ near misses

V = dict[str, Callable[[Tensor, Tensor], Tensor]]
NEAR_RMS: V = {
    "another dim": lambda v, w: v * torch.rsqrt(v.pow(2).mean(0, keepdim=True) + 1e-6) * w,
    "both dims": lambda v, w: v * torch.rsqrt(v.pow(2).mean((0, 1), keepdim=True) + 1e-6) * w,
    "all dims": lambda v, w: v * torch.rsqrt(v.pow(2).mean() + 1e-6) * w,
    "eps outside of the root": lambda v, w: v * (torch.rsqrt(v.pow(2).mean(-1, keepdim=True)) + 1e-6) * w,
    "eps beside the root": lambda v, w: v / (torch.sqrt(v.pow(2).mean(-1, keepdim=True)) + 1e-6) * w,
    "eps as a tensor": lambda v, w: v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + w[:1] * 1e-6) * w,
    "eps subtracted": lambda v, w: v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) - 1e-6) * w,
    "eps with a factor": lambda v, w: v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True).add(w[:1], alpha=1e-6)) * w,
    "no eps": lambda v, w: v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True)) * w,
    "eps as a bound": lambda v, w: v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True).clamp_min(1e-6)) * w,
    "a sum": lambda v, w: v * torch.rsqrt(v.pow(2).sum(-1, keepdim=True) + 1e-6) * w,
    "another count": lambda v, w: v * torch.rsqrt(v.pow(2).sum(-1, keepdim=True) / 15 + 1e-6) * w,
    "another share": lambda v, w: v * torch.rsqrt(v.pow(2).sum(-1, keepdim=True) * 0.0626 + 1e-6) * w,
    "cubes": lambda v, w: v * torch.rsqrt(v.pow(3).mean(-1, keepdim=True) + 1e-6) * w,
    "absolute values": lambda v, w: v * torch.rsqrt(v.abs().mean(-1, keepdim=True) + 1e-6) * w,
    "no squares": lambda v, w: v * torch.rsqrt(v.mean(-1, keepdim=True) + 1e-6) * w,
    "a product of two": lambda v, w: v * torch.rsqrt((v * (v + 1)).mean(-1, keepdim=True) + 1e-6) * w,
    "another vector scaled": lambda v, w: (v + 1) * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
    "the root, not its inverse": lambda v, w: v * torch.sqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
    "divided by the inverse": lambda v, w: v / torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
    "a power of -1/3": lambda v, w: v * (v.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt().pow(2 / 3) * w,
    "a root inside a sum": lambda v, w: (v + torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6)) * w,
    "rounded statistic": lambda v, w: v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True).bfloat16().float() + 1e-6) * w,
    "rounded root": lambda v, w: v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6).bfloat16().float() * w,
    "rounded x in the statistic": lambda v, w: v * torch.rsqrt(v.bfloat16().pow(2).mean(-1, keepdim=True) + 1e-6) * w,
    "another row's root": lambda v, w: v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6).mT * w,
    "along the rows": lambda v, w: v * torch.rsqrt(v.pow(2).mean(-1) + 1e-6) * w,
    "one row's root": lambda v, w: v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6)[:1] * w,
    "half of the width": lambda v, w: v[:, :8] * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6) * w[:8],
    "roots in another order": lambda v, w: v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6).flip(0) * w,
    "mean of the root": lambda v, w: v * torch.rsqrt(v.pow(2) + 1e-6).mean(-1, keepdim=True) * w,
    "mean subtracted": lambda v, w: _centred(v) * torch.rsqrt(_centred(v).pow(2).mean(-1, keepdim=True) + 1e-6) * w,
    "variance": lambda v, w: v * torch.rsqrt(v.var(-1, keepdim=True, correction=0) + 1e-6) * w,
    "integers": lambda v, w: v.int() * torch.rsqrt(v.int().pow(2.0).mean(-1, keepdim=True) + 1e-6) * w,
}  # fmt: skip


def _centred(v: Tensor) -> Tensor:
    return v - v.mean(-1, keepdim=True)


@pytest.mark.parametrize("how", NEAR_RMS)
def test_what_is_nearly_an_rms_norm_is_not_lifted(how: str) -> None:
    inputs = random_tensors([(16, 16), (16,)], [torch.float32] * 2, 0)
    assert_not_lifted(NEAR_RMS[how], inputs, LiftRmsNorm())


def test_a_whole_norm_inside_something_else_is_lifted_up_to_there() -> None:
    """What follows decides how much of a spelling is one norm; it never makes the norm itself wrong."""
    rounded: V = {
        "rounded before the weight": lambda v, w: (v * _rstd(v)).bfloat16().float() * w,
        "a factor of the shape of x": lambda v, w: v * _rstd(v) * (v + w),
        "a factor for each row": lambda v, w: v * _rstd(v) * w[:, None],
        "a number": lambda v, w: v * _rstd(v) * 3,
        "added": lambda v, w: v * _rstd(v) + w,
    }
    for function in rounded.values():
        inputs = random_tensors([(16, 16), (16,)], [torch.float32] * 2, 0)
        module = assert_lifted(function, inputs, [LiftRmsNorm()], leaves=("mul", "add", "unsqueeze"))
        assert "rms_norm" in str(module.graph)


def _rstd(v: Tensor) -> Tensor:
    return torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6)


NEAR_L2: dict[str, Step] = {
    "a mean": lambda v: v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6),
    "another dim": lambda v: v * torch.rsqrt(v.pow(2).sum(0, keepdim=True) + 1e-6),
    "eps outside": lambda v: v / (torch.sqrt(v.pow(2).sum(-1, keepdim=True)) + 1e-6),
    "a share of the sum": lambda v: v * torch.rsqrt(v.pow(2).sum(-1, keepdim=True) / 7 + 1e-6),
    "another vector": lambda v: v.sin() * torch.rsqrt(v.pow(2).sum(-1, keepdim=True) + 1e-6),
    "another row": lambda v: v * torch.rsqrt(v.pow(2).sum(-1, keepdim=True) + 1e-6).mT,
    "not kept": lambda v: v * torch.rsqrt(v.pow(2).sum(-1) + 1e-6),
    "rounded": lambda v: v * torch.rsqrt(v.pow(2).sum(-1, keepdim=True).bfloat16().float() + 1e-6),
    "rounded x": lambda v: v * torch.rsqrt(v.half().pow(2).sum(-1, keepdim=True) + 1e-6),
    "summed in another dtype": lambda v: v * torch.rsqrt(v.pow(2).sum(-1, keepdim=True, dtype=torch.float64) + 1e-6),
}
NEAR_NORMALIZE: dict[str, Step] = {
    "order 1": lambda v: F.normalize(v, p=1.0, dim=-1),
    "order 3": lambda v: v / torch.linalg.vector_norm(v, 3, dim=-1, keepdim=True).clamp_min(1e-6),
    "another dim": lambda v: F.normalize(v, dim=0),
    "no bound": lambda v: v / v.norm(dim=-1, keepdim=True),
    "eps added": lambda v: v / (v.norm(dim=-1, keepdim=True) + 1e-6),
    "another row": lambda v: v / v.norm(dim=-1, keepdim=True).clamp_min(1e-6).mT,
    "not kept": lambda v: v / v.norm(dim=-1).clamp_min(1e-6),
    "another vector": lambda v: v.sin() / v.norm(dim=-1, keepdim=True).clamp_min(1e-6),
    "multiplied": lambda v: v * v.norm(dim=-1, keepdim=True).clamp_min(1e-6),
    "upper bound": lambda v: v / v.norm(dim=-1, keepdim=True).clamp_max(1e-6),
}


@pytest.mark.parametrize("how", NEAR_L2)
def test_what_is_nearly_a_unit_vector_is_not_lifted(how: str) -> None:
    assert_not_lifted(NEAR_L2[how], random_tensors([(16, 16)], [torch.float32], 0), LiftL2Norm())


@pytest.mark.parametrize("how", NEAR_NORMALIZE)
def test_what_is_nearly_normalize_is_not_lifted(how: str) -> None:
    assert_not_lifted(NEAR_NORMALIZE[how], random_tensors([(16, 16)], [torch.float32], 0), LiftNormalize())
