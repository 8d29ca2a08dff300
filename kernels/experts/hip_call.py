"""What the kernels in HIP C++ share: which calls are theirs, and the macros that fix one.

They take few tokens, at addresses that vectors of 16 bytes can be read from. How many tokens there are and where
tensors lie is known when a call is made, so a call that is not theirs is handed to the Triton kernels then.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from k3rewrite.kernels.devices import device_facts
from k3rewrite.kernels.experts import launch
from k3rewrite.kernels.experts.op import OP
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.ops.runs import hand_over
from k3rewrite.targets import Target

_NAMES = tuple(inspect.signature(OP.reference).parameters)


def named_arguments(*arguments: Any, **options: Any) -> dict[str, Any]:
    """The op's arguments by name."""
    return dict(zip(_NAMES, arguments, strict=False)) | options


def too_many(arguments: Mapping[str, Any], target: Target) -> str | None:
    """The objection to a number of tokens that is known and for which the table has another path."""
    tokens = arguments["x"].shape[0]
    facts = Facts.of(arguments, target.vendor == "nvidia")
    if isinstance(tokens, int) and facts.schedule(target.arch, tokens).path != "routes":
        return f"for few tokens; {tokens} meet at experts"
    return None


def handed_over(named: Mapping[str, Any], facts: Facts, aligned: Mapping[str, int]) -> Tensor | None:
    """The result of the Triton kernels for a call that is not for these ones, else None. `aligned`: the bytes of which
    the address of a tensor must be a multiple."""
    x: Tensor = named["x"]
    odd = any(named[name].data_ptr() % step for name, step in aligned.items())
    odd |= x.stride(1) != 1 or x.stride(0) * x.element_size() % aligned["x"] != 0
    arch, _ = device_facts(x.device)
    if not odd and x.shape[0] and facts.schedule(arch, x.shape[0]).path == "routes":
        return None
    hand_over("triton")
    return launch.experts(**named)


def defines(prefix: str, facts: Facts, ids: torch.dtype, **values: int) -> dict[str, str]:
    """Macros with what both sources need to know of a call, and `values`."""
    every = {
        "INNER": facts.inner,
        "WIDTH": facts.width,
        "OUTER": facts.outer,
        "TOP_K": facts.top_k,
        "IDS": "i64" if ids == torch.int64 else "i32",
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
