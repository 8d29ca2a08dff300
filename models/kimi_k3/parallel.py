"""Tensor parallelism: which part of a weight a rank holds, and the collectives between the parts.

Form A of the layout: heads, expert columns and vocabulary rows are split; every row-parallel projection ends in an
all-reduce; a MoE layer has two of them (the routed latent before its norm, which is not linear, and the shared
expert). Norms, mixers, the router and the latent projections are replicated.

Collectives are the functional ones (`_c10d_functional`), so that a captured graph shows them as nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3rewrite import _torch_private as private
from k3rewrite.errors import ConfigError

ROWS, COLUMNS = 0, 1

SPLIT = {  # last module name of a checkpoint tensor -> dimension that is split; what is not named is replicated
    "embed_tokens": ROWS,
    "lm_head": ROWS,
    # KDA and MLA, by head
    "q_proj": ROWS,
    "k_proj": ROWS,
    "v_proj": ROWS,
    "g_proj": ROWS,
    "b_proj": ROWS,
    "f_b_proj": ROWS,
    "q_conv1d": ROWS,
    "k_conv1d": ROWS,
    "v_conv1d": ROWS,
    "A_log": ROWS,  # of its first num_heads entries: see `checkpoint.py`
    "dt_bias": ROWS,
    "q_b_proj": ROWS,
    "kv_b_proj": ROWS,
    "o_proj": COLUMNS,
    # dense MLP and shared expert
    "gate_proj": ROWS,
    "up_proj": ROWS,
    "down_proj": COLUMNS,
    # routed experts, by intermediate column
    "w1": ROWS,
    "w3": ROWS,
    "w2": COLUMNS,
}


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place in a tensor-parallel group. The default is one rank, whose collectives do nothing."""

    size: int = 1
    rank: int = 0
    group_name: str = ""

    @classmethod
    def of(cls, group: Any) -> TensorParallel:
        """From a process group or the registered name of one; None is a single device."""
        if group is None:
            return cls()
        if isinstance(group, TensorParallel):
            return group
        private.register_functional_collectives()
        if isinstance(group, str):
            group = private.group_of_name(group)
        return cls(size=dist.get_world_size(group), rank=dist.get_rank(group), group_name=group.group_name)

    def local(self, total: int, what: str) -> int:
        """This rank's share of `total`. Raises `ConfigError` when it does not divide."""
        if total % self.size:
            raise ConfigError(
                f"{what} = {total} does not split over {self.size} ranks",
                place="tensor parallelism",
                remedy=f"use a group size that divides {total}",
            )
        return total // self.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over the ranks, in its dtype."""
        if self.size == 1:
            return x
        c10d = torch.ops._c10d_functional
        return c10d.wait_tensor(c10d.all_reduce(x, "sum", self.group_name))

    def all_gather_last(self, x: Tensor) -> Tensor:
        """`[T, n]` of every rank -> `[T, size * n]`, in rank order."""
        if self.size == 1:
            return x
        c10d = torch.ops._c10d_functional
        gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous(), self.size, self.group_name))
        return gathered.view(self.size, *x.shape).transpose(0, 1).flatten(1)


def split_dimension(name: str) -> int | None:
    """The dimension along which the checkpoint tensor `name` is split over ranks, None if every rank holds it all."""
    parts = name.split(".")
    last = parts[-2] if parts[-1].startswith("weight") else parts[-1]
    return SPLIT.get(last)
