"""What one node does besides computing its value, read off its schema.

    aten.add.Tensor            nothing
    aten.copy_(dst, src)       writes dst, returns an alias of dst
    aten.view(x, ...)          returns an alias of x, reads no data
    _c10d_functional.*         takes part in a collective
    an op of somebody else     its schema is believed about writes, but not that it may be deleted or merged

Nothing is assumed: what has no schema (higher-order ops, `call_module`, plain functions) counts as writing and
returning every tensor that it is given.
"""

from __future__ import annotations

import builtins
import math
import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from k3rewrite import _torch_private as private
from k3rewrite.graph.arguments import every_node

TRUSTED_NAMESPACES = frozenset({"aten", "prims", "prim", "k3", "k3_kernels", "quantized_decomposed"})
"""Namespaces whose schemas are believed in full. Others may hold ops that write without saying so."""

TRUSTED_OPS = frozenset({"transformers::grouped_mm_fallback"})
"""Ops of other namespaces whose code was read: they compute their result and nothing else."""

COLLECTIVE_NAMESPACES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "symm_mem", "_dtensor"}
)

_UNDECLARED_ALIASES = frozenset(
    {
        "aten::_unsafe_view",
        "aten::unsafe_split.Tensor",
        "aten::unsafe_split_with_sizes",
        "aten::unsafe_chunk",
        "_c10d_functional::wait_tensor",
    }
)
"""Ops that return storage of their first argument although the schema does not say so."""

_UNDECLARED_WRITES = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
"""Ops that update their running statistics although the schema does not say so."""

_MAYBE_COPY = frozenset({"reshape", "contiguous", "to", "reshape_as", "flatten", "type_as", "expand_as"})
"""Ops that return an alias or a copy, depending on the input: they may read data."""

_CHECKS = frozenset({"_functional_assert_async", "_functional_sym_constrain_range", "_functional_assert_scalar"})

_OPERATORS = (
    "add sub mul truediv floordiv mod neg pos pow eq ne lt le gt ge and_ or_ xor not_ truth abs index inv invert"
    " lshift rshift is_ is_not"
)
_SCALAR_FUNCTIONS = frozenset(
    [getattr(operator, name) for name in _OPERATORS.split()]
    + [function for name, function in vars(math).items() if not name.startswith("_") and callable(function)]
    + [function for name, function in vars(torch).items() if name.startswith("sym_") and callable(function)]
    + [builtins.max, builtins.min, builtins.abs, builtins.round, builtins.int, builtins.float, builtins.bool]
)


@dataclass(frozen=True)
class OpFacts:
    """Facts of one op. Arguments are (position, name) pairs, as a call may give them either way."""

    written: tuple[tuple[int, str], ...]
    aliases: tuple[tuple[tuple[int, str], ...], ...]
    """per result: the arguments whose storage it may share"""
    effect: str | None
    """why a call is more than its value, apart from writes; None if it is not"""
    is_view: bool
    """every result is an alias and no data is read"""


@lru_cache(maxsize=8192)
def op_facts(target: torch._ops.OpOverload) -> OpFacts:
    """Facts of an op from its schema, its tags and the lists above."""
    schema = target._schema
    arguments = list(enumerate(schema.arguments))
    written = tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    if _base_name(target) in _UNDECLARED_WRITES:
        written += tuple((i, a.name) for i, a in arguments if a.name in ("running_mean", "running_var"))
    aliases = [
        tuple((i, a.name) for i, a in arguments if _may_share(a.alias_info, result.alias_info))
        for result in schema.returns
    ]
    name = target.name()
    if name in _UNDECLARED_ALIASES:
        aliases = [((0, schema.arguments[0].name),) for _ in aliases]
    is_view = bool(aliases) and all(aliases) and not written and _base_name(target) not in _MAYBE_COPY
    if _base_name(target) == "set_":
        # set_(x, source): x becomes an alias of source, and no annotation says so
        written = tuple((i, a.name) for i, a in arguments if "Tensor" in str(a.type))
        aliases = [written for _ in aliases]
    return OpFacts(written, tuple(aliases), _effect(target), is_view and target.namespace not in COLLECTIVE_NAMESPACES)


def _may_share(argument: Any, result: Any) -> bool:
    """Compare two alias annotations. One on a list's elements shows empty sets: it may be any."""
    if argument is None or result is None:
        return False
    return not argument.before_set or not result.before_set or bool(argument.before_set & result.before_set)


def _base_name(target: torch._ops.OpOverload) -> str:
    return target.name().split("::", 1)[1].split(".", 1)[0]


def _effect(target: torch._ops.OpOverload) -> str | None:
    schema = target._schema
    if target.namespace in COLLECTIVE_NAMESPACES:
        return "takes part in a collective"
    if not schema.returns:
        return "returns nothing, so it is there for its effect"
    if torch.Tag.nondeterministic_seeded in target.tags:
        return "draws random numbers"
    if _base_name(target) in _CHECKS or private.has_registered_side_effect(target):
        return "is registered as having a side effect"
    if "out" in target._overloadname.split("_") or any(a.name == "out" or a.is_out for a in schema.arguments):
        return "is an out-variant"
    if target.namespace not in TRUSTED_NAMESPACES and target.name() not in TRUSTED_OPS:
        return f"belongs to '{target.namespace}', whose schemas need not be complete"
    return None


def _argument(node: Node, where: tuple[int, str]) -> Any:
    position, name = where
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def _selected(node: Node, where: tuple[tuple[int, str], ...]) -> tuple[Node, ...]:
    return tuple(dict.fromkeys(n for w in where for n in every_node(_argument(node, w))))


def is_scalar_function(node: Node) -> bool:
    """True for arithmetic on sizes: a plain function whose result is no tensor."""
    if node.op != "call_function" or node.target not in _SCALAR_FUNCTIONS:
        return False
    value = node.meta.get("val")
    return value is not None and not isinstance(value, (torch.Tensor, list, tuple))


def is_unknown(node: Node) -> bool:
    """True for a call of something without a schema that is neither `getitem` nor arithmetic on sizes."""
    if node.op in ("call_module", "call_method"):
        return True
    if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target is not operator.getitem and not is_scalar_function(node)


def writes(node: Node) -> tuple[Node, ...]:
    """Argument nodes whose storage the node writes; all of them for a node without a schema."""
    if isinstance(node.target, torch._ops.OpOverload):
        facts = op_facts(node.target)
        return _selected(node, facts.written) if facts.written else ()
    return tuple(node.all_input_nodes) if is_unknown(node) else ()


def result_aliases(node: Node) -> tuple[tuple[Node, ...], ...]:
    """Per result, the argument nodes whose storage it may share. A node without a schema has one entry: everything.

    `getitem` shares with what it takes from; which part is known by the storage map (graph/storage.py).
    """
    if isinstance(node.target, torch._ops.OpOverload):
        facts = op_facts(node.target)
        return tuple(_selected(node, where) if where else () for where in facts.aliases)
    if is_unknown(node) or (node.op == "call_function" and node.target is operator.getitem):
        return (tuple(node.all_input_nodes),)
    return ((),)


def aliases_of(node: Node) -> tuple[Node, ...]:
    """Argument nodes whose storage any result of the node may share."""
    return tuple(dict.fromkeys(n for result in result_aliases(node) for n in result))


def is_view(node: Node) -> bool:
    """True if the node only makes another view: it reads no data, so writes do not matter to where it stands."""
    if node.op == "call_function" and node.target is operator.getitem:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and op_facts(node.target).is_view


def effect(node: Node) -> str | None:
    """Why the node is more than its value (it writes, talks to other ranks, draws random numbers, ...), or None.

    A node without an effect may be repeated, merged with an equal one or moved within the bounds of the data it reads.
    """
    if node.op in ("placeholder", "output"):
        return f"is {'an input' if node.op == 'placeholder' else 'the output'} of the graph"
    if node.op == "get_attr":
        return None
    if is_unknown(node):
        return "has no schema"
    if isinstance(node.target, torch._ops.OpOverload):
        facts = op_facts(node.target)
        if facts.written:
            names = ", ".join(name for _, name in facts.written)
            return f"writes its argument {names}"
        if facts.effect:
            return facts.effect
        if node.meta.get("unbacked_bindings"):
            return "gives a size its name"
    return None


def delete_objection(node: Node) -> str | None:
    """Why the node must stay, or None: it has users, or is more than its value."""
    if node.users:
        return f"is used by {next(iter(node.users)).name}"
    return effect(node)


def may_delete(node: Node) -> bool:
    """True if taking the node out changes nothing that can be seen."""
    return delete_objection(node) is None
