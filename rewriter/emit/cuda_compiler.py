"""The same HIP C++ for NVIDIA, where a CUDA compiler exists: nvcc, or the NVRTC library that torch's CUDA wheels bring.

source.cu --nvcc -ptx--> .ptx --nvcc -cubin--> .cubin
source.cu --NVRTC--> .ptx and .cubin
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from k3rewrite.emit.compiler import Compiled, Missing, place_of, refusal, run_tool
from k3rewrite.ops.kernel import HipUnit
from k3rewrite.targets.target import Target


def _options(unit: HipUnit, arch: str) -> tuple[str, ...]:
    return (f"--gpu-architecture={arch}", "-std=c++17", f"--fmad={'true' if unit.fp_fusion else 'false'}")


@dataclass(frozen=True)
class NvccCompiler:
    identity: str
    path: str

    def compile(self, unit: HipUnit, target: Target, text: str) -> Compiled:
        place = place_of(unit, target)
        with tempfile.TemporaryDirectory(prefix="k3rewrite-") as name:
            folder = Path(name)
            (folder / "kernel.cu").write_text(text, encoding="utf-8")
            options = _options(unit, target.arch)
            run_tool((self.path, *options, "-O3", "-ptx", "-o", "kernel.ptx", "kernel.cu"), folder, place)
            run_tool((self.path, options[0], "-cubin", "-o", "kernel.cubin", "kernel.ptx"), folder, place)
            return Compiled(
                assembly=(folder / "kernel.ptx").read_text(encoding="utf-8"),
                object=(folder / "kernel.cubin").read_bytes(),
                dynamic_lds=unit.dynamic_lds,
            )


@dataclass(frozen=True)
class NvrtcCompiler:
    identity: str
    path: str

    def compile(self, unit: HipUnit, target: Target, text: str) -> Compiled:
        place = place_of(unit, target)
        library = ctypes.CDLL(self.path)
        program = ctypes.c_void_p()
        created = library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
        if created != 0:
            raise refusal(f"NVRTC cannot create a program (status {created})", place)
        try:
            options = [option.encode() for option in _options(unit, target.arch)]
            array = (ctypes.c_char_p * len(options))(*options)
            if status := library.nvrtcCompileProgram(program, len(options), array):
                log = _nvrtc_read(library, program, "ProgramLog").rstrip(b"\0").decode("utf-8", "replace")
                raise refusal(log.strip() or f"NVRTC status {status}", place)
            ptx = _nvrtc_read(library, program, "PTX").rstrip(b"\0").decode("utf-8")
            return Compiled(ptx, _nvrtc_read(library, program, "CUBIN"), dynamic_lds=unit.dynamic_lds)
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc_read(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    """One result of a program: the pair nvrtcGet<what>Size, nvrtcGet<what>."""
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


@functools.cache
def find() -> NvccCompiler | NvrtcCompiler | Missing:
    """nvcc on the PATH, else NVRTC among the installed wheels."""
    if nvcc := shutil.which("nvcc"):
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
        if version := re.search(r"\bV(\d+\.\d+\.\d+)", done.stdout):
            return NvccCompiler(f"nvcc {version[1]}", nvcc)
    if library := _nvrtc_path():
        try:
            nvrtc = ctypes.CDLL(library)
        except OSError as error:
            return Missing(f"NVRTC cannot be loaded: {error}")
        major, minor = ctypes.c_int(), ctypes.c_int()
        nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return NvrtcCompiler(f"nvrtc {major.value}.{minor.value}", library)
    return Missing(
        "HIP C++ for NVIDIA needs nvcc on the PATH or the NVRTC library, which a CUDA build of torch and the extra "
        "'cuda' of this package bring"
    )


def _nvrtc_path() -> str | None:
    """libnvrtc.so of an installed `nvidia-cuda-nvrtc` wheel; the newest if there are several."""
    found: list[Path] = []
    for entry in sys.path:
        root = Path(entry) / "nvidia"
        if root.is_dir():
            found += [
                path for path in root.glob("*/lib/libnvrtc.so.*") if re.fullmatch(r"libnvrtc\.so\.\d+", path.name)
            ]
    newest = max(found, key=lambda path: (int(path.suffix[1:]), str(path)), default=None)
    return str(newest) if newest else None
