"""vLLM's fused_moe, loaded alone: its two Triton files, with the vLLM modules that they import replaced.

The files come from a vLLM wheel (0.26) and are not part of this repository: `fused_moe.py`, `moe_align_block_size.py`
and `configs/` of `vllm/model_executor/layers/fused_moe/`, and vLLM's compiled `_moe_C` extension, which sorts and sums.
Its activation is a kernel of a further extension; one Triton kernel stands in for it, as it is one kernel there too.

vLLM runs both GEMMs with one configuration. `tuned` gives each its own, and `tune` finds them; the module stays as it
was loaded. BLOCK_SIZE_M is shared: both GEMMs go by one assignment of routes to blocks.
"""

from __future__ import annotations

import enum
import importlib.util
import inspect
import lzma
import math
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

PACKAGE = "vllm.model_executor.layers.fused_moe"

Config = dict[str, int]
"""BLOCK_SIZE_M, _N and _K, GROUP_SIZE_M, num_warps, num_stages"""
Impl = Callable[..., torch.Tensor]
"""takes what vLLM's `fused_experts_impl` takes"""
Call = Callable[[int], torch.Tensor]
"""runs on routing i"""

TILES_13 = (
    (32, 128, 4, 4), (32, 256, 4, 3), (64, 64, 4, 5), (64, 128, 4, 4), (64, 256, 8, 3), (128, 64, 4, 4),
    (128, 128, 8, 3), (64, 128, 8, 4),
)  # fmt: skip
TILES_2 = (
    (32, 128, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2), (64, 128, 4, 3), (128, 64, 4, 3), (128, 128, 8, 3),
    (32, 256, 4, 2), (64, 256, 8, 2),
)  # fmt: skip
"""BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps and num_stages for decode in bf16: gate|up sums over long rows, down over
short ones"""


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


def tuned(module: Any, config_13: Config, config_2: Config) -> Impl:
    """`fused_experts_impl` whose GEMMs run with `config_13` and `config_2`. `ValueError` if their BLOCK_SIZE_M differ.

    It is the same code with globals of its own, two of them replaced: what chooses a configuration, and what launches.
    """
    if config_13["BLOCK_SIZE_M"] != config_2["BLOCK_SIZE_M"]:
        raise ValueError("both GEMMs go by one assignment of routes to blocks: BLOCK_SIZE_M must be the same")
    dispatch = module.dispatch_fused_moe_kernel
    signature = inspect.signature(dispatch)

    def launch(*arguments: Any, **named: Any) -> None:
        bound = signature.bind(*arguments, **named)
        # routing weights are multiplied in by the second GEMM, unless a caller asks for them on the input
        bound.arguments["config"] = dict(config_2 if bound.arguments["mul_routed_weight"] else config_13)
        dispatch(*bound.args, **bound.kwargs)

    return _with_globals(
        module.fused_experts_impl,
        try_get_optimal_moe_config=lambda *arguments, **named: dict(config_13),
        dispatch_fused_moe_kernel=launch,
    )


def stock_config(module: Any, call: Callable[[Impl, int], torch.Tensor]) -> Config:
    """What vLLM chooses for `call(impl, 0)`, which is run."""
    found: list[Config] = []

    def choose(*arguments: Any, **named: Any) -> Config:
        found.append(module.try_get_optimal_moe_config(*arguments, **named))
        return found[-1]

    call(_with_globals(module.fused_experts_impl, try_get_optimal_moe_config=choose), 0)
    return dict(found[0])


def candidates(tiles: tuple[tuple[int, int, int, int], ...], rows: int) -> list[Config]:
    """Configurations of `TILES_13` or `TILES_2` with `rows` as BLOCK_SIZE_M."""
    return [
        {
            "BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": columns, "BLOCK_SIZE_K": depth, "GROUP_SIZE_M": 1,
            "num_warps": warps, "num_stages": stages,
        }
        for columns, depth, warps, stages in tiles
    ]  # fmt: skip


def tune(
    module: Any, call: Callable[[Impl, int], torch.Tensor], time_of: Callable[[Call], float]
) -> tuple[Config, Config, float]:
    """The fastest configurations of gate|up and of down, and their time; vLLM's own for both if nothing is faster.

    call: runs an `Impl` on routing i. time_of: microseconds of a call; may raise for one that cannot run or is wrong.
    Gate|up first with vLLM's own down, then down: at most 20 compilations.
    """

    def timed(config_13: Config, config_2: Config) -> float:
        impl = tuned(module, config_13, config_2)
        try:
            return time_of(lambda i: call(impl, i))
        except (RuntimeError, ValueError, TypeError, TritonError):
            return math.inf

    stock = stock_config(module, call)
    best = (timed(stock, stock), stock, stock)
    if stock["BLOCK_SIZE_M"] != 16:
        fewer = stock | {"BLOCK_SIZE_M": 16}
        best = _first([best, (timed(fewer, fewer), fewer, fewer)])
    rows = best[1]["BLOCK_SIZE_M"]
    for config in candidates(TILES_13, rows):
        best = _first([best, (timed(config, best[2]), config, best[2])])
    for config in candidates(TILES_2, rows):
        best = _first([best, (timed(best[1], config), best[1], config)])
    return best[1], best[2], best[0]


def _first(found: list[tuple[float, Config, Config]]) -> tuple[float, Config, Config]:
    return min(found, key=lambda entry: entry[0])


def _with_globals(function: Any, **replaced: Any) -> Impl:
    """`function` with some of its globals replaced, for itself only."""
    scope = function.__globals__ | replaced
    made = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
