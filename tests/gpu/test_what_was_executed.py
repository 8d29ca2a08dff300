"""Where a kernel was seen to run, on the GPU: in its own language, or by the kernel that it handed the call to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from k3rewrite.backend import Backend
from k3rewrite.emit import read_manifest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def _mix(prefix: Tensor, delta: Tensor, block: Tensor, norm: Tensor, proj: Tensor) -> Tensor:
    updated = prefix + delta
    values = torch.stack([block, updated], dim=-2).float()
    scores = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-5) * (norm.float() * proj.float())
    mixed = (scores.sum(-1).softmax(-1).unsqueeze(-1) * values).sum(-2).to(prefix.dtype)
    wide = mixed.float()
    normed = norm * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(mixed.dtype)
    prefix.copy_(updated)
    return normed


@pytest.mark.parametrize("finalise", ["eager", "inductor"])
@pytest.mark.parametrize(("rows", "language"), [(5, "hip"), (100, "triton")])
def test_the_language_that_ran_is_the_one_that_is_reported(
    rows: int, language: str, finalise: str, tmp_path: Path
) -> None:
    """With a symbolic number of rows the HIP kernel is bound, and hands many rows over to Triton's."""
    inputs = [torch.randn(rows, 1024).bfloat16().cuda() for _ in range(3)]
    inputs += [torch.randn(1024).bfloat16().cuda() for _ in range(2)]
    for tensor in inputs[:3]:
        torch._dynamo.mark_dynamic(tensor, 0)
    backend = Backend({"finalise": finalise, "dump": tmp_path})
    with torch.no_grad():
        torch.compile(_mix, backend=backend)(*inputs)
    (report,) = backend.reports
    if "hip" not in {k.language for k in report.kernels}:
        pytest.skip("no HIP kernel takes this call here")
    assert {k.bound[0][-1] for k in report.kernels} == {"_"}, "in place"
    device = torch.cuda.get_device_name()
    assert {(k.language, k.executed) for k in report.kernels if k.language == language} == {(language, device)}
    assert {k.executed for k in report.kernels if k.language != language} == {"no"}
    listed = read_manifest(tmp_path / "run-001" / "kernels" / report.info.target)
    assert {e.name: e.executed for e in listed} == {k.name: k.executed for k in report.kernels}
