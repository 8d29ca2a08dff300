"""Process groups and the functional collectives, which torch has under private names only."""

from __future__ import annotations

from importlib import import_module

import torch.distributed as dist


def register_functional_collectives() -> None:
    """Make `torch.ops._c10d_functional` complete: fakes, autograd, and waits that count as effects."""
    import_module("torch.distributed._functional_collectives")


def group_of_name(name: str) -> dist.ProcessGroup:
    """The process group registered under `name`, as functional collectives name theirs; an unknown one raises
    RuntimeError."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]  # 2.12 made names a type


def start_fake_group(rank: int, world: int) -> None:
    """Make this process rank `rank` of `world` ranks that are not there: collectives can be captured, not computed.

    torch knows the backend "fake" once its module is imported; `dist.destroy_process_group()` ends the group.
    """
    import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world)
