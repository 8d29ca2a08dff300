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
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from k3rewrite._torch_private import FakeTensor, leaves
from k3rewrite.errors import ConfigError, K3RewriteError, ModelError, did_you_mean
from k3rewrite.graph.provenance import is_torchs


def load_factory(spec: str) -> Callable[..., Any]:
    """The callable behind "package.module:name". `ConfigError` if module or name does not exist, `ModelError` if the
    module cannot be imported."""
    module_name, _, attribute = spec.partition(":")
    try:
        with _users_code(f"importing {module_name}", ModuleNotFoundError):
            found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise _of_users_code(f"importing {module_name}", error) from error
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
    spec: str, settings: Mapping[str, Any], *, asked: frozenset[str] = frozenset(), run: bool = False
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Call the factory with those of `settings` that it takes, and check that it returns (module, args, kwargs).

    `ModelError` if it raises, or asks Python to exit; `ConfigError` if it is to `run` and there are no values.
    """
    factory = load_factory(spec)
    place = f"model {spec}"
    parameters = _parameters(factory, place)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    taken = {p.name for p in parameters if p.kind in _BY_NAME}
    for name in sorted(asked):
        if name not in taken and not takes_any:
            raise ConfigError(
                f"the factory takes no '{name}'",
                place=f"--{name}",
                remedy=f"leave the flag out, or add '{name}' to {spec}",
            )
    kinds = (*_BY_NAME, inspect.Parameter.POSITIONAL_ONLY)
    needed = [p for p in parameters if p.default is p.empty and p.kind in kinds]
    if missing := [p.name for p in needed if p.name not in taken or p.name not in settings]:
        raise ConfigError(
            f"the factory needs {', '.join(missing)}, which no flag gives",
            place=place,
            remedy=f"give {'it a default' if len(missing) == 1 else 'them defaults'}; "
            f"what a factory can be given, by name: {', '.join(settings)}",
        )
    with _users_code(f"the factory {spec}"):
        result = factory(**{name: value for name, value in settings.items() if name in taken or takes_any})
    if isinstance(result, tuple) and len(result) == 3:
        module, args, kwargs = result
        if isinstance(module, torch.nn.Module) and isinstance(args, (tuple, list)) and isinstance(kwargs, Mapping):
            _check_call(module, args, kwargs, place)
            if run:
                _check_values(module, args, kwargs, place)
            return module, tuple(args), dict(kwargs)
    found = (
        f"a tuple ({', '.join(type(r).__name__ for r in result)})"
        if isinstance(result, tuple)
        else type(result).__name__
    )
    raise ConfigError(f"the factory returned {found}", place=place, remedy="return (module, args, kwargs)")


def check_call(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """`ModelError` if the model as it is raises as well when it is called: the rewrite is not to blame."""
    with _users_code("the model, as it is,"), torch.no_grad():
        model(*args, **kwargs)


def _check_values(module: torch.nn.Module, args: Any, kwargs: Any, place: str) -> None:
    tensors = [*module.parameters(), *module.buffers(), *leaves((args, kwargs))]
    if any(isinstance(t, torch.Tensor) and (t.is_meta or isinstance(t, FakeTensor)) for t in tensors):
        raise ConfigError(
            "the model or its inputs have no values: meta or fake tensors", place=place, remedy="add --no-run"
        )


def settings_taken(spec: str, names: Iterable[str]) -> frozenset[str]:
    """Those of `names` that the factory is given when it is called."""
    parameters = _parameters(load_factory(spec), f"model {spec}")
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return frozenset(names)
    return frozenset(names) & {p.name for p in parameters if p.kind in _BY_NAME}


@contextmanager
def _users_code(what: str, *through: type[BaseException]) -> Iterator[None]:
    """`ModelError` for what the user's code raises, but for errors of ours and those to be let through."""
    try:
        yield
    except K3RewriteError:
        raise
    except through:
        raise
    except (Exception, SystemExit) as error:
        raise _of_users_code(what, error) from error


def _of_users_code(what: str, error: BaseException) -> ModelError:
    """With the frames of the user's own code: those above are ours and Python's import."""
    ours = (__file__, importlib.__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours]
    own = [f for f in frames if not is_torchs(f.filename)] or frames
    lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
    trace = "".join(lines).rstrip().replace("\n", "\n  ")
    return ModelError(
        f"{what} raised {type(error).__name__}\n  {trace}",
        place=f"{own[-1].filename}:{own[-1].lineno}" if own else None,
        remedy="mend the model's own code; without a run (--no-run) it is built of tensors without values",
    )


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _parameters(factory: Callable[..., Any], place: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(factory).parameters.values())
    except ValueError:  # a function of C
        raise ConfigError(
            "it does not say which parameters it has", place=place, remedy="name a function written in Python"
        ) from None


def _check_call(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[Any, Any], place: str) -> None:
    """`ConfigError` if the model cannot be called so: Dynamo would report it as a fault inside of torch."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            "the factory returned a TorchScript module, which cannot be captured",
            place=place,
            remedy="return the module that it was made from",
        )
    if wrong := [key for key in kwargs if not isinstance(key, str)]:
        raise ConfigError(f"the keyword {wrong[0]!r} is no text", place=place, remedy="name the keyword arguments")
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{type(module).__name__} does not take the arguments that the factory returned: {error}",
            place=place,
            remedy="return the arguments of its forward method",
        ) from None
