"""HIP C++ for AMD with the clang and the linker of the `ziglang` wheel: no ROCm, no GPU.

source.hip --clang -S--> .s --clang -c--> .o --ld.lld -shared--> .hsaco
"""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from k3rewrite.emit.compiler import Compiled, Missing, place_of, run_tool
from k3rewrite.ops.kernel import HipUnit
from k3rewrite.targets.target import Target

CODE_OBJECT_VERSION = 5
"""read by every ROCm that knows gfx942; the newer default is not"""

_ZIG = (sys.executable, "-m", "ziglang")


@dataclass(frozen=True)
class ClangCompiler:
    identity: str

    def compile(self, unit: HipUnit, target: Target, text: str) -> Compiled:
        place = place_of(unit, target)
        with tempfile.TemporaryDirectory(prefix="k3rewrite-") as name:
            folder = Path(name)
            (folder / "kernel.hip").write_text(text, encoding="utf-8")
            front = ("-x", "hip", f"--offload-arch={target.arch}", "--offload-device-only", "-nogpuinc", "-nogpulib")
            options = ("-O3", "-std=c++17", f"-mcode-object-version={CODE_OBJECT_VERSION}")
            contract = f"-ffp-contract={'fast' if unit.fp_fusion else 'off'}"
            run_tool((*_ZIG, "clang", *front, *options, contract, "-S", "-o", "kernel.s", "kernel.hip"), folder, place)
            assembler = ("-x", "assembler", "-target", "amdgcn-amd-amdhsa", f"-mcpu={target.arch}")
            version = f"-mcode-object-version={CODE_OBJECT_VERSION}"
            run_tool((*_ZIG, "clang", *assembler, version, "-c", "-o", "kernel.o", "kernel.s"), folder, place)
            run_tool((*_ZIG, "ld.lld", "-shared", "-o", "kernel.hsaco", "kernel.o"), folder, place)
            return Compiled(
                assembly=(folder / "kernel.s").read_text(encoding="utf-8"),
                object=(folder / "kernel.hsaco").read_bytes(),
                dynamic_lds=unit.dynamic_lds,
            )


@functools.cache
def find() -> ClangCompiler | Missing:
    """The wheel's clang, if the wheel is installed."""
    if importlib.util.find_spec("ziglang") is None:
        return Missing("HIP C++ for AMD needs the clang of the `ziglang` package: pip install 'k3rewrite[hip]'")
    done = subprocess.run([*_ZIG, "clang", "--version"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return Missing(f"the clang of the `ziglang` package does not run: {done.stderr.strip()}")
    return ClangCompiler(done.stdout.splitlines()[0].replace("version ", ""))
