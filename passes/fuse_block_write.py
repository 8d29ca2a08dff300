"""Let the fused mix store the updated prefix straight into its slot of a bank of blocks.

    prefix', h = k3::add_attn_res_norm(prefix, delta, blocks, ...)
    bank' = aten.select_scatter(bank, prefix', -2, slot)
    ->
    bank', h = k3::write_attn_res_norm(prefix, delta, blocks, bank, slot, ...)

Only where the updated prefix has no other reader: a layer that writes a block starts its prefix anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

import k3rewrite.kernels  # noqa: F401  registers the ops that the pattern names
from k3rewrite.graph.shapes import same_sizes
from k3rewrite.patterns import (
    OPERATORS,
    Anything,
    Builder,
    CounterExample,
    Example,
    Item,
    Match,
    Number,
    Policy,
    Refusal,
    Rule,
    Var,
    call,
)
from k3rewrite.pipeline.pass_base import RulePass

_K3 = torch.ops.k3


class FuseBlockWrite(Rule):
    """The updated prefix goes into a slot of a bank of blocks and nowhere else."""

    name = "write_attn_res_norm"
    policy = Policy.EXACT
    anchors = OPERATORS["select_scatter"]
    pattern = call(
        "select_scatter",
        Var("bank"),
        Item(
            call(
                _K3.add_attn_res_norm.default, Var("prefix"), Var("delta"), Anything("blocks"), Var("score_norm"),
                Var("score_proj"), Number("score_eps"), Var("weight"), Number("eps"), name="update",
                compute_dtype=Anything("compute"), mix_dtype=Anything("mix"), scale_dtype=Anything("scale"),
                out_dtype=Anything("out"),
            ),
            0,
        ),
        Anything("dim"),
        Number("slot"),
        name="anchor",
    )  # fmt: skip
    exposable = frozenset({"update[1]"})
    reach = 0

    def check(self, match: Match) -> Refusal | None:
        bank, prefix = match.value("bank"), match.value("prefix")
        if match["dim"] not in (-2, bank.dim() - 2) or not same_sizes((*bank.shape[:-2], bank.shape[-1]), prefix.shape):
            return Refusal("the block is not stored as one slot of a bank [..., slots, d]", match.root)
        if bank.dtype != prefix.dtype:
            return Refusal(f"the bank is {bank.dtype}, the prefix {prefix.dtype}", match.root)
        if match["slot"] < 0 and not isinstance(bank.shape[-2], int):
            return Refusal(
                f"slot {match['slot']} is counted from the end of a bank whose number of slots is not fixed", match.root
            )
        return None

    def build(self, match: Match, builder: Builder, exposed: frozenset[str]) -> Mapping[str, Node]:
        slots = match.value("bank").shape[-2]
        slot = match["slot"] if match["slot"] >= 0 else match["slot"] + slots
        node = builder.call(
            _K3.write_attn_res_norm.default, match["prefix"], match["delta"], list(match["blocks"]), match["bank"],
            slot,
            match["score_norm"], match["score_proj"], match["score_eps"], match["weight"], match["eps"],
            compute_dtype=match["compute"], mix_dtype=match["mix"], scale_dtype=match["scale"], out_dtype=match["out"],
        )  # fmt: skip
        results = {"root": builder.item(node, 0)}
        if "update[1]" in exposed:
            results["update[1]"] = builder.item(node, 1)
        return results

    def examples(self) -> Sequence[Example]:
        def stored(p: Tensor, a: Tensor, b: Tensor, n: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            bank = b.unsqueeze(1).repeat(1, 3, 1)
            p, h = _fused(p, a, bank[:, :1], n, w)
            return torch.select_scatter(bank, p, 1, 1), h

        return (Example("stored into a bank", stored, _inputs),)

    def counterexamples(self) -> Sequence[CounterExample]:
        def also_read(p: Tensor, a: Tensor, b: Tensor, n: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            bank = b.unsqueeze(1).repeat(1, 3, 1)
            p, h = _fused(p, a, bank[:, :1], n, w)
            return torch.select_scatter(bank, p, 1, 1), h, p * 2

        def other_value(p: Tensor, a: Tensor, b: Tensor, n: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            bank = b.unsqueeze(1).repeat(1, 3, 1)
            updated, h = _fused(p, a, bank[:, :1], n, w)
            return torch.select_scatter(bank, a, 1, 1), updated, h

        return (
            CounterExample("the prefix is read again", also_read, _inputs, "also used by"),
            CounterExample("another value is stored", other_value, _inputs, "expected result 0"),
        )


def _fused(p: Tensor, a: Tensor, blocks: Tensor, n: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.float32
    return _K3.add_attn_res_norm(p, a, [blocks], n, w, 1e-5, n, 1e-5, compute_dtype=wide, mix_dtype=wide,
                                 scale_dtype=wide, out_dtype=p.dtype)  # fmt: skip


def _inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    rows = tuple(torch.randn(5, 64, generator=generator).bfloat16() for _ in range(3))
    return (*rows, *(torch.randn(64, generator=generator).bfloat16() for _ in range(2)))


@dataclass(frozen=True)
class FuseBlockWritePass(RulePass):
    """Store the updated prefix into a bank of blocks from inside the fused mix."""

    name: ClassVar[str] = "fuse_block_write"
    requires: ClassVar[frozenset[str]] = frozenset({"fuse_attn_res_norm"})
    provides: ClassVar[frozenset[str]] = frozenset({"write_attn_res_norm"})

    def rules(self) -> tuple[Rule, ...]:
        return (FuseBlockWrite(),)
