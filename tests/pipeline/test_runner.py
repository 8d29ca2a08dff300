"""A pipeline over a captured graph: conditions, expectations, order, reports, also of what fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from graphs import capture_with_inputs
from small_graphs import aten, targets
from torch import Tensor, nn
from torch.fx import GraphModule

from k3rewrite.capture import Captured, capture
from k3rewrite.errors import ConfigError, ContractError, ExpectationError, K3RewriteError, UnsupportedError
from k3rewrite.kernels import KERNELS, OPS
from k3rewrite.passes import PASSES
from k3rewrite.pipeline.config import load_pipeline
from k3rewrite.pipeline.pass_base import Level, Pass, PassContext
from k3rewrite.pipeline.runner import _check_expectation, build_passes, count_layers, run_pipeline
from k3rewrite.pipeline.settings import PassConfig, PipelineConfig
from k3rewrite.report.schema import Miss, PassReport
from k3rewrite.targets import load_target


class Layer(nn.Module):
    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.norm = norm
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        if not self.norm:
            return x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-6) * self.weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Net(nn.Module):
    def __init__(self, *norms: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(norm) for norm in norms)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def three() -> Captured:
    return capture(Net(True, True, True), (torch.randn(2, 16),))


@pytest.fixture(scope="module")
def mixed() -> Captured:
    return capture(Net(True, False, *[False] * 6), (torch.randn(2, 16),))


@dataclass(frozen=True)
class Spoil(Pass):
    """A pass that does what it should not."""

    name: ClassVar[str] = "spoil"
    how: str = "dtype"

    def run(self, module: GraphModule, context: PassContext, report: PassReport) -> None:
        report.candidates = 1
        output = module.graph.output_node()
        last = output.args[0][0]  # type: ignore[index]
        if self.how == "raises":
            raise UnsupportedError("cannot", place="here", remedy="do not")
        if self.how == "size":
            assert last.meta["val"].shape[0] == 5  # True for this call only
            return
        with module.graph.inserting_before(output):
            if self.how == "dtype":
                new = module.graph.call_function(aten._to_copy.default, (last,), {"dtype": torch.float64})
                new.meta["val"] = last.meta["val"].double()
            else:
                new = module.graph.call_function(aten.clone.default, (last,))
                if self.how == "good":
                    new.meta["val"] = last.meta["val"].clone()
        output.args = ((new,),)


@dataclass(frozen=True)
class Leave(Pass):
    """A pass that leaves a dead node behind, at either level."""

    name: ClassVar[str] = "leave"

    def run(self, module: GraphModule, context: PassContext, report: PassReport) -> None:
        x = next(iter(module.graph.nodes))
        with module.graph.inserting_after(x):
            module.graph.call_function(aten.neg.default, (x,)).meta["val"] = x.meta["val"]


@dataclass(frozen=True)
class OnDynamo(Leave):
    """A pass of the other level."""

    name: ClassVar[str] = "on_dynamo"
    level: ClassVar[Level] = "dynamo"

    def run(self, module: GraphModule, context: PassContext, report: PassReport) -> None:
        report.candidates = report.matched = 1


KNOWN: Mapping[str, type[Pass]] = {**PASSES, **{p.name: p for p in (Spoil, Leave, OnDynamo)}}


def run(
    captured: Captured, passes: list[Any], *, names: Mapping[str, Any] | None = None, **options: Any
) -> tuple[list[PassReport], GraphModule, K3RewriteError | None]:
    """Reports, the graph, and the error that ended it."""
    config = load_pipeline({"version": 1, "target": "cpu", "passes": passes}, known_passes=KNOWN)
    module = captured.fresh().module
    reports: list[PassReport] = []
    context = PassContext(load_target("cpu"), OPS, KERNELS)
    try:
        run_pipeline(module, build_passes(config, KNOWN), context, names or {}, reports, **options)
    except K3RewriteError as error:
        return reports, module, error
    return reports, module, None


def test_a_pass_that_fixes_a_symbolic_size_is_named() -> None:
    captured, _ = capture_with_inputs(lambda x: x + 1, [torch.randn(5, 4)], dynamic=True)
    reports, _, error = run(captured, ["canonicalise", {"spoil": {"how": "size"}}])
    assert isinstance(error, ContractError) and "after spoil: 1 more assumption about symbolic sizes" in str(error)
    assert [report.name for report in reports] == ["canonicalise", "spoil"]


# ------------------------------------------------------------------------------------------------ reports


def test_a_pass_is_reported_with_its_figures(three: Captured) -> None:
    (report,), module, error = run(three, ["lift_rms_norm"])
    assert error is None
    assert (report.candidates, report.matched, report.missed, report.refused) == (3, 3, [], [])
    assert (report.nodes_before, report.nodes_after) == (23, 8)
    assert (report.launches_before, report.launches_after) == (18, 3)
    # each layer reads x and w and writes y once: 2 * 128 + 64 bytes
    assert report.bytes_after == 3 * (2 * 2 * 16 + 16) * 4 and report.bytes_before > report.bytes_after
    assert report.seconds > 0 and report.level == "aten" and report.expect_ok is None
    assert targets(module) == ["rms_norm"] * 3
    assert [s.module for s in report.sites] == ["layers.0", "layers.1", "layers.2"]
    assert all(s.source.endswith("in forward") and "test_runner.py:" in s.source for s in report.sites)


def test_misses_are_reported_with_the_users_line(mixed: Captured) -> None:
    (report,), _, _ = run(mixed, ["lift_rms_norm"])
    assert (report.candidates, report.matched, len(report.missed)) == (8, 1, 7)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "x.abs()" in text)
    for index, missed in enumerate(report.missed, 1):
        assert missed.reason.startswith("expected pow, found abs 'abs_")
        assert missed.source.endswith(f"test_runner.py:{line} in forward") and missed.source in missed.reason
        assert missed.module == f"layers.{index}"


def test_repeated_runs_report_the_same(mixed: Captured) -> None:
    def told() -> list[Any]:
        reports, module, _ = run(mixed, ["canonicalise", "lift_rms_norm", "lift_l2_norm", "select"])
        for report in reports:
            report.seconds = 0.0
        return [*reports, module.graph.python_code("self").src]

    first = told()
    assert all(told() == first for _ in range(3))


SCRIPT = """
import torch
from small_graphs import traced
from k3rewrite.kernels import KERNELS, OPS
from k3rewrite.passes import PASSES
from k3rewrite.pipeline.config import load_pipeline
from k3rewrite.pipeline.pass_base import PassContext
from k3rewrite.pipeline.runner import build_passes, run_pipeline
from k3rewrite.targets import load_target

def function(x, w, b):
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    y = x * rstd * w + x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    s = y.sigmoid()
    ids = (s + b).topk(2).indices
    return s.gather(-1, ids), ids, rstd, y * torch.rsqrt(y.abs().mean(-1, keepdim=True) + 1e-6)

module = traced(function, [torch.randn(4, 8), torch.randn(8), torch.randn(8)])
reports = []
config = load_pipeline("default", known_passes=PASSES)
run_pipeline(module, build_passes(config, PASSES), PassContext(load_target("mi355x"), OPS, KERNELS), {}, reports)
print(module.graph)
for report in reports:
    report.seconds = 0.0
    print(report)
"""


@pytest.mark.slow
def test_the_order_of_hashing_does_not_show() -> None:
    told = []
    for seed in ("1", "2", "3"):
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        run_script = [sys.executable, "-c", SCRIPT]
        told.append(subprocess.run(run_script, env=environment, capture_output=True, text=True, check=True).stdout)
    assert "matched=1" in told[0] and told[1] == told[0] and told[2] == told[0]


def test_dead_code_is_gone_after_each_pass(three: Captured) -> None:
    (report,), module, _ = run(three, ["leave"])
    assert "neg" not in targets(module) and report.nodes_after == report.nodes_before


def test_the_costs_of_a_pass_that_changes_nothing_are_the_same(three: Captured) -> None:
    reports, _, _ = run(three, ["canonicalise", "lift_l2_norm"])
    for report in reports:
        assert report.bytes_before == report.bytes_after > 0
        assert report.launches_before == report.launches_after


# ------------------------------------------------------------------------------------------------ conditions


def test_a_condition_that_is_false_skips_the_pass_and_says_so(three: Captured) -> None:
    reports, module, error = run(
        three, [{"lift_rms_norm": {"when": "tp > 1", "expect": "== 99"}}, "lift_l2_norm"], names={"tp": 1}
    )
    assert error is None
    skipped, ran = reports
    assert (skipped.skipped, skipped.candidates, skipped.expect_ok) == ("when: tp > 1", 0, None)
    assert ran.skipped == "" and ran.candidates == 3
    assert "rms_norm" not in targets(module)


def test_a_condition_on_an_unknown_name_is_an_error(three: Captured) -> None:
    _, _, error = run(three, [{"lift_rms_norm": {"when": "n_layer > 1"}}])
    assert isinstance(error, ConfigError) and "unknown name 'n_layer'" in str(error)
    assert "did you mean 'n_layers'?" in str(error)
    assert error.exit_code == 2


# ------------------------------------------------------------------------------------------------ expectations


@pytest.mark.parametrize("expect", ["== 3", "== n_layers", "matched == candidates", ">= 1", "== 2 * n_layers - 3"])
def test_an_expectation_that_holds(three: Captured, expect: str) -> None:
    (report,), _, error = run(three, [{"lift_rms_norm": {"expect": expect}}])
    assert error is None and report.expect_ok is True and report.expect == expect


def test_an_expectation_that_fails_shows_the_near_misses(mixed: Captured) -> None:
    reports, module, error = run(mixed, [{"lift_rms_norm": {"expect": "== n_layers"}}, "select"])
    assert isinstance(error, ExpectationError) and error.exit_code == 1
    text = str(error)
    assert "pass lift_rms_norm rewrote 1 of 8 sites" in text
    assert "'== n_layers' (n_layers = 8)" in text and "pipeline.passes[0]" in text
    assert text.count("found abs") == 5 and "and 2 more" in text and "test_runner.py:" in text
    (report,) = reports
    assert report.expect_ok is False and report.matched == 1, "the failing pass is reported, those behind it are not"
    assert "rms_norm" in targets(module), "what it did is there to be looked at"


def test_an_expectation_with_nothing_to_show_says_which_nothing(three: Captured) -> None:
    _, _, error = run(three, [{"lift_rms_norm": {"expect": "== 4"}}])
    assert "rewrote 3 of 3 sites" in str(error) and "none: every candidate was rewritten" in str(error)
    _, _, error = run(three, [{"lift_route": {"expect": "== 1"}}])
    assert "rewrote 0 of 0 sites" in str(error) and "none: no candidate site was found" in str(error)


def test_refusals_are_among_the_near_misses() -> None:
    report = PassReport("p", candidates=2, refused=[Miss("site", "net.py:3 in f", "contract: stride")])
    with pytest.raises(ExpectationError, match="contract: stride"):
        _check_expectation(report, PassConfig("p", expect="== 2"), {})


def test_the_pass_that_fails_its_expectation_is_dumped_first(three: Captured) -> None:
    seen: list[tuple[int, str]] = []
    run(
        three,
        ["canonicalise", {"lift_rms_norm": {"expect": "== 0"}}, "select"],
        after_pass=lambda index, module, report: seen.append((index, report.name)),
    )
    assert seen == [(0, "canonicalise"), (1, "lift_rms_norm")]


# ------------------------------------------------------------------------------------------------ names


def test_layers_are_counted_on_the_module_paths(three: Captured, mixed: Captured) -> None:
    assert count_layers(three.module.graph) == 3 and count_layers(mixed.module.graph) == 8
    captured, _ = capture_with_inputs(lambda x: x.sin(), [torch.randn(3)])
    assert count_layers(captured.module.graph) == 0


def test_layers_inside_of_layers_and_other_modules_are_not_counted() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.ModuleDict({"layers": nn.ModuleList([Net(True, True), Net(True)])})
            self.head = Layer()

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.model["layers"]:
                x = layer(x)
            return self.head(x)

    captured = capture(Outer(), (torch.randn(2, 16),))
    assert count_layers(captured.module.graph) == 2


def test_a_name_that_is_given_wins(three: Captured) -> None:
    _, _, error = run(three, [{"lift_rms_norm": {"expect": "== n_layers"}}], names={"n_layers": 4})
    assert "n_layers = 4" in str(error)


# ------------------------------------------------------------------------------------------------ order


def test_a_pass_that_requires_another_stands_behind_it(three: Captured) -> None:
    for passes, remedy in (
        (["lift_gated_rms_norm"], "set 'lift_gated_rms_norm: off' too"),
        (["lift_gated_rms_norm", "lift_rms_norm"], "put 'lift_rms_norm' earlier"),
    ):
        reports, _, error = run(three, passes)
        assert isinstance(error, ConfigError) and reports == [], "nothing has run"
        assert "requires 'lift_rms_norm' before it" in str(error)
        assert "pipeline.passes[0]" in str(error) and remedy in str(error)


def test_an_unknown_pass_is_an_error_before_anything_runs() -> None:
    config = PipelineConfig(passes=(PassConfig("lift_rms_nrm", place="p.yaml:3"),))
    with pytest.raises(ConfigError, match=r"p.yaml:3: unknown pass 'lift_rms_nrm'") as caught:
        build_passes(config, PASSES)
    assert "did you mean 'lift_rms_norm'?" in str(caught.value)


def test_passes_of_the_other_level_are_left_out(three: Captured) -> None:
    reports, _, _ = run(three, ["on_dynamo", "lift_rms_norm"])
    assert [r.name for r in reports] == ["lift_rms_norm"]
    reports, _, _ = run(three, ["on_dynamo", "lift_rms_norm"], level="dynamo")
    assert [(r.name, r.level) for r in reports] == [("on_dynamo", "dynamo")]


# ------------------------------------------------------------------------------------------------ errors


def test_a_pass_that_breaks_the_contract_ends_the_run(three: Captured) -> None:
    reports, _, error = run(three, ["canonicalise", "spoil", "lift_rms_norm"])
    assert isinstance(error, ContractError) and error.exit_code == 1
    assert "after spoil: output 0: dtype torch.float32 becomes torch.float64" in str(error)
    assert [r.name for r in reports] == ["canonicalise", "spoil"]
    _, _, error = run(three, [{"spoil": {"how": "no value"}}])
    assert "NoneType" in str(error) or "value description" in str(error)
    assert run(three, [{"spoil": {"how": "good"}}])[2] is None


def test_a_pass_that_raises_is_reported_with_the_graph_as_it_was(three: Captured) -> None:
    reports, _, error = run(three, [{"spoil": {"how": "raises"}}, "select"])
    assert isinstance(error, UnsupportedError)
    (report,) = reports
    assert report.nodes_after == report.nodes_before > 0 and report.bytes_after == report.bytes_before > 0


def test_an_op_without_a_kernel_is_an_error_if_the_pipeline_says_so(three: Captured) -> None:
    reports, _, error = run(three, ["lift_rms_norm", {"select": {"on_miss": "error"}}])
    assert isinstance(error, UnsupportedError)
    assert "k3::rms_norm gets no kernel: no kernel of k3::rms_norm" in str(error) and "test_runner.py:" in str(error)
    assert [r.name for r in reports] == ["lift_rms_norm", "select"]
    reports, _, error = run(three, ["lift_rms_norm", "select"])
    assert error is None and len(reports[1].missed) == 3


def test_an_op_that_nobody_announced_ends_the_run(three: Captured) -> None:
    """The op of a pass that was skipped is not announced by it."""

    @dataclass(frozen=True)
    class Silent(Pass):
        """Builds an op without saying so."""

        name: ClassVar[str] = "silent"

        def run(self, module: GraphModule, context: PassContext, report: PassReport) -> None:
            PASSES["lift_rms_norm"]().run(module, context, report)

    module = three.fresh().module
    context = PassContext(load_target("cpu"), OPS, KERNELS)
    with pytest.raises(ContractError, match="k3::rms_norm was not announced by any pass"):
        run_pipeline(module, [(Silent(), PassConfig("silent"))], context, {}, [])


def test_progress_names_the_passes_that_run(three: Captured) -> None:
    said: list[str] = []
    run(three, ["canonicalise", {"lift_l2_norm": {"when": "1 > 2"}}, "lift_rms_norm"], progress=said.append)
    assert said == ["canonicalise", "lift_rms_norm"]
