"""The key under which a compiled graph may be kept: everything beside the graph itself that decides the result.

    compilation_key(pipeline, target, ops, kernels, rank=0, world=8, names={"mode": 1}, native=True)  ->  "3f0c..."

Two compilations of one graph with one key are interchangeable. Small constants that passes look at, such as lookup
tables of a number format, are part of the graph. The key changes with the pipeline's settings, the values of the names
that its conditions use, the target's figures and whether it is the GPU of this machine, the rank and the number of
ranks (constants of a shard depend on them), the text of every op, every kernel, every pass and the core, the versions
of Python, torch, triton and this package, and the build of torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import torch

from k3rewrite.driver.names import used_names
from k3rewrite.ops.kernel import Kernel
from k3rewrite.ops.vocabulary import Op
from k3rewrite.pipeline.expressions import Value
from k3rewrite.pipeline.settings import PipelineConfig
from k3rewrite.report.versions import installed_versions
from k3rewrite.targets import Target

_CODE = ("k3rewrite", "k3rewrite.passes", "k3rewrite.kernels")
"""packages whose text decides what a graph becomes; models are what graphs come from"""
_SUFFIXES = frozenset({".py", ".hip", ".h"})


def compilation_key(
    pipeline: PipelineConfig,
    target: Target,
    ops: Iterable[Op],
    kernels: Iterable[Kernel],
    *,
    rank: int,
    world: int,
    names: Mapping[str, Value],
    native: bool,
) -> str:
    """32 hexadecimal digits, equal in every process of equal installations."""
    content = {
        "pipeline": dataclasses.replace(pipeline, name="", extends=()).to_yaml(),
        "names": {name: repr(names.get(name)) for name in used_names(pipeline)},
        "target": dataclasses.asdict(target),
        "native": native,
        "rank": [rank, world],
        "ops": sorted(f"{op.qualified_name} {op.source_hash}" for op in ops),
        "kernels": sorted(f"{kernel.name} {kernel.source_hash}" for kernel in kernels),
        "code": code_hash(),
        "versions": installed_versions(),
        "torch": torch_build(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


def torch_build() -> dict[str, str]:
    """What tells two builds of one version of torch apart."""
    version = torch.version
    return {"version": torch.__version__, **{k: str(getattr(version, k)) for k in ("git_version", "cuda", "hip")}}


@cache
def code_hash() -> str:
    """Hash of the text of this package as it was when it was first asked for: code that is loaded does not change."""
    digest = hashlib.sha256()
    for name, path in _code_files():
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _code_files() -> Iterator[tuple[str, Path]]:
    """The files with a name that is the same on every machine, in order."""
    (models,) = _folders("k3rewrite.models")
    for package in _CODE:
        for folder in _folders(package):
            for path in sorted(folder.rglob("*")):
                if path.suffix in _SUFFIXES and not path.is_relative_to(models):
                    yield f"{package}/{path.relative_to(folder).as_posix()}", path


def _folders(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    return [Path(location) for location in spec.submodule_search_locations]
