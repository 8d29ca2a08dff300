"""The AttnRes ops' meaning: references against an implementation of their own, fakes, costs, refusals."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from attn_res_cases import EPS, FEWEST, IN_FP64, Case, make_case, relative_error, row_by_row
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rewrite.errors import UnsupportedError
from k3rewrite.kernels import OPS
from k3rewrite.kernels.attn_res.op import ATTN_RES, attn_res
from k3rewrite.kernels.attn_res_norm.op import (
    ADD_ATTN_RES_NORM,
    ATTN_RES_NORM,
    WRITE_ATTN_RES_NORM,
    add_attn_res_norm,
    attn_res_norm,
    bank_reads,
    write_attn_res_norm,
)

BF16 = FEWEST | {"out_dtype": torch.bfloat16}
EXACT = BF16 | {"mix_dtype": torch.bfloat16, "scale_dtype": torch.bfloat16}

shapes = st.tuples(st.integers(0, 5), st.integers(0, 9), st.sampled_from([1, 2, 7, 32, 65]))


def exact(case: Case, prefix: torch.Tensor, *, norm: bool = True) -> torch.Tensor:
    weight = case.norm_weight if norm else None
    return row_by_row(prefix, case.chunk, case.score_norm, case.score_proj, weight)


@given(shape=shapes, seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_fp64_references_agree_with_row_by_row(shape: tuple[int, int, int], seed: int) -> None:
    case = make_case(*shape, torch.float64, seed=seed)
    mixed = attn_res([case.chunk, case.prefix], *case.weights[:3], compute_dtype=torch.float64, out_dtype=torch.float64)
    assert relative_error(mixed, exact(case, case.prefix, norm=False)) < 1e-12
    normed = attn_res_norm(case.prefix, [case.chunk], *case.weights, **IN_FP64)
    assert relative_error(normed, exact(case, case.prefix)) < 1e-12
    updated, added = add_attn_res_norm(case.prefix, case.delta, [case.chunk], *case.weights, **IN_FP64)
    assert relative_error(added, exact(case, case.prefix + case.delta)) < 1e-12
    assert torch.equal(updated, case.prefix + case.delta)


@given(shape=shapes, cuts=st.lists(st.integers(0, 9), max_size=3), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_chunks_and_single_sources_are_the_same(shape: tuple[int, int, int], cuts: list[int], seed: int) -> None:
    rows, count, columns = shape
    case = make_case((rows, 2), count, columns, seed=seed)
    ends = sorted({0, count, *(cut for cut in cuts if cut < count)})
    pieces = [case.bank[..., a:b, :] for a, b in itertools.pairwise(ends)]
    mixtures = [list(case.chunk.unbind(-2)), [case.chunk], pieces, [*pieces, case.bank[..., :0, :]]]
    results = [attn_res_norm(case.prefix, blocks, *case.weights, **BF16) for blocks in mixtures]
    assert all(torch.equal(result, results[0]) for result in results[1:])


def test_without_blocks_the_norm_still_applies() -> None:
    case = make_case(3, 0, 16, torch.float64)
    expected = torch.nn.functional.rms_norm(case.prefix, (16,), case.norm_weight, EPS)
    for blocks in ([], [case.chunk]):
        normed = attn_res_norm(case.prefix, blocks, *case.weights, **IN_FP64)
        torch.testing.assert_close(normed, expected, rtol=1e-12, atol=0)
    mixed = attn_res([case.prefix], *case.weights[:3], compute_dtype=torch.float64, out_dtype=torch.float64)
    assert torch.equal(mixed, case.prefix)


def test_stored_prefix_is_bit_equal_to_the_bf16_sum() -> None:
    case = make_case(1, 8, 7168)
    updated, _ = add_attn_res_norm(case.prefix, case.delta, [case.chunk], *case.weights, **BF16)
    assert torch.equal(updated, case.prefix + case.delta)
    unrounded = case.prefix.float() + case.delta.float()
    assert 0.0 < float((updated.float() - unrounded).abs().max()) <= 0.0157


def test_exact_mode_is_the_vendor_chain_and_differs_from_fewest_roundings() -> None:
    case = make_case(1, 8, 7168)
    mix = attn_res([case.chunk, case.prefix], *case.weights[:3], compute_dtype=torch.float32, out_dtype=torch.bfloat16)
    wide = mix.float()
    chain = case.norm_weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).bfloat16()
    in_exact_mode = attn_res_norm(case.prefix, [case.chunk], *case.weights, **EXACT)
    assert torch.equal(in_exact_mode, chain)
    fewest = attn_res_norm(case.prefix, [case.chunk], *case.weights, **BF16)
    differing = int((fewest != chain).sum())
    assert 500 < differing < 4000
    truth = exact(case, case.prefix)
    assert relative_error(fewest, truth) < relative_error(chain, truth) < 6e-3


def test_writing_a_slot_leaves_inputs_and_other_slots() -> None:
    case = make_case(4, 3, 24)
    bank_before, prefix_before = case.bank.clone(), case.prefix.clone()
    for delta in (None, case.delta):
        new = case.prefix if delta is None else case.prefix + delta
        bank, normed = write_attn_res_norm(case.prefix, delta, [case.chunk], case.bank, 3, *case.weights, **BF16)
        assert torch.equal(bank[:, 3], new)
        assert torch.equal(bank[:, :3], bank_before[:, :3])
        assert bool(bank[:, 4].isnan().all())
        assert relative_error(normed, exact(case, new)) < 4e-3
        assert torch.equal(case.bank.nan_to_num(9.0), bank_before.nan_to_num(9.0))
        assert torch.equal(case.prefix, prefix_before)


def test_rows_do_not_see_each_other() -> None:
    case = make_case(5, 3, 40)
    clean = attn_res_norm(case.prefix, [case.chunk], *case.weights, **BF16)
    case.prefix[2] = math.nan
    case.bank[4, 1] = math.nan
    dirty = attn_res_norm(case.prefix, [case.chunk], *case.weights, **BF16)
    assert torch.equal(dirty[[0, 1, 3]], clean[[0, 1, 3]])
    assert bool(dirty[[2, 4]].isnan().all())


def test_results_never_share_memory_with_inputs() -> None:
    case = make_case(3, 0, 16, torch.float32)
    results = [
        attn_res([case.prefix], *case.weights[:3], compute_dtype=torch.float32, out_dtype=torch.float32),
        *add_attn_res_norm(
            case.prefix, torch.zeros_like(case.delta), [], *case.weights, **FEWEST, out_dtype=torch.float32
        ),
        *write_attn_res_norm(case.prefix, None, [], case.bank, 0, *case.weights, **FEWEST, out_dtype=torch.float32),
    ]
    inputs = {t.untyped_storage().data_ptr() for t in (case.prefix, case.delta, case.bank)}
    assert not inputs & {result.untyped_storage().data_ptr() for result in results}


def _calls(case: Case) -> dict[str, tuple[tuple, dict]]:
    return {
        "attn_res": (
            ([case.chunk, case.prefix], *case.weights[:3]),
            {"compute_dtype": torch.float32, "out_dtype": torch.bfloat16},
        ),
        "attn_res_norm": ((case.prefix, [case.chunk], *case.weights), BF16),
        "add_attn_res_norm": ((case.prefix, case.delta, [case.chunk], *case.weights), BF16),
        "write_attn_res_norm": (
            (case.prefix, None, [case.chunk], case.bank.nan_to_num(), case.count, *case.weights),
            BF16,
        ),
    }


@pytest.mark.parametrize("name", ["attn_res", "attn_res_norm", "add_attn_res_norm", "write_attn_res_norm"])
@pytest.mark.parametrize(("rows", "count"), [(3, 2), (1, 8), ((2, 3), 0)])
def test_registered_ops_pass_opcheck(name: str, rows: int | tuple[int, ...], count: int) -> None:
    """Schema against behaviour (no alias, no write) and fake against real: shape, dtype, stride, dynamic sizes."""
    arguments, options = _calls(make_case(rows, count, 16, pad=8))[name]
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    with torch.no_grad():
        torch.library.opcheck(OPS[name].overload, arguments, options, test_utils=tests)


def test_an_empty_batch_gives_empty_results() -> None:
    for name, (arguments, options) in _calls(make_case(0, 2, 16)).items():
        results = OPS[name].overload(*arguments, **options)
        for result in results if isinstance(results, tuple) else (results,):
            assert result.numel() == 0 and result.shape[-1] == 16


def test_fake_adds_no_guard_for_a_symbolic_batch() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    case, environment = make_case(6, 2, 16), ShapeEnv()
    with FakeTensorMode(shape_env=environment) as mode:

        def fake(tensor: torch.Tensor, *, batch: bool) -> torch.Tensor:
            sizes = [DimDynamic.DYNAMIC if batch and i == 0 else DimDynamic.STATIC for i in range(tensor.dim())]
            return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

        prefix, bank = fake(case.prefix, batch=True), fake(case.bank, batch=True)
        weights = [fake(w, batch=False) if isinstance(w, torch.Tensor) else w for w in case.weights]
        before = len(environment.guards)
        bank_out, normed = OPS["write_attn_res_norm"].overload(prefix, None, [bank[:, :2]], bank, 2, *weights, **BF16)
        assert normed.dtype == torch.bfloat16 and normed.dim() == 2
        assert str(normed.shape[0]) == str(prefix.shape[0]) and bank_out.stride() == bank.stride()
        assert len(environment.guards) == before


def test_costs_are_those_of_one_launch() -> None:
    """One row of K3, 8 blocks: 9 sources and delta read, prefix and result written, 14,336 bytes each; 3 weights."""
    case, row = make_case(1, 8, 7168), 7168 * 2
    for op, reads, writes in ((ATTN_RES, 9 + 2, 1), (ATTN_RES_NORM, 9 + 3, 1), (ADD_ATTN_RES_NORM, 10 + 3, 2)):
        arguments, options = _calls(case)[op.name]
        cost = op.cost(*arguments, **options)
        assert (cost.launches, cost.bytes_read, cost.bytes_written) == (1, reads * row, writes * row)
    arguments, options = _calls(case)["write_attn_res_norm"]
    cost = WRITE_ATTN_RES_NORM.cost(*arguments, **options)
    assert (cost.bytes_read, cost.bytes_written) == (12 * row, 2 * row)


def test_bad_sources_and_slots_are_refused_by_reference_and_fake() -> None:
    case = make_case(2, 2, 8)
    dtypes = {"compute_dtype": torch.float32, "out_dtype": torch.bfloat16}
    for function in (ATTN_RES.reference, ATTN_RES.fake):
        with pytest.raises(UnsupportedError, match="there are no sources"):
            function([], *case.weights[:3], **dtypes)
        with pytest.raises(UnsupportedError, match=r"sources\[1\]: shape \(2, 9\)"):
            function([case.chunk, case.prefix.new_zeros(2, 9), case.prefix], *case.weights[:3], **dtypes)
    for function in (WRITE_ATTN_RES_NORM.reference, WRITE_ATTN_RES_NORM.fake):
        for bank, slot, message in (
            (case.bank, 4, "the bank has 4 slots, and slot 4 is none of them"),
            (case.bank, -1, "slot -1 is none of them"),
            (case.bank.float(), 0, "the bank holds torch.float32"),
            (case.prefix, 0, "the bank has shape"),
        ):
            with pytest.raises(UnsupportedError, match=message):
                function(case.prefix, None, [], bank, slot, *case.weights, **BF16)


def test_writing_in_place_asks_what_is_read_of_the_bank() -> None:
    """Slots 0 to 2 may be read while slot 3 is written; a source that covers slot 3, or half slots, may not be."""
    case = make_case(4, 3, 16)
    bank, other = case.bank, make_case(4, 3, 16)
    arguments = {"prefix": case.prefix, "delta": None, "blocks": [bank[:, :3]], "bank": bank, "slot": 3}
    for blocks in ([bank[:, :3]], [bank[:, 0], bank[:, 1:3], bank[:, 4]], [other.chunk], [bank[:, 3:3]], []):
        assert bank_reads(arguments | {"blocks": blocks}) is None
    assert bank_reads(arguments | {"prefix": bank[:, 2]}) is None
    for source, place in ((bank[:, :4], "blocks[0]"), (bank[:, 3], "blocks[0]"), (bank, "blocks[0]")):
        assert bank_reads(arguments | {"blocks": [source]}) == f"slot 3 is read as {place} and written"
    assert bank_reads(arguments | {"prefix": bank[:, 3]}) == "slot 3 is read as prefix and written"
    for source in (bank[:, ::2], bank[..., 8:], bank.as_strided((4, 16), (80, 1), 8), bank[::2, 0]):
        assert bank_reads(arguments | {"blocks": [source]}) == "blocks[0] is a view of the bank, but not of whole slots"
