"""Compile a function with the backend and hold everything that a caller can see against eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from k3rewrite.backend import Backend
from k3rewrite.report.schema import RunReport


def check(
    function: Callable[..., Any],
    *calls: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    tolerance: float = 1e-5,
    context: Callable[[], AbstractContextManager[Any]] = torch.no_grad,
) -> list[RunReport]:
    """Each call on copies of its arguments, eager and compiled: the same values, dtypes, shapes and sharing of storage,
    also of the arguments afterwards. The reports of the compiled graphs."""
    torch._dynamo.reset()
    backend = Backend({"finalise": "eager", **(options or {})})
    compiled = torch.compile(function, backend=backend)
    for arguments in calls:
        theirs, ours = _copies(arguments), _copies(arguments)
        with context():
            torch.manual_seed(0)
            expected = function(*theirs)
            torch.manual_seed(0)
            got = compiled(*ours)
        old, new = _tensors((expected, theirs)), _tensors((got, ours))
        assert len(old) == len(new)
        for a, b in zip(old, new, strict=True):
            assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
            a, b = (v.double() if "float8" in str(v.dtype) else v for v in (a, b))
            torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert _sharing(old) == _sharing(new)
    assert backend.reports, "the backend was called"
    return backend.reports


def _copies(arguments: Sequence[Any]) -> list[Any]:
    """Copies that share storage as the originals do."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        own = value.untyped_storage()
        storage = storages.setdefault(own._cdata, own.clone())
        return torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.shape, value.stride())

    return [pytree.tree_map(copy, argument) for argument in arguments]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _sharing(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    pairs = combinations(enumerate(tensors), 2)
    return [
        (i, j) for (i, a), (j, b) in pairs if a.numel() and a.untyped_storage()._cdata == b.untyped_storage()._cdata
    ]
