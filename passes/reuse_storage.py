"""Write results of bound kernels into the storage of the arguments that they replace, where nobody can tell.

    prefix', h = k3_kernels::add_attn_res_norm__...(prefix, delta, blocks, ...)      prefix has no later reader
    ->
    h = k3_kernels::add_attn_res_norm__..._(prefix, delta, blocks, ...)              writes prefix

State is functional in every pass before this one. An op declares which result may go where (`Op.inplace`); a later
reader of the old value, an alias that is returned, overlapping arguments, each refuses with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch.fx import GraphModule

from k3rewrite.finalise.reuse_storage import reuse_storage
from k3rewrite.graph.provenance import module_path
from k3rewrite.ops.binding import KERNEL_KEY, Binding, bind
from k3rewrite.ops.inplace_variant import InplaceVariant, inplace_variant
from k3rewrite.ops.vocabulary import Op
from k3rewrite.pipeline.pass_base import Pass, PassContext
from k3rewrite.report.schema import Miss, PassReport, Site


@dataclass(frozen=True)
class ReuseStoragePass(Pass):
    """Let bound kernels write into the storage of arguments that have no later reader."""

    name: ClassVar[str] = "reuse_storage"
    requires: ClassVar[frozenset[str]] = frozenset({"select"})

    def run(self, module: GraphModule, context: PassContext, report: PassReport) -> None:
        bound = {}
        bindings: dict[str, Binding] = {}
        modules = {}
        for node in module.graph.nodes:
            if (binding := node.meta.get(KERNEL_KEY)) is not None:
                op, _ = bind(binding.op, binding.kernel, binding.target, binding.native, binding.ranks)
                bound[op.overload] = op
                bindings[op.name] = binding
                modules[node.name] = module_path(node)

        def variant_of(op: Op, arguments: Sequence[str]) -> InplaceVariant:
            variant = replace(inplace_variant(op, arguments), namespace=op.namespace)
            return replace(variant, implementations=bindings[op.name].implementations(variant, in_place=True))

        for record in reuse_storage(module, bound, make_variant=variant_of):
            report.candidates += 1
            where: dict[str, Any] = {
                "site": record.node, "source": record.source, "module": modules.get(record.node, ""),
            }  # fmt: skip
            if record.done:
                report.matched += 1
                report.sites.append(Site(replaced_by=f"writes '{record.argument}' in place", **where))
            else:
                report.missed.append(Miss(reason=f"'{record.argument}': {record.reason}", **where))
