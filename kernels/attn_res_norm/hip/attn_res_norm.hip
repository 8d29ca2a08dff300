// AttnRes with its output norm, bf16: the schedule of `attn_res_resident` in ../triton.py.
//
//   every thread holds its columns of all sources in registers, so each is read once, all loads in flight together
//   -> two sums a source (square, product with the score weight) over the row
//   -> softmax over the sources, each wave for itself -> mix -> output norm -> store
//
// One workgroup takes a row, or on NVIDIA (sm_90 and later) a cluster of ATTN_RES_SPLIT workgroups does, which send
// their sums to each other's shared memory: with few rows a single compute unit's arithmetic is what takes the time.
//
// Sizes and optional parts are macros, as one source is compiled for each shape:
//
//   ATTN_RES_D        columns of a row, a multiple of 8
//   ATTN_RES_BLOCKS   sources beside the prefix, 0 to 15
//   ATTN_RES_SPLIT    workgroups that share a row; 1 on AMD
//   ATTN_RES_ASYNC    1: workgroups wait for the bytes of each other's sums, not for each other (only with a SPLIT)
//   ATTN_RES_EARLY    1: the last source is written before the sums are exchanged; 0: beside the result
//   ATTN_RES_DEPENDENT  1: launched while the kernel before it may still run (sm_90 and later); 0 on AMD
//   ATTN_RES_THREADS  threads of a workgroup; 8 columns a vector, so 448 threads take 7168 columns in 2 vectors each
//   ATTN_RES_DELTA    1: prefix + delta, rounded to bf16, is the last source; 0: the prefix is
//   ATTN_RES_STORE    1: the last source is written to new_prefix (which may be the prefix itself)
//   ATTN_RES_NORM     1: output norm; 0: the mix itself is written
//   ATTN_RES_MIX_BF16, ATTN_RES_SCALE_BF16   1: round to bf16 before the norm, before the norm's weight
//
// Row strides are in elements, multiples of 8; pointers are 16-byte aligned; the columns of a row are contiguous.

#include "cluster.h"
#include "portability.h"

namespace {

using namespace k3;

constexpr i32 columns = ATTN_RES_D;
constexpr i32 split = ATTN_RES_SPLIT;
constexpr i32 vectors = columns / 8 / split;  // of a workgroup
constexpr i32 threads = ATTN_RES_THREADS;
constexpr i32 per_thread = (vectors + threads - 1) / threads;
constexpr i32 sources = ATTN_RES_BLOCKS + 1;
constexpr i32 waves = threads / wave_size;
constexpr bool asynchronous = ATTN_RES_ASYNC, dependent = ATTN_RES_DEPENDENT;

static_assert(columns % (8 * split) == 0, "ATTN_RES_D must be a multiple of 8 * ATTN_RES_SPLIT");
static_assert(split == 1 || K3_NVIDIA, "only NVIDIA has clusters of workgroups");
static_assert(threads % wave_size == 0, "ATTN_RES_THREADS must be whole waves");
static_assert(sources <= 16, "at most 16 sources");
static_assert(split > 1 || !ATTN_RES_ASYNC, "one workgroup has nobody's bytes to wait for");

// Sources rounded up to a power of two: half of the sums that go over the workgroup.
constexpr i32 half = sources > 8 ? 16 : sources > 4 ? 8 : sources > 2 ? 4 : sources;

// `condition ? a : b` as a select: nvcc makes one branch of many of them, and the lanes diverge.
K3_DEVICE float choose(u32 condition, float a, float b) {
#if K3_NVIDIA
    float chosen;
    asm("{ .reg .pred p; setp.ne.u32 p, %3, 0; selp.f32 %0, %1, %2, p; }"
        : "=f"(chosen)
        : "f"(a), "f"(b), "r"(condition));
    return chosen;
#else
    return condition ? a : b;
#endif
}

// Sums over the wave, `Count` of them, a power of two up to the wave's size: half of the values change lanes in each
// step, so that the lanes end with one finished sum each, after Count - 1 exchanges instead of Count * log2(wave).
// Lane masks in this order because the first steps exchange most, and AMD reads lanes 1, 2 and 8 apart in one move.
template <i32 Count, i32 Mask>
K3_DEVICE void exchange(float* values, u32 upper) {
#pragma unroll
    for (i32 i = 0; i < Count / 2; ++i) {
        const float kept = choose(upper, values[i + Count / 2], values[i]);
        const float sent = choose(upper, values[i], values[i + Count / 2]);
        values[i] = kept + shuffle_xor<Mask>(sent);
    }
}

// Returns the sum that this lane holds, and in `index` which of the values it is the sum of. Every sum is held by
// wave_size / Count lanes.
template <i32 Count>
K3_DEVICE float scattered_wave_sums(float* values, i32& index) {
    const i32 here = lane();
    index = 0;
    if constexpr (Count >= 2) {
        exchange<Count, 1>(values, here & 1);
        index += here & 1 ? Count / 2 : 0;
    } else {
        values[0] += shuffle_xor<1>(values[0]);
    }
    if constexpr (Count >= 4) {
        exchange<Count / 2, 2>(values, here & 2);
        index += here & 2 ? Count / 4 : 0;
    } else {
        values[0] += shuffle_xor<2>(values[0]);
    }
    if constexpr (Count >= 8) {
        exchange<Count / 4, 8>(values, here & 8);
        index += here & 8 ? Count / 8 : 0;
    } else {
        values[0] += shuffle_xor<8>(values[0]);
    }
    if constexpr (Count >= 16) {
        exchange<Count / 8, 4>(values, here & 4);
        index += here & 4 ? Count / 16 : 0;
    } else {
        values[0] += shuffle_xor<4>(values[0]);
    }
    if constexpr (Count >= 32) {
        exchange<Count / 16, 16>(values, here & 16);
        index += here & 16 ? Count / 32 : 0;
    } else {
        values[0] += shuffle_xor<16>(values[0]);
    }
    if constexpr (wave_size == 64) values[0] = butterfly_step<sum_of, 32>(values[0]);
    return values[0];
}

// The same eight bf16, but the compiler must take them for new ones: it would otherwise keep the floats that it once
// unpacked, twice as many registers, alive from the scores to the mix.
K3_DEVICE void keep_packed(u32x4& packed) {
#if K3_AMD
    asm volatile("" : "+v"(packed.x), "+v"(packed.y), "+v"(packed.z), "+v"(packed.w));
#else
    asm volatile("" : "+r"(packed.x), "+r"(packed.y), "+r"(packed.z), "+r"(packed.w));
#endif
}

K3_DEVICE bool inside(i32 vector) { return vectors % threads == 0 || vector < vectors; }

}  // namespace

K3_KERNEL(ATTN_RES_THREADS)
K3_CLUSTER(ATTN_RES_SPLIT) attn_res_norm(
    const bf16* b0, const bf16* b1, const bf16* b2, const bf16* b3, const bf16* b4, const bf16* b5, const bf16* b6,
    const bf16* b7, const bf16* b8, const bf16* b9, const bf16* b10, const bf16* b11, const bf16* b12,
    const bf16* b13, const bf16* b14, i32 r0, i32 r1, i32 r2, i32 r3, i32 r4, i32 r5, i32 r6, i32 r7, i32 r8, i32 r9,
    i32 r10, i32 r11, i32 r12, i32 r13, i32 r14, const bf16* prefix, i32 prefix_stride, const bf16* delta,
    i32 delta_stride, bf16* new_prefix, i32 new_prefix_stride, const bf16* score_norm, const bf16* score_proj,
    const bf16* norm_weight, bf16* out, i32 out_stride, float score_eps, float norm_eps) {
    const bf16* const block_at[15] = {b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14};
    const i32 block_stride[15] = {r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, r10, r11, r12, r13, r14};
    __shared__ float wave_sums[split * waves][2 * half];
    __shared__ float wave_squares[split * waves];
    __shared__ arrivals of_sums, of_squares;
    const i64 row = block_x() / split;
    const i32 part = block_x() % split;
    const i32 place = part * waves + wave();  // of this wave, among those of the row
    const i32 first_column = part * vectors * 8;
    const u32x4 zero{0, 0, 0, 0};
    if constexpr (ATTN_RES_ASYNC) {
        // Every lane sends the sum that it holds, also where several lanes hold the same.
        if (thread_x() == 0) expect(of_sums, split * threads * sizeof(float)), expect(of_squares, sizeof(wave_squares));
    }
    cluster_arrive<split>();
    wait_for_earlier_kernel<dependent>();

    u32x4 held[sources][per_thread];
    u32x4 added[per_thread];
    u32x4 norm_vector[per_thread], proj_vector[per_thread], out_weight[per_thread];
#pragma unroll
    for (i32 v = 0; v < per_thread; ++v) {
        const i32 vector = thread_x() + v * threads;
        const bool here = inside(vector);
        const i32 column = first_column + vector * 8;
#pragma unroll
        for (i32 j = 0; j < ATTN_RES_BLOCKS; ++j)
            held[j][v] = here ? load16(block_at[j] + row * block_stride[j] + column) : zero;
        held[sources - 1][v] = here ? load16(prefix + row * prefix_stride + column) : zero;
        if constexpr (ATTN_RES_DELTA) added[v] = here ? load16(delta + row * delta_stride + column) : zero;
        norm_vector[v] = here ? load16(score_norm + column) : zero;
        proj_vector[v] = here ? load16(score_proj + column) : zero;
        if constexpr (ATTN_RES_NORM) out_weight[v] = here ? load16(norm_weight + column) : zero;
    }

    float partial[2 * half];
#pragma unroll
    for (i32 i = 0; i < 2 * half; ++i) partial[i] = 0.0f;
#pragma unroll
    for (i32 v = 0; v < per_thread; ++v) {
        float weight[8], proj[8];
        unpack8(norm_vector[v], weight);
        unpack8(proj_vector[v], proj);
#pragma unroll
        for (i32 k = 0; k < 8; ++k) weight[k] *= proj[k];
        if constexpr (ATTN_RES_DELTA) {
            float sum[8], delta_part[8];
            unpack8(held[sources - 1][v], sum);
            unpack8(added[v], delta_part);
#pragma unroll
            for (i32 k = 0; k < 8; ++k) sum[k] += delta_part[k];
            held[sources - 1][v] = pack8(sum);
        }
#pragma unroll
        for (i32 j = 0; j < sources; ++j) {
            float value[8];
            unpack8(held[j][v], value);
#pragma unroll
            for (i32 k = 0; k < 8; ++k) {
                partial[j] = k3::fma(value[k], value[k], partial[j]);
                partial[half + j] = k3::fma(value[k], weight[k], partial[half + j]);
            }
        }
    }

    if constexpr (ATTN_RES_EARLY && ATTN_RES_STORE) {
#pragma unroll
        for (i32 v = 0; v < per_thread; ++v) {
            const i32 vector = thread_x() + v * threads;
            if (!inside(vector)) continue;
            store16(new_prefix + row * new_prefix_stride + first_column + vector * 8, held[sources - 1][v]);
        }
    }

    // Sums over the row: each wave leaves its own, then every wave adds up all of them.
    i32 index;
    const float sum_of_wave = scattered_wave_sums<2 * half>(partial, index);
    release_later_kernel<dependent>();
    cluster_wait<split>();  // all workgroups of the row have started: their shared memory may be written
    leave<split, asynchronous>(&wave_sums[place][index], sum_of_wave, of_sums);
    meet<split, asynchronous>(of_sums);

    // A lane adds up one of the sums, and gets its source's other one from the lane `half` away. The softmax needs no
    // shared memory after this.
    const i32 mine = lane() & (2 * half - 1);
    const i32 source = mine & (half - 1);
    float sum_of_row = 0.0f;
#pragma unroll
    for (i32 w = 0; w < split * waves; ++w) sum_of_row += wave_sums[w][mine];
    const float other = shuffle_xor<half>(sum_of_row);
    const float square = mine < half ? sum_of_row : other;
    const float product = mine < half ? other : sum_of_row;
    const float log2_e = 1.4426950408889634f;
    const float score = product * fast_rsqrt(square * (1.0f / columns) + score_eps) * log2_e;
    const float shown = source < sources ? score : -__builtin_huge_valf();
    const float share = fast_exp2(shown - group_max<half>(shown));
    const float portion = share / group_sum<half>(share);

    float mix[per_thread][8];
#pragma unroll
    for (i32 v = 0; v < per_thread; ++v) {
#pragma unroll
        for (i32 k = 0; k < 8; ++k) mix[v][k] = 0.0f;
    }
#pragma unroll
    for (i32 j = 0; j < sources; ++j) {
        const float part = shuffle(portion, j);
#pragma unroll
        for (i32 v = 0; v < per_thread; ++v) {
            float value[8];
            keep_packed(held[j][v]);
            unpack8(held[j][v], value);
#pragma unroll
            for (i32 k = 0; k < 8; ++k) mix[v][k] = k3::fma(part, value[k], mix[v][k]);
        }
    }

    if constexpr (ATTN_RES_NORM) {
        float square_of_mix = 0.0f;
#pragma unroll
        for (i32 v = 0; v < per_thread; ++v) {
#pragma unroll
            for (i32 k = 0; k < 8; ++k) {
                if constexpr (ATTN_RES_MIX_BF16) mix[v][k] = round_to_bf16(mix[v][k]);
                square_of_mix = k3::fma(mix[v][k], mix[v][k], square_of_mix);
            }
        }
        square_of_mix = wave_sum(square_of_mix);
        if (lane() == 0) leave<split, asynchronous>(&wave_squares[place], square_of_mix, of_squares);
        meet<split, asynchronous>(of_squares);
        float sum = 0.0f;
#pragma unroll
        for (i32 w = 0; w < split * waves; ++w) sum += wave_squares[w];
        const float rstd = fast_rsqrt(sum * (1.0f / columns) + norm_eps);
#pragma unroll
        for (i32 v = 0; v < per_thread; ++v) {
            float weight[8];
            unpack8(out_weight[v], weight);
#pragma unroll
            for (i32 k = 0; k < 8; ++k) {
                float scaled = mix[v][k] * rstd;
                if constexpr (ATTN_RES_SCALE_BF16) scaled = round_to_bf16(scaled);
                mix[v][k] = scaled * weight[k];
            }
        }
    }

#pragma unroll
    for (i32 v = 0; v < per_thread; ++v) {
        const i32 vector = thread_x() + v * threads;
        const i32 column = first_column + vector * 8;
        if (!inside(vector)) continue;
        if constexpr (ATTN_RES_STORE && !ATTN_RES_EARLY) store16(new_prefix + row * new_prefix_stride + column, held[sources - 1][v]);
        store16(out + row * out_stride + column, pack8(mix[v]));
    }
}
