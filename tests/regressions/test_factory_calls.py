"""Factories that cannot be called, and models that cannot be called with what their factory returned."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from k3rewrite.driver.factory import build_from_factory
from k3rewrite.errors import ConfigError

SOURCE = """
import torch
class Net(torch.nn.Module):
    def forward(self, x, *, scale=1.0): return x * scale
def needs(batch, path, name): return Net(), (torch.ones(batch),), {}
def by_position(batch, /): return Net(), (torch.ones(batch),), {}
def by_position_with_default(batch=2, /): return Net(), (torch.ones(batch),), {}
def any_number(*parts): return Net(), (torch.ones(2),), {}
def too_many(): return Net(), (torch.ones(2), torch.ones(2)), {}
def none(): return Net(), (), {}
def keyword(): return Net(), (torch.ones(2),), {"scal": 2.0}
def number_for_keyword(): return Net(), (torch.ones(2),), {1: 2.0}
def script(): return torch.jit.script(torch.nn.Linear(2, 2)), (torch.ones(2),), {}
def right(): return Net(), (torch.ones(2),), {"scale": 2.0}
"""
SETTINGS = {"batch": 2, "dtype": torch.float32}


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "regression_models.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "regression_models", raising=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needs", "the factory needs path, name, which no flag gives\n  remedy: give them defaults"),
        ("by_position", "the factory needs batch, which no flag gives\n  remedy: give it a default"),
        ("too_many", "Net does not take the arguments that the factory returned: too many positional arguments"),
        ("none", "Net does not take the arguments that the factory returned: missing a required argument: 'x'"),
        ("keyword", "got an unexpected keyword argument 'scal'"),
        ("number_for_keyword", "the keyword 1 is no text"),
        ("script", "a TorchScript module, which cannot be captured"),
    ],
)
def test_one_clear_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_from_factory(f"regression_models:{name}", SETTINGS)
    assert str(caught.value).startswith(f"model regression_models:{name}: ") and message in str(caught.value)


def test_a_function_of_c_does_not_say_what_it_takes() -> None:
    with pytest.raises(ConfigError, match="does not say which parameters it has"):
        build_from_factory("builtins:max", SETTINGS)


@pytest.mark.parametrize("name", ["by_position_with_default", "any_number", "right"])
def test_what_can_be_called_is(name: str) -> None:
    module, args, kwargs = build_from_factory(f"regression_models:{name}", SETTINGS)
    assert module(*args, **kwargs).shape == (2,)


def test_a_flag_for_a_parameter_without_a_name() -> None:
    with pytest.raises(ConfigError, match="--batch: the factory takes no 'batch'"):
        build_from_factory("regression_models:by_position_with_default", SETTINGS, asked=frozenset({"batch"}))
