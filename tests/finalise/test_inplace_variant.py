"""From a functional op to the one that writes in place: schema, meaning, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from k3rewrite import _torch_private as private
from k3rewrite.errors import ContractError, UnsupportedError
from k3rewrite.ops.inplace_variant import ensure_registered, inplace_variant, split_schema
from k3rewrite.ops.vocabulary import Cost, Op

Tensor = torch.Tensor


def _cost(*args: Any, **kwargs: Any) -> Cost:
    return Cost(1, 2, 3)


def _op(name: str, schema: str, inplace: dict[str, int], reference: Any = None, fake: Any = None) -> Op:
    return Op(f"test_variant_{name}", schema, reference, fake, cost=_cost, inplace=inplace)


def _step(x: Tensor, conv: Tensor, state: Tensor, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    return x * state.sum() * scale, conv + x, state * scale


def _step_fake(x: Tensor, conv: Tensor, state: Tensor, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(conv), torch.empty_like(state)


STEP = _op(
    "step",
    "(Tensor x, Tensor conv, Tensor state, float scale=2.0) -> (Tensor out, Tensor conv, Tensor state)",
    {"conv": 1, "state": 2},
    _step,
    _step_fake,
)


@pytest.mark.parametrize(
    ("schema", "inplace", "written", "expected"),
    [
        ("(Tensor x) -> Tensor", {"x": 0}, "x", "(Tensor(a!) x) -> ()"),
        (
            "(Tensor x, Tensor? s, *, str mode='a, b') -> (Tensor y, Tensor s)",
            {"s": 1},
            "s",
            "(Tensor x, Tensor(a!)? s, *, str mode='a, b') -> Tensor y",
        ),
        (
            "(Tensor[] xs, Tensor p, Tensor q, int[2] at=[0, 1]) -> (Tensor, Tensor, Tensor[], Tensor)",
            {"q": 1, "p": 0},
            "q p",
            "(Tensor[] xs, Tensor(b!) p, Tensor(a!) q, int[2] at=[0, 1]) -> (Tensor[], Tensor)",
        ),
    ],
)
def test_the_schema_is_derived(schema: str, inplace: dict[str, int], written: str, expected: str) -> None:
    variant = inplace_variant(_op("any", schema, inplace), written.split())
    assert variant.schema == expected
    assert variant.name == "test_variant_any_"
    private.parse_schema(variant.qualified_name + variant.schema)


def test_a_part_of_the_arguments_has_a_name_of_its_own() -> None:
    assert inplace_variant(STEP, ["state"]).name == "test_variant_step_state_"
    assert inplace_variant(STEP, ["conv"]).kept == (0, 2)
    assert inplace_variant(STEP, ["conv", "state"]).name == "test_variant_step_"


@pytest.mark.parametrize("written", [["conv"], ["state"], ["conv", "state"]])
def test_the_variant_computes_what_the_op_does_and_passes_torchs_checks(written: list[str]) -> None:
    variant = inplace_variant(STEP, written)
    ensure_registered(variant)
    x, conv, state = torch.randn(3), torch.randn(3), torch.randn(5)
    expected = dict(zip(("out", "conv", "state"), _step(x, conv, state, 3.0), strict=True))
    given = {"conv": conv.clone(), "state": state.clone()}
    addresses = {name: tensor.data_ptr() for name, tensor in given.items()}
    results = variant.overload(x, given["conv"], given["state"], scale=3.0)
    results = results if isinstance(results, tuple) else (results,)
    kept = [name for name in expected if name not in written]
    assert all(torch.equal(r, expected[name]) for r, name in zip(results, kept, strict=True))
    for name, tensor in given.items():
        assert torch.equal(tensor, expected[name] if name in written else {"conv": conv, "state": state}[name])
        assert tensor.data_ptr() == addresses[name]
    torch.library.opcheck(
        variant.overload, (x, conv.clone(), state.clone()), test_utils=("test_schema", "test_faketensor")
    )


def test_the_hash_follows_the_op_and_what_is_written() -> None:
    first, second = inplace_variant(STEP, ["conv"]), inplace_variant(STEP, ["state"])
    assert len({STEP.source_hash, first.source_hash, second.source_hash}) == 3
    assert first.source_hash == inplace_variant(STEP, ["conv"]).source_hash


@pytest.mark.parametrize(
    ("schema", "inplace", "written", "message"),
    [
        ("(Tensor x, Tensor state) -> (Tensor, Tensor)", {"state": 1}, ["stat"], "did you mean 'state'"),
        ("(Tensor x, Tensor state) -> (Tensor, Tensor)", {"state": 1}, [], "no argument to write to"),
        ("(Tensor x, Tensor s) -> (Tensor, Tensor)", {"x": 1, "s": 1}, ["x", "s"], "two arguments would take"),
        ("(Tensor x) -> Tensor", {"x": 1}, ["x"], "has 1 results, not 2"),
        ("(Tensor[] x) -> Tensor", {"x": 0}, ["x"], "is not one tensor"),
        ("(Tensor x) -> Tensor[]", {"x": 0}, ["x"], "not one tensor"),
        ("(Tensor(a!) x) -> Tensor", {"x": 0}, ["x"], "already writes an argument"),
        ("(Tensor x) -> Tensor", {"y": 0}, ["y"], "has no parameter 'y'"),
    ],
)
def test_what_cannot_be_written_is_refused(
    schema: str, inplace: dict[str, int], written: list[str], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        inplace_variant(_op("bad", schema, inplace), written)


def test_one_name_with_two_schemas_is_an_error() -> None:
    ensure_registered(_op("once", "(Tensor x) -> Tensor", {}, lambda x: x + 1, torch.empty_like))
    ensure_registered(_op("once", "(Tensor x) -> Tensor", {}, lambda x: x + 1, torch.empty_like))
    with pytest.raises(ContractError, match="give one of them another name"):
        ensure_registered(_op("once", "(Tensor x, int n) -> Tensor", {}, lambda x, n: x + n, torch.empty_like))


def test_schema_text_is_split_at_top_level_only() -> None:
    assert split_schema("(Tensor a, int[2] b=[1, 2], str c='x,y') -> (Tensor, Tensor[])") == (
        ["Tensor a", "int[2] b=[1, 2]", "str c='x,y'"],
        ["Tensor", "Tensor[]"],
    )
    assert split_schema("() -> Tensor") == ([], ["Tensor"])
