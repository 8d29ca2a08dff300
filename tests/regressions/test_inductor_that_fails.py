"""Inductor's own failures are one clear error that names the way out, not a compiler log."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from k3rewrite import _torch_private as private
from k3rewrite.backend import Backend


def test_generated_code_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    log = (
        "C++ compile error\n\nCommand:\ng++ main.cpp\n\nOutput:\nmain.cpp:38: error: conflicting declaration 'auto a'\n"
    )

    def fail(*args: Any, **settings: Any) -> Any:
        raise private.inductor_error()(RuntimeError(log + "note\n" * 1000), None)  # type: ignore[call-arg]

    monkeypatch.setattr(private, "inductor_compile", fail)
    torch._dynamo.reset()
    backend = Backend({"pipeline": {"version": 1, "passes": []}})
    with torch.no_grad(), pytest.raises(Exception, match="Inductor cannot compile what no kernel took"):
        torch.compile(torch.sin, backend=backend)(torch.ones(2))
    error = backend.reports[0].error
    assert "C++ compile error error: conflicting declaration 'auto a'" in error and "finalise: eager" in error
    assert len(error) < 400
