"""Dynamo's side of a capture: its errors with the user's line, its state between captures.

torch._dynamo.exc.Unsupported("Data-dependent branching ... File "net.py", line 6, in f ...")
-> CaptureError("Data-dependent branching: ...", place="net.py:6 in f")
"""

from __future__ import annotations

import logging
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import RestartAnalysis, TorchDynamoException

from k3rewrite import _torch_private as private
from k3rewrite.errors import CaptureError
from k3rewrite.graph.provenance import UNKNOWN_SOURCE, is_torchs, trace_source_line
from k3rewrite.report.schema import BROKEN_GRAPH

_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
DYNAMO_ERRORS: tuple[type[Exception], ...] = (TorchDynamoException,)
RESTARTS: tuple[type[Exception], ...] = (RestartAnalysis,)
"""what passes through a backend when Dynamo traces the same code again, with what it has learned: no failure"""


def reset() -> None:
    """Forget compiled code and its guards (2.13 reuses the graph of another rank otherwise)."""
    torch._dynamo.reset()


def inner_exception(error: BaseException) -> BaseException:
    """What a backend raised, out of Dynamo's wrapping."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    return error


def capture_error(error: Exception) -> CaptureError:
    """One message: what Dynamo does not support, at which line of the user's code, and what to do."""
    text = str(error)
    head, _, trace = text.partition("from user code:")
    lines = [line.strip() for line in head.strip().splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    place = trace_source_line(trace) if trace else UNKNOWN_SOURCE
    where = None if place == UNKNOWN_SOURCE else place
    explanation = _labelled(lines, "Explanation:")
    if reason == "Observed exception":  # "Developer debug context: raised exception ValueError('...')"
        raised = _labelled(lines, "Developer debug context:").removeprefix("raised exception ")
        return CaptureError(f"the model raises {raised}", place=where, remedy="correct the model or its inputs")
    return CaptureError(
        f"the model cannot be captured as one graph: {reason}. {explanation}",
        place=where,
        remedy=f"rewrite that line without the construct, or compile the part of the model around it{_hint(text)}",
    )


def broken_graph(module: torch.fx.GraphModule) -> str | None:
    """What to say of a graph that is only the first part of what it was to be, or None of a whole one."""
    found = private.graph_break(module)
    if found is None:
        return None
    text, stack = found
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["for a reason that it does not say"]
    reason = "a branch on the values of a tensor" if lines[0].startswith("generic_jump") else lines[0]
    said = ". ".join(part.rstrip(".") for part in (reason, _labelled(lines, "Explanation:")) if part)
    own = [frame for frame in stack if not _is_no_users(frame.filename)] or stack
    where = f" at {Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else ""
    return (
        f"{BROKEN_GRAPH}{where}: {said}. What is spread over several graphs is not rewritten; "
        f"torch.compile(..., fullgraph=True) makes it an error{_hint(text, stack)}"
    )


def _is_no_users(file: str) -> bool:
    return is_torchs(file) or (file.startswith(_STDLIB) and "site-packages" not in file)


def _hint(text: str, stack: Sequence[Any] = ()) -> str:
    """What is behind the break of a mixture of experts: which of them are hit depends on data."""
    looped = "aten.nonzero" in text and "expert" in f"{text} {stack}".lower()
    return "; for a loop over the experts that are hit see docs/moe.md, 'Models of transformers'" if looped else ""


def _labelled(lines: list[str], label: str) -> str:
    return next((line.removeprefix(label).strip() for line in lines if line.startswith(label)), "")


@contextmanager
def quiet_shape_functions() -> Iterator[None]:
    """Keep torch from logging the traceback of a shape function that fails: the error is reported once, as ours."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def unwanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("failed while attempting to run meta")

    logger.addFilter(unwanted)
    try:
        yield
    finally:
        logger.removeFilter(unwanted)
