"""What a compiler takes and gives, and how one is found for a unit and a target.

unit    target   compiler
Triton  AMD      Triton's own LLVM
Triton  NVIDIA   Triton's own LLVM and ptxas
HIP     AMD      clang and ld.lld of the `ziglang` wheel
HIP     NVIDIA   nvcc if it is on the PATH, else NVRTC if a CUDA wheel of torch brought it
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from k3rewrite.errors import EmitError
from k3rewrite.ops.kernel import HipUnit, TritonUnit, Unit
from k3rewrite.targets.target import Target

TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Compiled:
    """Assembly text, object bytes, and what the object alone does not say.

    `threads` of a workgroup (0: the object says it), `dynamic_lds` bytes that a launch must ask for.
    """

    assembly: str
    object: bytes
    threads: int = 0
    dynamic_lds: int = 0


@dataclass(frozen=True)
class Missing:
    """No compiler for this unit and target on this machine; `reason` says what to install."""

    reason: str


class Compiler(Protocol):
    @property
    def identity(self) -> str:
        """Name and version: "triton 3.9.0", "clang 22.1.8"."""

    def compile(self, unit: Any, target: Target, text: str) -> Compiled:
        """Compile `unit`, whose complete source is `text`. `EmitError` with the compiler's message if it refuses."""


def find_compiler(unit: Unit, target: Target) -> Compiler | Missing:
    """The compiler to use, or what is missing."""
    from k3rewrite.emit import clang_compiler, cuda_compiler, triton_compiler

    if isinstance(unit, TritonUnit):
        return triton_compiler.find()
    return clang_compiler.find() if target.vendor == "amd" else cuda_compiler.find()


def run_tool(command: Sequence[str | Path], folder: Path, place: str) -> str:
    """Run one compiler step in `folder`; its standard output. `EmitError` with its messages if it fails."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EmitError(f"the compiler could not run: {error}", place=place, remedy="check its installation") from None
    if done.returncode != 0:
        raise refusal(done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}", place)
    return done.stdout


def refusal(message: str, place: str) -> EmitError:
    return EmitError(f"does not compile:\n{message}", place=place, remedy="correct the kernel, or bind another one")


def place_of(unit: Unit, target: Target) -> str:
    return f"kernel {unit.symbol} ({unit.language}) for {target.name} ({target.arch})"


def defines_text(unit: HipUnit) -> str:
    """The macros of a unit as `#define` lines, so that the written source is what was compiled."""
    return "".join(f"#define {name} {value}\n" for name, value in sorted(unit.defines.items()))
