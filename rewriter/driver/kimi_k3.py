"""The model that the command line knows by name: `k3rewrite compile kimi-k3 --config tiny`.

Every other model is built by its user's factory (`factory.py`). The model itself is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


def count_names() -> tuple[str, ...]:
    """What `expect` and `when` of a pipeline for this model may count: n_layers, n_moe_layers, ..."""
    return tuple(configuration("tiny", None).counts())
