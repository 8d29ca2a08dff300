"""Binding an op to one kernel of one target, under a name that holds the content hash of both.

    k3::add_attn_res_norm  +  triton kernel  +  h200   ->   k3_kernels::add_attn_res_norm__triton_h200_1f0c...

The bound op computes the same function: the kernel where the device is the target, the reference elsewhere (so that a
graph for a GPU that is not there still runs, and says so). Compiler caches key custom ops by name only, hence the hash.
The rank and the number of ranks are in it, so that no cache gives one rank what was compiled for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

from k3rewrite.ops.kernel import Kernel
from k3rewrite.ops.runs import REFERENCE, noting
from k3rewrite.ops.vocabulary import KERNEL_NAMESPACE, Op
from k3rewrite.targets import Target

KERNEL_KEY = "k3_kernel"
"""node.meta key of the `Binding` of a bound node"""
REASON_KEY = "k3_reason"
"""node.meta key: why a `k3::` node has no kernel"""


class Binding:
    """What a bound node runs: the op of the vocabulary, the kernel, the target, and the bound op's name."""

    def __init__(self, op: Op, kernel: Kernel, target: Target, native: bool, ranks: tuple[int, int]) -> None:
        self.op, self.kernel, self.target, self.native, self.ranks = op, kernel, target, native, ranks
        digest = hashlib.sha256(f"{op.source_hash}{kernel.source_hash}{target!r}{native}{ranks}".encode()).hexdigest()
        self.source_hash = digest[:12]
        self.name = f"{op.name}__{kernel.language}_{target.name}_{self.source_hash}"

    def implementations(self, form: Op, *, in_place: bool = False) -> Mapping[str, Callable[..., Any]]:
        """What the dispatcher runs for `form`, the bound op or its in-place variant, by kind of device. Each notes that
        it ran (see `runs.py`)."""
        bound = form.qualified_name.replace("::", ".")
        reference = noting(form.reference, bound, REFERENCE)
        if not self.native:
            return {"CPU": reference, "CUDA": reference}
        launch = partial(self.kernel.launch, in_place=True) if in_place else self.kernel.launch
        return {"CPU": reference, "CUDA": noting(launch, bound, self.kernel.language)}


@cache
def bind(op: Op, kernel: Kernel, target: Target, native: bool, ranks: tuple[int, int]) -> tuple[Op, Binding]:
    """The bound op, registered with the dispatcher, and its description. The same arguments give the same op.

    `native` says that the GPU of this machine is the target: only then does the op run the kernel on GPU tensors. A
    kernel tuned and compiled for another GPU is not run on this one; its reference is. `ranks` are the rank that is
    compiled for and the number of ranks.
    """
    binding = Binding(op, kernel, target, native, ranks)
    bound = Op(
        name=binding.name,
        schema=op.schema,
        reference=op.reference,
        fake=op.fake,
        cost=op.cost,
        traits=op.traits,
        inplace=op.inplace,
        inplace_reads=op.inplace_reads,
        namespace=KERNEL_NAMESPACE,
        base=op,
    )
    return replace(bound, implementations=binding.implementations(bound)).register(), binding
