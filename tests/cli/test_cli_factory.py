"""Models of the user's own: finding the factory, what it is given, what it must return; and the group of ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from k3rewrite.driver.factory import build_from_factory, settings_taken
from k3rewrite.driver.ranks import rank_group
from k3rewrite.driver.request import resolve_request
from k3rewrite.driver.run import compile_model
from k3rewrite.errors import ConfigError, ModelError
from k3rewrite.passes import PASSES
from k3rewrite.report.schema import RunReport
from k3rewrite.targets import known_targets

SOURCE = """
import torch
class Net(torch.nn.Linear):
    @classmethod
    def make(cls):
        return cls(2, 2), [torch.ones(1, 2)], {}
class Same(torch.nn.Module):
    def forward(self, *values): return values
def sized(batch=2, *, dtype=None):
    return Net(2, 2), (torch.ones(batch, 2, dtype=dtype),), {}
def anything(**settings):
    return Same(), tuple(sorted(settings)), {}
def nothing(): return None
def pair(): return Net(2, 2), ()
def swapped(): return (), Net(2, 2), {}
def broken(): return inner(1)
def inner(number): return number / 0
def leaves(): raise SystemExit(0)
def mismatched(): return torch.nn.Linear(2, 2).double(), (torch.ones(1, 2),), {}
def on_meta(): return Net(2, 2).to("meta"), (torch.ones(1, 2, device="meta"),), {}
def hooked():
    net = Net(2, 2)
    net.register_forward_hook(lambda module, args, out: out.tanh())
    net.register_forward_pre_hook(lambda module, args: (args[0].sin(),))
    return net, (torch.ones(1, 2),), {}
constant = 3
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_models.py").write_text(SOURCE)
    (tmp_path / "user_broken.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "user_untyped.py").write_text("def x(:\n")
    for name in ("user_models", "user_broken", "user_untyped"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "user_models"


def test_factory_gets_the_settings_that_it_takes(models: str) -> None:
    settings = {"batch": 5, "dtype": torch.float64, "phase": "decode"}
    module, args, kwargs = build_from_factory("user_models:sized", settings, asked=frozenset({"batch"}))
    assert isinstance(module, torch.nn.Linear) and kwargs == {}
    assert args[0].shape == (5, 2) and args[0].dtype == torch.float64
    assert build_from_factory("user_models:anything", settings)[1] == ("batch", "dtype", "phase")
    assert isinstance(build_from_factory("user_models:Net.make", settings)[1], tuple)


def test_a_report_says_only_what_the_model_was_given(models: str, tmp_path: Path) -> None:
    assert settings_taken("user_models:sized", ["batch", "phase"]) == {"batch"}
    assert settings_taken("user_models:anything", ["batch", "phase"]) == {"batch", "phase"}
    assert settings_taken("user_models:nothing", ["batch", "phase"]) == frozenset()
    request = resolve_request(
        model="user_models:sized", known_passes=PASSES, known_targets=known_targets(), target="cpu", dtype="fp32",
        pipeline={"version": 1, "finalise": "eager"}, out=tmp_path,
    )  # fmt: skip
    info = compile_model(request).info
    assert (info.batch, info.dtype, info.target) == (4, "float32", "cpu")
    assert (info.phase, info.tokens, info.context, info.seed) == ("", None, None, None)


def test_a_setting_that_was_asked_for_is_never_ignored(models: str) -> None:
    with pytest.raises(ConfigError, match="--phase: the factory takes no 'phase'"):
        build_from_factory("user_models:sized", {"phase": "decode"}, asked=frozenset({"phase"}))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("user_modles:sized", "no module 'user_modles'"),
        ("user_models.sub:sized", "no module 'user_models.sub'"),
        ("user_models:size", "'user_models' has no 'size'\n  remedy: did you mean 'sized'?"),
        ("user_models:Net.mke", "'user_models' has no 'Net.mke'"),
        ("user_models:constant", "'constant' is not callable"),
        ("user_models:nothing", "the factory returned NoneType\n  remedy: return (module, args, kwargs)"),
        ("user_models:pair", "the factory returned a tuple (Net, tuple)"),
        ("user_models:swapped", "the factory returned a tuple (tuple, Net, dict)"),
    ],
)
def test_bad_factory(models: str, spec: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_from_factory(spec, {})
    assert f"model {spec}: " in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "what", "last"),
    [
        (
            "user_broken:x",
            "importing user_broken raised ModuleNotFoundError",
            "No module named 'a_module_that_is_not_there'",
        ),
        ("user_untyped:x", "importing user_untyped raised SyntaxError", "SyntaxError"),
        ("user_models:broken", "the factory user_models:broken raised ZeroDivisionError", "division by zero"),
        ("user_models:leaves", "the factory user_models:leaves raised SystemExit", "SystemExit: 0"),
    ],
)
def test_errors_of_the_users_own_code_show_its_lines(models: str, spec: str, what: str, last: str) -> None:
    with pytest.raises(ModelError) as caught:
        build_from_factory(spec, {})
    text = str(caught.value)
    assert caught.value.exit_code == 2
    assert what in text and last in text and "importlib" not in text and "factory.py" not in text
    if spec != "user_untyped:x":  # it has no frame of its own
        assert (caught.value.place or "").startswith(str(Path(sys.path[0]) / spec.partition(":")[0]) + ".py:")


def _compiled(name: str, out: Path, **settings: Any) -> RunReport:
    request = resolve_request(
        model=f"user_models:{name}", known_passes=PASSES, known_targets=known_targets(), target="cpu", out=out,
        pipeline={"version": 1, "passes": ["canonicalise"], "finalise": "eager"}, **settings,
    )  # fmt: skip
    return compile_model(request)


def test_a_model_that_cannot_be_called_is_no_fault_of_the_rewrite(models: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the model, as it is, raised RuntimeError") as caught:
        _compiled("mismatched", tmp_path)
    assert caught.value.exit_code == 2 and "dtype" in str(caught.value)


def test_without_values_there_is_no_run(models: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="have no values: meta or fake tensors\n  remedy: add --no-run"):
        _compiled("on_meta", tmp_path)
    assert not list(tmp_path.glob("run-*"))


@pytest.mark.parametrize("run", [True, False])
def test_hooks_of_the_model_are_part_of_its_graph(models: str, tmp_path: Path, run: bool) -> None:
    report = _compiled("hooked", tmp_path, run=run, verify="end-to-end" if run else "none")
    captured = (tmp_path / "run-001" / "graphs" / "00-captured.txt").read_text()
    assert all(f"aten.{op}.default" in captured for op in ("sin", "addmm", "tanh"))
    assert report.error == "" and (report.end_to_end is not None and report.end_to_end.passed) is run


def test_one_rank_needs_no_group() -> None:
    with rank_group(0, 1) as group:
        assert group is None and not dist.is_initialized()


def test_a_fake_group_stands_in_and_is_taken_down() -> None:
    for rank in (0, 7):
        with rank_group(rank, 8) as group:
            assert group is not None and (dist.get_rank(), dist.get_world_size()) == (rank, 8)
            with pytest.raises(ConfigError, match=f"has rank {rank} of 8, asked for rank 1 of 4"), rank_group(1, 4):
                pass
            with rank_group(rank, 8) as inner:
                assert inner is group
            assert dist.is_initialized()
        assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError), rank_group(3, 8):
        raise ZeroDivisionError
    assert not dist.is_initialized()
