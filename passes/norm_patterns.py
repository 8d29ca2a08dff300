"""The pieces that norms are spelled with, shared by the lifting passes.

squares(v)        pow(v, 2) | square(v) | v * v
inverse_root(s)   rsqrt(s) | reciprocal(sqrt(s)) | 1 / sqrt(s) | pow(s, -0.5)      (its root op is the anchor)
root(s)           sqrt(s) | pow(s, 0.5), for spellings that divide by it           (the root op is the anchor)
at_least(v)       clamp_min(v, eps) | clamp(v, min=eps)
over_last(f, v)   f(v, -1, keepdim=True), or without keepdim (then some view behind it puts the dimension back)
"""

from __future__ import annotations

import torch
from torch.fx import Node

from k3rewrite.patterns import LAST_DIM, OPERATORS, Anything, Match, Number, Pattern, call

ROOTS = OPERATORS["rsqrt"] | OPERATORS["sqrt"] | OPERATORS["pow"]


def is_root(node: Node) -> bool:
    """True for rsqrt, sqrt and the powers 1/2 and -1/2: the candidate sites of a norm."""
    return node.target not in OPERATORS["pow"] or node.args[1] in (-0.5, 0.5)


def is_plain_scaling(match: Match) -> bool:
    """x * rsqrt(...), as the ops are written: no quotient, no reciprocal of a root, no power."""
    return match["anchor"].target in OPERATORS["rsqrt"] and match["normed"].target in OPERATORS["mul"]


def is_narrow(dtype: torch.dtype) -> bool:
    """True for dtypes in which the roundings of single steps count (bf16, fp16)."""
    return dtype.itemsize < 4


def squares(value: Pattern) -> Pattern:
    return call("pow", value, 2) | call("square", value) | call("mul", value, value)


def over_last(reduction: str, value: Pattern, name: str | None = None) -> Pattern:
    return call(reduction, value, LAST_DIM, keepdim=Anything(), name=name)


def at_least(value: Pattern) -> Pattern:
    return call("clamp_min", value, Number("eps")) | call("clamp", value, Number("eps"))


def root(statistic: Pattern) -> Pattern:
    return call("sqrt", statistic, name="anchor") | call("pow", statistic, 0.5, name="anchor")


def inverse_root(statistic: Pattern) -> Pattern:
    reciprocal = call("reciprocal", root(statistic))
    return (
        call("rsqrt", statistic, name="anchor")
        | reciprocal
        | call("mul", reciprocal, 1)
        | call("pow", statistic, -0.5, name="anchor")
    )
