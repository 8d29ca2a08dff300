"""Reports that said what was expected to happen: where kernels ran, in which language, and how a check ended."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from k3rewrite.backend import Backend
from k3rewrite.checks import end_to_end
from k3rewrite.emit import read_manifest
from k3rewrite.emit.emission import Emission
from k3rewrite.errors import VerificationError
from k3rewrite.kernels import KERNELS, OPS
from k3rewrite.ops.binding import Binding
from k3rewrite.ops.runs import REFERENCE, Run, hand_over, noting, watching
from k3rewrite.report.run_folder import RunFolder
from k3rewrite.report.schema import KernelReport
from k3rewrite.targets import load_target

SETTINGS = {"finalise": "eager", "target": "h200"}


def _mix(prefix: Tensor, delta: Tensor, block: Tensor, norm: Tensor, proj: Tensor) -> tuple[Tensor, Tensor]:
    updated = prefix + delta
    values = torch.stack([block, updated], dim=-2).float()
    scores = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-5) * (norm.float() * proj.float())
    mixed = (scores.sum(-1).softmax(-1).unsqueeze(-1) * values).sum(-2).to(prefix.dtype)
    wide = mixed.float()
    return updated, norm * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(mixed.dtype)


def _inputs(rows: int = 5) -> list[Tensor]:
    return [torch.randn(rows, 512).bfloat16() for _ in range(3)] + [torch.randn(512).bfloat16() for _ in range(2)]


def _compiled(backend: Backend, function: Callable[..., Any] = _mix, **settings: Any) -> Callable[..., Any]:
    run = torch.compile(function, backend=backend, fullgraph=True, **settings)

    def call(*inputs: Tensor) -> Any:
        with torch.no_grad():
            return run(*inputs)

    return call


# ------------------------------------------------------------------------------------------------ what was executed


@pytest.mark.parametrize("verify", ["none", "end-to-end"])
def test_a_kernel_has_run_when_it_has_been_called(tmp_path: Path, verify: str) -> None:
    seen: list[str] = []
    backend = Backend({**SETTINGS, "dump": tmp_path, "verify": verify})
    compile_graph = backend.__call__

    def remembering(module: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled = compile_graph(module, inputs)
        seen.extend(kernel.executed for kernel in backend.reports[0].kernels)
        seen.extend(k["executed"] for k in json.loads((tmp_path / "run-001" / "report.json").read_text())["kernels"])
        seen.extend(entry.executed for entry in read_manifest(tmp_path / "run-001" / "kernels" / "h200"))
        return compiled

    with torch.no_grad():
        torch.compile(_mix, backend=remembering)(*_inputs())
    assert seen and set(seen) == {"no"}, "compiled, and not called yet"
    run = RunFolder(tmp_path / "run-001")
    assert {kernel.executed for kernel in backend.reports[0].kernels} == {REFERENCE}
    assert {kernel.executed for kernel in run.read_report().kernels} == {REFERENCE}
    assert {entry.executed for entry in read_manifest(run.path / "kernels" / "h200")} == {REFERENCE}


def test_the_report_is_written_for_the_first_call_only(tmp_path: Path) -> None:
    call = _compiled(Backend({**SETTINGS, "dump": tmp_path}))
    call(*_inputs())
    file = tmp_path / "run-001" / "report.json"
    file.unlink()
    call(*_inputs())
    assert not file.exists()


def test_a_second_compilation_sees_its_own_calls_only() -> None:
    """The bound op is the same one in the whole process."""
    first, second = Backend(SETTINGS), Backend(SETTINGS)
    _compiled(first)(*_inputs())
    torch._dynamo.reset()
    kept: list[Any] = []

    def uncalled(module: torch.fx.GraphModule, inputs: Any) -> Any:
        kept.append(second(module, inputs))
        return module.forward

    with torch.no_grad():
        torch.compile(_mix, backend=uncalled)(*_inputs())
    assert [k.executed for k in first.reports[0].kernels] == [REFERENCE]
    assert [k.executed for k in second.reports[0].kernels] == ["no"]
    assert first.reports[0].kernels[0].name == second.reports[0].kernels[0].name


def test_in_place_variants_are_seen_too() -> None:
    def updating(prefix: Tensor, *rest: Tensor) -> Tensor:
        updated, normed = _mix(prefix, *rest)
        prefix.copy_(updated)
        return normed

    backend = Backend(SETTINGS)
    inputs = _inputs()
    got = _compiled(backend, updating)(*[v.clone() for v in inputs])
    torch.testing.assert_close(got, updating(*inputs), rtol=0.05, atol=0.05)
    (kernel,) = backend.reports[0].kernels
    assert kernel.bound[0].endswith("_") and kernel.executed == REFERENCE


def test_what_a_watch_sees() -> None:
    def launch(x: Tensor, many: bool = False) -> Tensor:
        if many:
            hand_over("triton")
        return x

    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("no launch")

    run, x = noting(launch, "op", "hip"), torch.ones(1)
    run(x)
    with watching() as outer:
        run([x])
        with watching() as inner:
            run(x, many=True)
            with pytest.raises(RuntimeError):
                noting(fails, "op", "hip")(x)
    run(x, many=True)
    assert outer == {Run("op", "hip", "cpu")} and inner == {Run("op", "triton", "cpu")}


@pytest.mark.parametrize("in_place", [False, True])
def test_what_the_dispatcher_gets_on_each_kind_of_device(in_place: bool) -> None:
    """A kernel for the GPU at hand runs there; everywhere else, and for every other GPU, its reference."""
    launched: list[bool] = []

    def launch(x: Tensor, in_place: bool = False) -> None:
        launched.append(in_place)

    op = OPS["rms_norm"]
    kernel = dataclasses.replace(KERNELS[0], op=op.name, language="triton", launch=launch)
    form = dataclasses.replace(op, name="form", namespace="k3_kernels", reference=lambda x: x)
    for native in (False, True):
        given = Binding(op, kernel, load_target("h200"), native, (0, 1)).implementations(form, in_place=in_place)
        for key in ("CPU", "CUDA"):
            with watching() as runs:
                given[key](torch.ones(1))
            by = "triton" if native and key == "CUDA" else REFERENCE
            assert runs == {Run("k3_kernels.form", by, "cpu")}
    assert launched == [in_place]


def test_runs_are_told_apart_by_language() -> None:
    hip, triton = (KernelReport("op", "h200", language, language, bound=["k3.op"]) for language in ("hip", "triton"))
    other = KernelReport("op", "h200", "other", "hip", bound=["k3.other"])
    emission = Emission(load_target("h200"), [hip, triton, other], written=[None])  # type: ignore[list-item]
    emission.note_runs({Run("k3.op", "triton", "NVIDIA H200")})
    assert [k.executed for k in emission.reports] == ["no", "NVIDIA H200", "no"]
    emission.note_runs({Run("k3.op", REFERENCE, "cpu"), Run("k3.op", "hip", "NVIDIA H200")})
    assert [k.executed for k in emission.reports] == ["NVIDIA H200", REFERENCE, "no"]
    emission.written = []
    emission.note_runs({Run("k3.op", "triton", "NVIDIA H200")})
    assert hip.executed == "NVIDIA H200", "without files an entry stands for all units of a kernel"


# ------------------------------------------------------------------------------------------------ symbolic batches


def _symbolic(backend: Backend) -> Backend:
    inputs = _inputs()
    for tensor in inputs[:3]:
        torch._dynamo.mark_dynamic(tensor, 0)
    _compiled(backend)(*inputs)
    return backend


def test_a_unit_is_reported_in_its_own_language(tmp_path: Path) -> None:
    """For a symbolic number of rows the HIP kernel hands many rows over to Triton's: one binding, two languages."""
    kernels = _symbolic(Backend({**SETTINGS, "dump": tmp_path})).reports[0].kernels
    suffixes = {"triton": ".py", "hip": ".hip"}
    assert {k.language for k in kernels} == {"hip", "triton"}
    assert all(k.source.endswith(suffixes[k.language]) for k in kernels)
    assert len({k.name for k in kernels}) == len(kernels)


def test_without_a_folder_a_bound_kernel_is_one_entry() -> None:
    (kernel,) = _symbolic(Backend(SETTINGS)).reports[0].kernels
    assert kernel.language == "hip" and kernel.bound == [f"k3_kernels.{kernel.name}"]
    assert kernel.executed == REFERENCE and kernel.provenance


# ------------------------------------------------------------------------------------------------ a check that fails


def test_a_failed_check_is_the_error_of_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_to_end, "measure_both", lambda *values: (end_to_end.Error(0, 0), end_to_end.Error(1, 1)))
    backend = Backend({"target": "cpu", "finalise": "eager", "verify": "end-to-end", "dump": tmp_path})
    call = _compiled(backend, lambda x: x.sin())
    for _ in range(2):
        with pytest.raises(VerificationError, match="output 0 has error") as caught:
            call(torch.randn(4))
        assert caught.value.report is backend.reports[0]
    report = RunFolder(tmp_path / "run-001").read_report()
    assert report.end_to_end is not None and not report.end_to_end.passed
    assert "output 0 has error" in report.error and report.error == backend.reports[0].error
