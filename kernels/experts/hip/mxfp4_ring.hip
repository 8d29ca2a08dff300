// The kernels of mxfp4_decode.hip with weights in flight to shared memory instead of registers: mxfp4_ring.h.
//
// No layout that is chosen has rings yet: these run in benchmarks and tests only.
//
// Macros as there, and MXFP4_RING. `mxfp4_prepare` is that file's.

#include "mxfp4_ring.h"
#include "nvidia.h"
#include "portability.h"

using namespace k3;

K3_DYNAMIC_SHARED(u32x4, room);

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
    const gate_up_source source = gate_up_rows(
        (matrix == 0 ? w_gate : w_up) + expert * expert_stride, row_stride,
        (matrix == 0 ? s_gate : s_up) + expert * scale_expert_stride, scale_row_stride, (2 * block_y() + half) * tile);
    const auto fetch = [&](i32 n) {
        const i32 pair = part + n * parts;
        if (pair < pairs) fetch_pair(stages[n % ring], source, pair);
        close_group_of_copies();  // also an empty one: stages are counted
    };
#pragma unroll
    for (i32 n = 0; n < ring; ++n) fetch(n);
    wait_for_earlier_kernel<dependent>();
    bring_digits(groups, x + route / MXFP4_TOP_K * prepared, MXFP4_INNER / 32);
    barrier();

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
    if (lane() % 4 == 0) {
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
    const i64 first_row = block_y() * tile;
    // The expert of the n-th round of this wave, or a negative number; the same in all lanes.
    const auto expert_of = [&](i32 n) {
        const i32 slot = n * waves + wave();
        return slot < MXFP4_TOP_K ? local_expert(ids, token * MXFP4_TOP_K + slot, first, count) : -1;
    };
    const auto fetch = [&](i32 n) {
        const i64 expert = n < each ? expert_of(n) : -1;
        if (expert >= 0) {
            fetch_rows(stages[n % ring], w_down + expert * expert_stride + first_row * row_stride, row_stride,
                       s_down + expert * scale_expert_stride + first_row * scale_row_stride, scale_row_stride);
        }
        close_group_of_copies();
    };
#pragma unroll
    for (i32 n = 0; n < ring; ++n) fetch(n);
    wait_for_earlier_kernel<dependent>();
    bring_digits(parts, hidden + token * (MXFP4_TOP_K * MXFP4_WIDTH / 32), MXFP4_TOP_K * MXFP4_WIDTH / 32);
    barrier();

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
        if (lane() % 4 == 0) sums[wave()][lane() / 4 + 8 * r] = result;
    }
    barrier();
    if (thread_x() >= tile) return;
    float result = 0.0f;
#pragma unroll
    for (i32 w = 0; w < waves; ++w) result += sums[w][thread_x()];
    out[token * MXFP4_OUTER + block_y() * tile + thread_x()] = to_bf16(result);
}
