"""What cannot be read off a graph: the contents of MXFP4's lookup tables; and which inputs say something about a site.

The tables are small buffers of the model. Their values are kept with the captured graph (`capture/constants.py`) and
compared with the format's, entry by entry. A model that was captured from fake tensors has no values, and nothing of it
can run: its tables are taken at their shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.fx import Node

from k3rewrite import _torch_private as private
from k3rewrite.capture.constants import NoValues, constant_of
from k3rewrite.kernels.experts.formats import e2m1_values, e8m0_values
from k3rewrite.ops.vocabulary import size_hint
from k3rewrite.passes.moe.weights import NotExperts, Weight

if TYPE_CHECKING:
    from k3rewrite.passes.moe.sites import Site

EXACT = (torch.bfloat16, torch.float32, torch.float64)
"""dtypes that hold every product of the two tables, or overflow where fp32 does"""


def check_tables(weight: Weight) -> None:
    """Raises NotExperts if the tables of an MXFP4 weight are not known to hold the format's values."""
    with private.no_modes():  # the backend works under AOTAutograd's fake mode, and these are real tensors
        _compare(weight)


def _compare(weight: Weight) -> None:
    for node, kind in weight.tables:
        value = node.meta["val"]
        expected = expected_table(kind, value.dtype) if value.dtype in EXACT else None
        if expected is None or tuple(value.shape) != tuple(expected.shape):
            raise NotExperts(f"the table {node.name} has not the shape or dtype of {kind}", node, progress=3)
        known = constant_of(node)
        if known is None:
            raise NotExperts(
                f"what the table {node.name} holds is not known: it is no buffer of the model, or is written",
                node,
                progress=3,
            )
        if not isinstance(known, NoValues) and not known.allclose(expected, rtol=0.0, atol=0.0, equal_nan=True):
            raise NotExperts(f"the table {node.name} does not hold {kind}", node, progress=3)


def expected_table(kind: str, dtype: torch.dtype) -> Tensor:
    """[256, 2] values of a byte's nibbles, or [256] powers of two."""
    every = torch.arange(256).to(torch.uint8)
    if kind == "E8M0 scales":
        return e8m0_values(every, torch.promote_types(dtype, torch.float32)).to(dtype)
    return e2m1_values(every, torch.promote_types(dtype, torch.float32)).to(dtype).view(256, 2)


def region_values(site: Site, seed: int) -> Mapping[Node, Tensor]:
    """Ids that are any, that leave most experts empty, and the last ones, each twice in a row unless the model rules
    that out; bytes and scales of a usual size; the tables."""
    found: dict[Node, Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    stored = site.experts.w_down.values
    count = size_hint(stored.node.meta["val"].shape[stored.expert_dim])
    shape = [size_hint(size) for size in site.ids.meta["val"].shape]
    top_k, rows = shape[-1], torch.Size(shape[:-1]).numel()
    any_ids = torch.rand(rows, max(count, top_k), generator=generator).argsort(-1)[:, :top_k] % count
    few = torch.arange(top_k).expand(rows, -1) % count
    last = count - 1 - (few if site.distinct else few // 2)
    ids = {0: any_ids, 1: few, 2: last}[seed]
    found[site.ids] = ids.reshape(shape).to(site.ids.meta["val"].dtype).to(site.ids.meta["val"].device)
    for weight in (site.experts.w_gate, site.experts.w_up, site.experts.w_down):
        if weight.scales is None:
            continue
        for node, low, high in ((weight.values.node, 0, 256), (weight.scales.node, 118, 126)):
            value = node.meta["val"]
            drawn = torch.randint(low, high, [size_hint(s) for s in value.shape], generator=generator)
            found[node] = drawn.to(torch.uint8).to(value.device)
        for node, kind in weight.tables:
            found[node] = expected_table(kind, node.meta["val"].dtype).to(node.meta["val"].device)
    return found
