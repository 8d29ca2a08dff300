"""The cache key stands for everything beside the graph that decides what it becomes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from k3rewrite.backend import Backend
from k3rewrite.driver import cache_key
from k3rewrite.driver.cache_key import compilation_key
from k3rewrite.kernels import KERNELS, OPS
from k3rewrite.ops.binding import Binding
from k3rewrite.passes import PASSES
from k3rewrite.pipeline.config import load_pipeline
from k3rewrite.pipeline.settings import Verify
from k3rewrite.targets import load_target


def _pipeline(when: str = "mode == 1 and tp > 0") -> Any:
    settings = {"version": 1, "passes": ["canonicalise", {"lift_rms_norm": {"when": when}}]}
    return load_pipeline(settings, known_passes=PASSES)


GIVEN: dict[str, Any] = {"rank": 0, "world": 1, "names": {"mode": 1, "tp": 1, "other": 5}, "native": False}


def _key(pipeline: Any = None, target: str = "h200", ops: Any = None, kernels: Any = None, **changed: Any) -> str:
    return compilation_key(
        pipeline or _pipeline(), load_target(target), ops or OPS.values(), kernels or KERNELS, **{**GIVEN, **changed}
    )


def test_what_a_graph_does_not_depend_on_leaves_the_key() -> None:
    key = _key()
    assert len(key) == 32 and key == _key()
    assert _key(names={"tp": 1, "mode": 1, "other": 6}) == key, "no condition uses it"
    assert _key(dataclasses.replace(_pipeline(), name="another", extends=("base",))) == key
    assert _key(ops=list(OPS.values())[::-1], kernels=KERNELS[::-1]) == key


ALTERED: dict[str, Callable[[], str]] = {
    "a pass": lambda: _key(dataclasses.replace(_pipeline(), passes=_pipeline().passes[:1])),
    "a check": lambda: _key(dataclasses.replace(_pipeline(), verify=Verify(regions=True))),
    "a condition": lambda: _key(_pipeline("mode == 1")),
    "a value": lambda: _key(names={"mode": 0, "tp": 1}),
    "a kind of value": lambda: _key(names={"mode": "1", "tp": 1}),
    "a value not given": lambda: _key(names={"tp": 1}),
    "target": lambda: _key(target="b200"),
    "native": lambda: _key(native=True),
    "rank": lambda: _key(rank=1, world=2),
    "world": lambda: _key(world=2),
    "an op": lambda: _key(ops=list(OPS.values())[1:]),
    "a kernel": lambda: _key(kernels=KERNELS[1:]),
}


@pytest.mark.parametrize("what", ALTERED)
def test_what_it_depends_on_changes_the_key(what: str) -> None:
    assert ALTERED[what]() != _key()


def _other_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "core.py").write_text("x = 1\n")
    monkeypatch.setattr(cache_key, "_code_files", lambda: iter([("k3rewrite/core.py", tmp_path / "core.py")]))


def _other_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache_key, "installed_versions", lambda: {"torch": "9.9"})


def _other_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "git_version", "0" * 40)


@pytest.mark.parametrize("change", [_other_text, _other_version, _other_build])
def test_text_versions_and_build_change_the_key(
    change: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = _key()
    cache_key.code_hash.cache_clear()
    change(monkeypatch, tmp_path)
    after = _key()
    cache_key.code_hash.cache_clear()
    assert after != before


def test_the_text_is_that_of_core_passes_and_kernels() -> None:
    names = {name for name, _ in cache_key._code_files()}
    assert {
        "k3rewrite/driver/cache_key.py",
        "k3rewrite/pipeline/runner.py",
        "k3rewrite.passes/lift_rms_norm.py",
        "k3rewrite.kernels/attn_res_norm/triton.py",
        "k3rewrite.kernels/portability.h",
    } <= names
    assert not [name for name in names if "kimi_k3/" in name]


def test_two_processes_give_one_key() -> None:
    code = "import test_cache_keys as t; import sys; sys.stdout.write(t._key())"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    assert run.stdout == _key()


def test_a_condition_on_a_given_name_is_in_the_key_of_a_report() -> None:
    keys = set()
    for mode in (0, 1):
        pipeline = {"version": 1, "extends": "default", "passes": [{"lift_rms_norm": {"when": "mode == 1"}},
                    {"fuse_attn_res_norm": "off"}, {"fuse_block_write": "off"}]}  # fmt: skip
        backend = Backend({"pipeline": pipeline, "names": {"mode": mode}, "target": "cpu", "finalise": "eager"})
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(_norm, backend=backend)(torch.randn(4, 8))
        keys.add(backend.reports[0].info.cache_key)
    assert len(keys) == 2


def _norm(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (8,), None, 1e-5)


def test_names_of_bound_ops_depend_on_the_rank_too() -> None:
    """Compiler caches know an op by its name."""
    kernel = KERNELS[0]
    ranks = [(0, 1), (0, 2), (1, 2)]
    assert len({Binding(OPS[kernel.op], kernel, load_target("h200"), False, r).name for r in ranks}) == 3
