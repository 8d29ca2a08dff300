"""vLLM's fused_moe, loaded alone: its two Triton files, with the vLLM modules that they import replaced.

The files come from a vLLM wheel (0.26) and are not part of this repository: `fused_moe.py`, `moe_align_block_size.py`
and `configs/` of `vllm/model_executor/layers/fused_moe/`, and vLLM's compiled `_moe_C` extension, which sorts and sums.
Its activation is a kernel of a further extension; one Triton kernel stands in for it, as it is one kernel there too.
"""

from __future__ import annotations

import enum
import importlib.util
import lzma
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

PACKAGE = "vllm.model_executor.layers.fused_moe"


@triton.jit
def _silu_and_mul(x, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(x + row * 2 * WIDTH + column, mask=inside).to(tl.float32)
    up = tl.load(x + row * 2 * WIDTH + WIDTH + column, mask=inside).to(tl.float32)
    tl.store(out + row * WIDTH + column, gate * tl.sigmoid(gate) * up, mask=inside)


def _activate(activation: Any, out: torch.Tensor, x: torch.Tensor) -> None:
    width = out.shape[-1]
    _silu_and_mul[(out.shape[0], triton.cdiv(width, 512))](x, out, width, 512)


class _Activation(enum.Enum):
    SILU = "silu"

    @classmethod
    def from_str(cls, name: str) -> _Activation:
        return cls(name)


class _Quiet:
    """A logger that says nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: None


class _Platform:
    """What the files ask of the platform: CUDA, and nothing special."""

    def is_rocm(self) -> bool:
        return False

    def is_cuda(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: False


class _Modular:
    @staticmethod
    def adjust_N_for_activation(width: int, activation: Any) -> int:
        return width // 2


def load(root: Path, device_name: str = "NVIDIA_H200") -> Any:
    """The module `fused_moe` below `root/vllm26`, with the extension `root/moe_C.so.xz`. `OSError` if one is not there.

    `device_name` is what vLLM's tuned configurations for a device are called by.
    """
    base = root / "vllm26" / Path(*PACKAGE.split("."))
    packed = root / "moe_C.so.xz"
    for path in (base / "fused_moe.py", packed):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not there")
    with tempfile.NamedTemporaryFile(suffix=".so", delete=False) as library:
        library.write(lzma.decompress(packed.read_bytes()))
    torch.ops.load_library(library.name)
    compiled = torch.ops._moe_C
    for name, content in _replaced(device_name, compiled).items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        module.__path__ = []  # type: ignore[attr-defined]
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    sys.modules[PACKAGE].get_config = lambda: None  # type: ignore[attr-defined]
    for name in ("moe_align_block_size", "fused_moe"):
        spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", base / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    module.apply_moe_activation = _activate  # type: ignore[attr-defined]
    return module


def _replaced(device_name: str, compiled: Any) -> dict[str, dict[str, Any]]:
    """Module name -> what is imported from it."""
    return {
        "vllm": {},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        PACKAGE: {},
        "vllm.utils": {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False, "VLLM_TUNED_CONFIG_FOLDER": None},
        "vllm.logger": {"init_logger": lambda name: _Quiet()},
        f"{PACKAGE}.activation": {"MoEActivation": _Activation, "apply_moe_activation": _activate},
        f"{PACKAGE}.modular_kernel": {"FusedMoEExpertsModular": _Modular},
        f"{PACKAGE}.config": {
            "FUSED_MOE_UNQUANTIZED_CONFIG": None,
            "FusedMoEQuantConfig": object,
            "_get_config_dtype_str": lambda **named: None,
        },
        f"{PACKAGE}.utils": {
            "enable_swap_ab": lambda *arguments: False,
            "moe_kernel_quantize_input": lambda A, A_scale=None, **named: (A, A_scale),
        },
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.utils.platform_utils": {"get_device_name_as_file_name": lambda: device_name},
        "vllm.utils.math_utils": {"round_up": lambda x, y: -(-x // y) * y, "cdiv": lambda a, b: -(-a // b)},
        "vllm.utils.torch_utils": {"direct_register_custom_op": lambda **named: None},
        "vllm._custom_ops": {
            "moe_sum": compiled.moe_sum,
            "moe_align_block_size": compiled.moe_align_block_size,
        },
    }
