"""What a pass is: a frozen dataclass whose fields are its YAML options, and one `run`.

@dataclass(frozen=True)
class PadHeads(Pass):
    '''Pad the heads of ... (the docstring is the help text)'''
    name = "pad_heads"
    requires = frozenset({"lift_mla"})
    multiple: int = 16
    def run(self, module, context, report): ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch.fx import GraphModule

from k3rewrite.graph.cost import node_value
from k3rewrite.ops.kernel import Kernel
from k3rewrite.ops.vocabulary import Op
from k3rewrite.patterns.rewrite import SiteCheck, apply_rule
from k3rewrite.patterns.rule import Rule
from k3rewrite.pipeline.settings import OnMiss
from k3rewrite.report.schema import PassReport

if TYPE_CHECKING:
    from k3rewrite.targets import Target

Level = Literal["dynamo", "aten"]


@dataclass(frozen=True)
class Offers:
    """The kernels that take a call, each with its estimate in microseconds, and the objections of all others."""

    taking: tuple[tuple[Kernel, float], ...]
    objections: tuple[str, ...]


@dataclass(frozen=True)
class PassContext:
    """What a pass may know beside the graph."""

    target: Target
    ops: Mapping[str, Op]
    kernels: tuple[Kernel, ...]
    verify_site: SiteCheck | None = None
    """runs each built replacement against the nodes that it would replace"""
    on_miss: OnMiss = "reference"
    native: bool = False
    """the GPU of this machine is the target, so bound kernels can run"""
    ranks: tuple[int, int] = (0, 1)
    """rank compiled for and number of ranks"""

    def offers(self, op_name: str, arguments: Mapping[str, Any]) -> Offers:
        """Which kernels take a call of `k3::<op_name>` on the target. `arguments`, by name, may hold nodes."""
        kernels = [kernel for kernel in self.kernels if kernel.op == op_name]
        if not kernels:
            return Offers((), (f"no kernel of k3::{op_name} in this project",))
        if not self.target.is_gpu:
            return Offers((), (f"target {self.target.name} runs the reference",))
        values = {name: node_value(value) for name, value in arguments.items()}
        told = [(kernel, kernel.accepts(values, self.target)) for kernel in kernels]
        return Offers(
            tuple((kernel, kernel.cost_us(values, self.target)) for kernel, objection in told if objection is None),
            tuple(f"{kernel.name}: {objection}" for kernel, objection in told if objection is not None),
        )


@dataclass(frozen=True)
class Pass(ABC):
    """Base of all passes. `requires` are passes that must have run before, `level` is the graph that it works on."""

    name: ClassVar[str]
    level: ClassVar[Level] = "aten"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    """`k3::` ops that may be in the graph after this pass"""
    binds_kernels: ClassVar[bool] = False
    """whether `on_miss` means something to this pass"""

    @abstractmethod
    def run(self, module: GraphModule, context: PassContext, report: PassReport) -> None:
        """Rewrite `module` in place and fill candidates, sites and misses of `report`."""


@dataclass(frozen=True)
class RulePass(Pass):
    """A pass that applies rules, one after the other."""

    allow_changes_rounding: bool = field(default=False, kw_only=True)
    """let rules of policy changes_rounding rewrite; without it each of their sites is a miss with that reason"""

    @abstractmethod
    def rules(self) -> tuple[Rule, ...]:
        """The rules of this pass, in the order in which they are tried."""

    def run(self, module: GraphModule, context: PassContext, report: PassReport) -> None:
        for rule in self.rules():
            apply_rule(
                rule,
                module,
                report,
                allow_changes_rounding=self.allow_changes_rounding,
                verify=context.verify_site,
            )
