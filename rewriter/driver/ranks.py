"""One rank of a tensor-parallel group, with or without the other ranks.

With a process group of the right size the compilation runs in it. Without one, torch's fake group stands in: its
collectives are captured like real ones and exchange nothing, so any rank can be compiled on one machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from k3rewrite import _torch_private as private
from k3rewrite.errors import ConfigError


@contextmanager
def rank_group(rank: int, world: int) -> Iterator[dist.ProcessGroup | None]:
    """The process group of `world` ranks, seen from `rank`; None for one rank.

    A fake group made here is taken down again. `ConfigError` if a group exists and is not what was asked for.
    """
    if world == 1:
        yield None
    elif dist.is_initialized():
        have = (dist.get_rank(), dist.get_world_size())
        if have != (rank, world):
            raise ConfigError(
                f"the process group has rank {have[0]} of {have[1]}, asked for rank {rank} of {world}",
                place="--tp / --rank",
                remedy=f"give --tp {have[1]} --rank {have[0]}",
            )
        yield dist.group.WORLD
    else:
        private.start_fake_group(rank, world)
        try:
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()
