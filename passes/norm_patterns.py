"""The pieces that norms are spelled with, shared by the lifting passes.

squares(v)        pow(v, 2) | square(v) | v * v
inverse_root(s)   rsqrt(s) | reciprocal(sqrt(s)) | 1 / sqrt(s) | pow(s, -0.5)      (its root op is the anchor)
"""

from __future__ import annotations

import torch
from torch.fx import Node

from k3rewrite.patterns import OPERATORS, Pattern, call

ROOTS = OPERATORS["rsqrt"] | OPERATORS["sqrt"] | OPERATORS["pow"]


def is_inverse_root(node: Node) -> bool:
    """True for rsqrt, sqrt and the power -1/2: the candidate sites of a norm."""
    return node.target not in OPERATORS["pow"] or node.args[1] == -0.5


def squares(value: Pattern) -> Pattern:
    return call("pow", value, 2) | call("square", value) | call("mul", value, value)


def root(statistic: Pattern) -> Pattern:
    """sqrt(statistic), for spellings that divide by it."""
    return call("sqrt", statistic, name="anchor")


def inverse_root(statistic: Pattern) -> Pattern:
    reciprocal = call("reciprocal", root(statistic))
    return (
        call("rsqrt", statistic, name="anchor")
        | reciprocal
        | call("mul", reciprocal, 1)
        | call("mul", reciprocal, 1.0)
        | call("pow", statistic, -0.5, name="anchor")
    )


def widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """True if every value of `narrow` is a value of `wide`."""
    return torch.promote_types(narrow, wide) == wide
