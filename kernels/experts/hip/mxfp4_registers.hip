// Routed experts with MXFP4 weights for few tokens, on NVIDIA's integer matrix units (sm_90 and later).
//
// How weights and activations become integers, and what a product is: mxfp4.h.
//
//   mxfp4_prepare   digits of the tokens, each once
//   mxfp4_gate_up   a workgroup owns 32 rows of one route's intermediate, a scale group of the down product, and leaves
//                   it as digits; its waves split rows, matrices and columns, and fetch their first weights before they wait
//   mxfp4_down      a workgroup owns 16 or 32 outputs of one token; its waves split the token's experts, whose weights they
//                   fetch before they wait for the kernel before
//
// Weights come as the checkpoint has them: bytes of two values, the even column in the low nibble, and one E8M0 byte for
// 32 columns (255, a NaN, gives an infinity or a NaN). A route outside of the window is skipped in both kernels.
//
//   MXFP4_INNER, _WIDTH, _OUTER   columns of x, of an expert's intermediate, of the result; multiples of 256, 128 and
//                                 16 * TILES
//   MXFP4_TOP_K                   experts of a token
//   MXFP4_WAVES                   waves of a workgroup, of gate/up a multiple of 4
//   MXFP4_TILES                   tiles of 16 rows of a wave of the down kernel
//   MXFP4_GROUP                   experts of which a wave of the down kernel has loads in flight together
//   MXFP4_OCCUPANCY               waves of a quarter of a multiprocessor for which gate/up's registers are kept few enough
//   MXFP4_IDS                     i32 or i64
//   MXFP4_SHARES                  float or bf16: the type of the routing weights
//   MXFP4_SITU, _LINEAR, _PRODUCT_BF16, _COMPUTE_BF16, _ROUTE_BF16, _COMBINE_BF16   as in warp_decode.hip
//   MXFP4_DEPENDENT               1: either kernel may be launched while the one before it still runs
//
// `two16` is 2^16.

#include "mxfp4.h"
#include "nvidia.h"
#include "portability.h"

namespace {

using namespace k3;

static_assert(MXFP4_OUTER % (tile * MXFP4_TILES) == 0, "rows come in tiles of 16");

template <i32 Count>
K3_DEVICE void bring(digits* to, const digits* from) {
#pragma unroll
    for (i32 at = thread_x(); at < Count * 5; at += threads) {
        copy16(reinterpret_cast<u32x4*>(to) + at, reinterpret_cast<const u32x4*>(from) + at);
    }
    wait_for_all_copies();
    barrier();
}

}  // namespace

// Grid: (tokens, blocks of 4 * THREADS columns), THREADS = MXFP4_WAVES * 32.
K3_KERNEL(threads)
mxfp4_prepare(const bf16* x, i32 x_stride, digits* made) {
    wait_for_earlier_kernel<dependent>();
    release_later_kernel<dependent>();
    prepare_columns(x, x_stride, made, block_x(), block_y());
}

// Grid: (routes, WIDTH / 32).
K3_KERNEL_OCCUPANCY(threads, MXFP4_OCCUPANCY)
mxfp4_gate_up(
    const digits* x, const id_type* ids, i32 first, i32 count, const unsigned char* w_gate, const unsigned char* w_up,
    i32 expert_stride, i32 row_stride, const unsigned char* s_gate, const unsigned char* s_up, i32 scale_expert_stride,
    i32 scale_row_stride, float beta, float linear_beta, u32 two16, digits* hidden) {
    constexpr i32 pairs = MXFP4_INNER / (2 * span);
    constexpr i32 parts = (waves + 3) / 4;
    __shared__ digits groups[MXFP4_INNER / 32];
    __shared__ float sums[parts][2][2 * tile];
    release_later_kernel<dependent>();
    const i64 route = block_x();
    const i64 expert = local_expert(ids, route, first, count);
    if (expert < 0) {
        wait_for_earlier_kernel<dependent>();  // whatever is launched next must not run beside what came before
        return;
    }
    // A wave takes 16 of the 32 rows of one of the two matrices, and every `parts`th pair of steps.
    const i32 half = wave() % 2, matrix = wave() / 2 % 2, part = wave() / 4;
    const i32 row = (2 * block_y() + half) * tile + lane() / 4;
    const i32 quarter = lane() % 4;
    const unsigned char* const stored =
        (matrix == 0 ? w_gate : w_up) + expert * expert_stride + static_cast<i64>(row) * row_stride + quarter * 16;
    const unsigned char* const scale =
        (matrix == 0 ? s_gate : s_up) + expert * scale_expert_stride + static_cast<i64>(row) * scale_row_stride;
    const i32 down8 = 8 * row_stride, scale_down8 = 8 * scale_row_stride;
    u32x4 upper[2], lower[2];  // steps of a pair; rows `row` and 8 further on
    u32x2 scales[2], later[2];
    const auto load = [&](i32 pair, i32 step) {
        upper[step] = load16_early(stored + pair * 128 + step * 64);
        lower[step] = load16_early(stored + down8 + pair * 128 + step * 64);
    };
    const auto load_scales = [&](u32x2 (&to)[2], i32 pair) {
        to[0] = load8_early(scale + pair * 8), to[1] = load8_early(scale + scale_down8 + pair * 8);
    };
    if (part < pairs) load_scales(scales, part), load(part, 0), load(part, 1);
    wait_for_earlier_kernel<dependent>();
    bring<MXFP4_INNER / 32>(groups, x + route / MXFP4_TOP_K * prepared);

    float total[4] = {};
#pragma unroll 1
    for (i32 pair = part; pair < pairs; pair += parts) {
        const i32 next = pair + parts;
        if (next < pairs) load_scales(later, next);
#pragma unroll
        for (i32 s = 0; s < 2; ++s) {
            const operand by = operand_of(&groups[(2 * pair + s) * 4]);
            multiply_span(total, upper[s], lower[s], scale_of(s == 0 ? scales[0].x : scales[0].y),
                          scale_of(s == 0 ? scales[1].x : scales[1].y), by, two16);
            if (next < pairs) load(next, s);
        }
        scales[0] = later[0], scales[1] = later[1];
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

// Grid: (tokens, OUTER / (16 * TILES)).
K3_KERNEL(threads)
mxfp4_down(
    const digits* hidden, const id_type* ids, const share_type* shares, i32 first, i32 count, const unsigned char* w_down,
    i32 expert_stride, i32 row_stride, const unsigned char* s_down, i32 scale_expert_stride, i32 scale_row_stride,
    u32 two16, bf16* out) {
    constexpr i32 steps = MXFP4_WIDTH / span;
    constexpr i32 tiles = MXFP4_TILES;
    constexpr i32 group = MXFP4_GROUP;
    constexpr i32 each = (MXFP4_TOP_K + waves - 1) / waves;  // experts of a wave
    constexpr bool by_route = MXFP4_ROUTE_BF16 || MXFP4_COMBINE_BF16;  // lanes added up for each expert
    __shared__ digits parts[MXFP4_TOP_K * MXFP4_WIDTH / 32];
    __shared__ float sums[waves][tiles * tile];
    release_later_kernel<dependent>();
    const i64 token = block_x();
    const i32 row = block_y() * tiles * tile + lane() / 4;
    const i32 quarter = lane() % 4;
    const unsigned char* const stored = w_down + static_cast<i64>(row) * row_stride + quarter * 16;
    const unsigned char* const scale = s_down + static_cast<i64>(row) * scale_row_stride;
    float total[2 * tiles] = {};  // rows 8 apart
    bool taken[group];
    u32x4 held[group][2 * tiles][steps];
    u32 scales[group][2 * tiles][steps];
    const auto load = [&](i32 g, i32 e) {
        const i32 slot = e * waves + wave();
        const i64 expert = slot < MXFP4_TOP_K ? local_expert(ids, token * MXFP4_TOP_K + slot, first, count) : -1;
        taken[g] = expert >= 0;  // the same in all lanes of a wave, which shares nothing with the others here
        if (!taken[g]) return;
#pragma unroll
        for (i32 r = 0; r < 2 * tiles; ++r) {
            const unsigned char* const from = stored + expert * expert_stride + static_cast<i64>(8 * r) * row_stride;
            const unsigned char* const by = scale + expert * scale_expert_stride + static_cast<i64>(8 * r) * scale_row_stride;
#pragma unroll
            for (i32 s = 0; s < steps; ++s) {
                held[g][r][s] = load16_early(from + s * 64);
                scales[g][r][s] = load4_early(by + s * 4);
            }
        }
    };
#pragma unroll
    for (i32 g = 0; g < group; ++g) load(g, g);
    wait_for_earlier_kernel<dependent>();
    bring<MXFP4_TOP_K * MXFP4_WIDTH / 32>(parts, hidden + token * (MXFP4_TOP_K * MXFP4_WIDTH / 32));
#pragma unroll 1
    for (i32 begin = 0; begin < each; begin += group) {
#pragma unroll
        for (i32 g = 0; g < group; ++g) {
            const i32 slot = (begin + g) * waves + wave();
            if (taken[g]) {
                float sum[tiles][4] = {};
#pragma unroll
                for (i32 s = 0; s < steps; ++s) {
                    const operand by = operand_of(parts + slot * (MXFP4_WIDTH / 32) + s * 4);
#pragma unroll
                    for (i32 t = 0; t < tiles; ++t) {
                        multiply_span(sum[t], held[g][2 * t][s], held[g][2 * t + 1][s], scale_of(scales[g][2 * t][s]),
                                      scale_of(scales[g][2 * t + 1][s]), by, two16);
                    }
                }
                const float share = when_bf16(MXFP4_COMBINE_BF16, to_float(shares[token * MXFP4_TOP_K + slot]));
#pragma unroll
                for (i32 r = 0; r < 2 * tiles; ++r) {
                    float result = k3::fma(sum[r / 2][r % 2 * 2], 256.0f, sum[r / 2][r % 2 * 2 + 1]);
                    if constexpr (by_route) {
                        result = when_bf16(MXFP4_ROUTE_BF16, group_sum<4>(result));
                        total[r] += when_bf16(MXFP4_COMBINE_BF16, result * share);
                    } else {
                        total[r] = k3::fma(result, share, total[r]);
                    }
                }
            }
            load(g, begin + group + g);
        }
    }
#pragma unroll
    for (i32 r = 0; r < 2 * tiles; ++r) {
        const float result = by_route ? total[r] : group_sum<4>(total[r]);
        if (quarter == 0) sums[wave()][lane() / 4 + 8 * r] = result;
    }
    barrier();
    if (thread_x() >= tiles * tile) return;
    float result = 0.0f;
#pragma unroll
    for (i32 w = 0; w < waves; ++w) result += sums[w][thread_x()];
    out[token * MXFP4_OUTER + block_y() * tiles * tile + thread_x()] = to_bf16(result);
}
