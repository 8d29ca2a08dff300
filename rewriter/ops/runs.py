"""What really ran: a bound op notes each call of it while somebody watches.

    with watching() as runs:
        compiled(inputs)
    runs                    {Run("k3_kernels.attn_res_norm__hip_h200_1f0c...", "hip", "NVIDIA H200")}

Which code a bound op runs is decided call by call: the dispatcher takes the reference for tensors on a CPU, and a
kernel may hand a call over to another one. So a report says what was seen, not what was expected. Calls that nobody
watches cost one look at a variable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

REFERENCE = "reference"
"""`Run.by` of a call that the meaning of the op ran in place of a kernel"""


class Run(NamedTuple):
    """One call: `bound` as the graph names the op, `by` the language of the kernel that ran, or `REFERENCE`."""

    bound: str
    by: str
    device: str


class _Watch:
    def __init__(self) -> None:
        self.runs: set[Run] = set()
        self.by = ""
        """what runs the call that is going on"""


_WATCH: ContextVar[_Watch | None] = ContextVar("k3rewrite_watch", default=None)


@contextmanager
def watching() -> Iterator[set[Run]]:
    """The calls of bound ops inside the block, in this thread; filled while they return."""
    watch = _Watch()
    token = _WATCH.set(watch)
    try:
        yield watch.runs
    finally:
        _WATCH.reset(token)


def noting(function: Callable[..., Any], bound: str, by: str) -> Callable[..., Any]:
    """`function` as an implementation of the op `bound`, which notes the calls that return."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        watch = _WATCH.get()
        if watch is None:
            return function(*args, **kwargs)
        watch.by = by
        result = function(*args, **kwargs)
        watch.runs.add(Run(bound, watch.by, _device_name(args)))
        return result

    return run


def hand_over(language: str) -> None:
    """To be called by a kernel that leaves the call at hand to a kernel in another language."""
    if (watch := _WATCH.get()) is not None:
        watch.by = language


def _device_name(args: tuple[Any, ...]) -> str:
    tensors = (t for a in args for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, torch.Tensor))
    device = next(tensors).device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
