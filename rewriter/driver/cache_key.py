"""The key under which a compiled graph may be kept: everything beside the graph itself that decides the result.

    compilation_key(pipeline, target, rank=0, world=8)  ->  "3f0c..."

Two compilations of one graph with one key are interchangeable. The key changes with the pipeline's settings, the
target's figures, the rank and the number of ranks (constants of a shard depend on them), the text of every op and
kernel of the vocabulary, and the versions of Python, torch, triton and this package.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable

from k3rewrite.ops.kernel import Kernel
from k3rewrite.ops.vocabulary import Op
from k3rewrite.pipeline.settings import PipelineConfig
from k3rewrite.report.versions import installed_versions
from k3rewrite.targets import Target


def compilation_key(
    pipeline: PipelineConfig, target: Target, ops: Iterable[Op], kernels: Iterable[Kernel], *, rank: int, world: int
) -> str:
    """32 hexadecimal digits, equal in every process of equal installations."""
    content = {
        "pipeline": pipeline.to_yaml(),
        "target": dataclasses.asdict(target),
        "rank": [rank, world],
        "ops": sorted(f"{op.qualified_name} {op.source_hash}" for op in ops),
        "kernels": sorted(f"{kernel.name} {kernel.source_hash}" for kernel in kernels),
        "versions": installed_versions(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]
