"""Fake tensors, the sizes that they may have as symbols, and the guards about these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


def detect_fake_mode(values: Sequence[Any]) -> FakeTensorMode | None:
    """The fake mode of the tensors among `values`, or the one that is active. (torch._guards, 2.1+)"""
    return torch._guards.detect_fake_mode(list(values))


def convertible_fakes() -> AbstractContextManager[object]:
    """Inside, fake modules can be converted: `Net().to(dtype)`. Does nothing where no fake mode is active.

    `Module.to` swaps a fake parameter with its converted self and refuses if a weak reference to it exists; the fake
    mode keeps one to each tensor that it made, to find it again by the tensor that it was made from. Nothing that is
    only just built is looked for so, and these references are dropped. (FakeTensorConverter.tensor_memo, 2.0+)
    """
    mode = detect_fake_mode(())
    return nullcontext() if mode is None else _NoMemo(mode)


class _NoMemo(TorchDispatchMode):
    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._memo = mode.fake_tensor_converter.tensor_memo

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._memo.clear()
        return result


def graph_fake_mode(graph: torch.fx.Graph) -> FakeTensorMode | None:
    """The fake mode in which a captured graph's values live: that of the first fake `val` found."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            value = next((v for v in value if isinstance(v, FakeTensor)), None)
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def fresh_fake(mode: FakeTensorMode, like: torch.Tensor) -> FakeTensor:
    """A new fake tensor with the metadata of `like` and storage of its own; nothing is run and no guard is added.

    Three times quicker than `torch.empty_strided` under the mode, which decides for the 10,000 nodes of a large graph.
    (The constructor's form FakeTensor(mode, meta tensor, device) has not changed from 2.0 to current.)
    """
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return FakeTensor(mode, meta, like.device)


def storage_id(value: torch.Tensor) -> int:
    """Equal for two tensors exactly if they share storage."""
    return value.untyped_storage()._cdata


def storage_owners(value: torch.Tensor) -> int:
    """How many tensors live in the storage of `value`, itself included. (Inductor's CUDA graphs count so; 2.1+)"""
    storage = value.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # the Python object of the storage


def definitely_disjoint(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two views of one storage are known not to overlap; sizes must be plain integers for a `True`.

    AOTAutograd decides with the same function whether two inputs may stay apart. (torch._C._dynamo, 2.6+)
    """
    from torch._C._dynamo.guards import compute_overlapping_tensors

    numbers = [*a.shape, *a.stride(), a.storage_offset(), *b.shape, *b.stride(), b.storage_offset()]
    if not all(isinstance(n, int) for n in numbers):
        return False
    return not compute_overlapping_tensors([a, b], symbolic=False)


def symbolic_text(value: Any) -> str:
    """The expression of a SymInt, SymFloat or SymBool, as text; equal expressions of one ShapeEnv give equal text."""
    return str(value.node.expr)


def symbolic_hint(size: torch.SymInt) -> int | None:
    """The size with which a symbolic one was traced, without adding a guard; None if it depends on data."""
    hint = size.node.hint
    return int(hint) if hint is not None else None


def symbolic_least(size: torch.SymInt) -> float:
    """The least that a symbolic number can be, without adding a guard; minus infinity if there is no bound. (2.2+)"""
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    try:
        return float(int(bounds.lower))
    except (OverflowError, TypeError, ValueError):  # minus infinity is none of Python's integers
        return -float("inf")


def statically_known(condition: bool | torch.SymBool) -> bool:
    """True if the condition holds for every input; False, and no guard, if that is not known."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def guard_count(mode: FakeTensorMode | None) -> int:
    """How many guards the mode's shape environment holds so far."""
    return len(mode.shape_env.guards) if mode is not None and mode.shape_env is not None else 0


def guard_texts(mode: FakeTensorMode | None, start: int = 0) -> tuple[str, ...]:
    """The guards added since there were `start` of them, as text."""
    if mode is None or mode.shape_env is None:
        return ()
    return tuple(str(guard.expr) for guard in mode.shape_env.guards[start:])
