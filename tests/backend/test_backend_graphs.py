"""Many graphs of one model: batch sizes, breaks, autocast, changed weights, dumps; the results are always eager's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import FrameSummary
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from k3rewrite.backend import Backend
from k3rewrite.capture.dynamo import broken_graph
from k3rewrite.errors import UnsupportedError
from k3rewrite.report.schema import BROKEN_GRAPH

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _fresh_compiler_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(16))
        self.register_buffer("shift", torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight + self.shift


def compiled(
    function: Callable[..., Any], *, dynamic: bool | None = None, fullgraph: bool = True, **options: Any
) -> Any:
    """(the compiled function without gradients, its backend)"""
    backend = Backend({"finalise": "eager", "target": "cpu", **options})
    return torch.no_grad()(torch.compile(function, backend=backend, fullgraph=fullgraph, dynamic=dynamic)), backend


def eager(function: Callable[..., Any], *inputs: Any) -> Any:
    with torch.no_grad():
        return function(*inputs)


def matched(backend: Backend, name: str = "lift_rms_norm") -> list[int]:
    return [p.matched for r in backend.reports for p in r.passes if p.name == name]


# ------------------------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize(("dynamic", "graphs"), [(None, 3), (True, 3), (False, 5)])
def test_other_batch_sizes_recompile_and_equal_eager(dynamic: bool | None, graphs: int) -> None:
    """0, 1 and 2 or more are three graphs; every one of them is rewritten."""
    model = Net()
    function, backend = compiled(model, dynamic=dynamic)
    for rows in (1, 2, 3, 0, 5):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(function(x), eager(model, x))
    assert len(backend.reports) == graphs
    assert matched(backend) == [1] * graphs


def test_no_guard_is_added_for_a_symbolic_batch() -> None:
    """Kind 75: one graph serves every batch from 2 on, with every pass of the pipeline and the region check."""
    model = Net()
    function, backend = compiled(model, dynamic=True, verify="all", target="mi355x")
    for rows in (7, 2, 300, 8, 16):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(function(x), eager(model, x))
    assert len(backend.reports) == 1 and backend.reports[0].end_to_end is not None


@pytest.mark.parametrize("kind", ["route", "mlp", "attn_res"])
def test_no_guard_is_added_by_the_costs_of_an_op(kind: str) -> None:
    """The figures of a report must not fix a size of the graph, not even the width."""

    def route(x: Tensor, w: Tensor) -> Tensor:
        scores = torch.sigmoid(x @ w)
        weights = scores.gather(-1, scores.topk(2)[1])
        return weights / weights.sum(-1, keepdim=True)

    def mlp(x: Tensor, w: Tensor) -> Tensor:
        return (torch.nn.functional.silu(x @ w.t()) * (x @ w.t())) @ w.t()

    def attn_res(x: Tensor, w: Tensor) -> Tensor:
        values = torch.stack([x, x + 1], dim=-2)
        normed = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-5) * w[0]
        return ((normed * w[1]).sum(-1).softmax(-1).unsqueeze(-1) * values).sum(-2)

    functions = {"route": route, "mlp": mlp, "attn_res": attn_res}
    function, backend = compiled(functions[kind], dynamic=True)
    for rows, width in ((5, 8), (6, 12), (9, 10)):
        x, w = torch.randn(rows, width), torch.randn(width, width)
        torch.testing.assert_close(function(x, w), functions[kind](x, w))
    assert matched(backend, f"lift_{kind}") == [1]


@pytest.mark.parametrize("fullgraph", [True, False])
def test_more_sizes_than_dynamo_keeps(fullgraph: bool) -> None:
    """Kind 91: behind the limit the function runs uncompiled (equal values), or torch says so with fullgraph."""
    model = Net()
    function, backend = compiled(model, dynamic=False, fullgraph=fullgraph)
    limit = torch._dynamo.config.recompile_limit
    for rows in range(1, limit + 1):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(function(x), eager(model, x))
    assert len(backend.reports) == limit
    x = torch.randn(limit + 1, 16)
    if fullgraph:
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            function(x)
    else:
        torch.testing.assert_close(function(x), eager(model, x))
    assert len(backend.reports) == limit, "the reports show that this size was not compiled"


# ------------------------------------------------------------------------------------------------ what a graph returns


def test_integers_floats_and_nothing_among_the_results() -> None:
    def function(x: Tensor, n: int) -> tuple[Any, ...]:
        return x.argmax(-1), x.shape[0], n * 2, None, 3.5, x * n, "text", x > 0

    for dynamic in (False, True):
        run, _ = compiled(function, dynamic=dynamic)
        for rows in (3, 5):
            x = torch.randn(rows, 4)
            got, want = run(x, 4), function(x, 4)
            assert [type(v) for v in got] == [type(v) for v in want]
            assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(got, want, strict=True))


def test_a_graph_without_a_site_is_fine() -> None:
    run, backend = compiled(lambda x: x + 1, verify="all")
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0))
    assert [p.candidates for p in backend.reports[0].passes] == [0] * len(backend.reports[0].passes)
    assert backend.reports[0].error == ""


def test_results_that_are_inputs_or_each_other() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = y * 2
        return x, x.view(-1), z, z, z.view(-1), y.t()

    run, _ = compiled(function)
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    got = run(x, y)
    assert got[0] is x and got[1].data_ptr() == x.data_ptr() and got[5].data_ptr() == y.data_ptr()
    assert got[2] is got[3] and got[4].data_ptr() == got[2].data_ptr()
    got[2].add_(1)
    assert torch.equal(got[4], (y * 2 + 1).view(-1))


# ------------------------------------------------------------------------------------------------ breaks, contexts


def test_a_graph_break_gives_two_graphs_and_eagers_result(capfd: pytest.CaptureFixture[str]) -> None:
    model = Net()

    def function(x: Tensor) -> Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        y += 1
        return model(y)

    run, backend = compiled(function, fullgraph=False)
    x = torch.randn(3, 16)
    for _ in range(2):
        torch.testing.assert_close(run(x), eager(function, x))
    assert matched(backend) == [1, 1]
    (note,) = [note for report in backend.reports for note in report.notes if note.startswith(BROKEN_GRAPH)]
    assert note.startswith(f"{BROKEN_GRAPH} at test_backend_graphs.py:") and " in function: " in note
    assert backend.reports[0].notes == [note] and note in capfd.readouterr().err


def test_a_loop_over_the_experts_that_are_hit_says_where_help_is() -> None:
    def experts(x: Tensor) -> Tensor:
        for expert in x.sum(-1).nonzero():
            x = x + expert
        return x

    def function(x: Tensor) -> Tensor:
        return experts(x) * 2

    run, backend = compiled(function, fullgraph=False)
    run(torch.ones(3, 16))
    assert any("docs/moe.md, 'Models of transformers'" in note for report in backend.reports for note in report.notes)
    run, _ = compiled(function, fullgraph=True)
    with pytest.raises(Exception, match="nonzero"):
        run(torch.ones(3, 16))


def test_a_break_is_told_in_words() -> None:
    def branches(x: Tensor) -> Tensor:
        x = x * 2
        if x.sum() > 0:
            x = x + 1
        return x

    run, backend = compiled(branches, fullgraph=False)
    run(torch.ones(3, 16))
    (note,) = [note for report in backend.reports for note in report.notes if note.startswith(BROKEN_GRAPH)]
    assert "in branches: a branch on the values of a tensor. What" in note and "  " not in note


def test_a_break_is_told_at_the_users_line() -> None:
    """Not where Python's library or torch gave up."""
    frames = [FrameSummary(file, 7, "called") for file in ("/home/me/net.py", logging.__file__, torch.__file__)]
    module = torch.fx.GraphModule({}, torch.fx.Graph())
    module.compile_subgraph_reason = SimpleNamespace(reason="no reason", user_stack=frames, graph_break=True)
    assert str(broken_graph(module)).startswith(f"{BROKEN_GRAPH} at net.py:7 in called: no reason. What")
    module.compile_subgraph_reason.graph_break = False
    assert broken_graph(module) is None


def test_what_a_graph_returns_is_fresh_in_every_call() -> None:
    """Kind 78: zeros that are written after a break must be zeros again in the next call."""

    def function() -> Tensor:
        y = torch.zeros(2)
        torch._dynamo.graph_break()
        y += 1
        return y

    run, _ = compiled(function, fullgraph=False)
    assert [run().tolist() for _ in range(3)] == [[1.0, 1.0]] * 3


def test_two_results_of_one_call_are_kept_apart_from_the_next() -> None:
    """Kind 96: nothing is returned in a buffer that the next call reuses."""
    model = Net()
    run, _ = compiled(model, target="mi355x")
    a, b = torch.randn(2, 16), torch.randn(2, 16)
    first = run(a)
    kept = first.clone()
    run(b)
    assert torch.equal(first, kept)


def test_autocast_inside_and_outside_of_the_graph() -> None:
    """Kind 92: the inner region without autocast stays fp32."""
    linear = nn.Linear(16, 16)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=BF16):
            narrow = linear(x)
            with torch.autocast("cpu", enabled=False):
                wide = x @ linear.weight
        return narrow, wide

    run, _ = compiled(function)
    x = torch.randn(3, 16)
    got, want = run(x), eager(function, x)
    assert [v.dtype for v in got] == [BF16, torch.float32]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    run, backend = compiled(Net())
    with torch.autocast("cpu", dtype=BF16):
        narrow = run(x)
    wide = run(x)
    assert narrow.dtype == wide.dtype == torch.float32 and not torch.equal(narrow, wide)
    assert len(backend.reports) == 2


@pytest.mark.parametrize("finalise", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_inference_mode_and_no_grad(finalise: str) -> None:
    model = Net()
    run, _ = compiled(model, finalise=finalise)
    x = torch.randn(3, 16)
    expected = eager(model, x)
    with torch.inference_mode():
        torch.testing.assert_close(run(x), expected)
    torch.testing.assert_close(run(x), expected)


# ------------------------------------------------------------------------------------------------ weights, inputs


@pytest.mark.parametrize("finalise", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_weights_that_change_between_calls_are_seen(finalise: str) -> None:
    """Kind 10: in place, by loading, by another tensor behind the parameter."""
    model = Net()
    run, backend = compiled(model, finalise=finalise)
    x = torch.randn(3, 16)
    torch.testing.assert_close(run(x), eager(model, x))
    with torch.no_grad():
        model.weight.mul_(2)
        model.shift.add_(1)
    torch.testing.assert_close(run(x), eager(model, x))
    model.load_state_dict({name: value * 3 for name, value in model.state_dict().items()})
    torch.testing.assert_close(run(x), eager(model, x))
    model.weight.data = torch.randn(16)
    torch.testing.assert_close(run(x), eager(model, x))
    assert len(backend.reports) == 1, "one graph saw them all"


def _adds(a: Tensor, b: Tensor) -> Tensor:
    a.add_(1)
    return b * 2


def test_one_tensor_given_twice() -> None:
    run, _ = compiled(_adds)
    x, y = torch.ones(3), torch.ones(3)
    assert torch.equal(run(x, x), _adds(y, y)) and torch.equal(x, y)


def test_inputs_that_overlap_are_right_or_refused() -> None:
    """Seen when the graph is made: right. Given to a graph that was made for inputs apart: refused, and not wrong."""
    run, _ = compiled(_adds)
    x, y = torch.ones(4), torch.ones(4)
    assert torch.equal(run(x[:3], x[1:]), _adds(y[:3], y[1:])) and torch.equal(x, y)
    torch._dynamo.reset()
    run, _ = compiled(_adds)
    run(torch.ones(3), torch.ones(3))
    x = torch.ones(4)
    with pytest.raises(UnsupportedError, match="overlap in memory and one of them is written"):
        run(x[:3], x[1:])
    assert torch.equal(x, torch.ones(4)), "nothing was written"


def test_strided_and_expanded_inputs() -> None:
    model = Net()
    run, _ = compiled(model, verify="all")
    for x in (torch.randn(16, 3).t(), torch.randn(1, 16).expand(4, 16), torch.randn(4, 32)[:, ::2]):
        torch.testing.assert_close(run(x), eager(model, x))


# ------------------------------------------------------------------------------------------------ dumps


def test_each_graph_leaves_a_run_of_its_own(tmp_path: Path) -> None:
    model = Net()

    def function(x: Tensor) -> Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        return model(y + 1)

    (tmp_path / "runs" / "run-004").mkdir(parents=True)
    (tmp_path / "runs" / "run-004" / "mine.txt").write_text("kept")
    run, backend = compiled(function, fullgraph=False, dump=tmp_path / "runs")
    run(torch.randn(3, 16))
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["run-004", "run-005", "run-006"]
    assert [p.name for p in (tmp_path / "runs" / "run-004").iterdir()] == ["mine.txt"]
    for number, entry in zip((5, 6), backend.reports, strict=True):
        folder = tmp_path / "runs" / f"run-{number:03d}"
        assert entry.folder == folder
        assert {"report.json", "pipeline.yaml", "graphs"} <= {p.name for p in folder.iterdir()}
        report = json.loads((folder / "report.json").read_text())
        names = [p["name"] for p in report["passes"]]
        graphs = sorted(p.name for p in (folder / "graphs").glob("*.txt"))
        assert graphs == ["00-captured.txt", *(f"{i:02d}-{n}.txt" for i, n in enumerate(names, 1))]
        assert [p.with_suffix(".txt").name for p in sorted((folder / "graphs").glob("*.svg"))] == graphs
        lifted = (folder / "graphs" / "02-lift_rms_norm.txt").read_text()
        assert "rms_norm" in lifted and "test_backend_graphs.py:" in lifted
        assert "pow" in (folder / "graphs" / "00-captured.txt").read_text() and "pow" not in lifted


def test_kernels_are_emitted_with_where_they_come_from(tmp_path: Path) -> None:
    """A depth mix bound to a kernel of a GPU that is not there: the object is written, the reference runs."""

    def function(prefix: Tensor, delta: Tensor, block: Tensor, norm: Tensor, proj: Tensor) -> Tensor:
        prefix = prefix + delta
        values = torch.stack([block, prefix], dim=1).float()
        normed = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-5) * norm.float()
        mix = ((normed * proj.float()).sum(-1).softmax(-1).unsqueeze(-1) * values).sum(1).to(prefix.dtype)
        wide = mix.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(mix.dtype) * norm

    inputs = [torch.randn(4, 512).to(BF16) for _ in range(3)] + [torch.randn(512).to(BF16) for _ in range(2)]
    run, backend = compiled(function, dump=tmp_path, target="h200")
    torch.testing.assert_close(run(*inputs), function(*inputs), rtol=0.05, atol=0.05)
    (report,) = backend.reports
    assert matched(backend, "fuse_attn_res_norm") == [1]
    if not matched(backend, "select")[0]:
        pytest.skip("no kernel takes this call here")
    (kernel,) = report.kernels
    assert kernel.executed == "reference" and kernel.op in ("add_attn_res_norm", "attn_res_norm")
    assert any("test_backend_graphs.py:" in line for line in kernel.provenance)
    assert (tmp_path / "run-001" / kernel.source).exists() and kernel.source_hash
    assert (tmp_path / "run-001" / "kernels" / "h200" / "manifest.json").exists()
