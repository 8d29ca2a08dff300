"""One token of a KDA layer as models write it: what `fuse_kda_decode` looks for, and the ways to spell its parts.

    q, k, v    unbind of [.., 3, H, K]; split and views of [.., 3 H K]
    decay      sigmoid(exp(A_log) * (f + dt_bias)) * bound; -exp(A_log) * softplus(f + dt_bias), with torch's softplus
               or as where(x > 20, x, log(1 + exp(x)))
    beta       sigmoid of b, before or after a cast

Views that keep the order of elements may stand anywhere: shapes are looked at by the rule.
"""

from __future__ import annotations

from typing import Any

import torch

import k3rewrite.kernels  # noqa: F401  registers the ops that the patterns name
from k3rewrite.patterns import Anything, Cast, Item, Number, Pattern, Var, Views, call

aten, k3 = torch.ops.aten, torch.ops.k3
NORM_DTYPES = tuple(f"norm{i}" for i in range(5))

_CONV = call(
    k3.short_conv.default, Var("qkv"), Var("conv_weight"), Var("conv_state"), Anything("slots"), Anything("null_slot"),
    Number("columns"), Anything("channels_last"), Anything("silu"), Anything("conv_compute"), Anything("conv_sum"),
    Anything("conv_out"), name="conv",
)  # fmt: skip
_MIXED = Views(Item(_CONV, 0), "parts")
_UNBOUND = call(aten.unbind.int, _MIXED, Anything("dim"))
_SPLIT = call(aten.split_with_sizes.default, _MIXED, Anything("sizes"), Anything("dim"))


def _part(index: int) -> Pattern:
    """q, k or v of what was convolved."""
    return Item(_UNBOUND, index) | Views(Item(_SPLIT, index), f"part{index}")


def _widened(inner: Pattern, name: str) -> Pattern:
    """Behind a cast, or one that makes contiguous, or none."""
    return Views(Cast(inner, f"{name}_dtype") | call("cast", inner, open=True, name=f"{name}_made"))


def _unit(index: int, name: str) -> Pattern:
    return call(
        k3.l2_norm.default, _widened(_part(index), name), Number(f"{name}_eps"), Anything(f"{name}_inside"),
        Anything(f"{name}_compute"), Anything(f"{name}_out"),
    )  # fmt: skip


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
_STEP = call(
    k3.kda_step.default,
    Views(call("mul", _unit(0, "q"), Number("q_scale")) | call("div", _unit(0, "q"), Number("q_divisor"))),
    Views(_unit(1, "k")),
    _widened(_part(2), "v"), Views(_DECAY, "g"),
    _widened(Views(call("sigmoid", Cast(Views(Var("b")), "b_dtype"))), "beta"), Var("state"), Anything("slots"),
    Anything("null_slot"), Anything("keys_last"), name="anchor",
)  # fmt: skip
KDA_TOKEN: Any = call(
    k3.gated_rms_norm.default, Views(Cast(Views(Item(_STEP, 0)), "step_out")), _weight("norm_weight"), Var("gate"),
    Number("norm_eps"), Anything("activation"), *map(Anything, NORM_DTYPES), Anything("out_dtype"), name="normed",
)  # fmt: skip
