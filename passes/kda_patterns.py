"""A KDA layer behind its projections as models write it, and the ways to spell its parts.

    q, k, v    unbind of [.., 3, H, K]; split, by sizes or in even parts, and views of [.., 3 H K]
    decay      sigmoid(exp(A_log) * (f + dt_bias)) * bound; -exp(A_log) * softplus(f + dt_bias), with torch's softplus
               or as where(x > 20, x, log(1 + exp(x)))
    beta       sigmoid of b, before or after a cast

Convolution and recurrence are given: those of a token for `fuse_kda_decode`, of a window for `fuse_kda_verify`. Views
that keep the order of elements may stand anywhere: shapes are looked at by `kda_layer.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import k3rewrite.kernels  # noqa: F401  registers the ops that the patterns name
from k3rewrite.patterns import Anything, Cast, Item, Number, Pattern, Var, Views, call

aten, k3 = torch.ops.aten, torch.ops.k3
NORM_DTYPES = tuple(f"norm{i}" for i in range(5))
CONV_DTYPES = ("conv_compute", "conv_sum", "conv_out")


def layer_pattern(conv: Pattern, recurrence: Callable[[Pattern, Pattern, Pattern, Pattern, Pattern], Pattern]) -> Any:
    """From `conv`, whose first result is q, k and v, to the gated norm of what the first result of `recurrence`, of
    q, k, v, g and beta, reads out."""
    mixed = Views(Item(conv, 0), "parts")
    unbound = call(aten.unbind.int, mixed, Anything("dim"))
    split = call(aten.split_with_sizes.default, mixed, Anything("sizes"), Anything("dim")) | call(
        aten.split.Tensor, mixed, Anything("sizes"), Anything("dim")
    )

    def part(index: int) -> Pattern:
        return Item(unbound, index) | Views(Item(split, index), f"part{index}")

    def unit(index: int, name: str) -> Pattern:
        return call(
            k3.l2_norm.default, _widened(part(index), name), Number(f"{name}_eps"), Anything(f"{name}_inside"),
            Anything(f"{name}_compute"), Anything(f"{name}_out"),
        )  # fmt: skip

    read = recurrence(
        Views(call("mul", unit(0, "q"), Number("q_scale")) | call("div", unit(0, "q"), Number("q_divisor"))),
        Views(unit(1, "k")),
        _widened(part(2), "v"),
        Views(_DECAY, "g"),
        _widened(Views(call("sigmoid", Cast(Views(Var("b")), "b_dtype")), "beta"), "beta"),
    )
    return call(
        k3.gated_rms_norm.default, Views(Cast(Views(Item(read, 0), "read"), "step_out")), _weight("norm_weight"),
        Var("gate"), Number("norm_eps"), Anything("activation"), *map(Anything, NORM_DTYPES), Anything("out_dtype"),
        name="normed",
    )  # fmt: skip


def _widened(inner: Pattern, name: str) -> Pattern:
    """Behind a cast, or one that makes contiguous, or none."""
    return Views(Cast(inner, f"{name}_dtype") | call("cast", inner, open=True, name=f"{name}_made"))


def _weight(name: str) -> Pattern:
    return Cast(Views(Var(name)), f"{name}_dtype")


_RATE = call(aten.exp.default, Views(Cast(call("slice", Var("a_log"), 0, 0, Anything("heads")) | Views(Var("a_log")),
                                          "a_log_dtype")))  # fmt: skip
_MOVED = Views(call("add", Cast(Views(Var("f")), "f_dtype"), Views(_weight("dt_bias"))), "decay")
_EXP = call(aten.exp.default, _MOVED)
_SOFTPLUS = call(aten.softplus.default, _MOVED) | call(
    aten.where.self,
    call(aten.gt.Scalar, _MOVED, 20),
    _MOVED,
    call(aten.log.default, call("add", _EXP, 1), name="log") | call(aten.log1p.default, _EXP, name="log"),
)
_DECAY = (
    call("mul", call("sigmoid", call("mul", Views(_RATE, "rate"), _MOVED)), Number("bound"))
    | call("mul", Views(call("neg", Views(_RATE)), "rate"), _SOFTPLUS)
    | call("neg", call("mul", Views(_RATE, "rate"), _SOFTPLUS))
)
