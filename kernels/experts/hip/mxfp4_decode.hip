// Routed experts with MXFP4 weights for few tokens, on NVIDIA's 8-bit matrix units (sm_90 and later).
//
// A 4-bit weight needs no table and no conversion there: its bits, moved, are an E4M3 number of 2^-6 times its value.
//
//   E2M1   s ee m        E4M3   s 00ee m00        exact, the subnormal 0.5 included
//
// A bf16 activation is the sum of two E4M3 numbers, once its row is scaled by a power of two: eight significant bits in
// two times four. They are two columns of one product, so the second costs nothing. What a row's largest value leaves
// below E4M3's range is dropped: 2^-22 of the largest value at most. Products are exact, and 32 of them, one scale
// group, are added up by the matrix unit; across groups the sum is fp32.
//
//   mxfp4_gate_up   a workgroup owns 16 rows of one route's intermediate; its waves split the columns
//   mxfp4_down      a workgroup owns 16 outputs of one token; its waves split the token's experts, whose weights they
//                   fetch before they wait for the kernel before
//
// Weights come as the checkpoint has them: bytes of two values, the even column in the low nibble, and one E8M0 byte for
// 32 columns (255, a NaN, gives an infinity or a NaN). A route outside of the window is skipped in both kernels.
//
//   MXFP4_INNER, _WIDTH, _OUTER   columns of x, of an expert's intermediate, of the result; INNER and WIDTH multiples of
//                                 64, WIDTH and OUTER of 16
//   MXFP4_TOP_K                   experts of a token
//   MXFP4_WAVES                   waves of a workgroup
//   MXFP4_UNROLL                  blocks of 64 columns of which a wave of gate/up has loads in flight together
//   MXFP4_IDS                     i32 or i64
//   MXFP4_SITU, _LINEAR, _PRODUCT_BF16, _COMPUTE_BF16, _ROUTE_BF16, _COMBINE_BF16   as in warp_decode.hip
//   MXFP4_DEPENDENT               1: the down kernel may be launched while gate/up still runs

#include "activation.h"
#include "portability.h"

#if !K3_NVIDIA
#error "mxfp4_decode.hip is for NVIDIA: AMD's matrix units take MXFP4 and its scales as they are"
#endif

namespace {

using namespace k3;

typedef MXFP4_IDS id_type;

constexpr i32 waves = MXFP4_WAVES;
constexpr i32 threads = waves * 32;
constexpr i32 span = 64;  // columns that a wave takes in one step: two scale groups
constexpr i32 tile = 16;  // rows of a workgroup
constexpr float weight_unit = 64.0f;  // a weight's value over that of its E4M3 number
constexpr float second_unit = 0.0625f;  // the second part of an activation is stored 16 times its value

static_assert(MXFP4_INNER % span == 0 && MXFP4_WIDTH % span == 0, "columns come in steps of 64");
static_assert(MXFP4_WIDTH % tile == 0 && MXFP4_OUTER % tile == 0, "rows come in tiles of 16");

struct alignas(8) u32x2 {
    u32 x, y;
};

K3_DEVICE u32x2 load8(const unsigned char* address) {
    u32x2 v;
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
        : "=r"(v.x), "=r"(v.y)
        : "l"(__cvta_generic_to_global(address)));
    return v;
}
K3_DEVICE u32 load2(const unsigned char* address) {
    unsigned short v;
    asm("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(__cvta_generic_to_global(address)));
    return v;
}
K3_DEVICE void wait_for_earlier_kernel() {
    if constexpr (MXFP4_DEPENDENT) asm volatile("griddepcontrol.wait;" ::: "memory");
}
K3_DEVICE void release_later_kernel() {
    if constexpr (MXFP4_DEPENDENT) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

K3_DEVICE i64 local_expert(const id_type* ids, i64 route, i32 first, i32 count) {
    const i64 expert = static_cast<i64>(ids[route]) - first;
    return expert < count ? expert : -1;
}

// The E4M3 numbers of the even columns (low nibbles) and of the odd ones of a word of eight weights.
K3_DEVICE u32 even_weights(u32 word) { return ((word & 0x07070707u) << 2) | ((word & 0x08080808u) << 4); }
K3_DEVICE u32 odd_weights(u32 word) { return ((word >> 2) & 0x1c1c1c1cu) | (word & 0x80808080u); }

// E4M3 of four floats, the first in the low byte, and what they stand for.
K3_DEVICE u32 to_e4m3(const float (&v)[4]) {
    unsigned short low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(v[1]), "f"(v[0]));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(v[3]), "f"(v[2]));
    return static_cast<u32>(high) << 16 | low;
}
K3_DEVICE void from_e4m3(u32 packed, float (&v)[4]) {
    u32 low, high;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(low) : "h"(static_cast<unsigned short>(packed & 0xffffu)));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(high) : "h"(static_cast<unsigned short>(packed >> 16)));
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(v[0]), "=f"(v[1]) : "r"(low));
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(v[2]), "=f"(v[3]) : "r"(high));
}

// Eight activations, times `scale`, as two parts: even columns, odd columns.
K3_DEVICE void split8(const u32x4& packed, float scale, u32x2& one, u32x2& two) {
    float value[8], even[4], odd[4], back[4];
    unpack8(packed, value);
#pragma unroll
    for (i32 i = 0; i < 4; ++i) even[i] = value[2 * i] * scale, odd[i] = value[2 * i + 1] * scale;
    one.x = to_e4m3(even), one.y = to_e4m3(odd);
    from_e4m3(one.x, back);
#pragma unroll
    for (i32 i = 0; i < 4; ++i) even[i] = (even[i] - back[i]) * 16.0f;
    from_e4m3(one.y, back);
#pragma unroll
    for (i32 i = 0; i < 4; ++i) odd[i] = (odd[i] - back[i]) * 16.0f;
    two.x = to_e4m3(even), two.y = to_e4m3(odd);
}

// The power of two that brings `largest` into [128, 256); 1 for a row of zeros, NaN for one with an infinity, which
// E4M3 does not have.
K3_DEVICE float row_scale(float largest) {
    const u32 exponent = bit_cast<u32>(largest) >> 23;
    if (exponent == 255) return bit_cast<float>(0x7fc00000u);
    const u32 wanted = 127 + 127 + 7 - exponent;
    return exponent == 0 ? 1.0f : bit_cast<float>((wanted < 254 ? wanted : 254) << 23);
}

K3_DEVICE float largest_of(const u32x4& packed) {
    float value[8], most = 0.0f;
    unpack8(packed, value);
#pragma unroll
    for (i32 i = 0; i < 8; ++i) most = maximum_number(most, value[i] < 0.0f ? -value[i] : value[i]);
    return most;
}

// sum[0], sum[1]: row `lane / 4`, columns 2 * (lane % 4) and the next; sum[2], sum[3]: row `lane / 4 + 8`.
K3_DEVICE void multiply(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16 rows times 64 columns added to `total`. Lane 4 r + q holds 16 columns of rows r and r + 8: columns 16 q to 16 q + 15,
// which lie in scale group q / 2. `values` are the activations of the same columns (zero in the columns of the product
// that are not used), so the product of one group takes the lanes of that group and zeros from the others.
K3_DEVICE void multiply_span(
    float (&total)[4], const u32x2& upper, const u32x2& lower, u32 upper_scales, u32 lower_scales, const u32x4& values) {
    const u32 a[2][4] = {
        {even_weights(upper.x), even_weights(lower.x), odd_weights(upper.x), odd_weights(lower.x)},
        {even_weights(upper.y), even_weights(lower.y), odd_weights(upper.y), odd_weights(lower.y)}};
#pragma unroll
    for (i32 g = 0; g < 2; ++g) {
        const u32 mine = ((lane() >> 1) & 1) == g ? 0xffffffffu : 0u;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        multiply(sum, a[0][0], a[0][1], a[0][2], a[0][3], values.x & mine, values.y & mine);
        multiply(sum, a[1][0], a[1][1], a[1][2], a[1][3], values.z & mine, values.w & mine);
        const float up = bit_cast<float>((g ? upper_scales << 15 : upper_scales << 23) & 0x7f800000u);
        const float low = bit_cast<float>((g ? lower_scales << 15 : lower_scales << 23) & 0x7f800000u);
        total[0] = k3::fma(sum[0], up, total[0]), total[1] = k3::fma(sum[1], up, total[1]);
        total[2] = k3::fma(sum[2], low, total[2]), total[3] = k3::fma(sum[3], low, total[3]);
    }
}

}  // namespace

// Grid: (routes, WIDTH / 16).
K3_KERNEL(threads)
mxfp4_gate_up(
    const bf16* x, i32 x_stride, const id_type* ids, i32 first, i32 count, const unsigned char* w_gate,
    const unsigned char* w_up, i32 expert_stride, i32 row_stride, const unsigned char* s_gate, const unsigned char* s_up,
    i32 scale_expert_stride, i32 scale_row_stride, float beta, float linear_beta, bf16* hidden) {
    constexpr i32 steps = MXFP4_INNER / span;
    constexpr i32 unroll = MXFP4_UNROLL;
    __shared__ alignas(16) u32x2 parts[2][MXFP4_INNER / 8];
    __shared__ float sums[waves][2][tile];
    __shared__ float most[waves];
    release_later_kernel();
    const i64 route = block_x();
    const i64 expert = local_expert(ids, route, first, count);
    if (expert < 0) return;
    const bf16* const source = x + route / MXFP4_TOP_K * x_stride;
    float largest = 0.0f;
    for (i32 v = thread_x(); v < MXFP4_INNER / 8; v += threads) largest = maximum_number(largest, largest_of(load16(source + v * 8)));
    largest = wave_max(largest);
    if (lane() == 0) most[wave()] = largest;
    barrier();
#pragma unroll
    for (i32 w = 0; w < waves; ++w) largest = maximum_number(largest, most[w]);
    const float scale = row_scale(largest);
    for (i32 v = thread_x(); v < MXFP4_INNER / 8; v += threads) {
        u32x2 one, two;
        split8(load16(source + v * 8), scale, one, two);
        parts[0][v] = one, parts[1][v] = two;
    }
    barrier();

    const i32 row = block_y() * tile + lane() / 4;
    const i32 quarter = lane() % 4;
    const i32 column = lane() / 4;  // of the product: parts of the one activation row in 0 and 1, nothing in the others
    const i64 begin = expert * expert_stride + static_cast<i64>(row) * row_stride + quarter * 8;
    const i64 begin_scale = expert * scale_expert_stride + static_cast<i64>(row) * scale_row_stride;
    const i64 half = static_cast<i64>(8) * row_stride, half_scale = static_cast<i64>(8) * scale_row_stride;
    float gate[4] = {0.0f, 0.0f, 0.0f, 0.0f}, up[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (i32 step = wave(); step < steps; step += waves * unroll) {
        u32x2 g0[unroll], g1[unroll], u0[unroll], u1[unroll];
        u32 gs0[unroll], gs1[unroll], us0[unroll], us1[unroll];
#pragma unroll
        for (i32 n = 0; n < unroll; ++n) {
            const i32 at = step + n * waves;
            const bool inside = steps % (waves * unroll) == 0 || at < steps;
            const i64 offset = begin + at * 32, scales = begin_scale + at * 2;
            const u32x2 zero{0, 0};
            g0[n] = inside ? load8(w_gate + offset) : zero, g1[n] = inside ? load8(w_gate + offset + half) : zero;
            u0[n] = inside ? load8(w_up + offset) : zero, u1[n] = inside ? load8(w_up + offset + half) : zero;
            gs0[n] = inside ? load2(s_gate + scales) : 0, gs1[n] = inside ? load2(s_gate + scales + half_scale) : 0;
            us0[n] = inside ? load2(s_up + scales) : 0, us1[n] = inside ? load2(s_up + scales + half_scale) : 0;
        }
#pragma unroll
        for (i32 n = 0; n < unroll; ++n) {
            const i32 at = step + n * waves;
            u32x4 values{0, 0, 0, 0};
            if (column < 2 && (steps % (waves * unroll) == 0 || at < steps)) values = load16(&parts[column][at * 8 + quarter * 2]);
            multiply_span(gate, g0[n], g1[n], gs0[n], gs1[n], values);
            multiply_span(up, u0[n], u1[n], us0[n], us1[n], values);
        }
    }
    if (quarter == 0) {
        sums[wave()][0][lane() / 4] = k3::fma(gate[1], second_unit, gate[0]);
        sums[wave()][0][lane() / 4 + 8] = k3::fma(gate[3], second_unit, gate[2]);
        sums[wave()][1][lane() / 4] = k3::fma(up[1], second_unit, up[0]);
        sums[wave()][1][lane() / 4 + 8] = k3::fma(up[3], second_unit, up[2]);
    }
    barrier();
    if (thread_x() >= tile) return;
    float one = 0.0f, other = 0.0f;
#pragma unroll
    for (i32 w = 0; w < waves; ++w) one += sums[w][0][thread_x()], other += sums[w][1][thread_x()];
    const float unit = weight_unit / scale;
    const float result = activated<MXFP4_SITU, MXFP4_LINEAR, MXFP4_PRODUCT_BF16, MXFP4_COMPUTE_BF16>(
        one * unit, other * unit, beta, linear_beta);
    hidden[route * MXFP4_WIDTH + block_y() * tile + thread_x()] = to_bf16(result);
}

// Grid: (tokens, OUTER / 16).
K3_KERNEL(threads)
mxfp4_down(
    const bf16* hidden, const id_type* ids, const float* weights, i32 first, i32 count, const unsigned char* w_down,
    i32 expert_stride, i32 row_stride, const unsigned char* s_down, i32 scale_expert_stride, i32 scale_row_stride,
    bf16* out) {
    constexpr i32 steps = MXFP4_WIDTH / span;
    constexpr i32 each = (MXFP4_TOP_K + waves - 1) / waves;  // experts of a wave
    __shared__ alignas(16) u32x2 parts[waves][2][MXFP4_WIDTH / 8];
    __shared__ float sums[waves][tile];
    const i64 token = block_x();
    const i32 row = block_y() * tile + lane() / 4;
    const i32 quarter = lane() % 4;
    const i32 column = lane() / 4;
    float total[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (i32 e = 0; e < each; ++e) {
        const i32 slot = e * waves + wave();
        const i64 route = token * MXFP4_TOP_K + slot;
        const i64 expert = slot < MXFP4_TOP_K ? local_expert(ids, route, first, count) : -1;
        u32x2 upper[steps], lower[steps];
        u32 upper_scales[steps], lower_scales[steps];
        const i64 begin = expert * expert_stride + static_cast<i64>(row) * row_stride + quarter * 8;
        const i64 begin_scale = expert * scale_expert_stride + static_cast<i64>(row) * scale_row_stride;
#pragma unroll
        for (i32 s = 0; s < steps; ++s) {
            const u32x2 zero{0, 0};
            const i64 offset = begin + s * 32, scales = begin_scale + s * 2;
            upper[s] = expert >= 0 ? load8(w_down + offset) : zero;
            lower[s] = expert >= 0 ? load8(w_down + offset + static_cast<i64>(8) * row_stride) : zero;
            upper_scales[s] = expert >= 0 ? load2(s_down + scales) : 0;
            lower_scales[s] = expert >= 0 ? load2(s_down + scales + static_cast<i64>(8) * scale_row_stride) : 0;
        }
        if (e == 0) wait_for_earlier_kernel();
        if (expert < 0) continue;  // the same in all lanes of a wave, which shares nothing with the others here
        const bf16* const source = hidden + route * MXFP4_WIDTH;
        float largest = 0.0f;
        for (i32 v = lane(); v < MXFP4_WIDTH / 8; v += 32) largest = maximum_number(largest, largest_of(load16(source + v * 8)));
        const float scale = row_scale(wave_max(largest));
        __syncwarp();
        for (i32 v = lane(); v < MXFP4_WIDTH / 8; v += 32) {
            u32x2 one, two;
            split8(load16(source + v * 8), scale, one, two);
            parts[wave()][0][v] = one, parts[wave()][1][v] = two;
        }
        __syncwarp();
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (i32 s = 0; s < steps; ++s) {
            u32x4 values{0, 0, 0, 0};
            if (column < 2) values = load16(&parts[wave()][column][s * 8 + quarter * 2]);
            multiply_span(sum, upper[s], lower[s], upper_scales[s], lower_scales[s], values);
        }
        const float unit = weight_unit / scale;
        const float share = when_bf16(MXFP4_COMBINE_BF16, weights[route]);
#pragma unroll
        for (i32 r = 0; r < 2; ++r) {
            const float result = when_bf16(MXFP4_ROUTE_BF16, k3::fma(sum[2 * r + 1], second_unit, sum[2 * r]) * unit);
            total[r] += when_bf16(MXFP4_COMBINE_BF16, result * share);
        }
    }
    if (quarter == 0) sums[wave()][lane() / 4] = total[0], sums[wave()][lane() / 4 + 8] = total[1];
    barrier();
    if (thread_x() >= tile) return;
    float result = 0.0f;
#pragma unroll
    for (i32 w = 0; w < waves; ++w) result += sums[w][thread_x()];
    out[token * MXFP4_OUTER + block_y() * tile + thread_x()] = to_bf16(result);
}
