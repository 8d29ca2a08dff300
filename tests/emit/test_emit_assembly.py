"""Counting instructions, on short texts of both kinds."""

from __future__ import annotations

import pytest

from k3rewrite.emit import summarise_assembly
from k3rewrite.emit.assembly import instructions

AMD = """; op:       k3::x  v_mfma_f32 in a comment
	.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
kernel:                                 ; @kernel
	s_load_dwordx4 s[4:7], s[0:1], 0x0
	global_load_dwordx4 v[2:5], v[2:3], off nt
	global_load_dword v6, v[2:3], off
	global_load_ushort v6, v[2:3], off
	buffer_load_dwordx4 v[2:5], v0, s[4:7], 0 offen
	v_add_f32_dpp v1, v4, v4 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf bound_ctrl:1
	v_mov_b32_dpp v1, v4 row_ror:8 row_mask:0xf bank_mask:0xf
	v_permlane32_swap_b32_e32 v1, v2
	ds_swizzle_b32 v2, v1 offset:swizzle(SWAP,16)
	ds_bpermute_b32 v2, v2, v1
	ds_write_b32 v0, v1
	ds_read_b128 v[0:3], v0
	s_barrier
	scratch_store_dword off, v0, s32
	v_mfma_f32_16x16x32_bf16 v[0:3], v[0:3], v[4:7], 0 ; a comment
	global_store_dwordx4 v[0:1], v[2:5], off
	global_store_short v[0:1], v2, off
	s_endpgm
.Lfunc_end0:
"""
PTX = """// op: k3::x, with st.local in a comment
.version 8.8
.visible .entry kernel(
	.param .u64 kernel_param_0
)
{
	.reg .pred 	%p<2>;
$L__BB0_1:
	ld.param.u64 	%rd1, [kernel_param_0];
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	ld.global.nc.L1::no_allocate.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];
	ld.global.L1::evict_first.L2::cache_hint.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1], %rd9;
	ld.global.v2.b64 { %rd4, %rd5 }, [ %rd1 ];
	ld.global.u16 	%rs1, [%rd1];
	@!%p1 st.global.v4.b32 [ %rd2 + 0 ], { %r1, %r2, %r3, %r4 };
	st.global.b16 [%rd2], %rs1;
	shfl.sync.bfly.b32 	%r5, %r4, 16, 31, -1;
	shfl.sync.idx.b32 	%r5, %r4, 0, 31, -1;
	st.shared.b32 [ %r6 ], %r5;
	bar.sync 	0;
	ld.shared.v2.b32 {%r1, %r2}, [ %r6 ];
	st.local.u32 [%rd3], %r1;
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r2 }, { %r3 }, { %r4 };
	ret;
}
"""


def test_amd() -> None:
    summary = summarise_assembly(AMD)
    assert (summary.global_loads, summary.wide_loads) == (4, 2)
    assert (summary.global_stores, summary.wide_stores) == (2, 1)
    assert (summary.dpp, summary.permlane_swaps, summary.lds_permutes, summary.shuffles) == (2, 1, 2, 0)
    assert summary.lane_exchanges == 5
    assert (summary.barriers, summary.lds_accesses, summary.scratch_accesses, summary.matrix_instructions) == (
        1,
        2,
        1,
        1,
    )


def test_ptx() -> None:
    summary = summarise_assembly(PTX)
    assert (summary.global_loads, summary.wide_loads) == (5, 4)
    assert (summary.global_stores, summary.wide_stores) == (2, 1)
    assert (summary.shuffles, summary.butterfly_shuffles, summary.dpp) == (2, 1, 0)
    assert summary.lane_exchanges == 2
    assert (summary.barriers, summary.lds_accesses, summary.scratch_accesses, summary.matrix_instructions) == (
        1,
        2,
        1,
        1,
    )


@pytest.mark.parametrize(("text", "first", "count"), [(AMD, "s_load_dwordx4", 18), (PTX, "ld.param.u64", 16)])
def test_instructions_are_nothing_else(text: str, first: str, count: int) -> None:
    found = instructions(text)
    assert found[0].startswith(first)
    assert not any(line.startswith(("@", ".", "//", ";")) for line in found)
    assert len(found) == count
