"""Sizes that a call may change stay symbolic through a rewrite: no number of the first call comes into a graph."""

from __future__ import annotations

import pytest
import torch
from graphs import capture_with_inputs
from small_graphs import LineRule, aten, rewritten
from torch import Tensor

from k3rewrite import _torch_private as private
from k3rewrite.backend import Backend
from k3rewrite.passes.fuse_block_write import FuseBlockWrite
from k3rewrite.patterns import Var, call
from k3rewrite.patterns.rewrite import apply_rule
from k3rewrite.report.schema import PassReport

_K3 = torch.ops.k3


def mixed(v: Tensor, n: Tensor, w: Tensor) -> Tensor:
    """The depth mix of sources [T, m, d] that lie in one tensor."""
    v = v.float()
    s = (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-5) * (n.float() * w.float())).sum(-1)
    return (s.softmax(-1).unsqueeze(-1) * v).sum(-2).bfloat16()


def _values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


@pytest.mark.parametrize("target", ["cpu", "h200", "mi355x"])
@pytest.mark.parametrize("finalise", ["eager", "inductor"])
def test_the_number_of_depth_sources_may_change(finalise: str, target: str) -> None:
    """`last = shape[-2] - 1` was a number in the graph, and the expansion took the chunk of sources apart."""
    torch._dynamo.reset()
    backend = Backend({"finalise": finalise, "target": target})
    compiled = torch.compile(mixed, backend=backend, fullgraph=True)
    n, w = _values(64), _values(1, 64)[0]
    for depth in (3, 6, 4):
        v = _values(5, depth, 64)
        torch._dynamo.mark_dynamic(v, 1)
        with torch.no_grad():
            torch.testing.assert_close(compiled(v, n, w), mixed(v, n, w), rtol=2e-2, atol=2e-2)
    (report,) = backend.reports
    assert {p.name: p.matched for p in report.passes}["lift_attn_res"] == 1


@pytest.mark.parametrize(("slot", "sites"), [(-1, 0), (1, 1)])
def test_a_slot_counted_from_the_end_of_a_bank_of_unknown_length(slot: int, sites: int) -> None:
    """-1 became 2, the last slot of the bank of the first call."""

    def stored(p: Tensor, a: Tensor, bank: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.float32
        p, h = _K3.add_attn_res_norm(p, a, [bank[:, :1]], n, n, 1e-5, n, 1e-5, compute_dtype=wide, mix_dtype=wide,
                                     scale_dtype=wide, out_dtype=p.dtype)  # fmt: skip
        return torch.select_scatter(bank, p, 1, slot), h

    bank = _values(5, 3, 64)
    torch._dynamo.mark_dynamic(bank, 1)
    captured, _ = capture_with_inputs(stored, (_values(5, 64), _values(5, 64), bank, _values(64)))
    mode = private.graph_fake_mode(captured.module.graph)
    before, report = private.guard_count(mode), PassReport("fuse_block_write")
    apply_rule(FuseBlockWrite(), captured.module, report)
    assert report.matched == sites and not private.guard_texts(mode, before)
    if not sites:
        assert "slot -1 is counted from the end" in report.missed[0].reason


def test_a_size_itself_is_no_argument_of_a_new_node() -> None:
    def build(match, builder, exposed):  # type: ignore[no-untyped-def]
        return {"root": builder.call(aten.slice.Tensor, match["x"], 0, 0, match.value("x").shape[0])}

    captured, _ = capture_with_inputs(lambda x: x.sin(), [torch.randn(5, 4)], dynamic=True)
    before = str(captured.module.graph)
    report = rewritten(LineRule(call(aten.sin.default, Var("x"), name="anchor"), build), captured.module)
    assert "would be frozen to the number of the first call" in report.missed[0].reason
    assert str(captured.module.graph) == before
