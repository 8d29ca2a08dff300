"""What the kernels in HIP C++ share: which calls are theirs, and the macros that fix one.

They take few tokens, at addresses that vectors of 16 bytes can be read from. How many tokens there are and where
tensors lie is known when a call is made, so a call that is not theirs is handed to the Triton kernels then.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.experts import launch
from k3rewrite.kernels.experts.op import OP
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.kernels.experts.schedule import expected_hits
from k3rewrite.ops.runs import hand_over
from k3rewrite.targets import Target

_ROWS_TOGETHER = 8
"""rows of a matrix that a workgroup reads"""
_FAR = 1.12
"""routes an expert up to which a second read may come from memory again"""
_NAMES = tuple(inspect.signature(OP.reference).parameters)


def named_arguments(*arguments: Any, **options: Any) -> dict[str, Any]:
    """The op's arguments by name."""
    return dict(zip(_NAMES, arguments, strict=False)) | options


@dataclass(frozen=True)
class Few:
    """How many tokens are few: a workgroup reads for one route, so an expert that several name is read again for each.

    The second read finds the rows in the L2, as all routes read the same rows at about the same time. It costs time
    all the same from `share_from` routes an expert on, counted over the experts that can be expected to be hit; and it
    comes from memory if more than `near_bytes` lie between the two, the rows that one workgroup of each route reads.
    """

    share_from: float
    near_bytes: float = math.inf

    def takes(self, facts: Facts, tokens: int) -> bool:
        routes = tokens * facts.top_k
        hits = expected_hits(routes, facts.experts)
        far = routes * 2 * _ROWS_TOGETHER * 2 * facts.inner > self.near_bytes
        return routes <= hits * (min(self.share_from, _FAR) if far else self.share_from)

    def objection(self, arguments: Mapping[str, Any], target: Target) -> str | None:
        """To a number of tokens that is known when a graph is compiled."""
        tokens = arguments["x"].shape[0]
        facts = Facts.of(arguments, target.vendor == "nvidia")
        if isinstance(tokens, int) and not self.takes(facts, tokens):
            return f"for few tokens; {tokens} meet at experts"
        return None


def handed_over(named: Mapping[str, Any], facts: Facts, few: Few, aligned: Mapping[str, int]) -> Tensor | None:
    """The result of the Triton kernels for a call that is not for these ones, else None. `aligned`: the bytes of which
    the address of a tensor must be a multiple."""
    x: Tensor = named["x"]
    odd = any(named[name].data_ptr() % step for name, step in aligned.items())
    odd |= x.stride(1) != 1 or (x.shape[0] > 1 and x.stride(0) * x.element_size() % aligned["x"] != 0)
    if not odd and x.shape[0] and few.takes(facts, x.shape[0]):
        return None
    hand_over("triton")
    return launch.experts(**named)


SHARES = {torch.float32: "float", torch.bfloat16: "bf16"}
"""dtypes of routing weights that are read"""


def dtype_objection(arguments: Mapping[str, Any]) -> str | None:
    """To the dtypes of what is handed in and out beside the experts."""
    if arguments["out_dtype"] != torch.bfloat16:
        return "writes bfloat16"
    if (dtype := arguments["weights"].dtype) not in SHARES:
        return f"reads routing weights in float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    return None


def defines(prefix: str, facts: Facts, **values: int) -> dict[str, str]:
    """Macros with what both sources need to know of a call, and `values`."""
    every = {
        "INNER": facts.inner,
        "WIDTH": facts.width,
        "OUTER": facts.outer,
        "TOP_K": facts.top_k,
        "IDS": "i64" if facts.ids == torch.int64 else "i32",
        "SHARES": SHARES[facts.shares],
        "SITU": int(facts.activation == "situ"),
        "LINEAR": int(facts.linear),
        "PRODUCT_BF16": int(facts.product == torch.bfloat16),
        "COMPUTE_BF16": int(facts.compute == torch.bfloat16),
        "ROUTE_BF16": int(facts.route == torch.bfloat16),
        "COMBINE_BF16": int(facts.combine == torch.bfloat16),
        "DEPENDENT": int(facts.nvidia),
        **values,
    }
    return {f"{prefix}_{name}": str(value) for name, value in every.items()}
