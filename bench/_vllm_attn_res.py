"""vLLM's AttnRes Triton kernels, loaded alone: its two files, with the few vLLM modules that they import replaced.

The files come from a vLLM wheel (0.33 has them) and are not part of this repository:

    unzip vllm-*.whl 'vllm/models/kimi_k3/*/ops/attn_res.py' -d .peers/vllm33
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl


class _Platform:
    """What the files ask of the platform. Like vLLM's own answers on Hopper."""

    @staticmethod
    def is_device_capability_family(family: int) -> bool:
        return torch.cuda.get_device_capability()[0] * 10 == family

    @staticmethod
    def is_arch_support_pdl() -> bool:
        return torch.cuda.get_device_capability() >= (9, 0)


def load(root: Path, vendor: str) -> Any:
    """`attn_res` of vllm/models/kimi_k3/<vendor>/ops/attn_res.py below `root`. `OSError` if the file is not there."""
    path = root / "vllm" / "models" / "kimi_k3" / vendor / "ops" / "attn_res.py"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there")
    utilities = "vllm.model_executor.layers.quantization.utils"
    replaced: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm._custom_ops": {},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.quantization": {},
        utilities: {},
        f"{utilities}.quant_utils": {"get_fp8_min_max": lambda: (-448.0, 448.0)},
    }
    for name, content in replaced.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    spec = importlib.util.spec_from_file_location(f"vllm_attn_res_{vendor}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.attn_res
