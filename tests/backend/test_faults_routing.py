"""Faults of other people's routers, and of what lies around their experts, each through the whole pipeline.

The right answer is that of the model's formula. Where torch leaves a choice open (which of equal scores is taken, what
a score that is no number is worth), it is eager's.

    row     where its tests are; without a file: here. The kernels' side of 20 to 43: kernels/test_faults_experts.py
    21      test_scores_without_numbers_choose_experts_that_exist, test_a_token_without_numbers_changes_no_other
    22      ROUTERS; models/test_k3_moe.py::test_biased_scores_below_minus_one_are_selected
    23      test_equal_scores_..., FORMULAS; models/test_k3_moe.py::test_ties_give_a_valid_selection
    24      ROUTERS, MIXTURES; models/test_k3_moe.py::test_high_expert_ids_are_reached
    25, 26  ROUTERS; shared memory (25) concerns no router here, as none has a kernel of its own
    27, 28  ROUTERS, FORMULAS; models/test_k3_moe.py::test_tiny_scores_follow_the_formula
    29      ROUTERS, FORMULAS; models/test_k3_moe.py::test_bias_selects_and_scores_weigh
    30      ROUTERS; models/test_k3_moe.py::test_the_scale_is_applied_once_in_both_branches
    31      MIXTURES; so are 41 and 42
    32      MIXTURES, test_a_rank_..., test_a_layer_..., test_a_step_...; models/test_k3_moe.py::test_no_token_at_all
    34      test_a_call_knows_nothing_of_the_one_before
    40      test_launches_go_to_the_current_stream
    43      test_sixteen_and_seventeen_tokens
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from k3rewrite.backend import Backend
from k3rewrite.emit.launch import DeviceFunction
from k3rewrite.models.kimi_k3 import KimiK3Config, build_kimi_k3
from k3rewrite.models.kimi_k3.experts import Bf16Experts
from k3rewrite.models.kimi_k3.moe import LatentMoE
from k3rewrite.models.kimi_k3.parallel import TensorParallel
from k3rewrite.models.kimi_k3.router import Router

BF16, FP32, NAN = torch.bfloat16, torch.float32, float("nan")
Chosen = tuple[Tensor, Tensor]
FORMS = pytest.mark.parametrize("form", ["grouped", "gather"])
FINALISERS = pytest.mark.parametrize("finalise", ["eager", "inductor"])


def run(function: Any, *calls: tuple[Tensor, ...], **options: Any) -> tuple[list[Any], dict[str, int]]:
    """What the compiled function gives for each call, for kernels of an H200, and how often each pass matched."""
    backend = Backend({"finalise": "eager", "target": "h200", **options})
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with torch.no_grad():
        results = [compiled(*inputs) for inputs in calls]
    return results, {entry.name: entry.matched for entry in backend.reports[0].passes}


def config(experts: int, top_k: int, **changes: Any) -> KimiK3Config:
    """As many columns as experts, so that the identity makes logits of the router's input."""
    sizes = {"hidden_size": experts, "routed_expert_hidden_size": 32, "moe_intermediate_size": 32}
    return KimiK3Config.tiny(**sizes, num_experts=experts, num_experts_per_token=top_k, experts="bf16", **changes)


def router(experts: int, top_k: int, bias: Any = 0.0, *, dtype: torch.dtype = FP32, **changes: Any) -> Router:
    gate = Router(config(experts, top_k, **changes), dtype=dtype)
    gate.weight.copy_(torch.eye(experts))
    gate.e_score_correction_bias.copy_(torch.as_tensor(bias))
    return gate


def hot(experts: int, *chosen: int) -> Tensor:
    """Logits of a token for each of `chosen`: 5 there, 0 elsewhere."""
    return 5.0 * F.one_hot(torch.tensor(chosen), experts)


class Routing(NamedTuple):
    """A router, logits of one token, and the right ids and weights; the weights that others got."""

    gate: Callable[[Tensor], Any]
    logits: Any
    ids: list[int]
    weights: Any
    wrong: Any = NAN


def eight_of_128() -> Routing:
    """The size at which others returned the biased scores as weights."""
    logits, bias = torch.linspace(-2, 2, 128), torch.linspace(0, 1, 128).flip(0) ** 2 * 3
    scores = logits.double().sigmoid()
    ids = sorted((scores + bias).argsort()[-8:].tolist())
    right, biased = scores[ids], (scores + bias)[ids]
    return Routing(router(128, 8, bias), logits, ids, right / right.sum(), biased / biased.sum())


FOUR, SPREAD = torch.tensor([1, 2, 3, 4], dtype=BF16), list(range(5, 2304, 144))
ROUTERS: dict[str, Callable[[], Routing]] = {
    "22: biased scores below -1": lambda: Routing(router(4, 1, [-5, -5, -4, -5]), [-2.2] * 4, [2], [1]),
    "24: expert 700 of 896": lambda: Routing(router(896, 1), hot(896, 700)[0], [700], [1]),
    "25: 16 of 2304": lambda: Routing(router(2304, 16), hot(2304, *SPREAD).sum(0), SPREAD, [1 / 16] * 16),
    "26: bf16, sigmoid": lambda: Routing(router(4, 1, dtype=BF16, moe_renormalize=False), FOUR, [3], [0.98201], [1.0]),
    "26: bf16, softmax": lambda: Routing(lambda x: tuple(x.softmax(-1, FP32).topk(1)), FOUR, [3], [0.64391], [1.0]),
    "27: scores of 0": lambda: Routing(router(4, 4), [-120] * 4, [0, 1, 2, 3], [0.0] * 4),
    "28: scores as small as eps": lambda: Routing(router(4, 4), [-50] * 4, [0, 1, 2, 3], [0.0716 / 4] * 4, [0.25] * 4),
    "29: 2 of 3": lambda: Routing(router(3, 2, [1, 0, 0.5]), [0, 2, -1], [0, 1], [0.3621, 0.6379], [0.630, 0.370]),
    "29: 8 of 128": eight_of_128,
    "30: renormalised": lambda: Routing(router(3, 1, routed_scaling_factor=2.5), [0, 2, -1], [1], [2.5], [1.0]),
    "30: not renormalised": lambda: Routing(
        router(3, 1, routed_scaling_factor=2.5, moe_renormalize=False), [0, 2, -1], [1], [2.202], [0.881]
    ),
}
EACH = [*(("eager", [name]) for name in ROUTERS), ("inductor", [*ROUTERS][3:8:4])]


@pytest.mark.parametrize(("finalise", "names"), EACH, ids=[*ROUTERS, "two of them by Inductor"])
def test_a_router_chooses_and_weighs_as_its_formula_says(finalise: str, names: list[str]) -> None:
    every = [ROUTERS[name]() for name in names]
    given = [torch.as_tensor(routing.logits).unsqueeze(0) for routing in every]
    logits = tuple(values if values.dtype is BF16 else values.float() for values in given)

    def function(*logits: Tensor) -> list[Chosen]:
        return [routing.gate(values) for routing, values in zip(every, logits, strict=True)]

    (results,), matched = run(function, logits, finalise=finalise)
    assert matched["lift_route"] == len(every)
    for (weights, ids), eager, routing in zip(results, function(*logits), every, strict=True):
        assert torch.equal(ids, eager[1]) and (torch.equal(weights, eager[0]) or finalise == "inductor")
        order = ids.argsort(1)
        assert ids.gather(1, order).tolist() == [routing.ids]
        weights = weights.gather(1, order).float()
        right, wrong = (torch.as_tensor(values).float().reshape(1, -1) for values in (routing.weights, routing.wrong))
        torch.testing.assert_close(weights, right, rtol=2e-3, atol=0)
        assert not torch.allclose(weights, wrong, rtol=0.01, atol=0)


def normed(weights: Tensor, ids: Tensor) -> Chosen:
    return weights / weights.sum(-1, keepdim=True), ids


def stable(logits: Tensor) -> Chosen:
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    return values[:, :16], order[:, :16]


FORMULAS: dict[str, tuple[Callable[[Tensor], Any], Tensor, list[float], list[int], int]] = {
    "23: a stable order": (stable, hot(896, 5), [5.0, *[0.0] * 15], [5, *range(5), *range(6, 16)], 0),
    "27: 0 / 0 without an epsilon": (
        lambda v: normed(*v.sigmoid().topk(4)), torch.full((1, 4), -120.0), [NAN] * 4, [0, 1, 2, 3], 1,
    ),
    "28: softmax of log-sigmoid": (
        lambda v: (F.logsigmoid(v.topk(4)[0]).softmax(-1), v.topk(4)[1]),
        torch.full((1, 4), -50.0), [0.25] * 4, [0, 1, 2, 3], 0,
    ),
    "29: biased scores as weights": (
        lambda v: normed(*(v.sigmoid() + torch.tensor([1, 0, 0.5])).topk(2)),
        torch.tensor([[0.0, 2.0, -1.0]]), [0.6304, 0.3696], [0, 1], 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_another_formula_stays_another(name: str) -> None:
    """What a model says is right, also where it is wrong for another model."""
    function, logits, right, chosen, lifted = FORMULAS[name]
    ((weights, ids),), matched = run(function, (logits,))
    assert matched["lift_route"] == lifted
    assert (ids if name.startswith("23") else ids.sort().values).tolist() == [chosen]
    torch.testing.assert_close(weights, torch.tensor([right]), rtol=1e-3, atol=0, equal_nan=True)


@FINALISERS
def test_scores_without_numbers_choose_experts_that_exist(finalise: str) -> None:
    """Row 21: of 8 NaN an index that is compared with the largest value is 9; torch takes NaN for the largest."""
    logits, gate = torch.randn(3, 8), router(8, 2)
    logits[1], logits[2, 5] = NAN, NAN
    ((weights, ids),), _ = run(gate, (logits,), finalise=finalise)
    assert torch.equal(ids, gate(logits)[1]) and 5 in ids[2]
    assert bool(((ids >= 0) & (ids < 8)).all()) and all(len(set(row)) == 2 for row in ids.tolist())
    assert torch.equal(ids[:1], gate(logits[:1])[1]) and bool(weights[0].isfinite().all())
    torch.testing.assert_close(weights, gate(logits)[0], equal_nan=True)


@FINALISERS
def test_equal_scores_are_taken_as_eager_takes_them(finalise: str) -> None:
    """Row 23: 896 zeros, but [5] = 1, 16 of them. Expert 5 is in; which others are is said by no one but torch."""
    logits, gate = hot(896, 5) / 5, router(896, 16)
    ((weights, ids),), matched = run(gate, (logits,), verify="all", finalise=finalise)
    assert matched["lift_route"] == 1 and torch.equal(ids, gate(logits)[1])
    assert 5 in ids and len(set(ids[0].tolist())) == 16 and bool(((ids >= 0) & (ids < 896)).all())
    torch.testing.assert_close(weights, gate(logits)[0])


class Mixture(nn.Module):
    """Kimi K3's router and experts, of which expert e gives `values[e]`: in bf16, 4 tanh(8) 25 tanh(.01) is 1."""

    def __init__(self, values: Tensor, top_k: int, *, first: int = 0, every: int = 0, **changes: Any) -> None:
        """`first`, `every`: the experts are those from `first` on, of so many."""
        super().__init__()
        self.first, self.local = first, len(values)
        self.gate = router(every or len(values), top_k, **changes)
        self.experts = Bf16Experts(config(len(values), top_k, **changes), TensorParallel(), dtype=BF16)
        self.experts.w13.zero_()[:, :, 0] = torch.tensor([32.0] * 32 + [0.25] * 32)
        self.experts.w2.zero_()[:, :, 0] = values

    def forward(self, logits: Tensor) -> Tensor:
        weights, ids = self.gate(logits)
        if self.first:
            ids = ids - self.first
            inside = (ids >= 0) & (ids < self.local)
            weights, ids = weights * inside, torch.where(inside, ids, 0)
        return self.experts(torch.eye(1, 32, dtype=BF16).expand(len(logits), -1), weights, ids)


def same(*numbers: float) -> Tensor:
    """Each number in 32 columns of a row."""
    return torch.tensor(numbers, dtype=FP32).unsqueeze(1).repeat(1, 32)


def mixed(model: Mixture, *logits: Tensor) -> list[Tensor]:
    """Results of a mixture that was lifted and has a kernel; memory that nothing was written to holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        results, matched = run(model, *((values,) for values in logits))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [matched[name] for name in ("lift_route", "lift_moe", "warp_decode_moe", "select")] == [1] * 4
    return results


def situ(**form: Any) -> Mixture:
    """g = [3, 30], u = [2, 60]: [4.83, 98.4]; SiLU gives [5.72, 1800]."""
    model = Mixture(same(0, 0), 1, **form)
    model.experts.w13.zero_()[0, [0, 1, 32, 33], 0] = torch.tensor([3, 30, 2, 60], dtype=BF16)
    model.experts.w2[0] = torch.eye(32)
    return model


MIXTURES: dict[str, tuple[Callable[..., Mixture], Tensor, Tensor]] = {
    "24: 896 experts": (
        lambda **form: Mixture(same(*(e % 199 for e in range(896))), 1, **form),
        hot(896, 700, 255, 256, 895, 0), same(700 % 199, 255 % 199, 256 % 199, 895 % 199, 0),
    ),
    "31: k = 1, factor 1.5, output 2": (
        lambda **form: Mixture(same(NAN, 2, NAN), 1, routed_scaling_factor=1.5, **form), hot(3, 1), same(3),
    ),
    "32: no token": (lambda **form: Mixture(same(1, 2), 1, **form), torch.ones(0, 2), torch.ones(0, 32)),
    "41: expert 40 is local expert 8": (
        lambda **form: Mixture(same(*range(1, 33)), 1, first=32, every=64, **form), hot(64, 40, 8, 63), same(9, 0, 32),
    ),
    "42: SiTU": (situ, hot(2, 0), torch.tensor([[4.83, 98.37, *[0.0] * 30]])),
}  # fmt: skip


@FORMS
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_gives_the_right_answer(name: str, form: str) -> None:
    make, logits, right = MIXTURES[name]
    (got,) = mixed(make(moe_form=form), logits)
    torch.testing.assert_close(got.float(), right, rtol=4e-3 if name.startswith("42") else 0, atol=0)


@FORMS
def test_a_token_without_numbers_changes_no_other(form: str) -> None:
    """Row 21: what it chooses are experts, or eager would fail; its row alone is NaN."""
    model, logits = Mixture(same(*range(8)), 2, moe_form=form), torch.randn(3, 8)
    logits[1] = NAN
    got, others = mixed(model, logits, logits[::2])
    assert got[1].isnan().all() and torch.equal(got[::2], others)
    torch.testing.assert_close(got, model(logits), equal_nan=True, rtol=2**-7, atol=0)


def test_a_call_knows_nothing_of_the_one_before() -> None:
    """Row 34: two routes, one, none, two others."""
    model = Mixture(same(1, 2, 3, 4), 1, first=4, every=8)
    results = mixed(model, *(hot(8, *chosen) for chosen in ((4, 6), (4, 1), (0, 1), (7, 5))))
    for got, right in zip(results, (same(1, 3), same(1, 0), same(0, 0), same(4, 2)), strict=True):
        assert torch.equal(got.float(), right)


@FORMS
def test_sixteen_and_seventeen_tokens(form: str) -> None:
    """Row 43: each token's result on both sides, and in a batch of three, from one graph."""
    model, logits = Mixture(same(*range(8)), 2, moe_form=form), torch.randn(17, 8)
    parts = [logits[:tokens].clone() for tokens in (17, 16, 3)]
    for part in parts:
        torch._dynamo.mark_dynamic(part, 0)
    results = mixed(model, *parts)
    for got, part in zip(results, parts, strict=True):
        assert torch.equal(got, results[0][: len(part)])
        torch.testing.assert_close(got, model(part), rtol=2**-7, atol=0)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_rank_without_a_token_enters_the_collectives(tokens: int, two_ranks: None) -> None:
    """Row 32: one for the latent and one for the shared expert, each waited for."""
    layer = LatentMoE(KimiK3Config.tiny(experts="bf16"), TensorParallel.of(dist.group.WORLD), dtype=BF16)
    compiled = torch.compile(layer, backend=Backend({"finalise": "eager", "target": "h200"}), fullgraph=True)
    x = torch.zeros(tokens, 96, dtype=BF16)
    with torch.no_grad():
        assert compiled(x).shape == (tokens, 96)
        with torch.profiler.profile() as seen:
            compiled(x)
    names = [event.name for event in seen.events()]
    assert [names.count(f"_c10d_functional::{name}") for name in ("all_reduce", "wait_tensor")] == [2, 2]


@FORMS
def test_a_layer_without_a_token_is_lifted(form: str) -> None:
    """Row 32."""
    layer = LatentMoE(KimiK3Config.tiny(experts="bf16", moe_form=form), TensorParallel(), dtype=BF16)
    (got,), matched = run(layer, (torch.zeros(0, 96, dtype=BF16),))
    assert got.shape == (0, 96) and matched["lift_moe"] == 1


def test_a_step_without_a_sequence() -> None:
    """Row 32."""
    model, (inputs, state), _ = build_kimi_k3(KimiK3Config.minimal().with_layers(2), batch=2, context=6, dtype=BF16)
    nobody = type(inputs)(inputs.tokens[:0], inputs.slots[:0], inputs.positions[:0])
    assert model(nobody, state).shape == (0, model.config.vocab_size)


def test_launches_go_to_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 40: a kernel on a stream of its own would not wait for what gathers its input."""
    seen: list[Any] = []
    driver: Any = SimpleNamespace(
        cuLaunchKernel=lambda *arguments: seen.append(arguments[8].value),
        cuLaunchKernelEx=lambda config, *rest: seen.append(config._obj.stream),
    )
    names = ("cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel")
    function = DeviceFunction(driver, names, ctypes.c_void_p(1), "kernel")
    for number, dependent in ((7, False), (8, False), (9, True), (7, True)):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda number=number: SimpleNamespace(cuda_stream=number))
        function(grid=(1,), threads=32, arguments=[1], dependent=dependent)
    assert seen == [7, 8, 9, 7]
