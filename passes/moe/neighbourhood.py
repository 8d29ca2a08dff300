"""Which nodes of a graph may belong to one mixture: found by their ops alone, before anything is read.

anchor      the down projection: a product with stacked weights, of an activation of other such products
seeds       the anchor, the products above its activation, and in a loop those with the other matrices of a stack
region      what is computed from the seeds, a few steps on
weights     what the weights of the seeds are unpacked with
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from k3rewrite.passes.moe.views import SPLITS
from k3rewrite.patterns import OPERATORS

aten = torch.ops.aten
MATRIX = frozenset({aten.mm.default, aten.addmm.default})
PRODUCTS = MATRIX | {aten.bmm.default, aten.baddbmm.default, aten._grouped_mm.default}
VIEWS = frozenset().union(
    *(OPERATORS[n] for n in ("view", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t", "slice", "select"))
) | {aten.clone.default, aten.alias.default, aten.detach.default}  # fmt: skip
GATHERS = frozenset({aten.index.Tensor, aten.index_select.default})
MASKS = frozenset({aten.eq.Scalar, aten.eq.Tensor, aten.scatter.src, aten.scatter_add.default})
SUMS = OPERATORS["sum"] | {
    aten.index_add.default, aten.index_put.default, aten.scatter_add.default, aten.bmm.default
}  # fmt: skip
ROOTS = SUMS | OPERATORS["mul"] | OPERATORS["cast"] | OPERATORS["add"] | OPERATORS["view"] | OPERATORS["mm"]
ACTIVATIONS = frozenset(
    {"silu", "sigmoid", "tanh", "gelu", "relu", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "elu",
     "leaky_relu", "hardswish", "hardsigmoid", "softplus", "mish", "exp"}
)  # fmt: skip
REACH = 14
"""how many users away from the down projection the mixture may lie; in a loop over experts, `MAX_NODES`"""
MAX_NODES = 400
LEVELS = 12


def is_grouped(node: Node) -> bool:
    """True for torch's grouped product, and for what transformers takes in its place."""
    return node.target is aten._grouped_mm.default or str(node.target) == "transformers.grouped_mm_fallback.default"


def is_down_projection(node: Node) -> bool:
    """True for an anchor; of a loop over experts only the one with the lowest number."""
    return (bool(first_products(node)) and not _follows_in_loop(node)) or is_separate_expert(node)


def is_separate_expert(node: Node) -> bool:
    """True for a down projection with a matrix of its own whose result is weighted by the share of one expert."""
    if node.target not in MATRIX or has_experts(node) or not _is_shared_out(node):
        return False
    above = list(_above(node))
    return any(_name(n) in ACTIVATIONS for n in above) and any(n.target in MATRIX for n in above)


def _is_shared_out(node: Node) -> bool:
    ring = [node]
    for _ in range(4):
        for user in (u for n in ring for u in n.users if u.target in OPERATORS["mul"]):
            if any(argument not in ring and leads_to_mask(argument) for argument in user.all_input_nodes):
                return True
        ring = [u for n in ring for u in n.users if u.target in VIEWS or u.target in OPERATORS["cast"]]
    return False


def first_products(node: Node) -> set[Node]:
    """The products with experts' weights whose activation `node` multiplies with such weights; else none."""
    if not has_experts(node):
        return set()
    found: set[Node] = set()
    activated = False
    for above in _above(node):
        if above.target in PRODUCTS or is_grouped(above):
            if has_experts(above):
                found.add(above)
        elif _name(above) in ACTIVATIONS:
            activated = True
    return found if activated else set()


def has_experts(node: Node) -> bool:
    """True for a product of which a factor is a stored stack of matrices, one of them, or gathered from one."""
    if is_grouped(node):
        return True
    return node.target in PRODUCTS and any(leads_to_stack(n) for n in node.all_input_nodes)


def leads_to_stack(node: Node, levels: int = LEVELS) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or levels == 0:
        return False
    if node.op in ("placeholder", "get_attr"):
        return value.dim() >= 3 and value.dtype.is_floating_point
    if node.target in GATHERS:
        return value.dim() >= 3
    passes_on = node.target in OPERATORS["mul"] or node.target in OPERATORS["cast"] or node.target in VIEWS
    return passes_on and any(leads_to_stack(n, levels - 1) for n in node.all_input_nodes)


def leads_to_mask(node: Node, levels: int = 8) -> bool:
    """True if the node is computed, in a few steps, from a comparison of integers or from scattered values."""
    if node.op != "call_function" or levels == 0:
        return False
    if node.target in MASKS:
        return True
    passes_on = is_pointwise(node) or any(
        node.target in kind for kind in (VIEWS, OPERATORS["sum"], OPERATORS["cast"])
    )  # fmt: skip
    return passes_on and any(leads_to_mask(n, levels - 1) for n in node.all_input_nodes)


def is_pointwise(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _name(node: Node) -> str:
    return node.target._opname if isinstance(node.target, torch._ops.OpOverload) else ""


def _passes(node: Node) -> bool:
    """Steps that a mixture may take between its products."""
    if node.op != "call_function":
        return False
    target: Any = node.target
    if target in VIEWS or target in GATHERS or target in SPLITS or target in SUMS or is_grouped(node):
        return True
    return is_pointwise(node) or target in OPERATORS["cast"] or getattr(target, "__name__", "") == "getitem"


def _above(node: Node) -> Iterator[Node]:
    """What the factors of a product are computed from, up to other products."""
    seen: set[Node] = set()
    stack = list(node.all_input_nodes)
    while stack and len(seen) < MAX_NODES // 4:
        above = stack.pop()
        if above in seen or above.op != "call_function":
            continue
        seen.add(above)
        yield above
        if above.target not in PRODUCTS and not is_grouped(above) and _passes(above):
            if above.target not in GATHERS or above.meta["val"].dim() < 3:
                stack.extend(above.all_input_nodes)


def seeds(anchor: Node) -> set[Node]:
    found = {anchor} | first_products(anchor)
    for product in list(found):
        for source in product.all_input_nodes:
            chosen = _select_above(source)
            if chosen is not None:
                found |= _products_of_stack(chosen.args[0], product)  # type: ignore[arg-type]
    return found


def _select_above(node: Node) -> Node | None:
    """The choice of one matrix of a stack behind views and casts of it."""
    while node.op == "call_function" and (node.target in VIEWS or node.target in OPERATORS["cast"]):
        if node.target in OPERATORS["select"]:
            return node
        node = node.args[0]  # type: ignore[assignment]
    return None


def _products_of_stack(stack: Node, product: Node) -> set[Node]:
    """The products with the other matrices of a stack; where the stack serves several loops, those of this one."""
    every: dict[object, set[Node]] = {}
    ring = [(user, user.args[2]) for user in stack.users if user.target in OPERATORS["select"]]
    while ring:
        node, number = ring.pop()
        for user in node.users:
            if user.target in PRODUCTS:
                every.setdefault(number, set()).add(user)
            elif user.target in VIEWS or user.target in OPERATORS["cast"]:
                ring.append((user, number))
    uses = [sorted(found) for found in every.values()]
    place = next((found.index(product) for found in uses if product in found), None)
    if place is None or len({len(found) for found in uses}) != 1:
        return {use for found in uses for use in found}
    return {found[place] for found in uses}


def _follows_in_loop(node: Node) -> bool:
    for source in node.all_input_nodes:
        chosen = _select_above(source)
        if chosen is not None:
            stack, dim, number = chosen.args
            assert isinstance(stack, Node)
            others = [u.args[2] for u in stack.users if u.target in OPERATORS["select"] and u.args[1] == dim]
            return any(isinstance(other, int) and other < number for other in others)  # type: ignore[operator]
    return False


def region_of(found: set[Node], anchor: Node) -> set[Node]:
    """What is computed from the seeds, by steps that a mixture may take."""
    seen, ring = set(found), sorted(found)
    for _ in range(MAX_NODES if anchor.target in MATRIX else REACH + LEVELS):
        following = dict.fromkeys(u for node in ring for u in node.users if u not in seen and _continues(u))
        seen.update(following)
        ring = list(following)
        if not ring or len(seen) > MAX_NODES:
            break
    return seen


def _continues(node: Node) -> bool:
    """False for a product with a plain matrix: there the mixture is over."""
    return _passes(node) or (
        node.target in MATRIX and not any(_is_plain_weight(argument) for argument in node.all_input_nodes)
    )


def _is_plain_weight(node: Node) -> bool:
    while node.op == "call_function" and (node.target in VIEWS or node.target in OPERATORS["cast"]):
        node = node.args[0]  # type: ignore[assignment]
    return node.op in ("placeholder", "get_attr")


def roots_of(region: set[Node], found: set[Node]) -> list[Node]:
    """Nodes of the region that may be a whole mixture, the last one first."""
    return sorted((node for node in region if node not in found and node.target in ROOTS), reverse=True)


def unpacking(found: set[Node]) -> set[Node]:
    """Element-wise steps between stored weights and the seeds."""
    steps: set[Node] = set()
    stack = [(source, LEVELS) for node in found for source in node.all_input_nodes]
    while stack:
        node, levels = stack.pop()
        if node in steps or levels == 0 or not leads_to_stack(node, levels):
            continue
        if node.target in OPERATORS["mul"]:
            steps.add(node)
        stack += [(source, levels - 1) for source in node.all_input_nodes]
    return steps
