"""Region check: run the nodes of a match and the nodes that would replace them on the same random inputs.

    old(x), new(x), old in fp64(x)   ->   a Refusal if error(new) > 1.5 * error(old) + floor: the rule is wrong

A result that overflows at every size of the inputs, so that there is no error to compare with, is refused too.
On refusal both outputs and the inputs are saved where a folder is given, so that the difference can be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from k3rewrite._torch_private import no_modes
from k3rewrite.checks.errors import MAX_UNSOUND, acceptable, is_inexact, measure_both, unsound_share
from k3rewrite.checks.precise import DecisionInterpreter
from k3rewrite.ops.vocabulary import size_hint
from k3rewrite.patterns.rewrite import Rewrite, SiteCheck
from k3rewrite.patterns.rule import Refusal
from k3rewrite.report.run_folder import unwritable

SCALES = (1.0, 2.0**-10, 32.0)
"""sizes of the random inputs: an epsilon shows with small ones, a saturation with large ones"""
MAX_LEVELS = 4
"""how many nodes a replacement may look through above its match"""


def region_check(folder: Path | None = None) -> SiteCheck:
    """A check of one built rewrite against the nodes that it replaces, on the same random inputs in every run."""

    def check(rewrite: Rewrite) -> Refusal | None:
        with no_modes():  # the backend works under AOTAutograd's fake mode
            return run(rewrite)

    def run(rewrite: Rewrite) -> Refusal | None:
        old = _down_to(_inputs_of(rewrite.made, rewrite.new.values()), rewrite.match.nodes | set(rewrite.old.values()))
        inputs = _inputs_of([*old, *rewrite.made], rewrite.new.values())
        names = list(rewrite.old)
        before = _region(old, inputs, [rewrite.old[n] for n in names])
        after = _region(list(rewrite.made), inputs, [rewrite.new[n] for n in names])
        unjudged = set(names)
        for seed, scale in enumerate(SCALES):
            given = rewrite.rule.region_values(rewrite.match, seed)
            values = [given[n] if n in given else random_value(n.meta["val"], i, scale) for i, n in enumerate(inputs)]
            runs = [DecisionInterpreter(before, wide=False), DecisionInterpreter(after, wide=False)]
            old_values, new_values = (run.run_on([_copy(v) for v in values]) for run in runs)
            exact_values = DecisionInterpreter(before, wide=True, forced=runs[0].routes.ids).run_on(values)
            for name, a, b, exact in zip(names, old_values, new_values, exact_values, strict=True):
                reason = _difference(name, a, b, exact)
                if reason:
                    if folder is not None:
                        tensors = {"inputs": values, "old": old_values, "new": new_values, "exact": exact_values}
                        _keep(tensors, folder, f"{rewrite.rule.name}-{rewrite.old['root'].name}.pt")
                    return Refusal(f"verification (inputs of size {scale:g}): {reason}", rewrite.old["root"])
                if _judgeable(a, b, exact):
                    unjudged.discard(name)
        if unjudged:
            return Refusal(f"verification: {_unjudged(min(unjudged))}", rewrite.old["root"])
        return None

    return check


def _keep(tensors: dict[str, Any], folder: Path, file: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(tensors, folder / file)
    except (OSError, RuntimeError) as error:  # torch's own writer raises the second
        raise unwritable(folder, file, error) from None


def compare(name: str, old: Any, new: Any, exact: Any) -> str | None:
    """What is wrong with `new`, or that nothing can be said about it; else None."""
    return _difference(name, old, new, exact) or (None if _judgeable(old, new, exact) else _unjudged(name))


def _unjudged(name: str) -> str:
    return f"output '{name}' cannot be judged: the original overflows, or is NaN, where fp64 does not"


def _judgeable(old: Any, new: Any, exact: Any) -> bool:
    """False if the old value overflows in so many places that it has no error to compare with."""
    if isinstance(old, (list, tuple)):
        return all(_judgeable(*parts) for parts in zip(old, new, exact, strict=True))
    return not (isinstance(old, Tensor) and is_inexact(old.dtype)) or unsound_share(old, exact, new) <= MAX_UNSOUND


def _difference(name: str, old: Any, new: Any, exact: Any) -> str | None:
    if isinstance(old, (list, tuple)):
        parts = zip(old, new, exact, strict=True)
        reasons = (_difference(f"{name}[{i}]", a, b, e) for i, (a, b, e) in enumerate(parts))
        return next((reason for reason in reasons if reason), None)
    if not isinstance(old, Tensor):
        return None if old == new else f"output '{name}': {old} became {new}"
    if not is_inexact(old.dtype):
        return None if torch.equal(old, new) else f"output '{name}': integer results differ"
    error_old, error_new = measure_both(old, exact, new, exact)
    if acceptable(error_new, error_old, new.dtype):
        return None
    return (
        f"output '{name}': error {error_new.rms:.3e} (worst element {error_new.worst:.3e}) against fp64, "
        f"the original has {error_old.rms:.3e} ({error_old.worst:.3e})"
    )


def random_value(fake: Any, seed: int, scale: float = 1.0) -> Any:
    """A random value of the metadata of a fake one: normal times `scale` for floating dtypes, 0 or 1 for integers.

    Device and strides are kept, symbolic sizes take their hints (no guard is added), and elements that share memory
    (an expanded tensor) are equal.
    """
    if isinstance(fake, torch.SymInt):
        return size_hint(fake)
    if isinstance(fake, (list, tuple)):
        return type(fake)(random_value(item, seed + i, scale) for i, item in enumerate(fake))
    if not isinstance(fake, Tensor):
        return fake
    generator = torch.Generator().manual_seed(seed)
    shape, strides = [size_hint(s) for s in fake.shape], [size_hint(s) for s in fake.stride()]
    apart = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
    if fake.dtype.is_floating_point or fake.dtype.is_complex:
        value = (torch.randn(apart, generator=generator, dtype=torch.float64) * scale).to(fake.dtype)
    else:
        value = torch.randint(0, 2, apart, generator=generator).to(fake.dtype)
    if _may_overlap(apart, strides):
        return value.to(fake.device)
    strided = torch.empty_strided(apart, strides, dtype=fake.dtype, device=fake.device)
    return strided.copy_(value).expand(shape)


def _may_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True unless each dimension steps over everything that the denser ones reach: then two places may be one."""
    reach = 1
    for stride, size in sorted((st, s) for s, st in zip(shape, strides, strict=True) if s > 1):
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _inputs_of(inside: Sequence[Node], results: Iterable[Node]) -> list[Node]:
    """Nodes that are read inside and made outside, and results that are existing values."""
    members = set(inside)
    found: dict[Node, None] = {}
    for node in inside:
        map_arg((node.args, node.kwargs), lambda n: found.setdefault(n, None) if n not in members else None)
    found.update({node: None for node in results if node not in members})
    return list(found)


def _down_to(frontier: Sequence[Node], nodes: Iterable[Node]) -> list[Node]:
    """The nodes, with what lies between them and the frontier: a replacement may read further up (the operands of a
    stack, a weight before its cast), and both sides must see the same values there."""
    wanted, region = set(frontier), set(nodes)
    for node in _inputs_of(sorted(region), ()):
        region |= _path_to(wanted, node, MAX_LEVELS)
    return sorted(region)


def _path_to(wanted: set[Node], node: Node, levels: int) -> set[Node]:
    if node in wanted or node.op != "call_function" or levels == 0:
        return set()
    above = [i for i in node.all_input_nodes if i in wanted]
    deeper = set().union(*(_path_to(wanted, i, levels - 1) for i in node.all_input_nodes))
    return {node, *deeper} if above or deeper else set()


def _region(nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node]) -> GraphModule:
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["val"] = node.meta.get("val")
    for node in nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, _lookup(copies))
    graph.output(tuple(copies[n] for n in outputs))
    return GraphModule({}, graph)


def _lookup(copies: dict[Node, Node]) -> Callable[[Node], Node]:
    return lambda n: copies[n]
