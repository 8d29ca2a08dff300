"""Bind each `k3::` op to the best kernel of the target, or say why it is left to its reference.

    h = k3::attn_res_norm(...)      -> h = k3_kernels::attn_res_norm__triton_mi355x_3f...(...)
    y = k3::mlp(...)                -> unchanged, reason: "no kernel of k3::mlp in this project"

Among the kernels that take the call, the one with the smallest estimate for the target wins; the objections of the
others and the estimates are in the reason. What is left is expanded to its reference when the graph is finalised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.fx import GraphModule, Node

from k3rewrite.errors import UnsupportedError
from k3rewrite.graph.arguments import bound_arguments
from k3rewrite.graph.cost import node_value
from k3rewrite.graph.provenance import module_path, source_line
from k3rewrite.ops.binding import KERNEL_KEY, REASON_KEY, bind
from k3rewrite.ops.kernel import Kernel
from k3rewrite.ops.vocabulary import NAMESPACE
from k3rewrite.pipeline.pass_base import Pass, PassContext
from k3rewrite.report.schema import Miss, PassReport, Site

Language = Literal["auto", "triton", "hip"]


@dataclass(frozen=True)
class SelectPass(Pass):
    """Bind each k3:: op to the kernel of the target with the smallest estimated time."""

    name: ClassVar[str] = "select"
    binds_kernels: ClassVar[bool] = True

    language: Language = "auto"
    """auto: whatever is estimated fastest; triton or hip: kernels in that language only"""

    def run(self, module: GraphModule, context: PassContext, report: PassReport) -> None:
        for node in list(module.graph.nodes):
            target = node.target
            if not isinstance(target, torch._ops.OpOverload) or target.namespace != NAMESPACE:
                continue
            if target._opname in context.ops and "weight_only" in context.ops[target._opname].traits:
                continue  # runs once, before the first step
            report.candidates += 1
            where = {"site": node.name, "source": source_line(node), "module": module_path(node)}
            kernel, reason = choose(node, target._opname, context, self.language)
            if kernel is None:
                if context.on_miss == "error":
                    raise UnsupportedError(
                        f"k3::{target._opname} gets no kernel: {reason}",
                        place=f"{node.name} ({where['source']})",
                        remedy="set 'on_miss: reference', or change what the reason names",
                    )
                node.meta[REASON_KEY] = reason
                report.missed.append(Miss(reason=reason, **where))
                continue
            op, binding = bind(context.ops[target._opname], kernel, context.target, context.native, context.ranks)
            node.target = op.overload
            node.meta[KERNEL_KEY] = binding
            node.meta[REASON_KEY] = reason
            report.matched += 1
            report.sites.append(Site(replaced_by=f"{op.name}: {reason}", **where))


def choose(node: Node, op_name: str, context: PassContext, language: Language = "auto") -> tuple[Kernel | None, str]:
    """The kernel for a node and why, or None and the objections of all kernels of the op."""
    arguments = {name: node_value(value) for name, value in bound_arguments(node).items()}
    offers = context.offers(op_name, arguments)
    wanted = [(k, us) for k, us in offers.taking if language in ("auto", k.language)]
    others = [f"{k.name}: the pipeline asks for {language}" for k, us in offers.taking if (k, us) not in wanted]
    objections = [*offers.objections, *others]
    if not wanted:
        return None, "; ".join(objections)
    best, estimate = min(wanted, key=lambda offer: offer[1])
    rest = [f"{k.name} {us:.2f} us" for k, us in wanted if k is not best] + objections
    paths = f": {best.paths(arguments, context.target)}" if best.paths else ""
    return best, f"{best.name}, estimated {estimate:.2f} us{paths}" + (f" (others: {'; '.join(rest)})" if rest else "")
