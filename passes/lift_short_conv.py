"""Lift one token of a causal depthwise convolution, and the line of past inputs that it moves, to one op.

    window = torch.cat([line, x[:, None]], 1)                       -> y, line = k3::short_conv(x, w, line, None, ...)
    y      = F.silu((window.float().unfold(1, 4, 1) * w).sum(-1))[:, 0].to(x.dtype)
    line   = window[:, 1:]

    window = torch.cat([line, x], -1)                               -> the same, channels first
    y      = F.silu(F.conv1d(window, w[:, None], groups=C)[..., -1:])
    line   = window[..., 1:]

The line of the next token is part of it where the model keeps one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

import k3rewrite.kernels  # noqa: F401  registers the op that is built
from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.dtypes import widens
from k3rewrite.graph.layout import keeps_order
from k3rewrite.graph.shapes import same_size, same_sizes
from k3rewrite.patterns import (
    LAST_DIM,
    Anything,
    Builder,
    Cast,
    CounterExample,
    Example,
    ListOf,
    Match,
    Named,
    Number,
    Policy,
    Refusal,
    Rule,
    Var,
    Views,
    call,
)
from k3rewrite.patterns.bindings import Attempt
from k3rewrite.pipeline.pass_base import RulePass

aten = torch.ops.aten
_CONV = torch.ops.k3.short_conv.default

_WINDOW = call("cat", ListOf((Var("line"), Views(Var("x"), "token"))), Anything("dim"), name="window")


class _ShortConv(Rule):
    """What both spellings have in common: the window, the line that moves, the op that is built."""

    exposable = frozenset({"moved"})
    channels_last: ClassVar[bool]

    def matches(self, anchor: Node) -> tuple[Iterator[Match], Attempt]:
        found, attempt = super().matches(anchor)
        return (_with_moved(match) for match in found), attempt

    def check(self, match: Match) -> Refusal | None:
        line, token, dim = match.value("line"), match.value("token"), 1 if self.channels_last else 2
        if line.dim() != 3 or match["dim"] % 3 != dim:
            return Refusal(f"the window is put together along dimension {match['dim']}", match["window"])
        if not same_size(token.shape[dim], 1):
            return Refusal("the window ends in more than one token", match["token"])
        if line.dtype != token.dtype:
            return Refusal(f"the line is {line.dtype}, and the token {token.dtype}", match["token"])
        taps = match.value("weight").shape[-1]
        if not isinstance(line.shape[dim], int) or not isinstance(taps, int) or line.shape[dim] < taps - 1:
            return Refusal(f"a line of {line.shape[dim]} for {taps} taps", match["line"])
        return self.check_sum(match)

    def check_sum(self, match: Match) -> Refusal | None:
        raise NotImplementedError

    def rounding(self, match: Match) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """compute, sum and out dtype."""
        raise NotImplementedError

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        line, dim = match.value("line"), 1 if self.channels_last else 2
        x, weight, channels = match["x"], match["weight"], line.shape[3 - dim]
        if weight.meta["val"].dim() != 2:
            weight = builder.call(aten.squeeze.dim, weight, 1)
        while x.meta["val"].dim() != 2 and keeps_order(x):
            x = x.args[0]
        if not same_sizes(x.meta["val"].shape[1:], [channels]):
            x = builder.call(aten.view.default, match["x"], [-1, channels])
        node = builder.call(
            _CONV, x, weight, match["line"], None, False, line.shape[dim], self.channels_last,
            "activated" in match.bindings, *self.rounding(match),
        )  # fmt: skip
        new = {"root": builder.call(aten.unsqueeze.default, builder.item(node, 0), dim)}
        return new | ({"moved": builder.item(node, 1)} if exposed else {})


class LiftShortConv(_ShortConv):
    """The spelling by windows: products with the taps, and their sum."""

    name = "short_conv"
    policy = Policy.REASSOCIATES  # the sum of the taps
    anchors = frozenset({aten.unfold.default})
    channels_last = True
    _summed = call(
        "sum",
        call(
            "mul",
            call(aten.unfold.default, Cast(_WINDOW, "compute"), 1, Number("taps"), 1, name="anchor"),
            Var("weight"),
        ),
        LAST_DIM,
        name="summed",
    )
    pattern = Cast(call("silu", _summed, name="activated"), "out") | Cast(_summed, "out")
    reach = 6

    def check_sum(self, match: Match) -> Refusal | None:
        weight, line = match.value("weight"), match.value("line")
        if not same_sizes(weight.shape, (line.shape[2], match["taps"])):
            return Refusal("the taps are not a row for each channel", match["weight"])
        if match.value("summed").dtype != match["compute"] or not widens(line.dtype, match["compute"]):
            return Refusal(f"the window is read as {match['compute']}, and summed as {match.value('summed').dtype}")
        if not same_size(match.value("summed").shape[1], 1):
            return Refusal("more than one token comes out", match["summed"])
        return None

    def rounding(self, match: Match) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        return match["compute"], match["compute"], match["out"]

    def examples(self) -> Sequence[Example]:
        def without_activation(x: Tensor, w: Tensor, line: Tensor) -> Tensor:
            return (torch.cat([line, x.unsqueeze(1)], 1).float().unfold(1, 4, 1) * w).sum(-1)

        return (
            Example("with the line", _windows, _inputs),
            Example("without the line", lambda *arguments: _windows(*arguments)[0], _inputs),
            Example("without SiLU", without_activation, _inputs),
        )

    def counterexamples(self) -> Sequence[CounterExample]:
        def two_tokens(x: Tensor, w: Tensor, line: Tensor) -> Tensor:
            return F.silu(
                (torch.cat([line, x.view(-1, 1, 8).expand(-1, 2, -1)], 1).float().unfold(1, 4, 1) * w).sum(-1)
            )

        def window_kept(x: Tensor, w: Tensor, line: Tensor) -> tuple[Tensor, Tensor]:
            window = torch.cat([line, x.unsqueeze(1)], 1)
            return F.silu((window.float().unfold(1, 4, 1) * w).sum(-1)), window

        def one_row_of_taps(x: Tensor, w: Tensor, line: Tensor) -> Tensor:
            return F.silu((torch.cat([line, x.unsqueeze(1)], 1).float().unfold(1, 4, 1) * w[0]).sum(-1))

        return (
            CounterExample("two tokens", two_tokens, _inputs, "more than one token"),
            CounterExample("the window is kept whole", window_kept, _inputs, "is also used by"),
            CounterExample("one row of taps for all channels", one_row_of_taps, _inputs, "taps are not a row"),
        )


class LiftShortConv1d(_ShortConv):
    """The spelling by torch.nn.functional.conv1d, one group a channel."""

    name = "short_conv1d"
    policy = Policy.REASSOCIATES
    anchors = frozenset({aten.convolution.default})
    channels_last = False
    _convolved = call(
        aten.convolution.default, Named(Cast(_WINDOW, "compute"), "read"), Views(Var("weight"), "taps"),
        Anything("bias"), Anything("stride"), Anything("padding"), Anything("dilation"), Anything("transposed"),
        Anything("output_padding"), Anything("groups"), name="anchor",
    )  # fmt: skip
    _last = call("slice", _convolved, 2, Number("first"), Anything(), name="last") | Named(_convolved, "last")
    pattern = Cast(call("silu", _last, name="activated") | Named(_last, "plain"), "out")
    reach = 5

    def is_site(self, node: Node) -> bool:
        return node.args[0].meta["val"].dim() == 3  # type: ignore[union-attr]

    def check_sum(self, match: Match) -> Refusal | None:
        taps, line, convolved = match.value("taps"), match.value("line"), match.value("anchor")
        if match["bias"] is not None:
            return Refusal("the convolution has a bias", match["anchor"])
        if not widens(line.dtype, match["compute"]):
            return Refusal(f"a line of {line.dtype} is read as {match['compute']}", match["read"])
        plain = (match["stride"], match["padding"], match["dilation"]) == ([1], [0], [1]) and not match["transposed"]
        if not plain or not same_size(match["groups"], line.shape[1]):
            return Refusal("the convolution is strided, padded, dilated, transposed or mixes channels", match["anchor"])
        if not same_sizes(taps.shape, (line.shape[1], 1, match.value("weight").shape[-1])):
            return Refusal("the taps are not a row for each channel", match["taps"])
        if (weight := match.value("weight")).dim() != 2 and not same_sizes(weight.shape, taps.shape):
            return Refusal("the taps are no matrix of channels by taps", match["weight"])
        count, first = convolved.shape[2], match.get("first")
        start = 0 if first is None else first if not isinstance(first, int) or first >= 0 else count + first
        if not same_size(match.value("last").shape[2], 1) or not same_size(start, count - 1):
            return Refusal("what is read is not the last token alone", match["last"])
        return None

    def rounding(self, match: Match) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        dtype = match.value("anchor").dtype
        return (torch.float32 if dtype.itemsize < 4 else dtype), dtype, match["out"]

    def examples(self) -> Sequence[Example]:
        return (
            Example("as transformers updates its cache", _conv1d, _channels_first),
            Example("a line as long as needed", lambda x, w, line: _conv1d(x, w, line[..., 1:]), _channels_first),
        )

    def counterexamples(self) -> Sequence[CounterExample]:
        def first_token(x: Tensor, w: Tensor, line: Tensor) -> Tensor:
            return F.silu(F.conv1d(torch.cat([line, x], -1), w.unsqueeze(1), groups=8)[..., :1])

        def mixed(x: Tensor, w: Tensor, line: Tensor) -> Tensor:
            return F.silu(F.conv1d(torch.cat([line, x], -1), w.unsqueeze(1).expand(-1, 2, -1), groups=4)[..., -1:])

        def biased(x: Tensor, w: Tensor, line: Tensor) -> Tensor:
            return F.silu(F.conv1d(torch.cat([line, x], -1), w.unsqueeze(1), w[:, 0].contiguous(), groups=8)[..., -1:])

        return (
            CounterExample("the token before", first_token, _channels_first, "not the last token"),
            CounterExample("channels in pairs", mixed, _channels_first, "mixes channels"),
            CounterExample("a bias", biased, _channels_first, "has a bias"),
        )


def _with_moved(match: Match) -> Match:
    """With the line that the next token gets, if the model keeps it: the window without its oldest column, or what is
    copied from there into the line."""
    window, dim = match["window"], match["dim"]
    for user in dict.fromkeys((*window.users, *match.get("read", window).users)):
        if user.target is not aten.slice.Tensor or not isinstance(dim, int):
            continue
        arguments, value = bound_arguments(user), user.meta["val"]
        length, start = window.meta["val"].shape[dim], arguments["start"] or 0
        if not isinstance(start, int):
            continue
        at = start if start >= 0 else length + start
        along = arguments["dim"] % value.dim() == dim % value.dim()
        if along and arguments["step"] == 1 and same_size(at, 1) and same_size(value.shape[dim], length - 1):
            reading = list(user.users)
            copied = [u for u in reading if u.target is aten.copy.default and u.args[0] is match["line"]]
            moved = reading[0] if len(reading) == 1 and copied else user
            if moved.meta["val"].dtype == window.meta["val"].dtype:
                return Match(match.root, {**match.bindings, "moved": moved}, match.nodes | {user, moved})
    return match


# ------------------------------------------------------------------ examples


def _windows(x: Tensor, w: Tensor, line: Tensor) -> tuple[Tensor, Tensor]:
    window = torch.cat([line, x.unsqueeze(1)], 1)
    return F.silu((window.float().unfold(1, 4, 1) * w).sum(-1)).to(x.dtype).squeeze(1), window[:, 1:] + 0


def _conv1d(x: Tensor, w: Tensor, line: Tensor) -> tuple[Tensor, Tensor]:
    window = torch.cat([line, x], -1)
    return F.silu(F.conv1d(window, w.unsqueeze(1), groups=8)[:, :, -1:]), window[:, :, -line.shape[-1] :] + 0


def _inputs() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(3, 8, generator=generator), torch.randn(8, 4, generator=generator)
    return x.bfloat16(), w, torch.randn(3, 3, 8, generator=generator).bfloat16()


def _channels_first() -> tuple[Any, ...]:
    x, w, _ = _inputs()
    line = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    return x.unsqueeze(1).transpose(1, 2), w.bfloat16(), line


@dataclass(frozen=True)
class LiftShortConvPass(RulePass):
    """Lift one token of a causal depthwise convolution with its state to k3::short_conv."""

    name: ClassVar[str] = "lift_short_conv"
    provides: ClassVar[frozenset[str]] = frozenset({"short_conv"})

    def rules(self) -> tuple[Rule, ...]:
        return (LiftShortConv(), LiftShortConv1d())
