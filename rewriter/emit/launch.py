"""Running an emitted HIP object on the device of this machine, without a vendor's runtime headers.

    function = load_function(emitted.object.read_bytes(), emitted.symbol)
    function(grid=(rows,), threads=256, arguments=(x, out, 7168))

Triton kernels need none of this: Triton launches its own. The drivers of both vendors take the same calls under two
names (`cuLaunchKernel`, `hipModuleLaunchKernel`), so this is one small module for both.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from k3rewrite.errors import EmitError, UnsupportedError

_CUDA_LIBRARIES = ("libcuda.so.1",)
_HIP_LIBRARIES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")
_CUDA = ("cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel")
_HIP = ("hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel")
_MAX_DYNAMIC_SHARED = 8
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h: an identifier and a union of 64 bytes, of which the first integer is used here."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h: grid, block, dynamic shared memory, stream, attributes."""

    _fields_ = (
        ("dimensions", ctypes.c_uint * 6),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


class DeviceFunction:
    """One kernel of a loaded object, on the device that was current when it was loaded."""

    def __init__(self, library: ctypes.CDLL, names: tuple[str, str, str], handle: ctypes.c_void_p, symbol: str) -> None:
        self._library, self._names, self._handle, self._symbol = library, names, handle, symbol

    def __call__(
        self,
        *,
        grid: Sequence[int],
        threads: int,
        arguments: Sequence[torch.Tensor | int | float],
        dynamic_lds: int = 0,
        dependent: bool = False,
    ) -> None:
        """Launch on torch's current stream; safe inside graph capture.

        `dependent` (CUDA only): the launch may overlap the end of the kernel before it (programmatic dependent launch);
        the kernel must wait with `griddepcontrol.wait` before it touches memory that an earlier kernel writes or reads;
        before that it may prefetch it, and look at numbers (`ld.relaxed`) that it reads again behind the wait.

        A tensor is passed as its address, an int as 32 bits, a float as a 32-bit float, as the kernel must declare
        them. `grid`: one to three numbers of workgroups; nothing is launched if one of them is 0.
        """
        if 0 in grid:
            return
        values = [_argument(value) for value in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        if dynamic_lds and self._names == _CUDA:  # the limit before is for it and what the kernel declares together
            self._call("cuFuncSetAttribute", self._handle, _MAX_DYNAMIC_SHARED, dynamic_lds)
        blocks = [*grid, 1, 1][:3]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if dependent and self._names == _CUDA:
            attribute = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1, b"")
            dimensions = (ctypes.c_uint * 6)(*blocks, threads, 1, 1)
            config = _LaunchConfig(dimensions, dynamic_lds, stream, ctypes.pointer(attribute), 1)
            self._call("cuLaunchKernelEx", ctypes.byref(config), self._handle, pointers, None)
            return
        self._call(self._names[2], self._handle, *blocks, threads, 1, 1, dynamic_lds, stream, pointers, None)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise EmitError(
                f"{name} failed with status {status}",
                place=f"kernel {self._symbol}",
                remedy="check grid, threads, LDS and that the object is for this device",
            )


def load_function(content: bytes, symbol: str) -> DeviceFunction:
    """Load a .cubin or .hsaco on the current device.

    `EmitError` if the driver refuses it, `UnsupportedError` if there is no GPU.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "there is no GPU to load a kernel on", place=f"kernel {symbol}", remedy="run the reference"
        )
    torch.cuda.current_stream().synchronize()  # makes torch's context the current one
    names, libraries = (_HIP, _HIP_LIBRARIES) if torch.version.hip else (_CUDA, _CUDA_LIBRARIES)
    module, handle = ctypes.c_void_p(), ctypes.c_void_p()
    function = DeviceFunction(_driver(libraries, symbol), names, handle, symbol)
    function._call(names[0], ctypes.byref(module), content)
    function._call(names[1], ctypes.byref(handle), module, symbol.encode())
    return function


def _driver(names: Sequence[str], symbol: str) -> ctypes.CDLL:
    """The vendor's driver library; torch has loaded it, so its name is enough."""
    for name in names:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise UnsupportedError(
        f"no driver library among {', '.join(names)}", place=f"kernel {symbol}", remedy="check the GPU driver"
    )


def _argument(value: torch.Tensor | int | float) -> Any:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, float):
        return ctypes.c_float(value)
    if not -(2**31) <= value < 2**31:
        raise UnsupportedError(f"{value} does not fit 32 bits", place="launch argument", remedy="pass a smaller number")
    return ctypes.c_int(value)
