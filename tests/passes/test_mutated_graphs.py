"""Graphs that are lifted, with one to three things changed at random: what comes out computes what went in.

Every change that a literal matcher could overlook: another operand of the same shape, another op, constant, dimension
or dtype, a transposition, a rounding, a write in place. All matrices are square, so that no shape betrays a mistake.
"""

from __future__ import annotations

import functools
import logging
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_graphs import aten
from spelling_checks import copy_of, graph_of
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from k3rewrite import _torch_private as private
from k3rewrite.kernels import KERNELS, OPS
from k3rewrite.passes import PASSES
from k3rewrite.pipeline.config import load_pipeline
from k3rewrite.pipeline.pass_base import PassContext
from k3rewrite.pipeline.runner import build_passes, run_pipeline
from k3rewrite.report.schema import PassReport
from k3rewrite.targets import load_target

SIZE = 8
BF16, FP32 = torch.bfloat16, torch.float32
UNARY = [
    op.default
    for op in (
        aten.neg,
        aten.sin,
        aten.abs,
        aten.sigmoid,
        aten.tanh,
        aten.silu,
        aten.square,
        aten.sqrt,
        aten.rsqrt,
        aten.clone,
    )
]
BINARY = [op.Tensor for op in (aten.add, aten.mul, aten.sub, aten.div)]
# The model's own roundings, so that a rounding that is lost shows in most elements.
PIPELINE = load_pipeline(
    {
        "version": 1,
        "extends": "base",
        "target": "cpu",
        "passes": [{"fuse_attn_res_norm": {"roundings": "model", "allow_changes_rounding": False}}],
    },
    known_passes=PASSES,
)


# ------------------------------------------------------------------------------------------------ what is lifted


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def gated_norm(x: Tensor, w: Tensor, z: Tensor) -> Tensor:
    v = x.float()
    normed = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6) * w.float()
    return (normed * torch.sigmoid(z.float())).to(x.dtype)


def unit_vectors(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return (v / torch.sqrt((v * v).sum(-1, keepdim=True) + 1e-6)).to(x.dtype) * F.normalize(w, dim=-1)


def situ(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    g, u = F.linear(x, a).float(), F.linear(x, b).float()
    return F.linear((4 * torch.tanh(g / 4) * torch.sigmoid(g) * (25 * torch.tanh(u / 25))).to(x.dtype), c)


def stacked_silu(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    g, u = F.linear(x, torch.cat([a, b])).chunk(2, -1)
    return F.linear(F.silu(g) * u, c)


def router(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(logits.float())
    ids = (scores + bias.float()).topk(4, -1).indices
    weights = scores.gather(-1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


def softmax_router(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.float().softmax(-1).topk(4, -1)
    return weights / weights.sum(-1, keepdim=True), ids


def depth(p: Tensor, a: Tensor, b0: Tensor, b1: Tensor, n: Tensor, q: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    p = p + a
    v = torch.stack([b0, b1, b0 + b1, b0 - b1, b1 - b0, a, a + b0, p], dim=1).float()
    scores = (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-5) * (n.float() * q.float())).sum(-1)
    mixed = (scores.softmax(-1).unsqueeze(-1) * v).sum(1).to(p.dtype)
    wide = mixed.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(mixed.dtype) * w, p


M, V = (SIZE, SIZE), (SIZE,)
BASES: list[tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = [
    (rms_norm, (M, V)),
    (gated_norm, (M, V, M)),
    (unit_vectors, (M, M)),
    (situ, (M, M, M, M)),
    (stacked_silu, (M, M, M, M)),
    (router, (M, V)),
    (softmax_router, (M, V)),
    (depth, (M, M, M, M, V, V, V)),
]


# ------------------------------------------------------------------------------------------------ changes


class Mutation:
    """One change of a graph; `False` if there is nothing to change in that way."""

    def __init__(self, graph: Graph, chance: random.Random, writes: bool) -> None:
        self.graph, self.chance = graph, chance
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.tensors = [n for n in graph.nodes if n.op != "output" and isinstance(n.meta["val"], Tensor)]
        self.calls = [n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
        kinds = [
            self.another_operand, self.another_operator, self.another_constant, self.another_function,
            self.transposed, self.rounded, self.exchanged, self.another_dim, self.returned_too, self.rearranged,
        ]  # fmt: skip
        self.kinds = [self.written, self.written_through_a_view, *kinds] if writes else kinds

    def __call__(self) -> bool:
        return self.chance.choice(self.kinds)()

    def _set(self, node: Node, index: int, value: Any) -> bool:
        node.args = (*node.args[:index], value, *node.args[index + 1 :])
        return True

    def _insert(self, node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_after(node):
            new = self.graph.call_function(target, (node, *args), kwargs)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        return new

    def another_operand(self) -> bool:
        node = self.chance.choice(self.calls)
        places = [i for i, a in enumerate(node.args) if isinstance(a, Node) and isinstance(a.meta["val"], Tensor)]
        if not places:
            return False
        place = self.chance.choice(places)
        shape = node.args[place].meta["val"].shape  # type: ignore[union-attr]
        others = [t for t in self.tensors if self.order[t] < self.order[node] and t.meta["val"].shape == shape]
        return bool(others) and self._set(node, place, self.chance.choice(others))

    def another_operator(self) -> bool:
        node = self.chance.choice(self.calls)
        if node.target in BINARY:
            node.target = self.chance.choice(BINARY)
        return node.target in BINARY

    def another_constant(self) -> bool:
        node = self.chance.choice(self.calls)
        places = [i for i, a in enumerate(node.args) if isinstance(a, (int, float))]
        if not places:
            return False
        place = self.chance.choice(places)
        value = node.args[place]
        assert isinstance(value, (int, float))
        return self._set(node, place, self.chance.choice([value + 1, value * 2, -value, 0, 1, float(value), 3]))

    def another_function(self) -> bool:
        self._insert(self.chance.choice(self.tensors), self.chance.choice(UNARY))
        return True

    def transposed(self) -> bool:
        node = self.chance.choice(self.tensors)
        rank = node.meta["val"].dim()
        return rank > 1 and bool(self._insert(node, aten.transpose.int, *self.chance.sample(range(rank), 2)))

    def rounded(self) -> bool:
        node = self.chance.choice([t for t in self.tensors if t.meta["val"].is_floating_point()])
        dtype = self.chance.choice([BF16, torch.float16, FP32, torch.float64])
        cast = self._insert(node, aten._to_copy.default, dtype=dtype)
        if self.chance.random() < 0.6:
            self._insert(cast, aten._to_copy.default, dtype=node.meta["val"].dtype)
        return True

    def exchanged(self) -> bool:
        node = self.chance.choice(self.calls)
        if node.target not in BINARY or not isinstance(node.args[1], Node):
            return False
        node.args = (node.args[1], node.args[0], *node.args[2:])
        return True

    def another_dim(self) -> bool:
        node = self.chance.choice(self.calls)
        for place, value in enumerate(node.args):
            if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
                return self._set(node, place, [self.chance.randrange(-2, 2)])
        return False

    def returned_too(self) -> bool:
        output = self.graph.output_node()
        output.args = ((*output.args[0], self.chance.choice(self.tensors)),)  # type: ignore[misc]
        return True

    def rearranged(self) -> bool:
        node = self.chance.choice(self.tensors)
        shape = list(node.meta["val"].shape)
        if len(shape) < 2:
            return False
        dim = self.chance.randrange(len(shape))
        how = self.chance.choice(["flip", "slice", "view", "roll"])
        if how == "flip":
            self._insert(node, aten.flip.default, [dim])
        elif how == "slice":
            self._insert(node, aten.slice.Tensor, dim, 0, shape[0] // 2)
        elif how == "view":
            self._insert(node, aten.view.default, shape[::-1])
        else:
            self._insert(node, aten.roll.default, [1], [dim])
        return True

    def _place_behind(self, node: Node) -> Node:
        inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
        later = [n for n in self.graph.nodes if self.order[n] >= self.order[node] and n.op == "call_function"]
        return self.chance.choice([inputs[-1], *later] if node.op == "placeholder" else later)

    def written(self) -> bool:
        node = self.chance.choice(self.tensors)
        with self.graph.inserting_after(self._place_behind(node)):
            self.graph.call_function(self.chance.choice([aten.add_.Tensor, aten.mul_.Tensor]), (node, 2))
        return True

    def written_through_a_view(self) -> bool:
        node = self.chance.choice(self.tensors)
        with self.graph.inserting_after(self._place_behind(node)):
            view = self.graph.call_function(aten.slice.Tensor, (node, 0, 0, 2))
        with self.graph.inserting_after(view):
            self.graph.call_function(aten.add_.Tensor, (view, 1))
        return True


# ------------------------------------------------------------------------------------------------ the check


def _set_values(module: GraphModule) -> None:
    mode = private.graph_fake_mode(module.graph)
    assert mode is not None
    with mode:
        for node in module.graph.nodes:
            if node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)


@functools.cache
def _base(index: int, dtype: torch.dtype) -> GraphModule:
    """Traced once: the same graph whatever the values are, to be copied before it is changed."""
    function, shapes = BASES[index]
    return graph_of(function, [torch.ones(shape, dtype=dtype) for shape in shapes])


def _run(module: GraphModule, inputs: list[Tensor]) -> list[Tensor]:
    """Results and the inputs afterwards."""
    values = [v.clone() for v in inputs]
    return [*(v.clone() for v in module(*values)), *values]


def _differs(old: Tensor, new: Tensor) -> bool:
    """Beyond sums in another order, and the roundings to bf16 that such a sum turns in a few elements."""
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return True
    if not old.is_floating_point():
        return not torch.equal(old, new)
    a, b = old.double(), new.double()
    finite = a[a.isfinite()]
    tolerance = 1e-4 * (a.abs() + (finite.pow(2).mean().sqrt() if finite.numel() else 0.0))
    same = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= tolerance)
    return bool((~same).double().mean() > 0.06) if same.numel() else False


def _check(seed: int, writes: bool) -> int:
    """-1 if the change makes no valid graph, else the number of sites that were rewritten all the same."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    index = chance.randrange(len(BASES))
    dtype = chance.choice([FP32, FP32, BF16])
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in BASES[index][1]]
    module = copy_of(_base(index, dtype))
    try:
        for _ in range(chance.choice([1, 1, 2, 3])):
            if Mutation(module.graph, chance, writes)():
                _set_values(module)
        module.graph.lint()
        module.recompile()
        old = _run(module, inputs)
    except (RuntimeError, TypeError, IndexError, ValueError, AssertionError):  # the change makes no sense to torch
        return -1
    changed = copy_of(module)
    reports: list[PassReport] = []
    context = PassContext(load_target("cpu"), OPS, KERNELS)
    run_pipeline(changed, build_passes(PIPELINE, PASSES), context, {}, reports)
    changed.recompile()
    new = _run(changed, inputs)
    wrong = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if _differs(a, b)]
    assert not wrong, f"seed {seed}: values {wrong} of\n{module.graph}\nbecame\n{changed.graph}"
    for report in reports:
        assert report.candidates == report.matched + len(report.missed) + len(report.refused)
        assert all(miss.reason for miss in [*report.missed, *report.refused])
    return sum(report.matched for report in reports if report.name.startswith("lift"))


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shape functions write each failure to the log, and changes that make no sense are meant to fail there."""
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("writes", [False, True], ids=["functional", "with writes"])
@pytest.mark.parametrize("first", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_changed_graph_computes_what_it_did(writes: bool, first: int) -> None:
    lifted = [_check(seed, writes) for seed in range(first, first + (60 if first == 0 else 250))]
    assert sum(n >= 0 for n in lifted) > 0.8 * len(lifted), "most changes make a valid graph"
    assert sum(n > 0 for n in lifted) > 0.3 * len(lifted), "many of them are still lifted, in whole or in part"
