"""What a call costs by the bytes that it moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3rewrite.ops.vocabulary import Op
from k3rewrite.targets import Target


def moving_us(op: Op, arguments: Mapping[str, Any], target: Target) -> float:
    """Microseconds of the op's bytes at the bandwidth that the target reads with."""
    return op.cost(**arguments).bytes / target.read_bandwidth * 1e6
