// What the MXFP4 kernels for NVIDIA's integer matrix units (sm_90 and later) have in common: weights as integers,
// activations as digits, and their product. AMD's matrix units take MXFP4 and its scales as they are.
//
// The 8-bit floating point product of mma.sync is taken apart into fp16 ones on sm_90; the integer product is not, and
// a 4-bit weight is an integer there: twice its value is one of 0, 1, 2, 3, 4, 6, 8, 12 and their negatives. A byte
// permutation is a table of eight bytes with four lookups, and its selectors are the stored nibbles as they are. Where
// a selector's top bit, the sign, is set, it gives zero instead, if the table holds no byte above 127. So
//
//   lookup(12 + value, codes) | lookup(12 - value, codes with the sign turned)   is 12 + the number meant, exactly.
//
// A bf16 activation becomes a 16-bit integer, over a power of two for each 32 columns (a scale group), and that becomes
// two signed digits of base 256. Activations below 2^-7 of their group's largest lose bits of their eight; what is lost
// is hardly more than 2^-15 of the largest. Products and sums of a group are exact; across groups the sum is fp32.
//
// The product of 16 rows with 32 columns has 8 results a row. Lane 4 r + q reads whole groups, 32 columns of row r, so
// that a product takes eight columns of each of four groups; results 2 q and 2 q + 1 are the two digits of the lane's own
// group, as the activations of other groups are zero there. No lane multiplies what it has by another's scale. The 12
// that is too much is taken off where a sum starts; sums start at 1.5 * 2^23 as well, so that their bits are a float.
#pragma once

#include "activation.h"
#include "nvidia.h"
#include "portability.h"

namespace k3 {

typedef MXFP4_IDS id_type;
typedef MXFP4_SHARES share_type;

constexpr i32 waves = MXFP4_WAVES;
constexpr i32 threads = waves * 32;
constexpr i32 span = 128;  // columns of a step: four scale groups
constexpr i32 tile = 16;   // rows of a product
constexpr i32 prepared = (MXFP4_INNER / 32 + 7) / 8 * 8;  // groups of a prepared token: whole waves
constexpr bool dependent = MXFP4_DEPENDENT;
constexpr i32 origin = 0x4b400000;  // 1.5 * 2^23: adding an integer to these bits adds it to the number
constexpr float origin_value = 12582912.0f;

static_assert(MXFP4_INNER % (2 * span) == 0 && MXFP4_WIDTH % span == 0, "columns come in steps of 128, of x in pairs");

// 32 activations: two digits each, at which integers their products start, and the value of one.
struct alignas(16) digits {
    u32 digit[2][8];
    i32 start[2];
    float unit;
    u32 unused;
};
static_assert(sizeof(digits) == 80, "as mxfp4/sizes.py says");

K3_DEVICE i64 local_expert(const id_type* ids, i64 route, i32 first, i32 count) {
    const i64 expert = static_cast<i64>(ids[route]) - first;
    return expert < count ? expert : -1;
}

// 12 plus twice the value, as bytes, of the four codes in the low half of a word; `turned` are the codes with the other sign.
K3_DEVICE u32 four_weights(u32 codes, u32 turned) {
    return permute_bytes(0x0f0e0d0cu, 0x18141210u, codes) | permute_bytes(0x090a0b0cu, 0x00040608u, turned);
}

// The weights of 16 rows and 128 columns as bytes, in the order of four products; rows `lane / 4` and 8 further on.
struct widened {
    u32 bytes[4][4];
};

// The integer pipe is the busy one here, so the upper halves of words are products: `two16` is 2^16, and the compiler must
// not know.
K3_DEVICE void widen_words(u32 (&to)[4], u32 upper, u32 lower, u32 two16) {
    const u32 turned_upper = upper ^ 0x88888888u, turned_lower = lower ^ 0x88888888u;
    to[0] = four_weights(upper, turned_upper), to[1] = four_weights(lower, turned_lower);
    to[2] = four_weights(high_product(upper, two16), high_product(turned_upper, two16));
    to[3] = four_weights(high_product(lower, two16), high_product(turned_lower, two16));
}

K3_DEVICE widened widen(const u32x4& upper, const u32x4& lower, u32 two16) {
    widened made;
    widen_words(made.bytes[0], upper.x, lower.x, two16);
    widen_words(made.bytes[1], upper.y, lower.y, two16);
    widen_words(made.bytes[2], upper.z, lower.z, two16);
    widen_words(made.bytes[3], upper.w, lower.w, two16);
    return made;
}

K3_DEVICE void multiply_words(i32 (&sum)[4], const u32 (&weights)[4], u32 b0, u32 b1) {
    multiply_bytes(sum, weights[0], weights[1], weights[2], weights[3], b0, b1);
}

// The E8M0 byte of the lane's own group as a float.
K3_DEVICE float scale_of(u32 four_groups) {
    return bit_cast<float>(permute_bytes(four_groups, 0u, 0x0444u | static_cast<u32>(lane() % 4) << 12) >> 1);
}

// One lane's part of 128 columns of activations, from shared memory.
struct operand {
    u32x4 low, high;  // words 0 to 3 and 4 to 7 of the digit and group whose product is this lane's business; else zero
    i32 start[2];
    float unit;
};

K3_DEVICE operand operand_of(const digits* groups) {
    const i32 quarter = lane() % 4, digit = lane() / 4 - 2 * quarter;
    const digits& own = groups[quarter];
    operand made{{0, 0, 0, 0}, {0, 0, 0, 0}, {0, 0}, 0.0f};
    if (digit == 0 || digit == 1) made.low = load16(&own.digit[digit][0]), made.high = load16(&own.digit[digit][4]);
    const u32x4 rest = load16(&own.start[0]);
    made.start[0] = static_cast<i32>(rest.x), made.start[1] = static_cast<i32>(rest.y), made.unit = bit_cast<float>(rest.z);
    return made;
}

// The sums of 16 rows and the lane's group, added to `total`: rows `lane / 4` (0, 1: its digits) and 8 further on (2, 3).
K3_DEVICE void add_scaled(float (&total)[4], const i32 (&sum)[4], float upper_scale, float lower_scale, float unit) {
    const float up = upper_scale * unit, low = lower_scale * unit;
    total[0] = k3::fma(bit_cast<float>(sum[0]) - origin_value, up, total[0]);
    total[1] = k3::fma(bit_cast<float>(sum[1]) - origin_value, up, total[1]);
    total[2] = k3::fma(bit_cast<float>(sum[2]) - origin_value, low, total[2]);
    total[3] = k3::fma(bit_cast<float>(sum[3]) - origin_value, low, total[3]);
}

// 16 rows times 128 columns added to `total`.
K3_DEVICE void multiply_span(float (&total)[4], const u32x4& upper, const u32x4& lower, float upper_scale, float lower_scale,
                             const operand& by, u32 two16) {
    i32 sum[4] = {by.start[0], by.start[1], by.start[0], by.start[1]};
    u32 weights[4];
    widen_words(weights, upper.x, lower.x, two16), multiply_words(sum, weights, by.low.x, by.low.y);
    widen_words(weights, upper.y, lower.y, two16), multiply_words(sum, weights, by.low.z, by.low.w);
    widen_words(weights, upper.z, lower.z, two16), multiply_words(sum, weights, by.high.x, by.high.y);
    widen_words(weights, upper.w, lower.w, two16), multiply_words(sum, weights, by.high.z, by.high.w);
    add_scaled(total, sum, upper_scale, lower_scale, by.unit);
}

// The same with weights that are widened once for several tokens.
K3_DEVICE void multiply_widened(float (&total)[4], const widened& weights, float upper_scale, float lower_scale,
                                const operand& by) {
    i32 sum[4] = {by.start[0], by.start[1], by.start[0], by.start[1]};
    multiply_words(sum, weights.bytes[0], by.low.x, by.low.y);
    multiply_words(sum, weights.bytes[1], by.low.z, by.low.w);
    multiply_words(sum, weights.bytes[2], by.high.x, by.high.y);
    multiply_words(sum, weights.bytes[3], by.high.z, by.high.w);
    add_scaled(total, sum, upper_scale, lower_scale, by.unit);
}

// Of the largest magnitude of a group, as bits: what its values are multiplied with to be integers below 255 * 128.
K3_DEVICE u32 exponent_of(u32 largest) {
    const u32 wanted = 268 - ((largest + 0x10000u) >> 23);
    return wanted < 253 ? wanted : 253;
}
// Half of what one is worth, as weights are doubled; NaN if the group has an infinity or a NaN.
K3_DEVICE float unit_of(u32 largest, u32 exponent) {
    return largest >= 0x7f800000u ? bit_cast<float>(0x7fc00000u) : bit_cast<float>((254 - exponent) << 23) * 0.5f;
}
// The nearest integer, its digits in bytes 0 and, once 128 is added, 1.
K3_DEVICE u32 integer_of(float value, u32 exponent) {
    return bit_cast<u32>(k3::fma(value, bit_cast<float>(exponent << 23), origin_value));
}

K3_DEVICE u32 bytes_of(const u32 (&from)[4], u32 byte) {
    const u32 selector = byte | (byte + 4) << 4;
    return permute_bytes(permute_bytes(from[0], from[1], selector), permute_bytes(from[2], from[3], selector), 0x5410);
}

// Eight activations of a group; the four lanes of a quad have the group.
K3_DEVICE void split8(const u32x4& packed, digits& to) {
    float value[8];
    unpack8(packed, value);
    u32 largest = 0;
#pragma unroll
    for (i32 i = 0; i < 8; ++i) {
        const u32 magnitude = bit_cast<u32>(value[i]) & 0x7fffffffu;
        largest = largest > magnitude ? largest : magnitude;
    }
    u32 other = shuffle_xor<1>(largest);
    largest = largest > other ? largest : other;
    other = shuffle_xor<2>(largest);
    largest = largest > other ? largest : other;
    const u32 exponent = exponent_of(largest);
    i32 sums[2] = {0, 0};
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
        u32 integers[4], raised[4];
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            integers[i] = integer_of(value[4 * half + i], exponent);
            raised[i] = integers[i] + 128;
        }
        const u32 high = bytes_of(raised, 1), low = bytes_of(integers, 0);
        to.digit[0][2 * (lane() % 4) + half] = high, to.digit[1][2 * (lane() % 4) + half] = low;
        sums[0] = add_bytes(high, sums[0]);
        sums[1] = add_bytes(low, sums[1]);
    }
#pragma unroll
    for (i32 d = 0; d < 2; ++d) {
        sums[d] += static_cast<i32>(shuffle_xor<1>(static_cast<u32>(sums[d])));
        sums[d] += static_cast<i32>(shuffle_xor<2>(static_cast<u32>(sums[d])));
    }
    if (lane() % 4 == 0) {
        to.start[0] = origin - 12 * sums[0], to.start[1] = origin - 12 * sums[1];
        to.unit = unit_of(largest, exponent);
    }
}

// One activation a lane, a group a wave.
K3_DEVICE void split1(float value, digits& to) {
    const u32 largest = wave_max_of_bits(bit_cast<u32>(value) & 0x7fffffffu);
    const u32 exponent = exponent_of(largest), integer = integer_of(value, exponent);
    const i32 low = static_cast<signed char>(integer & 0xffu), high = static_cast<signed char>((integer + 128) >> 8 & 0xffu);
    reinterpret_cast<signed char*>(to.digit[0])[lane()] = static_cast<signed char>(high);
    reinterpret_cast<signed char*>(to.digit[1])[lane()] = static_cast<signed char>(low);
    const i32 sum_high = wave_sum_of_integers(high), sum_low = wave_sum_of_integers(low);
    if (lane() == 0) {
        to.start[0] = origin - 12 * sum_high, to.start[1] = origin - 12 * sum_low;
        to.unit = unit_of(largest, exponent);
    }
}

// Digits of `threads` vectors of eight columns of a token, the `block`-th of them.
K3_DEVICE void prepare_columns(const bf16* x, i32 x_stride, digits* made, i64 token, i32 block) {
    constexpr i32 vectors = MXFP4_INNER / 8;
    const i32 vector = block * threads + thread_x();
    if (vector - lane() >= vectors) return;
    const u32x4 zero{0, 0, 0, 0};  // of a wave that has vectors, all lanes take part
    split8(vector < vectors ? load16(x + token * x_stride + vector * 8) : zero, made[token * prepared + vector / 4]);
}

}  // namespace k3
