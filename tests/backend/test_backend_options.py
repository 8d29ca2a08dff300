"""Options of the backend: each wrong one is one clear error, before anything is compiled or written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from k3rewrite.backend import Backend, k3rewrite
from k3rewrite.errors import CaptureError, ConfigError, UnsupportedError

EAGER = {"finalise": "eager", "target": "cpu"}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def _pass(name: str, **settings: Any) -> dict[str, Any]:
    return {"pipeline": {"version": 1, "passes": [{name: settings}]}}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pipline": "default"}, "unknown option 'pipline'\n  remedy: did you mean 'pipeline'?"),
        ({3: 4}, "unknown option '3'\n  remedy: known: dump, finalise, names, pipeline, target, verify"),
        ({"pipeline": 3}, "pipeline is 3\n  remedy: give a name, a YAML file, or its content"),
        ({"pipeline": ["default"]}, "pipeline is ['default']"),
        ({"pipeline": "defalt"}, "no pipeline 'defalt'\n  remedy: did you mean 'default'?"),
        ({"pipeline": "kimi-k3-decod"}, "did you mean 'kimi-k3-decode'?"),
        ({"pipeline": "none/p.yaml"}, "no file 'none/p.yaml'"),
        ({"pipeline": ""}, "no pipeline ''"),
        ({"target": "mi355"}, "did you mean 'mi355x'?"),
        ({"target": 3}, "target is 3\n  remedy: give a name or a file"),
        ({"target": "none/t.yaml"}, "none/t.yaml"),
        ({"verify": True}, "'verify': True is none of the choices\n  remedy: known: all, end-to-end, none, regions"),
        ({"verify": "end_to_end"}, "'end_to_end' is none of the choices\n  remedy: did you mean 'end-to-end'?"),
        ({"finalise": "aot"}, "'finalise': 'aot' is none of the choices\n  remedy: known: eager, inductor"),
        ({"finalise": 0}, "'finalise': 0 is none of the choices"),
        ({"dump": 3}, "dump is 3\n  remedy: give the folder for dumps as a path"),
        ({"dump": ""}, "dump is ''"),
        ({"names": 3}, "names is 3\n  remedy: give a mapping"),
        ({"names": []}, "names is []"),
        ({"names": {"n": [1]}}, "names['n'] is [1]"),
        ({"names": {3: 1}}, "names[3] is 1"),
        ([1], "options is [1]\n  remedy: give a mapping of option names to values"),
        ("default", "options is 'default'"),
        (_pass("lift_rms_nrm"), "unknown pass 'lift_rms_nrm'\n  remedy: did you mean 'lift_rms_norm'?"),
        (_pass("lift_rms_norm", alow_changes_rounding=True), "did you mean 'allow_changes_rounding'?"),
        (_pass("lift_rms_norm", allow_changes_rounding="yes"), "allow_changes_rounding"),
        (_pass("lift_rms_norm", expect="== n_layer"), "unknown name 'n_layer' in '== n_layer'"),
        (_pass("lift_rms_norm", when="tpp > 1"), "unknown name 'tpp' in 'tpp > 1'"),
        (_pass("lift_rms_norm", expect="__import__('os')"), "Call is not allowed in"),
        (_pass("lift_gated_rms_norm"), "requires 'lift_rms_norm' before it"),
        (_pass("fuse_attn_res_norm", roundings="few"), "roundings"),
        ({"pipeline": {"version": 9, "passes": []}}, "version"),
        ({"pipeline": {"version": 1, "pases": []}}, "did you mean 'passes'?"),
        ({"pipeline": {"version": 1, "extends": "bas", "passes": []}}, "did you mean 'base'?"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_option_is_one_clear_error(options: Any, text: str) -> None:
    if "requires" in text:  # the order of passes is checked when a graph comes
        with pytest.raises(ConfigError) as caught:
            _run(Backend({**EAGER, **options}))
    else:
        with pytest.raises(ConfigError) as caught:
            Backend(options)
    message = str(caught.value)
    assert text in message
    assert caught.value.exit_code == 2 and "remedy: " in message and "Traceback" not in message


def _run(backend: Any) -> Tensor:
    compiled = torch.compile(Norm(), backend=backend)
    with torch.no_grad():
        try:
            return compiled(torch.randn(2, 16))
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise error.inner_exception from None


def test_nothing_is_written_for_a_wrong_option(tmp_path: Path) -> None:
    for wrong in ({"target": "mi355"}, {"verify": 3}, {"names": 3}, {"pipeline": "defalt"}, {"x": 1}):
        with pytest.raises(ConfigError):
            Backend({"dump": tmp_path / "runs", **wrong})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    with pytest.raises(ConfigError, match="no run folder can be made"):
        _run(Backend({**EAGER, "dump": tmp_path / "file"}))
    assert (tmp_path / "file").read_text() == "here"


def test_the_mode_of_torch_compile_is_none_of_ours() -> None:
    with pytest.raises(ConfigError, match="mode='max-autotune' is not an option") as caught:
        k3rewrite(None, [], mode="max-autotune")  # type: ignore[arg-type]
    assert "options={...}" in str(caught.value)
    compiled = torch.compile(Norm(), backend="k3rewrite", mode="max-autotune")
    with torch.no_grad(), pytest.raises(Exception, match="mode='max-autotune' is not an option"):
        compiled(torch.randn(2, 16))


def test_options_reach_the_backend_by_its_name(tmp_path: Path) -> None:
    model, x = Norm(), torch.randn(2, 16)
    options = {"pipeline": "default", "dump": str(tmp_path), "verify": "all", **EAGER}
    compiled = torch.compile(model, backend="k3rewrite", options=options)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    report = json.loads((tmp_path / "run-001" / "report.json").read_text())
    assert report["info"]["target"] == "cpu" and report["end_to_end"]["passed"] is True
    compiled = torch.compile(model, backend="k3rewrite", options={"target": "cpux"})
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="did you mean 'cpu'"):
        compiled(x)


@pytest.mark.parametrize(
    "options",
    [
        None,
        {},
        {"pipeline": None, "target": None, "dump": None, "verify": None, "finalise": None, "names": None},
        {"pipeline": "default.yaml"},
        {"pipeline": {"version": 1, "passes": ["canonicalise"]}},
        {"pipeline": {"version": 1, "extends": "base", "passes": []}, "verify": "regions"},
        {"names": {"n_moe_layers": 3, "phase": "decode", "exact": True, "share": 0.5}},
    ],
)
def test_options_that_are_fine(options: Any) -> None:
    assert Backend(options).reports == []


def test_what_may_be_a_path_may_be_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("version: 1\ntarget: cpu\npasses: [lift_rms_norm]\nfinalise: eager\n")
    for path in (file, str(file)):
        backend = Backend({"pipeline": path, "dump": tmp_path / "runs"})
        assert backend.pipeline.name == "mine" and [p.name for p in backend.pipeline.passes] == ["lift_rms_norm"]
    assert backend.target.name == "cpu"
    assert not (tmp_path / "runs").exists(), "a folder is made when a graph comes"


def test_options_win_over_the_pipeline() -> None:
    pipeline = {"version": 1, "target": "h200", "finalise": "inductor", "verify": {"regions": True}, "passes": []}
    backend = Backend({"pipeline": pipeline, "target": "cpu", "finalise": "eager", "verify": "end-to-end"})
    assert (backend.target.name, backend.pipeline.finalise) == ("cpu", "eager")
    assert (backend.pipeline.verify.regions, backend.pipeline.verify.end_to_end) == (False, True)


def test_names_that_every_run_has() -> None:
    """`when: tp > 1` needs no option; numbers of the model do, or are read off the graph."""
    conditions = {"when": "tp == 1 and dcp == 1 and target == 'cpu'", "expect": "== n_layers * each"}
    backend = Backend({**_pass("lift_rms_norm", **conditions), **EAGER, "names": {"each": 1}})
    layers = nn.ModuleDict({"layers": nn.ModuleList([Norm(), Norm()])})

    def forward(x: Tensor) -> Tensor:
        for layer in layers["layers"]:  # type: ignore[attr-defined]
            x = layer(x)
        return x

    with torch.no_grad():
        torch.compile(forward, backend=backend)(torch.randn(2, 16))
    assert backend.reports[0].passes[0].expect_ok is True
    assert backend.reports[0].passes[0].matched == 2


# ------------------------------------------------------------------------------------------------ errors of a graph


def test_gradients_are_refused_with_a_remedy_and_a_report(tmp_path: Path) -> None:
    backend = Backend({**EAGER, "dump": tmp_path})
    compiled = torch.compile(Norm(), backend=backend)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(torch.randn(2, 16))
    error = caught.value.inner_exception
    assert isinstance(error, CaptureError) and error.report is backend.reports[0]
    assert "compiled with gradients enabled" in str(error) and "torch.no_grad()" in str(error)
    report = json.loads((tmp_path / "run-001" / "report.json").read_text())
    assert "gradients" in report["error"]


def test_gradients_that_nothing_needs_are_no_obstacle() -> None:
    compiled = torch.compile(lambda x: x * 2, backend=Backend(EAGER))
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_parameters_are_fine(context: Callable[[], Any]) -> None:
    model, x = Norm(), torch.randn(2, 16)
    with context():
        torch.testing.assert_close(torch.compile(model, backend=Backend(EAGER))(x), model(x))


def test_an_expectation_that_fails_leaves_its_report(tmp_path: Path) -> None:
    backend = Backend({**EAGER, **_pass("lift_rms_norm", expect="== 2"), "dump": tmp_path})
    with pytest.raises(Exception, match="rewrote 1 of 1 sites, and the pipeline expects '== 2'"):
        _run(backend)
    (entry,) = backend.reports[0].passes
    assert entry.expect_ok is False and "expects '== 2'" in backend.reports[0].error
    report = json.loads((tmp_path / "run-001" / "report.json").read_text())
    assert report["passes"][0]["matched"] == 1 and "expects '== 2'" in report["error"]
    assert (tmp_path / "run-001" / "graphs" / "01-lift_rms_norm.txt").exists()


def _inductor(**settings: Any) -> dict[str, Any]:
    return {"version": 1, "target": "cpu", "passes": [], "inductor": settings}


def test_settings_of_inductor_reach_it() -> None:
    """Rounding between operators is kept unless the pipeline says otherwise, and then the report says so."""

    def rounds_in_between(x: Tensor) -> Tensor:
        return (x * 1.001) * 1.001 - x

    x = torch.linspace(1, 2, 256, dtype=torch.bfloat16)
    kept, dropped = Backend({"pipeline": _inductor()}), Backend({"pipeline": _inductor(keep_roundings=False)})
    with torch.no_grad():
        same = torch.compile(rounds_in_between, backend=kept)(x)
        torch._dynamo.reset()
        other = torch.compile(rounds_in_between, backend=dropped)(x)
    assert torch.equal(same, rounds_in_between(x)) and not torch.equal(other, same)
    assert not kept.reports[0].notes
    assert dropped.reports[0].notes == [
        "keep_roundings is off: Inductor drops roundings of the model outside of kernels"
    ]


def test_cuda_graphs_without_inductor_or_without_a_gpu_are_an_error() -> None:
    asked = _inductor(cuda_graphs=True)
    with torch.no_grad():
        with pytest.raises(ConfigError, match="cuda_graphs does nothing without Inductor"):
            Backend({"pipeline": asked, "finalise": "eager"})(*_traced())
        with pytest.raises(UnsupportedError, match="no input of the graph is on a CUDA device"):
            Backend({"pipeline": asked})(*_traced())


def _traced() -> tuple[torch.fx.GraphModule, list[Any]]:
    found: list[tuple[torch.fx.GraphModule, list[Any]]] = []

    def keep(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append((module, inputs))
        return module.forward

    torch._dynamo.reset()
    torch.compile(Norm(), backend=keep)(torch.randn(2, 16))
    return found[0]
