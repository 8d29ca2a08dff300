// Routed experts for few tokens, bf16, in the published form of warp decode: a wave owns an output.
//
//   warp_decode_gate_up   a wave owns one (or a few) rows of one route's intermediate: it streams x once for the gate
//                         and the up row, keeps a private sum in every lane, and adds lanes up at the end
//   warp_decode_down      a wave owns one (or a few) outputs of one token: it walks the token's experts and folds the
//                         routing weights into one fp32 sum
//
// No shared memory, no barrier, no atomics; waves depend on nothing but their inputs. Lanes are added up by a butterfly
// (shfl.sync.bfly on NVIDIA, data-parallel primitives on AMD). A route outside of the window is skipped in both: its
// row of `hidden` is not written and not read.
//
// Sizes and optional parts are macros, as one source is compiled for each shape:
//
//   WARP_DECODE_INNER, _WIDTH, _OUTER   columns of x, of an expert's intermediate, of the result; multiples of 8
//   WARP_DECODE_TOP_K      experts of a token
//   WARP_DECODE_THREADS    threads of a workgroup: 8 waves in the published form
//   WARP_DECODE_ROWS       outputs of a wave: 1 in the published form
//   WARP_DECODE_GROUP      experts of which a wave of the down kernel has loads in flight together
//   WARP_DECODE_UNROLL     vectors of 8 columns that a lane of the gate/up kernel has in flight together
//   WARP_DECODE_IDS        i32 or i64: the type of ids
//   WARP_DECODE_SITU, _LINEAR   1: SiTU instead of SiLU; the up half goes through a tanh of its own
//   WARP_DECODE_PRODUCT_BF16, _COMPUTE_BF16, _ROUTE_BF16, _COMBINE_BF16   1: the model's roundings (op.py)
//   WARP_DECODE_DEPENDENT  1: the down kernel may be launched while gate/up still runs (NVIDIA, sm_90 and later)
//
// Strides are in elements, of rows multiples of 8; pointers are 16-byte aligned; the columns of a row are contiguous.

#include "activation.h"
#include "portability.h"

namespace {

using namespace k3;

typedef WARP_DECODE_IDS id_type;

constexpr i32 rows = WARP_DECODE_ROWS;
constexpr i32 waves = WARP_DECODE_THREADS / wave_size;
constexpr i32 group = WARP_DECODE_GROUP;
constexpr i32 unroll = WARP_DECODE_UNROLL;

static_assert(WARP_DECODE_INNER % 8 == 0 && WARP_DECODE_WIDTH % 8 == 0, "columns come in vectors of 8");
static_assert(WARP_DECODE_THREADS % wave_size == 0, "WARP_DECODE_THREADS must be whole waves");

// The place of a route's expert in the weight stacks; negative outside of the window.
K3_DEVICE i64 local_expert(const id_type* ids, i64 route, i32 first, i32 count) {
    const i64 expert = static_cast<i64>(ids[route]) - first;
    return expert < count ? expert : -1;
}

K3_DEVICE float dot8(const u32x4& a, const float (&b)[8], float sum) {
    float values[8];
    unpack8(a, values);
#pragma unroll
    for (i32 k = 0; k < 8; ++k) sum = k3::fma(values[k], b[k], sum);
    return sum;
}

#if K3_NVIDIA
K3_DEVICE void wait_for_earlier_kernel() {
    if constexpr (WARP_DECODE_DEPENDENT) asm volatile("griddepcontrol.wait;" ::: "memory");
}
K3_DEVICE void release_later_kernel() {
    if constexpr (WARP_DECODE_DEPENDENT) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
#else
K3_DEVICE void wait_for_earlier_kernel() {}
K3_DEVICE void release_later_kernel() {}
#endif

}  // namespace

// Grid: (routes, blocks of WAVES * ROWS rows of an expert).
K3_KERNEL(WARP_DECODE_THREADS)
warp_decode_gate_up(const bf16* x, i32 x_stride, const id_type* ids, i32 first, i32 count, const bf16* w_gate,
                    const bf16* w_up, i32 expert_stride, i32 row_stride, float beta, float linear_beta, bf16* hidden) {
    constexpr i32 vectors = WARP_DECODE_INNER / 8;
    release_later_kernel();
    const i64 route = block_x();
    const i64 expert = local_expert(ids, route, first, count);
    if (expert < 0) return;
    const i32 row = (block_y() * waves + wave()) * rows;
    if (row >= WARP_DECODE_WIDTH) return;
    const bf16* const source = x + route / WARP_DECODE_TOP_K * x_stride;
    const i64 begin = expert * expert_stride + static_cast<i64>(row) * row_stride;
    float gate[rows], up[rows];
#pragma unroll
    for (i32 r = 0; r < rows; ++r) gate[r] = up[r] = 0.0f;
    for (i32 vector = lane(); vector < vectors; vector += wave_size * unroll) {
        u32x4 input[unroll], one[unroll][rows], other[unroll][rows];
#pragma unroll
        for (i32 u = 0; u < unroll; ++u) {
            const i32 at = vector + u * wave_size;
            const bool inside = vectors % (wave_size * unroll) == 0 || at < vectors;
            const u32x4 zero{0, 0, 0, 0};
            input[u] = inside ? load16(source + at * 8) : zero;
#pragma unroll
            for (i32 r = 0; r < rows; ++r) {
                const bool here = inside && (WARP_DECODE_WIDTH % rows == 0 || row + r < WARP_DECODE_WIDTH);
                const i64 offset = begin + static_cast<i64>(r) * row_stride + at * 8;
                one[u][r] = here ? load16_stream(w_gate + offset) : zero;
                other[u][r] = here ? load16_stream(w_up + offset) : zero;
            }
        }
#pragma unroll
        for (i32 u = 0; u < unroll; ++u) {
            float values[8];
            unpack8(input[u], values);
#pragma unroll
            for (i32 r = 0; r < rows; ++r) {
                gate[r] = dot8(one[u][r], values, gate[r]);
                up[r] = dot8(other[u][r], values, up[r]);
            }
        }
    }
#pragma unroll
    for (i32 r = 0; r < rows; ++r) {
        const float result =
            activated<WARP_DECODE_SITU, WARP_DECODE_LINEAR, WARP_DECODE_PRODUCT_BF16, WARP_DECODE_COMPUTE_BF16>(
                wave_sum(gate[r]), wave_sum(up[r]), beta, linear_beta);
        if (lane() == 0 && row + r < WARP_DECODE_WIDTH) hidden[route * WARP_DECODE_WIDTH + row + r] = to_bf16(result);
    }
}

// Grid: (tokens, blocks of WAVES * ROWS outputs).
K3_KERNEL(WARP_DECODE_THREADS)
warp_decode_down(const bf16* hidden, const id_type* ids, const float* weights, i32 first, i32 count,
                 const bf16* w_down, i32 expert_stride, i32 row_stride, bf16* out) {
    constexpr i32 vectors = WARP_DECODE_WIDTH / 8;
    constexpr i32 steps = (vectors + wave_size - 1) / wave_size;
    constexpr bool by_route = WARP_DECODE_ROUTE_BF16 || WARP_DECODE_COMBINE_BF16;  // lanes added up for each expert
    wait_for_earlier_kernel();
    const i64 token = block_x();
    const i32 row = (block_y() * waves + wave()) * rows;
    if (row >= WARP_DECODE_OUTER) return;
    float total[rows];
#pragma unroll
    for (i32 r = 0; r < rows; ++r) total[r] = 0.0f;
#pragma unroll 1
    for (i32 j = 0; j < WARP_DECODE_TOP_K; j += group) {
        i64 expert[group];
        float share[group];
        u32x4 values[group][steps], matrix[group][rows][steps];
#pragma unroll
        for (i32 g = 0; g < group; ++g) {
            const bool there = WARP_DECODE_TOP_K % group == 0 || j + g < WARP_DECODE_TOP_K;
            const i64 route = token * WARP_DECODE_TOP_K + j + g;
            expert[g] = there ? local_expert(ids, route, first, count) : -1;
            share[g] = expert[g] >= 0 ? weights[route] : 0.0f;
#pragma unroll
            for (i32 s = 0; s < steps; ++s) {
                const i32 at = lane() + s * wave_size;
                const bool inside = expert[g] >= 0 && (vectors % wave_size == 0 || at < vectors);
                const u32x4 zero{0, 0, 0, 0};
                values[g][s] = inside ? load16(hidden + route * WARP_DECODE_WIDTH + at * 8) : zero;
#pragma unroll
                for (i32 r = 0; r < rows; ++r) {
                    const bool here = inside && (WARP_DECODE_OUTER % rows == 0 || row + r < WARP_DECODE_OUTER);
                    const i64 offset = expert[g] * expert_stride + static_cast<i64>(row + r) * row_stride + at * 8;
                    matrix[g][r][s] = here ? load16_stream(w_down + offset) : zero;
                }
            }
        }
#pragma unroll
        for (i32 g = 0; g < group; ++g) {
            float sum[rows];
#pragma unroll
            for (i32 r = 0; r < rows; ++r) sum[r] = 0.0f;
#pragma unroll
            for (i32 s = 0; s < steps; ++s) {
                float input[8];
                unpack8(values[g][s], input);
#pragma unroll
                for (i32 r = 0; r < rows; ++r) sum[r] = dot8(matrix[g][r][s], input, sum[r]);
            }
#pragma unroll
            for (i32 r = 0; r < rows; ++r) {
                if constexpr (by_route) {
                    const float route = when_bf16(WARP_DECODE_ROUTE_BF16, wave_sum(sum[r]));
                    const float weight = when_bf16(WARP_DECODE_COMBINE_BF16, share[g]);
                    const float term = when_bf16(WARP_DECODE_COMBINE_BF16, route * weight);
                    total[r] += expert[g] >= 0 ? term : 0.0f;
                } else {
                    total[r] = k3::fma(sum[r], share[g], total[r]);
                }
            }
        }
    }
#pragma unroll
    for (i32 r = 0; r < rows; ++r) {
        const float result = by_route ? total[r] : wave_sum(total[r]);
        if (lane() == 0 && row + r < WARP_DECODE_OUTER) out[token * WARP_DECODE_OUTER + row + r] = to_bf16(result);
    }
}
