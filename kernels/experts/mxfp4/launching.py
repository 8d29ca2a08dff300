"""What the launches of every layout share: kernels loaded once for each device, and the memory between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from k3rewrite.kernels.devices import loaded_function
from k3rewrite.kernels.experts.formats import GROUP
from k3rewrite.kernels.experts.mxfp4.sizes import DIGITS, prepared_groups
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.ops.kernel import HipUnit


@dataclass(frozen=True)
class Room:
    """Of one call: ids and routing weights in one piece, the result, and what one launch leaves for the next."""

    ids: Tensor
    weights: Tensor
    out: Tensor
    prepared: Tensor
    """digits of the tokens"""
    hidden: Tensor
    """digits of each route's intermediate"""

    @classmethod
    def of(cls, named: Mapping[str, Any], facts: Facts) -> Room:
        x, ids = named["x"], named["ids"].contiguous()
        tokens, blocks = x.shape[0], facts.width // GROUP
        return cls(
            ids,
            named["weights"].contiguous(),
            x.new_empty((tokens, facts.outer)),
            x.new_empty((tokens, prepared_groups(facts), DIGITS), dtype=torch.uint8),
            x.new_empty((ids.numel(), blocks, DIGITS), dtype=torch.uint8),
        )

    @property
    def gate_up_grid(self) -> tuple[int, int]:
        """A workgroup for each route and scale group of its intermediate."""
        return self.hidden.shape[0], self.hidden.shape[1]


class _Layout(Protocol):
    def units(self, facts: Facts) -> list[HipUnit]: ...


@cache
def launches(facts: Facts, layout: _Layout, device: torch.device) -> tuple[Callable[..., None], ...]:
    """Those of `layout.units(facts)`, on `device`, the current one. Each is launched before the one before it ends, and
    waits for it inside."""
    units = layout.units(facts)
    return tuple(partial(loaded_function(unit), dynamic_lds=unit.dynamic_lds, dependent=True) for unit in units)
