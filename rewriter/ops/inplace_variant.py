"""From a functional op to the one that writes into its arguments' storage.

    k3::step (Tensor x, Tensor state) -> (Tensor out, Tensor state)     with inplace {"state": 1}
    k3::step_(Tensor x, Tensor(a!) state) -> Tensor out

Its meaning is the functional reference followed by a copy into the argument, so it has one source of truth with the
op it comes from. The last pass of a pipeline (`finalise/reuse_storage.py`) decides where it may be used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from k3rewrite import _torch_private as private
from k3rewrite.errors import ContractError, UnsupportedError, did_you_mean
from k3rewrite.ops.vocabulary import Op


@dataclass(frozen=True)
class InplaceVariant(Op):
    """An op made by `inplace_variant`. `kept[i]` is the functional op's result that is result i of this one."""

    arguments: tuple[str, ...] = ()
    kept: tuple[int, ...] = ()

    @property
    def source_hash(self) -> str:
        """Content hash of the functional op it comes from and of what it writes."""
        assert self.base is not None
        parts = [self.base.source_hash, self.schema, *self.arguments]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def inplace_variant(op: Op, arguments: Sequence[str]) -> InplaceVariant:
    """The variant of `op` that writes the results named by `op.inplace` into `arguments` and does not return them.

    It is called `<op>_` if it writes all that the op declares, else `<op>_<arguments>_`. Not yet registered.

    Raises:
        UnsupportedError: an argument that the op does not declare, that is a list, or whose result is not one tensor;
            two arguments for one result; an op that already writes an argument.
    """
    names = tuple(arguments)
    place = op.qualified_name
    if not names:
        raise UnsupportedError("no argument to write to was named", place=place, remedy="name at least one")
    for name in names:
        if name not in op.inplace:
            raise UnsupportedError(
                f"does not declare that '{name}' may be written; {did_you_mean(name, op.inplace)}",
                place=place,
                remedy=f"add it to Op.inplace of {op.name}",
            )
    indices = [op.inplace[name] for name in names]
    parameters, results = split_schema(op.schema)
    if len(set(indices)) != len(indices):
        raise UnsupportedError("two arguments would take the same result", place=place, remedy="name one of them")
    if any(index not in range(len(results)) for index in indices):
        raise UnsupportedError(
            f"has {len(results)} results, not {max(indices) + 1}",
            place=place,
            remedy=f"correct the index of the result in Op.inplace of {op.name}; the first result is 0",
        )
    kept = tuple(i for i in range(len(results)) if i not in indices)
    all_names = _parameter_names(op)
    return InplaceVariant(
        name=f"{op.name}_" if set(names) == set(op.inplace) else f"{op.name}_{'_'.join(names)}_",
        schema=_derive_schema(place, parameters, results, names, indices, kept),
        reference=_reference(op, all_names, dict(zip(names, indices, strict=True)), kept),
        fake=_fake(op, kept),
        cost=op.cost,
        traits=op.traits,
        base=op,
        arguments=names,
        kept=kept,
    )


def ensure_registered(op: Op) -> Op:
    """Register an op unless the dispatcher already has it; one of the same name and another schema is an error."""
    packet = getattr(getattr(torch.ops, op.namespace), op.name, None)
    if packet is None:
        return op.register()
    known, wanted = str(packet.default._schema), str(private.parse_schema(op.qualified_name + op.schema))
    if known != wanted:
        raise ContractError(
            f"is registered as {known}, not as {wanted}",
            place=op.qualified_name,
            remedy="give one of them another name",
        )
    return op


# --------------------------------------------------------------------------------------------- schema text


def split_schema(schema: str) -> tuple[list[str], list[str]]:
    """Texts of the parameters and of the results of "(Tensor x, float eps=1e-6) -> (Tensor, Tensor)"."""
    left, _, right = schema.partition("->")
    right = right.strip()
    results = _split_list(right[1:-1]) if right.startswith("(") else [right]
    return _split_list(left.strip()[1:-1]), results


def _split_list(text: str) -> list[str]:
    """Split at the commas that stand outside of brackets and quotes."""
    parts, depth, start, quote = [], 0, 0, ""
    for i, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def _derive_schema(
    place: str,
    parameters: Sequence[str],
    results: Sequence[str],
    names: Sequence[str],
    indices: Sequence[int],
    kept: Sequence[int],
) -> str:
    if any("!" in part for part in parameters):
        raise UnsupportedError("already writes an argument", place=place, remedy="start from the functional op")
    for index in indices:
        if results[index].split()[0] != "Tensor":
            raise UnsupportedError(
                f"result {index} is '{results[index]}', not one tensor",
                place=place,
                remedy="name a result that is a plain Tensor; a list takes over no argument's storage",
            )
    marks = dict(zip(names, "abcdefghijklmnop", strict=False))
    derived = []
    for part in parameters:
        kind, _, rest = part.partition(" ")
        mark = marks.pop(rest.split("=")[0].strip(), None)
        if mark is not None:
            if kind not in ("Tensor", "Tensor?"):
                raise UnsupportedError(f"'{part}' is not one tensor", place=place, remedy="only tensors can be written")
            part = f"Tensor({mark}!){kind[6:]} {rest}"
        derived.append(part)
    if marks:
        raise UnsupportedError(
            f"has no parameter {', '.join(map(repr, marks))}", place=place, remedy="check Op.inplace"
        )
    remaining = [results[i] for i in kept]
    tail = remaining[0] if len(remaining) == 1 else f"({', '.join(remaining)})"
    return f"({', '.join(derived)}) -> {tail}"


def _parameter_names(op: Op) -> tuple[str, ...]:
    return tuple(a.name for a in private.parse_schema(op.qualified_name + op.schema).arguments)


# --------------------------------------------------------------------------------------------- meaning


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _select(results: tuple[Any, ...], kept: Sequence[int]) -> Any:
    if not kept:
        return None
    return results[kept[0]] if len(kept) == 1 else tuple(results[i] for i in kept)


def _reference(op: Op, names: tuple[str, ...], written: Mapping[str, int], kept: tuple[int, ...]) -> Callable[..., Any]:
    def reference(*args: Any, **kwargs: Any) -> Any:
        results = _as_tuple(op.reference(*args, **kwargs))
        bound = dict(zip(names, args, strict=False)) | kwargs
        for name, index in written.items():
            bound[name].copy_(results[index])
        return _select(results, kept)

    return reference


def _fake(op: Op, kept: tuple[int, ...]) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        return _select(_as_tuple(op.fake(*args, **kwargs)), kept)

    return fake
