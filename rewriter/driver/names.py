"""The names that `expect` and `when` of a pipeline may use, for each of the three doors into this package.

    torch.compile          tp dcp rank target      n_layers      and what options={"names": ...} gives
    k3rewrite compile      tp dcp rank target      n_layers      phase batch tokens context dtype
    ... compile kimi-k3    tp dcp rank target      n_layers      phase batch tokens context dtype      n_moe_layers ...

`n_layers` is read off the module paths of a graph unless the model gives it. A pipeline is checked against these names
before anything is traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from k3rewrite.driver import kimi_k3
from k3rewrite.errors import ConfigError
from k3rewrite.pipeline.expressions import EXPECT_NAMES, Value, parse_expect, parse_when
from k3rewrite.pipeline.settings import PipelineConfig

OWN_NAMES = ("tp", "dcp", "rank", "target")
"""names that every run defines itself"""
READ_OFF = ("n_layers",)
SHAPE_NAMES = ("phase", "batch", "tokens", "context", "dtype")
"""names that the command line defines beside them"""
RUN_NAMES = (*OWN_NAMES, *SHAPE_NAMES)


def names_in_programs(given: Iterable[str] = ()) -> tuple[str, ...]:
    """Names known under torch.compile; `given` are those of the backend's option `names`."""
    return tuple(dict.fromkeys((*OWN_NAMES, *READ_OFF, *given)))


def names_of_command(model: str) -> tuple[str, ...]:
    """Names known to `k3rewrite compile MODEL`."""
    counts = kimi_k3.count_names() if model == kimi_k3.NAME else ()
    return tuple(dict.fromkeys((*RUN_NAMES, *READ_OFF, *counts)))


def own_values(pipeline: PipelineConfig, target: str, *, rank: int, world: int) -> dict[str, Value]:
    """What every run defines itself; `target` is the resolved name."""
    return {"tp": world, "dcp": pipeline.parallel.dcp, "rank": rank, "target": target}


def check_given(names: Mapping[str, Value], place: str) -> None:
    """`ConfigError` if a name is given that the run defines itself: the pipeline and the target would say otherwise."""
    if taken := sorted({*names} & {*OWN_NAMES, *EXPECT_NAMES}):
        raise ConfigError(
            f"names gives '{taken[0]}', which the run defines itself",
            place=place,
            remedy=f"leave it out; {', '.join(OWN_NAMES)} come from pipeline, target and process group",
        )


def used_names(pipeline: PipelineConfig) -> frozenset[str]:
    """The names that conditions of a pipeline use, without those of an expectation's own counts."""
    used: set[str] = set()
    for entry in pipeline.passes:
        used |= parse_when(entry.when, entry.place).names if entry.when is not None else frozenset()
        used |= parse_expect(entry.expect, entry.place).names if entry.expect is not None else frozenset()
    return frozenset(used - {*EXPECT_NAMES})
