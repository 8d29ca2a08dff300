// Routed experts with MXFP4 weights for more tokens than mxfp4_registers.hip is best for: weights by bulk copies (sm_90 and
// later). mxfp4_prepare, of that file, comes before.
//
// How weights and activations become integers, and what a product is: mxfp4.h. Rows of an expert lie one after the other,
// so 16 of them are one stretch of memory (28 KB of K3's gate or up): one thread asks for all of it, memory is read in its
// own order, and what is in flight takes no registers.
//
//   mxfp4_bulk_gate_up   a workgroup owns 32 rows of one route's intermediate, a scale group of the down product, and
//                        leaves it as digits; its waves split the columns
//   mxfp4_bulk_down      a workgroup owns 16 * TILES outputs of one token; its waves split the token's experts
//
// Both ask for their first weights before they wait for the kernel before. Formats, and routes outside of the window, as in
// mxfp4_registers.hip.
//
//   MXFP4_RING        stages of 16 rows, of down 16 * TILES, in flight: of gate/up for a workgroup, of down for each wave
//   MXFP4_WAVES       waves of a workgroup
//   MXFP4_OCCUPANCY   waves of a quarter of a multiprocessor for which registers are kept few enough
//   the others        as in mxfp4_registers.hip, without GROUP
//
// `two16` is 2^16. Dynamic shared memory: the stages, and the digits behind them.

#include "mxfp4.h"
#include "nvidia.h"
#include "portability.h"

using namespace k3;

constexpr i32 ring = MXFP4_RING;
constexpr i32 tiles = MXFP4_TILES;
static_assert(threads >= tile * tiles, "a thread stores a row");
static_assert(MXFP4_OUTER % (tile * tiles) == 0, "rows come in tiles of 16");
constexpr i32 inner_groups = MXFP4_INNER / 32, width_groups = MXFP4_WIDTH / 32;

// `Rows` rows of one matrix, as they lie in memory.
template <i32 Rows, i32 Columns>
struct alignas(16) stage {
    unsigned char weights[Rows * Columns / 2];
    unsigned char scales[Rows * Columns / 32];
};
using gate_up_stage = stage<tile, MXFP4_INNER>;
using down_stage = stage<tile * tiles, MXFP4_WIDTH>;
static_assert(sizeof(gate_up_stage) == tile * MXFP4_INNER / 32 * 17, "as mxfp4/bulk.py counts it");
static_assert(sizeof(down_stage) == tile * tiles * MXFP4_WIDTH / 32 * 17, "as mxfp4/bulk.py counts it");

K3_DYNAMIC_SHARED(u32x4, room);

// For one thread: asks for a stage.
template <i32 Rows, i32 Columns>
K3_DEVICE void fetch_stage(stage<Rows, Columns>& to, const unsigned char* weights, const unsigned char* scales, arrival* at) {
    expect_bytes(at, sizeof(to.weights) + sizeof(to.scales));
    copy_bulk(to.weights, weights, sizeof(to.weights), at);
    copy_bulk(to.scales, scales, sizeof(to.scales), at);
}

K3_DEVICE float scale_at(const unsigned char* scale) { return bit_cast<float>(static_cast<u32>(*scale) << 23); }

// Where a lane finds its part of activations: digits for the products that are its business, zeros for the others.
struct digit_reader {
    const unsigned char* digits;
    i32 step;  // to the next 128 columns
    const unsigned char* own;
};
K3_DEVICE digit_reader reader_of(const digits* groups, const u32x4* zeros) {
    const i32 quarter = lane() % 4, digit = lane() / 4 - 2 * quarter;
    const bool busy = digit == 0 || digit == 1;
    const digits& own = groups[quarter];
    return {busy ? reinterpret_cast<const unsigned char*>(&own.digit[digit][0]) : reinterpret_cast<const unsigned char*>(zeros),
            busy ? 4 * static_cast<i32>(sizeof(digits)) : 0, reinterpret_cast<const unsigned char*>(&own.start[0])};
}
K3_DEVICE operand operand_at(const digit_reader& from, i32 s) {
    operand made;
    const unsigned char* const at = from.digits + s * from.step;
    made.low = load16(at), made.high = load16(at + 16);
    const u32x4 rest = load16(from.own + s * 4 * static_cast<i32>(sizeof(digits)));
    made.start[0] = static_cast<i32>(rest.x), made.start[1] = static_cast<i32>(rest.y), made.unit = bit_cast<float>(rest.z);
    return made;
}

// Grid: (routes, WIDTH / 32).
K3_KERNEL_OCCUPANCY(threads, MXFP4_OCCUPANCY)
mxfp4_bulk_gate_up(
    const digits* x, const id_type* ids, i32 first, i32 count, const unsigned char* w_gate,
    const unsigned char* w_up, i32 expert_stride, const unsigned char* s_gate, const unsigned char* s_up,
    i32 scale_expert_stride, float beta, float linear_beta, u32 two16, digits* hidden) {
    constexpr i32 spans = MXFP4_INNER / span;
    constexpr i32 stages_of_all = 4;  // gate and up of the first 16 rows, then of the others
    __shared__ arrival arrived[ring + 1];
    __shared__ u32x4 zeros[2];
    __shared__ float sums[waves][2][2 * tile];
    gate_up_stage* const stages = reinterpret_cast<gate_up_stage*>(room);
    digits* const groups = reinterpret_cast<digits*>(stages + ring);
    release_later_kernel<dependent>();
    const i64 route = block_x();
    const i64 expert = local_expert(ids, route, first, count);
    if (expert < 0) {
        wait_for_earlier_kernel<dependent>();  // whatever is launched next must not run beside what came before
        return;
    }
    const auto fetch = [&](i32 n) {
        const i64 row = 2 * tile * block_y() + n / 2 * tile;
        fetch_stage(stages[n % ring], (n % 2 == 0 ? w_gate : w_up) + expert * expert_stride + row * (MXFP4_INNER / 2),
                    (n % 2 == 0 ? s_gate : s_up) + expert * scale_expert_stride + row * inner_groups, &arrived[n % ring]);
    };
    if (thread_x() == 0) {
#pragma unroll
        for (i32 r = 0; r <= ring; ++r) make_arrival(&arrived[r]);
        arrivals_are_made();
#pragma unroll
        for (i32 n = 0; n < ring && n < stages_of_all; ++n) fetch(n);
    }
    if (thread_x() < 2) zeros[thread_x()] = u32x4{0, 0, 0, 0};
    wait_for_earlier_kernel<dependent>();
    if (thread_x() == 0) {
        expect_bytes(&arrived[ring], sizeof(digits) * inner_groups);
        copy_bulk(groups, x + route / MXFP4_TOP_K * prepared, sizeof(digits) * inner_groups, &arrived[ring]);
    }
    barrier();
    const digit_reader reader = reader_of(groups, zeros);
    const i32 row = lane() / 4, quarter = lane() % 4;
    wait_for(&arrived[ring], 0);

#pragma unroll 1
    for (i32 n = 0; n < stages_of_all; ++n) {
        wait_for(&arrived[n % ring], n / ring % 2);
        const unsigned char* const weights = stages[n % ring].weights + row * (MXFP4_INNER / 2) + quarter * 16;
        const unsigned char* const scales = stages[n % ring].scales + row * inner_groups + quarter;
        float total[4] = {};
#pragma unroll 2
        for (i32 s = wave(); s < spans; s += waves) {
            multiply_span(total, load16(weights + s * 64), load16(weights + 8 * (MXFP4_INNER / 2) + s * 64),
                          scale_at(scales + s * 4), scale_at(scales + 8 * inner_groups + s * 4), operand_at(reader, s),
                          two16);
        }
        // All four lanes of a row have its sum, and store it: no branch, which exchanges might be moved into.
        sums[wave()][n % 2][n / 2 * tile + row] = group_sum<4>(k3::fma(total[0], 256.0f, total[1]));
        sums[wave()][n % 2][n / 2 * tile + row + 8] = group_sum<4>(k3::fma(total[2], 256.0f, total[3]));
        if (n + ring < stages_of_all) {
            barrier();  // everyone has read the stage
            if (thread_x() == 0) fetch(n + ring);
        }
    }
    barrier();
    if (thread_x() >= 2 * tile) return;
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (i32 w = 0; w < waves; ++w) gate += sums[w][0][thread_x()], up += sums[w][1][thread_x()];
    const float result =
        activated<MXFP4_SITU, MXFP4_LINEAR, MXFP4_PRODUCT_BF16, MXFP4_COMPUTE_BF16>(gate, up, beta, linear_beta);
    split1(round_to_bf16(result), hidden[route * width_groups + block_y()]);
}

// 16 * TILES rows of an expert times a route's intermediate: rows `lane / 4` and 8 further on of each tile, added up over
// the lane's own groups only.
K3_DEVICE void multiply_stage(float (&total)[2 * tiles], const down_stage& from, const digit_reader& reader, u32 two16) {
    const i32 row = lane() / 4, quarter = lane() % 4;
    const unsigned char* const weights = from.weights + row * (MXFP4_WIDTH / 2) + quarter * 16;
    const unsigned char* const scales = from.scales + row * width_groups + quarter;
    float sum[tiles][4] = {};
#pragma unroll
    for (i32 s = 0; s < MXFP4_WIDTH / span; ++s) {
        const operand by = operand_at(reader, s);
#pragma unroll
        for (i32 t = 0; t < tiles; ++t) {
            const i32 at = t * tile * (MXFP4_WIDTH / 2) + s * 64, scale = t * tile * width_groups + s * 4;
            multiply_span(sum[t], load16(weights + at), load16(weights + at + 8 * (MXFP4_WIDTH / 2)), scale_at(scales + scale),
                          scale_at(scales + scale + 8 * width_groups), by, two16);
        }
    }
#pragma unroll
    for (i32 r = 0; r < 2 * tiles; ++r) total[r] = k3::fma(sum[r / 2][r % 2 * 2], 256.0f, sum[r / 2][r % 2 * 2 + 1]);
}

// Grid: (tokens, OUTER / (16 * TILES)).
K3_KERNEL_OCCUPANCY(threads, MXFP4_OCCUPANCY)
mxfp4_bulk_down(
    const digits* hidden, const id_type* ids, const share_type* shares, i32 first, i32 count, const unsigned char* w_down,
    i32 expert_stride, const unsigned char* s_down, i32 scale_expert_stride, u32 two16, bf16* out) {
    constexpr i32 each = (MXFP4_TOP_K + waves - 1) / waves;  // experts of a wave
    constexpr bool by_route = MXFP4_ROUTE_BF16 || MXFP4_COMBINE_BF16;  // lanes added up for each expert
    __shared__ arrival arrived[waves][ring + 1];
    __shared__ u32x4 zeros[2];
    __shared__ float sums[waves][tiles * tile];
    down_stage* const stages = reinterpret_cast<down_stage*>(room) + wave() * ring;
    digits* const parts = reinterpret_cast<digits*>(reinterpret_cast<down_stage*>(room) + waves * ring) + wave() * each * width_groups;
    release_later_kernel<dependent>();
    const i64 token = block_x();
    const i64 row = static_cast<i64>(block_y()) * tiles * tile;
    const auto expert_of = [&](i32 n) -> i64 {
        const i32 slot = n * waves + wave();
        return n < each && slot < MXFP4_TOP_K ? local_expert(ids, token * MXFP4_TOP_K + slot, first, count) : -1;
    };
    const auto fetch = [&](i32 n) {
        const i64 expert = expert_of(n);
        if (expert < 0) return expect_bytes(&arrived[wave()][n % ring], 0);  // turns are counted
        fetch_stage(stages[n % ring], w_down + expert * expert_stride + row * (MXFP4_WIDTH / 2),
                    s_down + expert * scale_expert_stride + row * width_groups, &arrived[wave()][n % ring]);
    };
    if (lane() == 0) {
#pragma unroll
        for (i32 r = 0; r <= ring; ++r) make_arrival(&arrived[wave()][r]);
        arrivals_are_made();
#pragma unroll
        for (i32 n = 0; n < ring && n < each; ++n) fetch(n);
    }
    if (thread_x() < 2) zeros[thread_x()] = u32x4{0, 0, 0, 0};
    wait_for_earlier_kernel<dependent>();
    if (lane() == 0) {
        u32 taken = 0;
#pragma unroll
        for (i32 n = 0; n < each; ++n) taken += expert_of(n) >= 0;
        expect_bytes(&arrived[wave()][ring], taken * static_cast<u32>(width_groups * sizeof(digits)));
#pragma unroll
        for (i32 n = 0; n < each; ++n) {
            if (expert_of(n) >= 0) {
                copy_bulk(parts + n * width_groups, hidden + (token * MXFP4_TOP_K + n * waves + wave()) * width_groups,
                          width_groups * sizeof(digits), &arrived[wave()][ring]);
            }
        }
    }
    barrier();
    wait_for(&arrived[wave()][ring], 0);
    float total[2 * tiles] = {};  // rows 8 apart
#pragma unroll 1
    for (i32 n = 0; n < each; ++n) {
        wait_for(&arrived[wave()][n % ring], n / ring % 2);
        if (expert_of(n) >= 0) {
            float result[2 * tiles];
            multiply_stage(result, stages[n % ring], reader_of(parts + n * width_groups, zeros), two16);
            const float share = when_bf16(MXFP4_COMBINE_BF16, to_float(shares[token * MXFP4_TOP_K + n * waves + wave()]));
#pragma unroll
            for (i32 r = 0; r < 2 * tiles; ++r) {
                if constexpr (by_route) {
                    const float rounded = when_bf16(MXFP4_ROUTE_BF16, group_sum<4>(result[r]));
                    total[r] += when_bf16(MXFP4_COMBINE_BF16, rounded * share);
                } else {
                    total[r] = k3::fma(result[r], share, total[r]);
                }
            }
        }
        if (n + ring < each) {
            wave_barrier();  // every lane has read the stage
            if (lane() == 0) fetch(n + ring);
        }
    }
#pragma unroll
    for (i32 r = 0; r < 2 * tiles; ++r) {
        const float result = by_route ? total[r] : group_sum<4>(total[r]);
        sums[wave()][lane() / 4 + 8 * r] = result;
    }
    barrier();
    if (thread_x() >= tiles * tile) return;
    float result = 0.0f;
#pragma unroll
    for (i32 w = 0; w < waves; ++w) result += sums[w][thread_x()];
    out[token * MXFP4_OUTER + row + thread_x()] = to_bf16(result);
}
