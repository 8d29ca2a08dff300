"""Runs HIP kernels on the CPU: the source compiled by the host's C++ compiler against `emulation/`, threads as fibers.

    function = emulated(unit, wave_size=32)      # instead of k3rewrite.kernels.devices.loaded_function
    function(grid=(4, 2), threads=128, arguments=[x, 3, 1.0, out])

    with emulating(hip_kernel, folder, 64):  # every launch of a module
        hip_kernel.kda_decode(**call)

What a GPU does differently is not seen: registers, rounding of its fast functions, races between waves that no barrier
orders but that happen to be run in order here. Seen are indices, masks, the order of asynchronous copies, and what is
handed over.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from k3rewrite.emit.source import include_folder
from k3rewrite.ops.kernel import HipUnit

COMPILER = shutil.which("g++")
EMULATION = Path(__file__).parent / "emulation"
FLAGS = ("-std=c++17", "-Og", "-ffp-contract=off", "-fPIC", "-w")
"""It is the compiler that takes time, more without any optimisation than with a little, and not the kernels."""
LOOKS = ("right", "mixed", "wrong")
"""what a kernel sees of its slots while the one before it still runs: what will be there, or not"""
_DRIVER = """
#include "emulator.h"
#include "portability.h"
#include "{source}"
extern "C" int k3_emulate(int gx, int gy, int gz, int threads, int looks, void** arguments) {{
    k3_emulator::looks = looks;
    return k3_emulator::run(gx, gy, gz, threads, K3_EMULATED_WAVE, k3_emulator::bound(&{symbol}, arguments));
}}
"""


@contextlib.contextmanager
def emulating(module: Any, folder: Path, wave_size: int, looks: str = "mixed") -> Iterator[None]:
    """Calls of `module`, a kernel's `hip_kernel.py`, run here, as on gfx950 where waves are of 64 lanes. `looks`: see
    `LOOKS`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "loaded_function", lambda unit: emulated(unit, folder, wave_size, looks))
        patch.setattr(module, "device_facts", lambda device: ("gfx950", 256))
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(torch.version, "hip", "7.0" if wave_size == 64 else None)
        module._function.cache_clear()
        try:
            yield
        finally:
            module._function.cache_clear()


def emulated(unit: HipUnit, folder: Path, wave_size: int = 32, looks: str = "mixed") -> Callable[..., None]:
    """The kernel of a unit as a function of grid, threads and arguments; compiled in `folder`."""
    macros = [f"-D{name}={value}" for name, value in unit.defines.items()]
    flags = [*FLAGS, "-shared", *macros, f"-DK3_EMULATED_WAVE={wave_size}"]
    key = hashlib.sha256(repr((flags, unit.symbol)).encode()).hexdigest()[:16]
    driver, library = folder / f"{key}.cpp", folder / f"{key}.so"
    if not library.exists():
        precompiled = folder / "emulator.h.gch"
        if not precompiled.exists():
            _compile(*FLAGS, "-x", "c++-header", "-o", precompiled, EMULATION / "emulator.h")
        driver.write_text(_DRIVER.format(source=unit.path.name, symbol=unit.symbol))
        folders = (EMULATION, unit.path.parent, include_folder())
        _compile(*flags, *(f"-I{each}" for each in folders), "-o", library, driver)
    loaded = ctypes.CDLL(str(library))

    def launch(
        *, grid: Sequence[int], threads: int, arguments: Sequence[torch.Tensor | int | float], **options: Any
    ) -> None:
        if 0 in grid:
            return
        values = [_argument(value) for value in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stuck = loaded.k3_emulate(*[*grid, 1, 1][:3], threads, LOOKS.index(looks), pointers)
        assert not stuck, f"{unit.symbol}: threads wait for one another in different places"

    return launch


def _compile(*arguments: str | Path) -> None:
    assert COMPILER is not None
    done = subprocess.run([COMPILER, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def _argument(value: torch.Tensor | int | float) -> Any:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_int(value) if isinstance(value, int) else ctypes.c_float(value)
