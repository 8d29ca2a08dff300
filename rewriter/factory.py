"""The user's model: "package.module:factory", where the factory returns (module, args, kwargs).

    def tiny(batch: int = 2):                       # my/models.py
        return Net(), (torch.randn(batch, 16),), {}

    build_from_factory("my.models:tiny", {"batch": 8}, asked=frozenset({"batch"}))

A factory takes those settings of the command line (`phase`, `batch`, `tokens`, `context`, `dtype`, `device`, `seed`)
that its parameters name; one that the user asked for and that it does not take is an error, never ignored.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from k3rewrite.errors import ConfigError, did_you_mean


def load_factory(spec: str) -> Callable[..., Any]:
    """The callable behind "package.module:name". `ConfigError` if module or name does not exist.

    An error inside the user's module is not caught: its traceback is what the user needs.
    """
    module_name, _, attribute = spec.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise ConfigError(
            f"no module '{error.name}'", place=f"model {spec}", remedy="run from its folder, or install it"
        ) from None
    for name in attribute.split("."):
        if not hasattr(found, name):
            public = [known for known in vars(found) if not known.startswith("_")] if hasattr(found, "__dict__") else []
            raise ConfigError(
                f"'{module_name}' has no '{attribute}'", place=f"model {spec}", remedy=did_you_mean(name, public)
            )
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"'{attribute}' is not callable", place=f"model {spec}", remedy="name a function")
    factory: Callable[..., Any] = found
    return factory


def build_from_factory(
    spec: str, settings: Mapping[str, Any], *, asked: frozenset[str] = frozenset()
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Call the factory with those of `settings` that it takes, and check that it returns (module, args, kwargs)."""
    factory = load_factory(spec)
    parameters = inspect.signature(factory).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for name in sorted(asked):
        if name not in parameters and not takes_any:
            raise ConfigError(
                f"the factory takes no '{name}'",
                place=f"--{name}",
                remedy=f"leave the flag out, or add '{name}' to {spec}",
            )
    result = factory(**{name: value for name, value in settings.items() if name in parameters or takes_any})
    if isinstance(result, tuple) and len(result) == 3:
        module, args, kwargs = result
        if isinstance(module, torch.nn.Module) and isinstance(args, (tuple, list)) and isinstance(kwargs, Mapping):
            return module, tuple(args), dict(kwargs)
    found = (
        f"a tuple ({', '.join(type(r).__name__ for r in result)})"
        if isinstance(result, tuple)
        else type(result).__name__
    )
    raise ConfigError(f"the factory returned {found}", place=f"model {spec}", remedy="return (module, args, kwargs)")
