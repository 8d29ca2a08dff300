"""The decoder's state: one slot-indexed tensor per layer and kind, updated in place.

Slot 0 is the null slot: a row of a batch with slot <= 0 is padding, reads nothing and writes nothing.

A sequence owns one slot. During speculation with N-token windows it owns N: the recurrent state after window position
j goes to slot j of its row in the slot table, so that acceptance merely selects one; its conv window and its latent
cache stay in the first of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from k3rewrite._torch_private import mark_static_address
from k3rewrite.models.kimi_k3.config import KimiK3Config
from k3rewrite.models.kimi_k3.numerics import math_dtype
from k3rewrite.models.kimi_k3.parallel import TensorParallel


class KimiK3State(NamedTuple):
    """`conv` and `recurrent` have one tensor per KDA layer, `latent` one per MLA layer, in layer order.

    conv       [slots, 3 + speculative, 3 * H * K]   raw inputs of the short convolution, channels [q | k | v]
    recurrent  [slots, H, V, K]                      fp32 (fp64 in an fp64 model)
    latent     [slots, max_context, 576]             compressed latent | shared key dimensions
    """

    conv: tuple[Tensor, ...]
    recurrent: tuple[Tensor, ...]
    latent: tuple[Tensor, ...]

    @classmethod
    def zeros(
        cls,
        config: KimiK3Config,
        *,
        slots: int,
        max_context: int,
        speculative: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        parallel: TensorParallel | None = None,
    ) -> KimiK3State:
        """Empty state. `slots` counts the null slot; `speculative` is the number of draft tokens a window adds."""
        heads = (parallel or TensorParallel()).local(config.kda_num_heads, "kda_num_heads")
        size = config.kda_head_dim
        history = config.short_conv_kernel_size - 1 + speculative

        def pools(count: int, *shape: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
            return tuple(torch.zeros(slots, *shape, dtype=dtype, device=device) for _ in range(count))

        return cls(
            conv=pools(len(config.kda_layers), history, 3 * heads * size, dtype=dtype),
            recurrent=pools(len(config.kda_layers), heads, size, size, dtype=math_dtype(dtype)),
            latent=pools(len(config.full_attn_layers), max_context, config.latent_size, dtype=dtype),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """All pools, in the order conv, recurrent, latent."""
        return (*self.conv, *self.recurrent, *self.latent)

    def clone(self) -> KimiK3State:
        return KimiK3State(*(tuple(t.clone() for t in kind) for kind in self))

    def double(self) -> KimiK3State:
        """An fp64 copy with the same values: the state of an fp64 twin."""
        return KimiK3State(*(tuple(t.to(torch.float64, copy=True) for t in kind) for kind in self))

    def mark_static(self) -> KimiK3State:
        """Tell the compiler that these addresses never change, so that a captured graph may use them as they are."""
        for tensor in self.tensors():
            mark_static_address(tensor)
        return self


def leave_speculation(state: KimiK3State, slots: Tensor, accepted: Tensor, *, history: int = 3) -> None:
    """Make the accepted column of a verify window the state from which a plain step starts, in place.

    `slots` `[B, N]` is the window's slot table, `accepted` `[B]` in 1..N the number of its tokens that are committed,
    `history` the inputs that the short convolution looks back on. Afterwards each sequence lives in slot `slots[:, 0]`
    alone. Null rows are skipped. To be called between a verify step and a plain one, outside a captured graph.
    """
    rows = slots[:, 0] > 0
    table, offset = slots[rows], accepted[rows] - 1
    first, chosen = table[:, 0], table.gather(1, offset.unsqueeze(1)).squeeze(1)
    columns = offset.unsqueeze(1) + torch.arange(history, device=slots.device)
    for pool in state.recurrent:
        pool[first] = pool[chosen]
    for pool in state.conv:
        pool[first, :history] = pool[first.unsqueeze(1), columns]
