"""Names of dtypes: in the signature of a Triton kernel, and in what a user reads.

NAMES[torch.bfloat16]      "bf16"        what kernels compute in
pointer(torch.int64)       "*i64"
text(torch.bfloat16)       "bfloat16"
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
)
_OTHERS = {
    torch.int32: "i32", torch.int64: "i64", torch.bool: "i1", torch.uint8: "u8", torch.float8_e4m3fn: "u8",
}  # fmt: skip


def pointer(dtype: torch.dtype) -> str:
    """As a Triton signature has it. KeyError for a dtype that no kernel reads."""
    return f"*{NAMES.get(dtype) or _OTHERS[dtype]}"


def text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
