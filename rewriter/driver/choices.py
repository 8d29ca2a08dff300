"""Settings with a few values, under the names that flags of the command line and options of the backend share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, get_args

from k3rewrite.errors import ConfigError, did_you_mean
from k3rewrite.pipeline.settings import Finalise, Verify

VERIFY: Mapping[str, Verify] = MappingProxyType(
    {
        "none": Verify(),
        "regions": Verify(regions=True),
        "end-to-end": Verify(end_to_end=True),
        "all": Verify(regions=True, end_to_end=True),
    }
)
FINALISE: tuple[Finalise, ...] = get_args(Finalise)


def check_choice(value: Any, choices: Iterable[str], place: str) -> str:
    """`value`, which is one of `choices`; else `ConfigError`."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{value!r} is none of the choices", place=place, remedy=did_you_mean(str(value), choices))
    return value
