"""Small models, states and phase runners that the decoder's tests share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3rewrite.models.kimi_k3 import (
    DecodeInputs,
    KimiK3,
    KimiK3Config,
    KimiK3State,
    PrefillInputs,
    VerifyInputs,
    initialise,
)
from k3rewrite.models.kimi_k3.router import Router


def random_model(config: KimiK3Config, dtype: torch.dtype = torch.float64, seed: int = 0) -> KimiK3:
    return initialise(KimiK3(config, dtype=dtype), seed)


def empty_state(model: KimiK3, *, slots: int, max_context: int, speculative: int = 0) -> KimiK3State:
    return KimiK3State.zeros(
        model.config, slots=slots, max_context=max_context, speculative=speculative, dtype=model.dtype
    )


def random_tokens(model: KimiK3, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def prefill(
    model: KimiK3,
    state: KimiK3State,
    tokens: Tensor,
    slots: Sequence[int],
    starts: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Logits `[B, L, vocab]` of a (chunk of a) prompt."""
    batch, width = tokens.shape
    return model(
        PrefillInputs(
            tokens,
            torch.tensor(slots),
            torch.tensor(starts if starts is not None else [0] * batch),
            torch.tensor(lengths if lengths is not None else [width] * batch),
        ),
        state,
    )


def decode(model: KimiK3, state: KimiK3State, tokens: Tensor, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Logits `[B, vocab]` of one step; tokens `[B]`."""
    return model(DecodeInputs(tokens, torch.tensor(slots), torch.tensor(positions)), state)


def decode_all(model: KimiK3, state: KimiK3State, tokens: Tensor, slots: Sequence[int], start: int = 0) -> Tensor:
    """Logits `[B, L, vocab]` of tokens `[B, L]`, one step at a time."""
    steps = range(tokens.shape[1])
    return torch.stack([decode(model, state, tokens[:, i], slots, [start + i] * len(slots)) for i in steps], dim=1)


def verify(
    model: KimiK3, state: KimiK3State, tokens: Tensor, table: Tensor, accepted: Sequence[int], positions: Sequence[int]
) -> Tensor:
    """Logits `[B, N, vocab]` of one window."""
    return model(VerifyInputs(tokens, table, torch.tensor(accepted), torch.tensor(positions)), state)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """RMS of the difference over RMS of the fp64 reference."""
    difference = value.double() - reference.double()
    return float(difference.pow(2).mean().sqrt() / reference.double().pow(2).mean().sqrt())


def with_routes_of(model: KimiK3, twin: KimiK3) -> None:
    """Make `twin` select, at its next step, the experts that `model` selects at its own (with the twin's weights).

    A bf16 model and its fp64 twin disagree on near ties; the outputs then differ by a whole expert, which is no
    rounding error. With the routes forced, what is left is rounding.
    """
    routes: dict[str, Tensor] = {}
    twins = dict(twin.named_modules())
    for name, router in model.named_modules():
        if isinstance(router, Router):

            def record(
                _module: Router, _inputs: tuple[Tensor], result: tuple[Tensor, Tensor], name: str = name
            ) -> None:
                routes[name] = result[1]

            def replay(
                module: Router, inputs: tuple[Tensor], _result: tuple[Tensor, Tensor], name: str = name
            ) -> tuple[Tensor, Tensor]:
                return module.weigh(module.scores(inputs[0]), routes[name]), routes[name]

            router.register_forward_hook(record)
            twins[name].register_forward_hook(replay)
