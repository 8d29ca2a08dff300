"""Sizes that the MXFP4 kernels for NVIDIA and their launches agree upon (`hip/mxfp4.h`)."""

from __future__ import annotations

from pathlib import Path

from k3rewrite.kernels.experts.formats import GROUP
from k3rewrite.kernels.experts.plan import Facts

FOLDER = Path(__file__).parents[1] / "hip"
TILE, SPAN = 16, 128
"""rows of a product, columns of a step"""
DIGITS = 80
"""bytes of a group of activations as digits"""
MAX_WIDTH = 1024
"""of an expert: a wave of `mxfp4_down` has a row's steps in registers, and up to here none of them spills"""
_WHOLE_WAVES = 8
"""groups that a wave prepares together"""


def prepared_groups(facts: Facts) -> int:
    """Groups of digits for which a prepared token has room: whole waves prepare them."""
    return -(-facts.inner // (_WHOLE_WAVES * GROUP)) * _WHOLE_WAVES
