"""The kernels of a layout, compiled and loaded once for each device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Protocol

import torch

from k3rewrite.kernels.devices import loaded_function
from k3rewrite.kernels.experts.plan import Facts
from k3rewrite.ops.kernel import HipUnit


class _Layout(Protocol):
    def units(self, facts: Facts) -> list[HipUnit]: ...


@cache
def launches(facts: Facts, layout: _Layout, device: torch.device) -> tuple[Callable[..., None], ...]:
    """Those of `layout.units(facts)`, on `device`, the current one. Each is launched before the one before it ends, and
    waits for it inside."""
    units = layout.units(facts)
    return tuple(partial(loaded_function(unit), dynamic_lds=unit.dynamic_lds, dependent=True) for unit in units)
