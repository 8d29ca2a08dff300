"""What `merge_projections` must rewrite, and what it must leave alone, each with its reason: small modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import k3rewrite.kernels  # noqa: F401  registers the op that a module calls
from k3rewrite.patterns import CounterExample, Example

WIDTH = 32


class Layers(nn.Module):
    """Linear layers of the given sizes on one input; `forward` gives their results to `read`."""

    def __init__(self, read: Callable[..., Any], *rows: int, bias: bool | tuple[bool, ...] = False) -> None:
        super().__init__()
        self.read = read
        biases = (bias,) * len(rows) if isinstance(bias, bool) else bias
        self.weights = nn.ParameterList(_drawn(i, n, WIDTH) for i, n in enumerate(rows))
        self.biases = nn.ParameterList(
            _drawn(i, n) if b else None for i, (n, b) in enumerate(zip(rows, biases, strict=True))
        )

    def forward(self, x: Tensor) -> Any:
        return self.read(x, *(F.linear(x, w, b) for w, b in zip(self.weights, self.biases, strict=True)))


def _drawn(seed: int, *shape: int) -> nn.Parameter:
    """Of a generator of its own: a rule that is made leaves the numbers that the user draws alone."""
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), requires_grad=False)


def inputs() -> tuple[Tensor]:
    return (torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)),)


def tokens() -> tuple[Tensor]:
    return (torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1)),)


def total(x: Tensor, *results: Tensor) -> Tensor:
    """Readers that take each element where it lies."""
    return torch.stack([result.sum(-1) for result in results])


def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two heads of queries, one of keys and values."""
    q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (q, k, v))
    return F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q)).transpose(1, 2).flatten(2)


def conv_and_gates(x: Tensor, q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, g: Tensor) -> Tensor:
    """Kimi Delta Attention before its convolution: q, k and v are one, the others read by themselves."""
    mixed: Tensor = torch.cat([q, k, v], dim=-1).unflatten(-1, (3, 2, -1)).sum(1)
    return (mixed * g.unflatten(-1, (2, -1)).sigmoid()).sum(-1) + b[:, :2].sigmoid() + f.sum(-1, keepdim=True)


class Gated(nn.Module):
    """An MLP beside a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.latent = (_drawn(i, n, WIDTH) for i, n in enumerate((24, 24, 16)))
        self.down = _drawn(3, WIDTH, 24)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.k3.mlp(x, self.gate, self.up, self.down, "situ", 4.0, 25.0, torch.float32)
        return y.sum(-1) + F.linear(x, self.latent).sum(-1)


class Tied(Layers):
    def __init__(self) -> None:
        super().__init__(total, 16, 16)
        self.weights[1] = self.weights[0]


class Stored(nn.Module):
    """Weights that are used as they are stored, as GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = _drawn(0, WIDTH, 8), _drawn(1, WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return total(x, x @ self.a, x @ self.b)


class Router(nn.Module):
    """A router in fp64 beside a latent projection."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.latent = nn.Parameter(_drawn(0, 8, WIDTH).double(), False), _drawn(1, 8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.double(), self.router).sum(-1) + F.linear(x, self.latent).sum(-1)


def returned(x: Tensor, *results: Tensor) -> Any:
    return results


def as_one_row(x: Tensor, *results: Tensor) -> Tensor:
    return torch.stack([y.view(-1).sum() for y in results])


def given(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return total(x, F.linear(x, a), F.linear(x, b))


def weights_given() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return (*inputs(), *(torch.randn(8, WIDTH, generator=generator) for _ in range(2)))


def examples() -> tuple[Example, ...]:
    return (
        Example("two of one input", Layers(total, 16, 8), inputs),
        Example("attention", Layers(attention, 16, 8, 8), tokens),
        Example("biases", Layers(total, 16, 8, 3, bias=True), inputs),
        Example("some with a bias", Layers(total, 16, 8, 8, 12, bias=(True, False, True, False)), inputs, sites=2),
        Example("KDA", Layers(conv_and_gates, 32, 32, 32, 8, 3, 32), inputs),
        Example("gate, up and a latent", Gated(), inputs),
    )


def counterexamples() -> tuple[CounterExample, ...]:
    return (
        CounterExample("one weight twice", Tied(), inputs, "is that of other projections too"),
        CounterExample("weights as they are stored", Stored(), inputs, "not transposed"),
        CounterExample("weights that are given", given, weights_given, "no parameter or buffer"),
        CounterExample("another dtype", Router(), inputs, "reads it in float"),
        CounterExample("a bias and none", Layers(total, 8, 8, bias=(True, False)), inputs, "bias"),
        CounterExample("returned", Layers(returned, 8, 8), inputs, "it is returned"),
        CounterExample("read as one row", Layers(as_one_row, 8, 8), inputs, "view"),
    )
