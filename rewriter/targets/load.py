"""Reading target descriptions: YAML, checked field by field, every mistake with its file and line."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3rewrite.errors import ConfigError, did_you_mean
from k3rewrite.plain_data.typed import Misfit, fit
from k3rewrite.targets.target import Target

if TYPE_CHECKING:
    from k3rewrite.plain_data.located import Item

_FOLDER = "k3rewrite.pass_configs.targets"
_FIELDS = {field.name: field for field in dataclasses.fields(Target)}
_OPTIONAL = ("measured_bandwidth", "head_multiples", "sources")
_KEYS = {"measured_bandwidth": ("read", "copy"), "sources": tuple(name for name in _FIELDS if name != "sources")}
_CPU_MAY_BE_ZERO = ("lds_bytes_per_cu", "lds_bytes_per_workgroup", "l2_bytes", "bf16_flops", "memory_bytes")
_ANY_MAY_BE_ZERO = ("lds_reserved_per_workgroup", "sgprs_per_simd")
_TEXT_FORMS = {  # (field, vendor or any): what its text must look like; the name is part of symbols and folders
    ("name", ""): (re.compile(r"[A-Za-z][A-Za-z0-9_]*"), "letters, digits and underscores, a letter first"),
    ("arch", "amd"): (re.compile(r"gfx[0-9a-f]+"), "an architecture of AMD such as gfx950"),
    ("arch", "nvidia"): (re.compile(r"sm_[0-9]+[af]?"), "an architecture of NVIDIA such as sm_90"),
}


def known_targets() -> tuple[str, ...]:
    """Names of the shipped targets, sorted."""
    names = (entry.name for entry in resources.files(_FOLDER).iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def load_target(name: str | Path) -> Target:
    """The shipped target of that name, the description in a `.yaml` file, or for "auto" this machine's device.

    `ConfigError` for an unknown name (with the nearest known one) and for a file with a mistake (with file and line).
    """
    if name == "auto":
        from k3rewrite.targets.detect import detect_target

        return detect_target()
    text = str(name)
    if isinstance(name, Path) or text.endswith((".yaml", ".yml")) or "/" in text:
        return _read(Path(name), text)
    if text not in known_targets():
        raise ConfigError(
            f"there is no target '{text}'; {did_you_mean(text, [*known_targets(), 'auto'])}",
            place="target",
            remedy="run `k3rewrite targets` for the list, or give the path of a target's YAML file",
        )
    return _shipped(text)


@cache
def _shipped(name: str) -> Target:
    with resources.as_file(resources.files(_FOLDER) / f"{name}.yaml") as path:
        return _read(path, f"targets/{name}.yaml")


def _read(path: Path, shown: str) -> Target:
    from k3rewrite.plain_data.located import read_yaml  # here: the pipeline package itself needs targets

    item = read_yaml(path, shown)
    if not isinstance(item.value, dict):
        raise ConfigError("a target is a mapping of fields", place=item.place, remedy="write `name: ...` lines")
    for key in item.value:
        if key not in _FIELDS:
            raise ConfigError(
                f"a target has no field '{key}'; {did_you_mean(key, _FIELDS)}",
                place=item.keys[key],
                remedy="correct or remove the line",
            )
    if missing := [key for key in _FIELDS if key not in item.value and key not in _OPTIONAL]:
        raise ConfigError(
            f"the target lacks {', '.join(missing)}",
            place=shown,
            remedy="add the fields; `k3rewrite targets` shows a shipped target to start from",
        )
    hints = typing.get_type_hints(Target)
    values = {key: _checked(key, value, hints[key]) for key, value in item.value.items()}
    target = Target(**values)
    for key, value in item.value.items():
        if problem := _problem(target, key):
            raise ConfigError(f"{key}: {problem}", place=value.place, remedy="correct the figure")
    return target


def _checked(key: str, item: Item, hint: Any) -> Any:
    """The field's value with its right type; names inside a nested mapping are checked too."""
    if isinstance(item.value, dict) and key in _KEYS:
        for name in item.value:
            if name not in _KEYS[key]:
                raise ConfigError(
                    f"{key} has no entry '{name}'; {did_you_mean(name, _KEYS[key])}",
                    place=item.keys[name],
                    remedy="correct or remove the line",
                )
    try:
        return fit(item.plain(), hint)
    except Misfit as misfit:
        name = misfit.path.removeprefix(".")
        place = item.value[name].place if isinstance(item.value, dict) and name in item.value else item.place
        raise ConfigError(
            f"{key}{misfit.path}: {misfit.expected} is needed, not {misfit.found}",
            place=place,
            remedy="correct the value",
        ) from None


def _problem(target: Target, key: str) -> str | None:
    """What is wrong with a field that has the right type, or None."""
    value = getattr(target, key)
    if isinstance(value, dict):
        wrong = [name for name, entry in value.items() if not isinstance(entry, str) and entry <= 0]
        return f"'{wrong[0]}' must be greater than zero" if wrong else None
    if isinstance(value, str):
        if not value.strip():
            return "must not be empty"
        form, words = _TEXT_FORMS.get((key, target.vendor)) or _TEXT_FORMS.get((key, "")) or (None, "")
        return f"must be {words}, not '{value}'" if form is not None and not form.fullmatch(value) else None
    if not math.isfinite(value):
        return "must be finite"
    may_be_zero = key in _ANY_MAY_BE_ZERO or (not target.is_gpu and key in _CPU_MAY_BE_ZERO)
    if value < 0 or (value == 0 and not may_be_zero):
        return "must be greater than zero" if not may_be_zero else "must not be negative"
    if key == "lds_bytes_per_workgroup" and value > target.lds_bytes_per_cu:
        return f"a workgroup cannot have more than the {target.lds_bytes_per_cu} bytes of its compute unit"
    if key == "max_registers_per_thread" and value > target.registers_per_simd:
        return f"a thread cannot have more than the {target.registers_per_simd} registers of its SIMD"
    return None
