// Routed experts with MXFP4 weights where several tokens meet at an expert, on NVIDIA's integer matrix units.
//
// Up to TOGETHER routes of an expert share what is read and widened of its weights; a token more is four products and the
// fetch of its digits for each 128 columns. The first of the routes does the work of all: no sort, no list of experts, and
// an expert that nobody names costs nothing. Which routes meet is looked up once, beside the preparation of the tokens.
//
//   mxfp4_shared_prepare   digits of the tokens, each once; for each route its place among those of its expert
//   mxfp4_shared_gate_up   a workgroup owns 32 rows of an expert's intermediate for up to TOGETHER routes
//   mxfp4_shared_down      a workgroup owns a share of an expert's outputs for up to TOGETHER routes, each left as it is
//   mxfp4_shared_combine   a workgroup owns outputs of one token, and adds up its routes in their order
//
// How weights and activations become integers: mxfp4.h; how weights get here: mxfp4_ring.h. A route outside of the window
// is skipped everywhere.
//
// Macros as in mxfp4_registers.hip, TILES and GROUP left out; MXFP4_RING; MXFP4_TOGETHER (2, 4 or 8). The rings are dynamic
// shared memory, and the digits behind them.

#include "mxfp4_ring.h"
#include "nvidia.h"
#include "portability.h"

using namespace k3;

constexpr i32 together = MXFP4_TOGETHER;

// A route's place among those of its expert, -1 outside of the window; the routes that come next there, else -1.
struct link {
    i32 rank;
    i32 next[together - 1];
};
static_assert(sizeof(link) == 4 * together, "as mxfp4/shared.py allocates it");

K3_DYNAMIC_SHARED(u32x4, room);

// The routes of which this workgroup does the work, and how many; none if another one does it.
K3_DEVICE i32 routes_of(const link* links, i32 route, i32 (&named)[together]) {
    const link& own = links[route];
    if (own.rank % together != 0) return 0;
    i32 count = 1;
    named[0] = route;
#pragma unroll
    for (i32 t = 1; t < together; ++t) named[t] = own.next[t - 1], count += named[t] >= 0;
    return count;
}

// Grid: (tokens, blocks of 4 * THREADS columns, and behind them blocks of WAVES routes of the token).
K3_KERNEL(threads)
mxfp4_shared_prepare(const bf16* x, i32 x_stride, const id_type* ids, i32 first, i32 count, i32 routes, digits* made,
                     link* links) {
    constexpr i32 blocks = (MXFP4_INNER / 8 + threads - 1) / threads;
    wait_for_earlier_kernel<dependent>();
    release_later_kernel<dependent>();
    const i64 token = block_x();
    if (block_y() < blocks) return prepare_columns(x, x_stride, made, token, block_y());
    const i32 slot = (block_y() - blocks) * waves + wave();
    if (slot >= MXFP4_TOP_K) return;
    const i32 route = static_cast<i32>(token) * MXFP4_TOP_K + slot;
    const id_type own = ids[route];
    link place;
    place.rank = -1;
#pragma unroll
    for (i32 t = 0; t < together - 1; ++t) place.next[t] = -1;
    if (local_expert(ids, route, first, count) >= 0) {
        i32 earlier = 0, later = 0;
#pragma unroll 4
        for (i32 begin = 0; begin < routes; begin += 32) {
            const i32 at = begin + lane();
            const u32 same = wave_ballot(at < routes && ids[at < routes ? at : route] == own);
            const i32 behind = route - begin;  // the bit of this route, if it is among these
            const u32 before = behind >= 32 ? same : behind <= 0 ? 0 : same & ((1u << behind) - 1);
            u32 after = behind < 0 ? same : behind >= 31 ? 0 : same & ~((2u << behind) - 1);
            earlier += count_bits(before);
            while (after != 0 && later < together - 1) {
                const i32 found = begin + lowest_bit(after);
#pragma unroll
                for (i32 t = 0; t < together - 1; ++t) place.next[t] = later == t ? found : place.next[t];
                after &= after - 1;
                ++later;
            }
        }
        place.rank = earlier;
    }
    if (lane() == 0) links[route] = place;
}

// Grid: (routes, WIDTH / 32).
K3_KERNEL_OCCUPANCY(threads, MXFP4_OCCUPANCY)
mxfp4_shared_gate_up(
    const digits* x, const link* links, const id_type* ids, i32 first, i32 count, const unsigned char* w_gate,
    const unsigned char* w_up, i32 expert_stride, i32 row_stride, const unsigned char* s_gate, const unsigned char* s_up,
    i32 scale_expert_stride, i32 scale_row_stride, float beta, float linear_beta, u32 two16, digits* hidden) {
    constexpr i32 pairs = MXFP4_INNER / (2 * span);
    constexpr i32 parts = (waves + 3) / 4;
    constexpr i32 each = MXFP4_INNER / 32;  // groups of a token
    __shared__ float sums[parts][together][2][2 * tile];
    gate_up_stage* const stages = reinterpret_cast<gate_up_stage*>(room) + wave() * ring;
    digits* const groups = reinterpret_cast<digits*>(reinterpret_cast<gate_up_stage*>(room) + waves * ring);
    release_later_kernel<dependent>();
    wait_for_earlier_kernel<dependent>();
    i32 named[together];
    const i32 tokens = routes_of(links, block_x(), named);
    if (tokens == 0) return;
    const i64 expert = local_expert(ids, named[0], first, count);
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
#pragma unroll
    for (i32 t = 0; t < together; ++t) {
        if (t < tokens) bring_digits(groups + t * each, x + static_cast<i64>(named[t] / MXFP4_TOP_K) * prepared, each);
    }
    barrier();

    float total[together][4] = {};
#pragma unroll 1
    for (i32 n = 0; part + n * parts < pairs; ++n) {
        wait_for_oldest_stage();
        const gate_up_stage& from = stages[n % ring];
#pragma unroll
        for (i32 s = 0; s < 2; ++s) {
            const widened weights = widen(from.weights[2 * s][lane()], from.weights[2 * s + 1][lane()], two16);
            const float upper = scale_of(from.scales[lane() / 4][s]), lower = scale_of(from.scales[lane() / 4 + 8][s]);
            const digits* const columns = groups + (2 * (part + n * parts) + s) * 4;
#pragma unroll
            for (i32 t = 0; t < together; ++t) {
                if (t < tokens) multiply_widened(total[t], weights, upper, lower, operand_of(columns + t * each));
            }
        }
        wave_barrier();  // every lane has read the scales
        fetch(n + ring);
    }
#pragma unroll
    for (i32 t = 0; t < together; ++t) {
        if (t >= tokens) continue;
        const float one = group_sum<4>(k3::fma(total[t][0], 256.0f, total[t][1]));
        const float other = group_sum<4>(k3::fma(total[t][2], 256.0f, total[t][3]));
        if (lane() % 4 == 0) {
            sums[part][t][matrix][half * tile + lane() / 4] = one;
            sums[part][t][matrix][half * tile + lane() / 4 + 8] = other;
        }
    }
    barrier();
    for (i32 t = wave(); t < tokens; t += waves) {
        float gate = 0.0f, up = 0.0f;
#pragma unroll
        for (i32 p = 0; p < parts; ++p) gate += sums[p][t][0][lane()], up += sums[p][t][1][lane()];
        const float result =
            activated<MXFP4_SITU, MXFP4_LINEAR, MXFP4_PRODUCT_BF16, MXFP4_COMPUTE_BF16>(gate, up, beta, linear_beta);
        const i64 route = t == 0 ? block_x() : links[block_x()].next[t - 1];
        split1(round_to_bf16(result), hidden[route * (MXFP4_WIDTH / 32) + block_y()]);
    }
}

// Grid: (routes, any number of shares of the rows).
K3_KERNEL(threads)
mxfp4_shared_down(
    const digits* hidden, const link* links, const id_type* ids, i32 first, i32 count, const unsigned char* w_down,
    i32 expert_stride, i32 row_stride, const unsigned char* s_down, i32 scale_expert_stride, i32 scale_row_stride,
    u32 two16, i32 shares, float* routed) {
    constexpr i32 tiles = MXFP4_OUTER / tile;
    constexpr i32 each = MXFP4_WIDTH / 32;
    down_stage* const stages = reinterpret_cast<down_stage*>(room) + wave() * ring;
    digits* const parts = reinterpret_cast<digits*>(reinterpret_cast<down_stage*>(room) + waves * ring);
    release_later_kernel<dependent>();
    wait_for_earlier_kernel<dependent>();
    i32 named[together];
    const i32 tokens = routes_of(links, block_x(), named);
    if (tokens == 0) return;
    const i64 expert = local_expert(ids, named[0], first, count);
    const unsigned char* const stored = w_down + expert * expert_stride;
    const unsigned char* const scale = s_down + expert * scale_expert_stride;
    // Neighbouring waves take neighbouring tiles.
    const i32 begin = static_cast<i32>(static_cast<i64>(tiles) * block_y() / shares);
    const i32 end = static_cast<i32>(static_cast<i64>(tiles) * (block_y() + 1) / shares);
    const auto fetch = [&](i32 n) {
        const i64 t = begin + n * waves + wave();
        if (t < end) {
            fetch_rows(stages[n % ring], stored + t * tile * row_stride, row_stride, scale + t * tile * scale_row_stride,
                       scale_row_stride);
        }
        close_group_of_copies();
    };
#pragma unroll
    for (i32 n = 0; n < ring; ++n) fetch(n);
#pragma unroll
    for (i32 t = 0; t < together; ++t) {
        if (t < tokens) bring_digits(parts + t * each, hidden + static_cast<i64>(named[t]) * each, each);
    }
    barrier();
#pragma unroll 1
    for (i32 n = 0; begin + n * waves + wave() < end; ++n) {
        wait_for_oldest_stage();
        const down_stage& from = stages[n % ring];
        float total[together][4] = {};
#pragma unroll
        for (i32 s = 0; s < down_steps; ++s) {
            const widened weights = widen(from.weights[2 * s][lane()], from.weights[2 * s + 1][lane()], two16);
            const float upper = scale_of(from.scales[lane() / 4][s]), lower = scale_of(from.scales[lane() / 4 + 8][s]);
#pragma unroll
            for (i32 t = 0; t < together; ++t) {
                if (t < tokens) multiply_widened(total[t], weights, upper, lower, operand_of(parts + t * each + s * 4));
            }
        }
        const i32 row = (begin + n * waves + wave()) * tile + lane() / 4;
#pragma unroll
        for (i32 t = 0; t < together; ++t) {
            if (t >= tokens) continue;
            float* const to = routed + static_cast<i64>(named[t]) * MXFP4_OUTER + row;
            const float one = when_bf16(MXFP4_ROUTE_BF16, group_sum<4>(k3::fma(total[t][0], 256.0f, total[t][1])));
            const float other = when_bf16(MXFP4_ROUTE_BF16, group_sum<4>(k3::fma(total[t][2], 256.0f, total[t][3])));
            if (lane() % 4 == 0) to[0] = one, to[8] = other;
        }
        wave_barrier();
        fetch(n + ring);
    }
}

// Grid: (tokens, blocks of 4 * THREADS columns).
K3_KERNEL(threads)
mxfp4_shared_combine(const float* routed, const id_type* ids, const share_type* shares, i32 first, i32 count, bf16* out) {
    release_later_kernel<dependent>();
    wait_for_earlier_kernel<dependent>();
    const i64 token = block_x();
    const i32 column = (block_y() * threads + thread_x()) * 4;
    if (column >= MXFP4_OUTER) return;
    float total[4] = {};
#pragma unroll 4
    for (i32 slot = 0; slot < MXFP4_TOP_K; ++slot) {
        const i64 route = token * MXFP4_TOP_K + slot;
        if (local_expert(ids, route, first, count) < 0) continue;
        const float share = when_bf16(MXFP4_COMBINE_BF16, to_float(shares[route]));
        const u32x4 four = load16(routed + route * MXFP4_OUTER + column);
        const float of[4] = {bit_cast<float>(four.x), bit_cast<float>(four.y), bit_cast<float>(four.z), bit_cast<float>(four.w)};
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            total[i] = MXFP4_COMBINE_BF16 ? total[i] + round_to_bf16(of[i] * share) : k3::fma(of[i], share, total[i]);
        }
    }
    u32* const to = reinterpret_cast<u32*>(out + token * MXFP4_OUTER + column);
    to[0] = pack2(total[0], total[1]), to[1] = pack2(total[2], total[3]);
}
