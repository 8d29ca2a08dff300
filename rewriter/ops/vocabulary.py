"""The vocabulary: functional `k3::` ops, each with a meaning, a shape function, traits and a cost.

An `Op` is declared once, in `kernels/<op>/op.py`, and registered with the dispatcher as `k3::<name>`:

* `reference` is the meaning, in plain PyTorch. It runs wherever no kernel is bound, it is the oracle of every check,
  and it is what a left-over op is expanded to. It never aliases an input.
* `fake` gives shape, dtype, device and stride of the results without running anything. It is always written out:
  running the reference on fake tensors would add guards.
* `cost` counts launches and bytes of one fused execution.

State is functional (state in, state out). `inplace` names the arguments whose storage a result may take over; the
last pass of a pipeline uses it where the old value has no later reader.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from k3rewrite import _torch_private as private

NAMESPACE = "k3"
KERNEL_NAMESPACE = "k3_kernels"
"""namespace of ops that `select` has bound to one kernel of one target"""
TRAITS = frozenset({"elementwise", "row_independent", "linear_in", "weight_only", "commutative"})

_LIBRARIES = MappingProxyType({name: torch.library.Library(name, "FRAGMENT") for name in (NAMESPACE, KERNEL_NAMESPACE)})
_REGISTERED: dict[str, Op] = {}
"""qualified name -> what the dispatcher has under it; written where it is registered, which is once for a process"""


@dataclass(frozen=True)
class Cost:
    """What one execution moves and does: kernel launches, bytes read and written in device memory, operations."""

    launches: int
    bytes_read: int
    bytes_written: int
    flops: int = 0

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True)
class Op:
    """One word of the vocabulary. `schema` is without the name: "(Tensor x, float eps) -> Tensor"."""

    name: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    cost: Callable[..., Cost]
    traits: frozenset[str] = frozenset()
    inplace: Mapping[str, int] = field(default_factory=dict, hash=False)
    """argument name -> index of the result that may be written into that argument's storage"""
    namespace: str = NAMESPACE
    implementations: Mapping[str, Callable[..., Any]] = field(default_factory=dict, hash=False)
    """dispatch key ("CUDA", which is also ROCm's) -> implementation that stands before the reference there"""
    inplace_reads: Callable[[Mapping[str, Any]], str | None] | None = None
    """Asked before a result takes over an argument of which another argument is a view: None if what is read through
    that view is never what is written, else the reason. It gets parameter name -> fake tensor or scalar; tensors that
    share storage are given as views of each other, so that offsets and strides can be compared."""
    parts: Callable[..., Sequence[torch.Tensor]] | None = None
    """Of a `weight_only` op: where in its result the weights are, as views of it. It gets the result and the arguments;
    the views are in the order of the weights. With them the op is run once and the weights live on in its result."""
    base: Op | None = None
    """the op that this is another form of: what a kernel was bound to, what an in-place variant was made from"""

    def __post_init__(self) -> None:
        if unknown := self.traits - TRAITS:
            raise ValueError(f"k3::{self.name}: unknown traits {sorted(unknown)}; known: {sorted(TRAITS)}")

    @property
    def qualified_name(self) -> str:
        return f"{self.namespace}::{self.name}"

    @property
    def word(self) -> Op:
        """The op of the vocabulary whose form this is; itself, if it is no form of another."""
        return self if self.base is None else self.base.word

    @property
    def overload(self) -> torch._ops.OpOverload:
        """The dispatcher's handle, as it appears as a node's target."""
        return getattr(getattr(torch.ops, self.namespace), self.name).default

    @property
    def source_hash(self) -> str:
        """Content hash of schema and of the files that hold meaning and shape function, with the functions of other ops
        that these files import: part of every cache key."""
        files = sorted(_source_files(self.reference) | _source_files(self.fake))
        digest = hashlib.sha256(f"{self.name}{self.schema}".encode())
        for file in files:
            digest.update(Path(file).read_bytes())
        return digest.hexdigest()[:16]

    def register(self) -> Op:
        """Define the op with the dispatcher. Done once, when `k3rewrite.kernels` is imported; again does nothing.

        With the repository's root on the import path `import kernels` finds that folder a second time, and transformers
        imports whatever is called so, looking for a package of that name.
        """
        _define(self)
        return self


@cache
def _define(op: Op) -> None:
    library = _LIBRARIES[op.namespace]
    library.define(f"{op.name}{op.schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(op.name, op.reference, "CompositeExplicitAutograd")
    for key, implementation in op.implementations.items():
        library.impl(op.name, implementation, key)
    torch.library.register_fake(op.qualified_name, op.fake, lib=library)
    _REGISTERED[op.qualified_name] = op


def op_of(target: Any) -> Op | None:
    """The op of the vocabulary that a node's target stands for, bound to a kernel or in place; None for all others.

        k3::mlp, k3_kernels::mlp__triton_h200_1f0c..., k3_kernels::mlp__triton_h200_1f0c..._     ->     k3::mlp

    Names tell it apart for people only: an op and an argument of it may end in anything.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _LIBRARIES:
        return None
    known = _REGISTERED.get(f"{target.namespace}::{target._opname}")
    return None if known is None else known.word


def _source_files(function: Callable[..., Any]) -> set[str]:
    """The file of a function, and those of the `op.py` functions in its globals."""
    found = {inspect.getsourcefile(function) or ""}
    for value in inspect.unwrap(function).__globals__.values():
        if inspect.isfunction(value) and value.__module__.startswith("k3rewrite.kernels"):
            found.add(inspect.getsourcefile(value) or "")
    return found - {""}


def tensor_bytes(*tensors: Any) -> int:
    """Bytes of the tensors among the arguments (lists and None allowed); 0 for symbolic sizes without a hint."""
    total = 0
    for value in tensors:
        if isinstance(value, (list, tuple)):
            total += tensor_bytes(*value)
        elif isinstance(value, torch.Tensor):
            total += static_numel(value) * value.element_size()
    return total


def static_numel(tensor: torch.Tensor) -> int:
    """Number of elements; a symbolic size counts with its hint, without adding a guard."""
    return math.prod(size_hint(size) for size in tensor.shape)


def size_hint(size: int | torch.SymInt) -> int:
    """The size with which a symbolic one was traced, without adding a guard; 0 if it has none (it depends on data)."""
    if isinstance(size, int):
        return size
    return private.symbolic_hint(size) or 0
