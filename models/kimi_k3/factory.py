"""A ready model with inputs for one phase: what the command line, benchmarks and tests start from."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from k3rewrite.errors import ConfigError, did_you_mean
from k3rewrite.models.kimi_k3.config import KimiK3Config
from k3rewrite.models.kimi_k3.inputs import DecodeInputs, Inputs, PrefillInputs, VerifyInputs
from k3rewrite.models.kimi_k3.model import KimiK3
from k3rewrite.models.kimi_k3.random_init import initialise, initialise_state
from k3rewrite.models.kimi_k3.state import KimiK3State

Phase = Literal["decode", "verify", "prefill"]
DEFAULT_TOKENS = {"decode": 1, "verify": 4, "prefill": 128}


def build_kimi_k3(
    config: KimiK3Config,
    *,
    phase: Phase = "decode",
    batch: int = 2,
    tokens: int | None = None,
    context: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    group: Any = None,
    padding_rows: int = 0,
) -> tuple[KimiK3, tuple[Inputs, KimiK3State], dict[str, Any]]:
    """(module, args, kwargs) such that `module(*args, **kwargs)` runs one step.

    batch         sequences, of which the last `padding_rows` are padding (slot 0)
    tokens        tokens a sequence: 1 in decode, the window in verify (default 4), the prompt in prefill (default 128,
                  of which row 0 uses all and the others a random number)
    context       tokens already cached for every sequence (default 64; 0 in prefill)
    Slots are shuffled; in verify each sequence owns a random row of distinct slots and a random accepted count. Inside
    `FakeTensorMode` nothing is allocated and no value is drawn. Raises `ConfigError` for sizes that make no sense.
    """
    if phase not in DEFAULT_TOKENS:
        raise ConfigError(
            f"phase '{phase}', {did_you_mean(phase, DEFAULT_TOKENS)}",
            place="build_kimi_k3",
            remedy=f"give one of {', '.join(DEFAULT_TOKENS)}",
        )
    tokens = DEFAULT_TOKENS[phase] if tokens is None else tokens
    context = (0 if phase == "prefill" else 64) if context is None else context
    for name, value, least in (("batch", batch, 1), ("tokens", tokens, 1), ("context", context, 0)):
        if value < least:
            raise ConfigError(
                f"{name} is {value}, must be at least {least}", place="build_kimi_k3", remedy=f"raise {name}"
            )
    if phase == "decode" and tokens != 1:
        raise ConfigError("a decode step takes 1 token a sequence", place="build_kimi_k3", remedy="use phase 'verify'")
    if not 0 <= padding_rows <= batch:
        raise ConfigError(
            f"padding_rows is {padding_rows}, must be 0 to {batch}",
            place="build_kimi_k3",
            remedy="raise batch, which counts the padding rows as well, or lower padding_rows",
        )

    model = KimiK3(config, dtype=dtype, device=device, group=group).eval()
    columns = tokens if phase == "verify" else 1
    state = KimiK3State.zeros(
        config,
        slots=1 + batch * columns,
        max_context=context + tokens,
        speculative=columns - 1,
        dtype=dtype,
        device=device,
        parallel=model.parallel,
    )
    initialise(model, seed)
    initialise_state(state, model, context, seed)
    generator = torch.Generator().manual_seed(seed)
    inputs = _inputs(phase, config.vocab_size, batch, tokens, context, padding_rows, generator)
    return model, (type(inputs)(*(x.to(device) for x in inputs)), state), {}


def _inputs(
    phase: Phase, vocab: int, batch: int, tokens: int, context: int, padding_rows: int, generator: torch.Generator
) -> Inputs:
    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    real = (torch.arange(batch) < batch - padding_rows).long()
    columns = tokens if phase == "verify" else 1
    slots = (1 + torch.randperm(batch * columns, generator=generator)).view(batch, columns) * real.unsqueeze(1)
    positions = torch.full((batch,), context)
    if phase == "decode":
        return DecodeInputs(integers(0, vocab, batch), slots[:, 0], positions)
    ids = integers(0, vocab, batch, tokens)
    if phase == "verify":
        return VerifyInputs(ids, slots, integers(1, tokens + 1, batch), positions)
    lengths = torch.where(torch.arange(batch) == 0, tokens, integers(1, tokens + 1, batch))
    return PrefillInputs(ids, slots[:, 0], positions, lengths * real)
