"""README.md: the pass that it shows is a whole pass, its factory makes a model that compiles, its pipelines load, and
what it says of kernels is so."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from rule_checks import check_counterexample, check_example, vocabulary_ops

from k3rewrite.capture import capture
from k3rewrite.driver.request import resolve_request
from k3rewrite.driver.run import compile_model
from k3rewrite.errors import ContractError
from k3rewrite.kernels import KERNELS, OPS
from k3rewrite.passes import PASSES
from k3rewrite.pipeline.config import load_pipeline
from k3rewrite.pipeline.pass_base import PassContext, RulePass
from k3rewrite.pipeline.runner import build_passes, run_pipeline
from k3rewrite.report.schema import PassReport
from k3rewrite.targets import known_targets, load_target

NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(16, 16, bias=False)
        self.outer = torch.nn.Linear(16, 16)
        self.outer.weight = self.inner.weight
        self.register_buffer("scale", torch.full((16,), 0.5))
    def forward(self, x):
        return self.outer(self.inner(x) * self.scale)
"""
README = (Path(__file__).parents[2] / "README.md").read_text()


def _section(heading: str) -> str:
    found = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no '## {heading}'"
    return found[1]


def _block(heading: str, language: str) -> str:
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", _section(heading), re.MULTILINE | re.DOTALL)
    return block


@pytest.fixture
def module(tmp_path: Path) -> Iterator[ModuleType]:
    """The block pasted into a file of its own, and imported."""
    path = tmp_path / "readme_pass.py"
    path.write_text(_block("A pass in one file", "python"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made  # dataclasses look there for the types of fields
    try:
        spec.loader.exec_module(made)
        yield made
    finally:
        del sys.modules[path.stem]


@pytest.fixture
def shown(module: ModuleType) -> type[RulePass]:
    """The pass of the block; there is one, and it is none of the shipped ones."""
    (found,) = [
        v for v in vars(module).values() if isinstance(v, type) and issubclass(v, RulePass) and v is not RulePass
    ]
    assert found.name not in PASSES
    return found


def _run(made: type[RulePass], tmp_path: Path) -> tuple[Any, dict[str, PassReport]]:
    """The graph of the first example after the pipeline that README shows, and the report of each pass."""
    path = tmp_path / "readme.yaml"
    path.write_text(_block("A pass in one file", "yaml"))
    known = {**PASSES, made.name: made}
    config = load_pipeline(path, known_passes=known)
    example = made().rules()[0].examples()[0]
    captured = capture(example.function, example.inputs())
    reports: list[PassReport] = []
    context = PassContext(load_target("cpu"), OPS, KERNELS)
    run_pipeline(captured.module, build_passes(config, known), context, {}, reports)
    return captured.module, {report.name: report for report in reports}


def test_its_lines_are_about_thirty() -> None:
    lines = [line for line in _block("A pass in one file", "python").splitlines() if line]
    own = [line for line in lines if not line.startswith(("import ", "from ", '"""'))]
    assert len(own) <= 30


def test_its_examples_are_rewritten_and_its_counterexamples_are_not(shown: type[RulePass]) -> None:
    for rule in shown().rules():
        for example in rule.examples():
            assert check_example(rule, example) == shown.provides
        for counterexample in rule.counterexamples():
            check_counterexample(rule, counterexample)


def test_it_works_in_the_pipeline_that_selects_it(shown: type[RulePass], tmp_path: Path) -> None:
    module, reports = _run(shown, tmp_path)
    shipped = [name for name in PASSES if name not in ("merge_projections", "stack_weights")]  # `default` is without
    at = shipped.index("lift_l2_norm")
    assert list(reports) == [*shipped[:at], shown.name, *shipped[at:]]
    assert reports[shown.name].matched == 1 and reports[shown.name].expect_ok
    assert vocabulary_ops(module.graph.nodes) == {"l2_norm"}


def test_without_provides_it_would_be_an_error_that_says_so(shown: type[RulePass], tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Silent(shown):  # type: ignore[misc, valid-type]
        provides: ClassVar[frozenset[str]] = frozenset()

    with pytest.raises(ContractError, match="was not announced") as caught:
        _run(Silent, tmp_path)
    assert caught.value.remedy == "name 'l2_norm' in `provides` of the pass that makes it"


@pytest.mark.parametrize("run", [True, False], ids=["run", "no-run"])
def test_its_factory_makes_a_model_that_compiles(run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"^```python\n(def factory.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (tmp_path / "readme_model.py").write_text(NET + block)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "readme_model", raising=False)
    request = resolve_request(
        model="readme_model:factory", pipeline={"version": 1, "passes": ["canonicalise"], "finalise": "eager"},
        known_passes=PASSES, known_targets=known_targets(), batch=3, dtype="float64", run=run, out=tmp_path / "runs",
    )  # fmt: skip
    report = compile_model(request)
    assert report.error == "" and (report.info.batch, report.info.dtype) == (3, "float64")
    captured = (tmp_path / "runs" / "run-001" / "graphs" / "00-captured.txt").read_text()
    assert re.search(r"addmm +f64\[3, 16\]", captured)


def test_its_pipeline_without_changes_of_rounding(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(_block("How far it goes", "yaml"))
    allowed = [p.name for p in load_pipeline("default", known_passes=PASSES).passes
               if p.options.get("allow_changes_rounding")]  # fmt: skip
    fusions = ["fuse_attn_res_norm", "warp_decode_moe", "fuse_kda_decode", "fuse_kda_verify"]
    assert allowed == ["lift_kda_chunk", *fusions]
    own = {p.name: p.options for p in load_pipeline(path, known_passes=PASSES).passes}
    assert own["lift_kda_chunk"] == {"allow_changes_rounding": False}
    for name in fusions:
        assert own[name] == {"roundings": "model", "allow_changes_rounding": False}


def test_it_names_the_ops_that_have_kernels_and_those_that_have_none() -> None:
    bullet = next(b for b in _section("How far it goes").split("\n* ") if b.startswith("**Kernels"))
    with_kernels, _, without = bullet.partition(" have kernels.")
    having = {kernel.op for kernel in KERNELS}
    assert set(re.findall(r"`(\w+)`", with_kernels)) == having
    assert set(re.findall(r"`(\w+)`", without)) == set(OPS) - having
