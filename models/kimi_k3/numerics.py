"""The two dtypes of the model: what is stored and passed on, and what is computed in.

Where the equations say "fp32", the model computes in `math_dtype(x.dtype)`: fp32 for a bf16 or fp32 model, fp64 for an
fp64 model, so that an fp64 copy of a model is its oracle, with no rounding below fp64 left in it.
"""

from __future__ import annotations

import torch


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms, softmax, gates, activations and recurrent state are computed."""
    return torch.promote_types(dtype, torch.float32)
