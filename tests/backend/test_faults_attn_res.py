"""Faults of attention residuals through the whole pipeline: aliased outputs, taps, the prefix's bits, the roundings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from k3rewrite.backend import Backend
from k3rewrite.checks.errors import measure
from k3rewrite.kernels.attn_res_norm.op import updated_prefix

BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-5


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def depth_mix(sources: Tensor, norm: Tensor, proj: Tensor) -> Tensor:
    """[T, m, d] -> [T, d]"""
    wide = sources.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    scores = (wide * rstd * (norm.float() * proj.float())).sum(-1, keepdim=True)
    return (scores.softmax(1) * wide).sum(1).to(sources.dtype)


class Depth(nn.Module):
    """Layers that read mixes of stored blocks and the running prefix, which starts anew behind each stored block."""

    def __init__(self, layers: int, block: int, width: int, dtype: torch.dtype, storage: str = "list") -> None:
        super().__init__()
        self.block, self.storage = block, storage
        generator = torch.Generator().manual_seed(layers + block)

        def parameters(*shape: int) -> nn.ParameterList:
            values = [torch.randn(*shape, generator=generator) for _ in range(layers + 1)]
            return nn.ParameterList([nn.Parameter(v.to(dtype)) for v in values])

        self.score_norm, self.norm = parameters(width), parameters(width)
        # Scores of order one: larger ones choose a single source, and near ties then decide about every digit.
        self.proj = nn.ParameterList([nn.Parameter(v / width**0.5) for v in parameters(width)])
        self.weight = nn.ParameterList([nn.Parameter(v / width**0.5) for v in parameters(width, width)])

    def forward(self, x: Tensor, tap: bool = False) -> tuple[Tensor, ...]:
        layers = len(self.weight) - 1
        slots = layers // self.block + 2
        bank = x.new_zeros(x.shape[0], slots, x.shape[1])
        blocks: list[Tensor] = []
        prefix, taps = x, []

        def store(value: Tensor) -> None:
            if self.storage == "bank":
                bank[:, len(blocks)] = value
            blocks.append(value)

        def mix(index: int, prefix: Tensor) -> Tensor:
            if self.storage == "bank":
                sources = torch.cat([bank[:, : len(blocks)], prefix.unsqueeze(1)], dim=1)
            else:
                sources = torch.stack([*blocks, prefix], dim=1)
            return depth_mix(sources, self.score_norm[index], self.proj[index])

        store(x)
        prefix = torch.tanh(rms_norm(x, self.norm[0]) @ self.weight[0])
        for index in range(1, layers):
            if index % self.block == 0:
                store(prefix)
                mixed = depth_mix(torch.stack(blocks, dim=1), self.score_norm[index], self.proj[index])
                prefix = torch.tanh(rms_norm(mixed, self.norm[index]) @ self.weight[index])
            else:
                mixed = mix(index, prefix)
                prefix = prefix + torch.tanh(rms_norm(mixed, self.norm[index]) @ self.weight[index])
        mixed = mix(layers, prefix)
        taps = [mixed] if tap else []
        return (rms_norm(mixed, self.norm[layers]), prefix, *taps)


def run(function: Any, *inputs: Any, roundings: Literal["fewest", "model"] = "fewest", **options: Any) -> Any:
    """(results compiled, results of eager, the backend); the compiled one has kernels bound, whose references run."""
    pipeline = {
        "version": 1,
        "extends": "base",
        "passes": [{"fuse_attn_res_norm": {"roundings": roundings, "allow_changes_rounding": roundings == "fewest"}}],
        "dump": {"formats": []},
    }
    backend = Backend({"pipeline": pipeline, "target": "mi355x", "finalise": "eager", **options})
    with torch.no_grad():
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        return compiled(*inputs), function(*inputs), backend


def matched(backend: Backend) -> dict[str, int]:
    return {p.name: p.matched for p in backend.reports[0].passes}


@pytest.mark.parametrize("storage", ["list", "bank"])
@pytest.mark.parametrize("block", [1, 2, 3, 9])
def test_blocks_begin_and_end_where_they_should(block: int, storage: str) -> None:
    """Layers at a block's start read stored blocks alone and begin a new prefix; all are fused, all equal eager."""
    model = Depth(5, block, 32, FP32, storage)
    got, want, backend = run(model, torch.randn(4, 32))
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert matched(backend)["lift_attn_res"] == matched(backend)["fuse_attn_res_norm"] == 5


@pytest.mark.parametrize("roundings", ["fewest", "model"])
def test_list_and_bank_are_the_same_bits(roundings: Any) -> None:
    x = torch.randn(4, 32).to(BF16)
    results = [run(Depth(5, 2, 32, BF16, kind), x, roundings=roundings)[0] for kind in ("list", "bank")]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_output_never_lies_in_a_slot_that_is_still_read() -> None:
    """Kind 16: bank [1, 2], prefix 4: the mix of all three comes from the old bank, and slot 0 stays 1."""

    def function(bank: Tensor, prefix: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        mixed = depth_mix(torch.cat([bank, prefix.unsqueeze(1)], dim=1), weight * 0, weight)
        normed = rms_norm(mixed, weight)
        again = depth_mix(torch.cat([bank, mixed.unsqueeze(1)], dim=1), weight * 0, weight)
        return normed, rms_norm(again, weight), bank[:, 0] * 1

    bank = torch.tensor([1.0, 2.0]).view(1, 2, 1).expand(3, 2, 8).contiguous()
    inputs = (bank, torch.full((3, 8), 4.0), torch.ones(8))
    got, want, _ = run(function, *inputs)
    torch.testing.assert_close(got, want)
    assert torch.equal(got[2], torch.ones(3, 8)) and torch.equal(bank[:, 0], torch.ones(3, 8))


@pytest.mark.parametrize("reader", ["a later mix", "the caller", "an earlier mix", "nobody"])
def test_a_bank_that_is_written_in_place_is_written_where_nobody_reads(reader: str) -> None:
    """A bank of the caller: its slot is updated by the fused mix, and every read sees the value it should."""

    def function(bank: Tensor, prefix: Tensor, delta: Tensor, n: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        old = bank[:, 2] * 1 if reader == "the caller" else None
        early = depth_mix(bank, n, p) if reader == "an earlier mix" else None
        prefix = prefix + delta
        bank[:, 2] = prefix
        normed = rms_norm(depth_mix(torch.cat([bank[:, :2], prefix.unsqueeze(1)], dim=1), n, p), n)
        late = rms_norm(depth_mix(torch.cat([bank, normed.unsqueeze(1)], dim=1), n, p), n)
        extra = {"a later mix": late, "the caller": old, "an earlier mix": early, "nobody": None}[reader]
        return (normed,) if extra is None else (normed, extra)

    def inputs() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(5)
        bank = torch.randn(3, 4, 32, generator=generator)
        return (bank, *(torch.randn(3, 32, generator=generator) for _ in range(2)),
                *(torch.randn(32, generator=generator) for _ in range(2)))  # fmt: skip

    mine, theirs = inputs(), inputs()
    backend = Backend({"target": "mi355x", "finalise": "eager"})
    with torch.no_grad():
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(compiled(*mine), function(*theirs), rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)


def test_a_tap_behind_the_last_layer_is_the_mixture_before_the_norm() -> None:
    """Kind 17: bank [8], prefix 2, equal scores: 5. The tapped mix is kept, and the reason says who reads it."""

    def function(block: Tensor, prefix: Tensor, norm: Tensor, proj: Tensor) -> tuple[Tensor, Tensor]:
        mixed = depth_mix(torch.stack([block, prefix], dim=1), norm, proj)
        return rms_norm(mixed, norm), mixed

    inputs = (torch.full((2, 16), 8.0), torch.full((2, 16), 2.0), torch.ones(16), torch.zeros(16))
    (normed, tap), want, backend = run(function, *inputs)
    assert torch.equal(tap, torch.full((2, 16), 5.0))
    torch.testing.assert_close(normed, want[0])
    entry = next(p for p in backend.reports[0].passes if p.name == "fuse_attn_res_norm")
    assert entry.matched == 0 and "is also used by the output of the graph" in entry.missed[0].reason
    model = Depth(4, 2, 32, FP32)
    got, want, backend = run(lambda x: model(x, True), torch.randn(3, 32))
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert matched(backend)["fuse_attn_res_norm"] == 3, "the layers' mixes are fused, the tapped one is not"


bits = st.lists(st.integers(-(2**15), 2**15 - 1), min_size=64, max_size=64)


@given(prefix=bits, delta=bits)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_prefix_is_bit_equal_for_any_pair(prefix: list[int], delta: list[int]) -> None:
    """Kind 18, with every exponent, subnormal numbers, infinities and NaN."""
    a, b = (torch.tensor(v, dtype=torch.int16).view(BF16) for v in (prefix, delta))
    got, want = updated_prefix(a, b, FP32), a + b
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.0, 1e38, -1e38), want.nan_to_num(0.0, 1e38, -1e38))


@pytest.mark.parametrize("roundings", ["fewest", "model"])
def test_the_prefix_is_bit_equal_through_the_pipeline(roundings: Any) -> None:
    """Kind 18: 7168 random pairs; an unrounded sum would differ by up to 2^-6."""

    def function(p: Tensor, a: Tensor, b: Tensor, n: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        p = p + a
        return p, rms_norm(depth_mix(torch.stack([b, p], dim=1), n, w), n)

    rows = [torch.randn(1, 7168).to(BF16) for _ in range(3)]
    weights = [torch.randn(7168).to(BF16) for _ in range(2)]
    (prefix, _), _, backend = run(function, *rows, *weights, roundings=roundings)
    assert matched(backend)["fuse_attn_res_norm"] == 1
    assert torch.equal(prefix, rows[0] + rows[1])
    unrounded = rows[0].float() + rows[1].float()
    assert 0 < float((prefix.float() - unrounded).abs().max()) <= 0.0157


def test_the_two_roundings_differ_and_each_is_its_own_reference() -> None:
    """Kind 19: 9 sources of 7168. `model` is the spelled chain but for the order of sums, `fewest` nearer to fp64."""

    def function(n: Tensor, w: Tensor, *rows: Tensor) -> Tensor:
        return rms_norm(depth_mix(torch.stack(rows, dim=1), n, w), n)

    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, 7168, generator=generator).to(BF16) for _ in range(9)]
    weights = [
        (1 + 0.1 * torch.randn(7168, generator=generator)).to(BF16),
        torch.randn(7168, generator=generator).to(BF16),
    ]
    weights[1] /= 30
    fewest, eager, _ = run(function, *weights, *rows, roundings="fewest")
    torch._dynamo.reset()
    model, _, backend = run(function, *weights, *rows, roundings="model")
    assert {s.policy for p in backend.reports[0].passes if p.name == "fuse_attn_res_norm" for s in p.sites} == {
        "reassociates"
    }
    assert float((fewest != model).float().mean()) > 0.05, "the modes are two"
    assert float((model != eager).float().mean()) < 0.01, "the model's roundings are the model's"
    exact = _exact(weights, rows)
    assert measure(fewest, exact).rms < measure(model, exact).rms


def _exact(weights: list[Tensor], rows: list[Tensor]) -> Tensor:
    """The chain in fp64."""
    norm, proj = (w.double() for w in weights)
    v = torch.stack([r.double() for r in rows], dim=1)
    scores = (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + EPS) * norm * proj).sum(-1, keepdim=True)
    mixed = (scores.softmax(1) * v).sum(1)
    return mixed * torch.rsqrt(mixed.pow(2).mean(-1, keepdim=True) + EPS) * norm


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_regions_and_the_whole_are_verified(dtype: torch.dtype) -> None:
    for storage in ("list", "bank"):
        torch._dynamo.reset()
        _, _, backend = run(Depth(4, 2, 64, dtype, storage), torch.randn(3, 64).to(dtype), verify="all")
        assert backend.reports[0].end_to_end is not None and backend.reports[0].end_to_end.passed


def test_one_graph_and_one_bound_kernel_serve_every_batch() -> None:
    """Kind 75: neither rules nor kernels nor checks fix the number of rows."""

    def function(p: Tensor, a: Tensor, b: Tensor, n: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        p = p + a
        return p, rms_norm(depth_mix(torch.stack([b, p], dim=1), n, w), n)

    weights = [torch.randn(512).to(BF16) for _ in range(2)]
    backend = Backend({"target": "mi355x", "finalise": "eager", "verify": "all"})
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for rows in (5, 9, 300, 2):
        inputs = [torch.randn(rows, 512).to(BF16) for _ in range(3)]
        for value in inputs:
            torch._dynamo.maybe_mark_dynamic(value, 0)
        with torch.no_grad():
            got, want = compiled(*inputs, *weights), function(*inputs, *weights)
        assert torch.equal(got[0], want[0])
        torch.testing.assert_close(got[1], want[1], rtol=0.05, atol=0.05)
    assert len(backend.reports) == 1 and matched(backend)["select"] == 1


def test_one_source_alone_and_empty_batches() -> None:
    def function(p: Tensor, n: Tensor, w: Tensor) -> Tensor:
        return rms_norm(depth_mix(p.unsqueeze(1), n, w), n)

    for rows in (3, 0):
        torch._dynamo.reset()
        got, want, _ = run(function, torch.randn(rows, 16), torch.randn(16), torch.randn(16))
        torch.testing.assert_close(got, want)
