// Routed experts for few tokens, bf16, in the published form of warp decode: a wave owns an output.
//
//   warp_decode_gate_up   a wave owns one (or a few) rows of one route's intermediate: it streams x once for the gate
//                         and the up row, keeps a private sum in every lane, and adds lanes up at the end
//   warp_decode_down      a wave owns one (or a few) outputs of one token: it walks the token's experts, one or a few side
//                         by side, and folds the routing weights into one fp32 sum
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
//   WARP_DECODE_LANES      lanes of the down kernel that read one expert's row together; the others read other experts'
//   WARP_DECODE_GROUP      rounds of experts of which a wave of the down kernel has loads in flight together
//   WARP_DECODE_UNROLL     vectors of 8 columns that a lane of the gate/up kernel has in flight together
//   WARP_DECODE_IDS        i32 or i64: the type of ids
//   WARP_DECODE_SHARES     float or bf16: the type of the routing weights
//   WARP_DECODE_SITU, _LINEAR   1: SiTU instead of SiLU; the up half goes through a tanh of its own
//   WARP_DECODE_PRODUCT_BF16, _COMPUTE_BF16, _ROUTE_BF16, _COMBINE_BF16   1: the model's roundings (op.py)
//   WARP_DECODE_DEPENDENT  1: either kernel may be launched while the one before it still runs (NVIDIA, sm_90 and later);
//                          the down kernel reads its first weights before it waits
//
// Strides are in elements, of rows multiples of 8; pointers are 16-byte aligned; the columns of a row are contiguous.

#include "activation.h"
#include "portability.h"

namespace {

using namespace k3;

typedef WARP_DECODE_IDS id_type;
typedef WARP_DECODE_SHARES share_type;

constexpr i32 rows = WARP_DECODE_ROWS;
constexpr i32 waves = WARP_DECODE_THREADS / wave_size;
constexpr i32 lanes = WARP_DECODE_LANES;
constexpr i32 together = wave_size / lanes;  // experts that a wave of the down kernel reads side by side
constexpr i32 group = WARP_DECODE_GROUP;
constexpr i32 unroll = WARP_DECODE_UNROLL;

static_assert(WARP_DECODE_INNER % 8 == 0 && WARP_DECODE_WIDTH % 8 == 0, "columns come in vectors of 8");
static_assert(WARP_DECODE_THREADS % wave_size == 0, "WARP_DECODE_THREADS must be whole waves");
static_assert(lanes > 0 && wave_size % lanes == 0, "lanes of an expert divide the wave");

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

}  // namespace

// Grid: (routes, blocks of WAVES * ROWS rows of an expert).
K3_KERNEL(WARP_DECODE_THREADS)
warp_decode_gate_up(const bf16* x, i32 x_stride, const id_type* ids, i32 first, i32 count, const bf16* w_gate,
                    const bf16* w_up, i32 expert_stride, i32 row_stride, float beta, float linear_beta, bf16* hidden) {
    constexpr i32 vectors = WARP_DECODE_INNER / 8;
    wait_for_earlier_kernel<WARP_DECODE_DEPENDENT>();
    release_later_kernel<WARP_DECODE_DEPENDENT>();
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
warp_decode_down(const bf16* hidden, const id_type* ids, const share_type* weights, i32 first, i32 count,
                 const bf16* w_down, i32 expert_stride, i32 row_stride, bf16* out) {
    constexpr i32 vectors = WARP_DECODE_WIDTH / 8;
    constexpr i32 steps = (vectors + lanes - 1) / lanes;
    constexpr i32 rounds = (WARP_DECODE_TOP_K + together - 1) / together;
    constexpr bool by_route = WARP_DECODE_ROUTE_BF16 || WARP_DECODE_COMBINE_BF16;  // lanes added up for each expert
    release_later_kernel<WARP_DECODE_DEPENDENT>();
    const i64 token = block_x();
    const i32 row = (block_y() * waves + wave()) * rows;
    const i32 column = lane() % lanes;
    float total[rows];
#pragma unroll
    for (i32 r = 0; r < rows; ++r) total[r] = 0.0f;
#pragma unroll 1
    for (i32 round = 0; round < rounds; round += group) {
        i64 expert[group];
        u32x4 matrix[group][rows][steps];
#pragma unroll
        for (i32 g = 0; g < group; ++g) {
            const i32 slot = (round + g) * together + lane() / lanes;
            const bool there = WARP_DECODE_TOP_K % (together * group) == 0 || slot < WARP_DECODE_TOP_K;
            expert[g] = there ? local_expert(ids, token * WARP_DECODE_TOP_K + slot, first, count) : -1;
#pragma unroll
            for (i32 r = 0; r < rows; ++r) {
                const bool here = expert[g] >= 0 && row + r < WARP_DECODE_OUTER;
                const bf16* const begin = w_down + expert[g] * expert_stride + static_cast<i64>(row + r) * row_stride;
#pragma unroll
                for (i32 s = 0; s < steps; ++s) {
                    const i32 at = column + s * lanes;
                    const u32x4 zero{0, 0, 0, 0};
                    matrix[g][r][s] = here && (vectors % lanes == 0 || at < vectors) ? load16_early(begin + at * 8) : zero;
                }
            }
        }
        if (round == 0) wait_for_earlier_kernel<WARP_DECODE_DEPENDENT>();
#pragma unroll
        for (i32 g = 0; g < group; ++g) {
            // The rows of skipped experts are loaded and never written: what comes of them is put aside, not multiplied
            // by zero.
            const i32 slot = (round + g) * together + lane() / lanes;
            const i64 route = token * WARP_DECODE_TOP_K + (slot < WARP_DECODE_TOP_K ? slot : 0);
            const float share = to_float(weights[route]);
            float sum[rows];
#pragma unroll
            for (i32 r = 0; r < rows; ++r) sum[r] = 0.0f;
#pragma unroll
            for (i32 s = 0; s < steps; ++s) {
                const i32 at = column + s * lanes;
                const bool inside = vectors % lanes == 0 || at < vectors;
                const u32x4 zero{0, 0, 0, 0};
                float input[8];
                const u32x4 written = load16_written(hidden + route * WARP_DECODE_WIDTH + (inside ? at : 0) * 8);
                unpack8(inside ? written : zero, input);
#pragma unroll
                for (i32 r = 0; r < rows; ++r) sum[r] = dot8(matrix[g][r][s], input, sum[r]);
            }
#pragma unroll
            for (i32 r = 0; r < rows; ++r) {
                if constexpr (by_route) {
                    const float route_sum = when_bf16(WARP_DECODE_ROUTE_BF16, group_sum<lanes>(sum[r]));
                    const float weight = when_bf16(WARP_DECODE_COMBINE_BF16, share);
                    const float term = when_bf16(WARP_DECODE_COMBINE_BF16, route_sum * weight);
                    total[r] += expert[g] >= 0 && column == 0 ? term : 0.0f;
                } else {
                    total[r] = expert[g] >= 0 ? k3::fma(sum[r], share, total[r]) : total[r];
                }
            }
        }
    }
#pragma unroll
    for (i32 r = 0; r < rows; ++r) {
        const float result = wave_sum(total[r]);
        if (lane() == 0 && row + r < WARP_DECODE_OUTER) out[token * WARP_DECODE_OUTER + row + r] = to_bf16(result);
    }
}
