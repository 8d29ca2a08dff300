"""From requests for states inside a prompt to the table that `k3::kda_chunk` takes.

A state can be had after every 64th token, counted from where the call starts, and inside the row; in a slot that is
nobody's own. Whatever else is asked for is refused here, before anything runs: a state that was never written would be
found later as if it had been.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3rewrite.kernels.kda_chunk.form import CHUNK


def checkpoint_table(
    requests: Sequence[tuple[int, int, int]], slots: Sequence[int], lengths: Sequence[int], *,
    device: torch.device | str = "cpu",
) -> Tensor:  # fmt: skip
    """The table [rows, chunks], int32, of `requests`: (row, tokens of it, slot that gets the state after them).

    `slots` and `lengths` are those of the rows. ValueError for a boundary that is no multiple of 64 or outside of its
    row, for the null slot, and for a slot that is a row's own or was asked for twice.
    """
    table = torch.zeros(len(lengths), max([1, *(length // CHUNK for length in lengths)]), dtype=torch.int32)
    taken = set(slots)
    for row, tokens, slot in requests:
        what = f"checkpoint after {tokens} tokens of row {row} in slot {slot}"
        if not 0 <= row < len(lengths):
            raise ValueError(f"{what}: there are {len(lengths)} rows; name one of them")
        if tokens <= 0 or tokens % CHUNK:
            raise ValueError(
                f"{what}: states are had at multiples of {CHUNK} tokens; ask for {tokens // CHUNK * CHUNK}"
            )
        if tokens > lengths[row]:
            raise ValueError(f"{what}: the row ends after {lengths[row]}; ask for a boundary inside of it")
        if slot <= 0:
            raise ValueError(f"{what}: slots from 1 on are somebody's; give one of these")
        if slot in taken:
            raise ValueError(f"{what}: the slot is a row's own, or was asked for twice; give one that is free")
        taken.add(slot)
        table[row, tokens // CHUNK - 1] = slot
    return table.to(device)
