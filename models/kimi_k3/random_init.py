"""Random weights and state that exercise the model as trained ones would.

A mild draw hides faults: decays near one hide an unstable inverse, small activations hide a wrong SiTU, equal depth
scores hide a wrong mix. So A_log = log U(1, 16) and dt_bias ~ N(0, 1) give decays from e^-5 to 1, gate and up
projections reach beyond SiTU's clips of 4 and 25, mixers prefer some sources, and the correction bias changes which
experts are selected.

Each tensor has its own seed, made of the given one and its name, so that a tensor does not depend on which others
there are. With tensor parallelism a split tensor's seed holds the rank as well: replicated tensors are equal on all
ranks, split ones differ.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from k3rewrite._torch_private import FakeTensor
from k3rewrite.models.kimi_k3.config import KimiK3Config
from k3rewrite.models.kimi_k3.model import KimiK3
from k3rewrite.models.kimi_k3.parallel import split_dimension
from k3rewrite.models.kimi_k3.state import KimiK3State

_GAIN = {  # standard deviation of a linear layer's output for an input of unit variance; 1 where nothing is said
    "gate_proj": 3.0,
    "up_proj": 10.0,
    "down_proj": 0.2,
    "gate": 1.5,
    "w13": 6.0,
    "w2": 0.4,
}
_NIBBLE_STD = 2.93  # of E2M1 values under uniformly drawn nibbles


def initialise(model: KimiK3, seed: int = 0) -> KimiK3:
    """Fill all weights of `model` in place. Fake tensors have no values and are left alone."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, FakeTensor) or name.endswith((".pairs", ".scales")):
            continue
        split = split_dimension(name) is not None or ".experts." in name
        generator = _generator(tensor, seed, name, model.parallel.rank if split else 0)
        _fill(name, tensor.data, model.config, generator)
    return model


def initialise_state(state: KimiK3State, model: KimiK3, context: int, seed: int = 0) -> KimiK3State:
    """Fill the state in place as if every slot held a sequence of `context` tokens; the null slot is filled as well."""
    for kind, pools in zip(state._fields, state, strict=True):
        for index, pool in enumerate(pools):
            if isinstance(pool, FakeTensor):
                continue
            rank = 0 if kind == "latent" else model.parallel.rank
            generator = _generator(pool, seed, f"state.{kind}.{index}", rank)
            used = pool[:, :context] if kind == "latent" else pool
            _normal(used, 0.3 if kind == "recurrent" else 1.0, generator)
    return state


def _generator(like: Tensor, seed: int, name: str, rank: int) -> torch.Generator:
    generator = torch.Generator(device=like.device)
    return generator.manual_seed(zlib.crc32(f"{seed}/{rank}/{name}".encode()))


def _normal(tensor: Tensor, std: float, generator: torch.Generator, mean: float = 0.0) -> None:
    """Drawn in fp32 whatever the dtype: models of different dtypes with one seed are roundings of each other."""
    drawn = torch.randn(tensor.shape, generator=generator, device=tensor.device, dtype=torch.float32)
    tensor.copy_(drawn * std + mean)


def _uniform(tensor: Tensor, low: float, high: float, generator: torch.Generator) -> Tensor:
    drawn = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=torch.float32)
    return tensor.copy_(drawn * (high - low) + low)


def _fill(name: str, tensor: Tensor, config: KimiK3Config, generator: torch.Generator) -> None:
    *_, owner, leaf = ("", *name.split("."))
    gain = _GAIN.get(leaf.split("_")[0] if leaf.startswith("w") and leaf != "weight" else owner, 1.0)
    if leaf == "A_log":
        real = min(tensor.shape[0], config.kda_num_heads)
        _uniform(tensor[:real], 1.0, 16.0, generator).log_()
        tensor[real:] = 0
    elif leaf == "dt_bias":
        _normal(tensor, 1.0, generator)
    elif leaf == "e_score_correction_bias":
        _uniform(tensor, -0.3, 0.3, generator)
    elif leaf.endswith("_packed"):
        tensor.random_(0, 256, generator=generator)
    elif leaf.endswith("_scale"):
        inputs = tensor.shape[-1] * 32
        exponent = 127 + round(math.log2(gain / (_NIBBLE_STD * math.sqrt(inputs))))
        tensor.random_(exponent - 1, exponent + 2, generator=generator)
    elif owner.endswith("conv1d"):
        _normal(tensor, 0.5, generator)
    elif owner == "embed_tokens":
        _normal(tensor, 1.0, generator)
    elif tensor.ndim == 1:
        _normal(tensor, 0.1, generator, mean=1.0)  # norm weights
    else:
        _normal(tensor, gain / math.sqrt(tensor.shape[-1]), generator)
