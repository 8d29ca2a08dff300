"""Triton ahead of time: any target, no GPU.

    triton.compile(ASTSource(function, signature, constants, attributes), target=GPUTarget("hip", "gfx950", 64))

Checked with Triton 3.6 and 3.9. Floating-point fusion is always passed on, because its default differs between versions
and can be set from the environment.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from typing import Any

from k3rewrite.emit.compiler import Compiled, Missing, place_of, refusal
from k3rewrite.errors import EmitError, did_you_mean
from k3rewrite.ops.kernel import TritonUnit
from k3rewrite.targets.target import Target

DIVISIBILITY = 16
"""what a pointer or integer named in `aligned` is divisible by"""


@dataclass(frozen=True)
class TritonCompiler:
    identity: str

    def compile(self, unit: TritonUnit, target: Target, text: str) -> Compiled:
        import triton
        from triton.compiler import ASTSource
        from triton.errors import TritonError

        place = place_of(unit, target)
        _check_parameters(unit, place)
        names = list(unit.function.arg_names)
        source = ASTSource(
            unit.function,
            {name: unit.signature[name] for name in names},
            {(names.index(name),): value for name, value in unit.constants.items()},
            {(names.index(name),): [["tt.divisibility", DIVISIBILITY]] for name in unit.aligned},
        )
        gpu = _gpu_target(target)
        options = _options(unit, gpu, place)
        try:
            compiled = triton.compile(source, target=gpu, options=options)
        except (TritonError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
            raise refusal(f"{type(error).__name__}: {error}", place) from error
        assembly, binary = ("amdgcn", "hsaco") if target.vendor == "amd" else ("ptx", "cubin")
        return Compiled(
            assembly=compiled.asm[assembly],
            object=compiled.asm[binary],
            threads=compiled.metadata.num_warps * target.wave_size,
            dynamic_lds=compiled.metadata.shared,
        )


def find() -> TritonCompiler | Missing:
    if importlib.util.find_spec("triton") is None:
        return Missing("Triton kernels need the `triton` package: pip install 'k3rewrite[triton]'")
    import triton

    return TritonCompiler(f"triton {triton.__version__}")


def _gpu_target(target: Target) -> Any:
    from triton.backends.compiler import GPUTarget

    if target.vendor == "amd":
        return GPUTarget("hip", target.arch, target.wave_size)
    return GPUTarget("cuda", int(target.arch.removeprefix("sm_")), target.wave_size)


def _options(unit: TritonUnit, gpu: Any, place: str) -> dict[str, Any]:
    """The backend's options. Triton drops unknown ones without a word, so they are checked here."""
    from triton.compiler import make_backend

    known = {field.name for field in dataclasses.fields(make_backend(gpu).parse_options({"enable_fp_fusion": True}))}
    for name in unit.options:
        if name not in known:
            raise EmitError(
                f"Triton has no compile option '{name}' for this target; {did_you_mean(name, known)}",
                place=place,
                remedy="correct the unit's options",
            )
    return {
        **unit.options,
        "num_warps": unit.num_warps,
        "num_stages": unit.num_stages,
        "enable_fp_fusion": unit.fp_fusion,
    }


def _check_parameters(unit: TritonUnit, place: str) -> None:
    """Every parameter has a type, every constexpr a value, and nothing is named that is not a parameter."""
    names = list(unit.function.arg_names)
    problems = [f"parameter '{name}' has no type in the signature" for name in names if name not in unit.signature]
    for what, given in (("signature", unit.signature), ("constants", unit.constants), ("aligned", unit.aligned)):
        problems += [
            f"{what}: no parameter '{name}'; {did_you_mean(name, names)}" for name in given if name not in names
        ]
    for name, kind in unit.signature.items():
        if kind == "constexpr" and name not in unit.constants:
            problems.append(f"constexpr parameter '{name}' has no value in the constants")
        if kind != "constexpr" and name in unit.constants:
            problems.append(f"parameter '{name}' has a value in the constants, but is {kind} in the signature")
    if problems:
        raise EmitError("; ".join(sorted(problems)), place=place, remedy="correct the unit")
