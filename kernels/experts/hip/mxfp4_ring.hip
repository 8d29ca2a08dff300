// The kernels of mxfp4_decode.hip with weights in flight to shared memory instead of registers.
//
// A wave has few registers to spare, and what it has in flight bounds what memory delivers: at 2 KB for each of 24 waves
// about 60 % of it. Here each wave has a ring of stages of its own, which it fills with asynchronous copies and empties
// in order: no other wave waits for it, and no workgroup does.
//
//   mxfp4_ring_gate_up   stages of 16 rows and 256 columns of one of the two matrices
//   mxfp4_ring_down      stages of 16 rows of one expert
//
// No layout that is chosen has rings yet: these run in benchmarks and tests only.
//
// Macros as there, and MXFP4_RING, the stages of a ring. The stages are dynamic shared memory: waves * ring * stage.
// `mxfp4_prepare` is that file's.

#include "mxfp4.h"
#include "nvidia.h"
#include "portability.h"

namespace {

using namespace k3;

constexpr i32 ring = MXFP4_RING;
constexpr i32 down_steps = MXFP4_WIDTH / span;

// Weights by the lane that has them, `Vectors` of 16 bytes each, and `Words` of four scales of each of 16 rows.
template <i32 Vectors, i32 Words>
struct alignas(16) stage {
    u32x4 weights[Vectors][32];
    u32 scales[tile][Words];
};
using gate_up_stage = stage<4, 2>;
using down_stage = stage<2 * down_steps, down_steps>;
static_assert(sizeof(gate_up_stage) == 2176, "as hip_mxfp4.py counts it");
static_assert(sizeof(down_stage) == (1024 + 64) * down_steps, "as hip_mxfp4.py counts it");

K3_DYNAMIC_SHARED(u32x4, room);

// The oldest stage is there: a lane knows of its own copies only, so the lanes meet.
K3_DEVICE void wait_for_oldest_stage() {
    wait_for_copies_but<ring - 1>();
    wave_barrier();
}

// Digits come after what is in flight has been asked for, and are not one of its groups.
template <i32 Count>
K3_DEVICE void bring_digits(digits* to, const digits* from) {
#pragma unroll
    for (i32 at = thread_x(); at < Count * 5; at += threads) {
        store16(reinterpret_cast<u32x4*>(to) + at, load16(reinterpret_cast<const u32x4*>(from) + at));
    }
    barrier();
}

}  // namespace

// Grid: (routes, WIDTH / 32).
K3_KERNEL(threads)
mxfp4_ring_gate_up(
    const digits* x, const id_type* ids, i32 first, i32 count, const unsigned char* w_gate, const unsigned char* w_up,
    i32 expert_stride, i32 row_stride, const unsigned char* s_gate, const unsigned char* s_up, i32 scale_expert_stride,
    i32 scale_row_stride, float beta, float linear_beta, u32 two16, digits* hidden) {
    constexpr i32 pairs = MXFP4_INNER / (2 * span);
    constexpr i32 parts = (waves + 3) / 4;
    __shared__ digits groups[MXFP4_INNER / 32];
    __shared__ float sums[parts][2][2 * tile];
    gate_up_stage* const stages = reinterpret_cast<gate_up_stage*>(room) + wave() * ring;
    release_later_kernel<dependent>();
    const i64 route = block_x();
    const i64 expert = local_expert(ids, route, first, count);
    if (expert < 0) {
        wait_for_earlier_kernel<dependent>();  // whatever is launched next must not run beside what came before
        return;
    }
    // A wave takes 16 of the 32 rows of one of the two matrices, and every `parts`th pair of steps.
    const i32 half = wave() % 2, matrix = wave() / 2 % 2, part = wave() / 4;
    const i32 first_row = (2 * block_y() + half) * tile, row = first_row + lane() / 4;
    const i32 quarter = lane() % 4;
    const unsigned char* const stored =
        (matrix == 0 ? w_gate : w_up) + expert * expert_stride + static_cast<i64>(row) * row_stride + quarter * 16;
    const unsigned char* const scale = (matrix == 0 ? s_gate : s_up) + expert * scale_expert_stride +
                                       static_cast<i64>(first_row + lane() / 2) * scale_row_stride + lane() % 2 * 4;
    const i32 down8 = 8 * row_stride;
    const auto fetch = [&](i32 n) {
        const i32 pair = part + n * parts;
        if (pair < pairs) {
            gate_up_stage& to = stages[n % ring];
#pragma unroll
            for (i32 v = 0; v < 4; ++v) {
                copy16_once(&to.weights[v][lane()], stored + (v % 2 == 0 ? 0 : down8) + pair * 128 + v / 2 * 64);
            }
            copy4(&to.scales[lane() / 2][lane() % 2], scale + pair * 8);
        }
        close_group_of_copies();  // also an empty one: stages are counted
    };
#pragma unroll
    for (i32 n = 0; n < ring; ++n) fetch(n);
    wait_for_earlier_kernel<dependent>();
    bring_digits<MXFP4_INNER / 32>(groups, x + route / MXFP4_TOP_K * prepared);

    float total[4] = {};
#pragma unroll 1
    for (i32 n = 0; part + n * parts < pairs; ++n) {
        wait_for_oldest_stage();
        const gate_up_stage& from = stages[n % ring];
#pragma unroll
        for (i32 s = 0; s < 2; ++s) {
            const operand by = operand_of(&groups[(2 * (part + n * parts) + s) * 4]);
            multiply_span(total, from.weights[2 * s][lane()], from.weights[2 * s + 1][lane()], from.scales[lane() / 4][s],
                          from.scales[lane() / 4 + 8][s], by, two16);
        }
        wave_barrier();  // every lane has read the scales
        fetch(n + ring);
    }
    const float one = group_sum<4>(k3::fma(total[0], 256.0f, total[1]));
    const float other = group_sum<4>(k3::fma(total[2], 256.0f, total[3]));
    if (quarter == 0) {
        sums[part][matrix][half * tile + lane() / 4] = one;
        sums[part][matrix][half * tile + lane() / 4 + 8] = other;
    }
    barrier();
    if (thread_x() >= 2 * tile) return;
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (i32 w = 0; w < parts; ++w) gate += sums[w][0][thread_x()], up += sums[w][1][thread_x()];
    const float result =
        activated<MXFP4_SITU, MXFP4_LINEAR, MXFP4_PRODUCT_BF16, MXFP4_COMPUTE_BF16>(gate, up, beta, linear_beta);
    split1(round_to_bf16(result), hidden[route * (MXFP4_WIDTH / 32) + block_y()]);
}

// Grid: (tokens, OUTER / 16).
K3_KERNEL(threads)
mxfp4_ring_down(
    const digits* hidden, const id_type* ids, const share_type* shares, i32 first, i32 count, const unsigned char* w_down,
    i32 expert_stride, i32 row_stride, const unsigned char* s_down, i32 scale_expert_stride, i32 scale_row_stride,
    u32 two16, bf16* out) {
    constexpr i32 each = (MXFP4_TOP_K + waves - 1) / waves;  // experts of a wave
    constexpr bool by_route = MXFP4_ROUTE_BF16 || MXFP4_COMBINE_BF16;  // lanes added up for each expert
    __shared__ digits parts[MXFP4_TOP_K * MXFP4_WIDTH / 32];
    __shared__ float sums[waves][tile];
    down_stage* const stages = reinterpret_cast<down_stage*>(room) + wave() * ring;
    release_later_kernel<dependent>();
    const i64 token = block_x();
    const i32 first_row = block_y() * tile, row = first_row + lane() / 4;
    const i32 quarter = lane() % 4;
    const unsigned char* const stored = w_down + static_cast<i64>(row) * row_stride + quarter * 16;
    const unsigned char* const scale = s_down + static_cast<i64>(first_row) * scale_row_stride;
    const i32 down8 = 8 * row_stride;
    // The expert of the n-th round of this wave, or a negative number; the same in all lanes.
    const auto expert_of = [&](i32 n) {
        const i32 slot = n * waves + wave();
        return slot < MXFP4_TOP_K ? local_expert(ids, token * MXFP4_TOP_K + slot, first, count) : -1;
    };
    const auto fetch = [&](i32 n) {
        const i64 expert = n < each ? expert_of(n) : -1;
        if (expert >= 0) {
            down_stage& to = stages[n % ring];
            const unsigned char* const from = stored + expert * expert_stride;
            const unsigned char* const by = scale + expert * scale_expert_stride;
#pragma unroll
            for (i32 v = 0; v < 2 * down_steps; ++v) {
                copy16_once(&to.weights[v][lane()], from + (v % 2 == 0 ? 0 : down8) + v / 2 * 64);
            }
            for (i32 word = lane(); word < tile * down_steps; word += 32) {
                const i32 r = word / down_steps, s = word % down_steps;
                copy4(&to.scales[r][s], by + static_cast<i64>(r) * scale_row_stride + s * 4);
            }
        }
        close_group_of_copies();
    };
#pragma unroll
    for (i32 n = 0; n < ring; ++n) fetch(n);
    wait_for_earlier_kernel<dependent>();
    bring_digits<MXFP4_TOP_K * MXFP4_WIDTH / 32>(parts, hidden + token * (MXFP4_TOP_K * MXFP4_WIDTH / 32));

    float total[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (i32 n = 0; n < each; ++n) {
        wait_for_oldest_stage();
        const i32 slot = n * waves + wave();
        if (expert_of(n) >= 0) {
            const down_stage& from = stages[n % ring];
            const float share = when_bf16(MXFP4_COMBINE_BF16, to_float(shares[token * MXFP4_TOP_K + slot]));
            float sum[4] = {};
#pragma unroll
            for (i32 s = 0; s < down_steps; ++s) {
                const operand by = operand_of(parts + slot * (MXFP4_WIDTH / 32) + s * 4);
                multiply_span(sum, from.weights[2 * s][lane()], from.weights[2 * s + 1][lane()], from.scales[lane() / 4][s],
                              from.scales[lane() / 4 + 8][s], by, two16);
            }
#pragma unroll
            for (i32 r = 0; r < 2; ++r) {
                float result = k3::fma(sum[2 * r], 256.0f, sum[2 * r + 1]);
                if constexpr (by_route) {
                    result = when_bf16(MXFP4_ROUTE_BF16, group_sum<4>(result));
                    total[r] += when_bf16(MXFP4_COMBINE_BF16, result * share);
                } else {
                    total[r] = k3::fma(result, share, total[r]);
                }
            }
        }
        wave_barrier();
        fetch(n + ring);
    }
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
        const float result = by_route ? total[r] : group_sum<4>(total[r]);
        if (quarter == 0) sums[wave()][lane() / 4 + 8 * r] = result;
    }
    barrier();
    if (thread_x() >= tile) return;
    float result = 0.0f;
#pragma unroll
    for (i32 w = 0; w < waves; ++w) result += sums[w][thread_x()];
    out[token * MXFP4_OUTER + block_y() * tile + thread_x()] = to_bf16(result);
}
