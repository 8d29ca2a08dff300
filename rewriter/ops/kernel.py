"""A kernel: one implementation of one op, for the targets that it was written for.

`select` binds a `k3::` node to the first kernel whose `accepts` has no objection, and records the objection of the
others. The same `Kernel` gives what ahead-of-time compilation needs (`units`) and what runs on a device (`launch`),
so that the object in a report and the code that ran share one source hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from k3rewrite.targets import Target


@dataclass(frozen=True)
class TritonUnit:
    """One Triton function with one signature, ready for ahead-of-time compilation.

    `signature` maps every parameter to its Triton type ("*bf16", "i32", "constexpr"); `constants` gives the
    constexpr values; `aligned` names pointer and integer parameters known to be divisible by 16.

    `fp_fusion` allows a * b + c to become one fused multiply-add. It is always passed on, because Triton's default
    depends on its version and on the environment: a launch passes `enable_fp_fusion=unit.fp_fusion`. `options` are
    further compile options of the target's Triton backend ("waves_per_eu"); an unknown one is an error.
    """

    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    aligned: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 2
    fp_fusion: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    language: ClassVar[Literal["triton"]] = "triton"

    @property
    def symbol(self) -> str:
        """Name of the function that is compiled."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))


@dataclass(frozen=True)
class HipUnit:
    """One extern "C" function of a HIP C++ file, with the macros that fix its sizes.

    The file includes "portability.h" (in `k3rewrite.kernels`), which takes the place of a vendor's headers.
    `dynamic_lds` is the LDS (shared memory), in bytes, that the launch asks for beside what the source declares.
    `fp_fusion`: as for `TritonUnit`, `-ffp-contract=fast` or `off`.
    """

    path: Path
    symbol: str
    defines: Mapping[str, str] = field(default_factory=dict)
    dynamic_lds: int = 0
    fp_fusion: bool = True

    language: ClassVar[Literal["hip"]] = "hip"


Unit = TritonUnit | HipUnit


@dataclass(frozen=True)
class Kernel:
    """One implementation of `k3::<op>`.

    accepts(arguments, target) -> None, or the reason why this kernel does not take the call. `arguments` maps the
        op's parameter names to fake tensors and scalars.
    launch(*args) -> results, with the op's own signature, on device tensors. Of an op that declares `inplace`, it also
        takes in_place=True: results go into the declared arguments and are not returned.
    units(arguments, target) -> what to compile ahead of time for such a call.
    cost_us(arguments, target) -> estimated microseconds; the cheapest accepting kernel is chosen.
    paths(arguments, target) -> of a kernel that looks at sizes when it is called: what it runs for which, in words.
    """

    name: str
    op: str
    language: Literal["triton", "hip"]
    accepts: Callable[[Mapping[str, Any], Target], str | None]
    launch: Callable[..., Any]
    units: Callable[[Mapping[str, Any], Target], Sequence[Unit]]
    cost_us: Callable[[Mapping[str, Any], Target], float]
    sources: tuple[Path, ...]
    """every file whose text decides what this kernel computes"""
    paths: Callable[[Mapping[str, Any], Target], str] | None = None

    @property
    def source_hash(self) -> str:
        digest = hashlib.sha256(self.name.encode())
        for path in self.sources:
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]
