"""The model that the command line knows by name: `k3rewrite compile kimi-k3 --config tiny`.

Every other model is built by its user's factory (`factory.py`). The model itself is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from k3rewrite.errors import ConfigError
from k3rewrite.report.table import human_bytes

if TYPE_CHECKING:
    import torch

    from k3rewrite.models.kimi_k3 import KimiK3Config

NAME = "kimi-k3"
CONFIGS = ("tiny", "tiny-tp8", "full")
"""built-in configurations; any other is the path of a published config.json"""


def configuration(config: str, layers: int | None) -> KimiK3Config:
    """One of `CONFIGS`, or the content of a published config.json; of it the first `layers` layers.

    `ConfigError` for a file that is none, and for more layers than there are.
    """
    from k3rewrite.models.kimi_k3 import KimiK3Config

    makers: Mapping[str, Callable[[], KimiK3Config]] = {
        "tiny": KimiK3Config.tiny,
        "tiny-tp8": KimiK3Config.tiny_tp8,
        "full": KimiK3Config,
    }
    made = makers[config]() if config in makers else KimiK3Config.from_json(config)
    return made if layers is None else made.with_layers(layers)


def check_memory(config: KimiK3Config, dtype: torch.dtype, group: Any, memory: int) -> None:
    """`ConfigError` if a rank's weights alone do not fit `memory` bytes: the system would end the process."""
    from k3rewrite.models.kimi_k3 import KimiK3

    try:
        model = KimiK3(config, dtype=dtype, device="meta", group=group)
    except RuntimeError as error:  # a tensor of more elements than 64 bits count
        raise ConfigError(f"no such model: {error}", place="--config", remedy="correct its sizes") from None
    needed = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    if needed > memory:
        raise ConfigError(
            f"the weights take {human_bytes(needed)}, and there are {human_bytes(memory)} of memory",
            place="--config",
            remedy="add --no-run (no weights) or --layers N",
        )


def count_names() -> tuple[str, ...]:
    """What `expect` and `when` of a pipeline for this model may count: n_layers, n_moe_layers, ..."""
    return tuple(configuration("tiny", None).counts())
