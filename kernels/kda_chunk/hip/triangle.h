// The 64 by 64 triangle of a chunk in fp32, in LDS: A becomes T = (I + A)⁻¹ in its place.
//
// Of its sixteen blocks of 16 by 16 the ten that are occupied are stored, a row of a block in 20 floats, so that the rows
// of a block begin in different banks. Diagonal blocks are inverted by substitution, the others by products in fp32,
//
//   T₁₀ = -T₁₁ (A₁₀ T₀₀)      T₃₂ = -T₃₃ (A₃₂ T₂₂)      T_{23,01} = -T_{23,23} (A_{23,01} T_{01,01})
//
// never by squaring, which cancels where keys are nearly parallel. What a product leaves in registers is the right operand
// of the next one. Four waves of 64 lanes.
#pragma once

#include "matrix.h"

namespace k3 {

constexpr i32 triangle_pitch = 20, triangle_block = 16 * triangle_pitch, triangle_floats = 10 * triangle_block;

K3_DEVICE float* block_of(float* triangle, i32 i, i32 j) { return triangle + (i * (i + 1) / 2 + j) * triangle_block; }

// Four neighbours of row r = lane % 16: those that lane / 16 says.
K3_DEVICE f32x4* row_part(float* block) {
    return reinterpret_cast<f32x4*>(block + lane() % 16 * triangle_pitch + lane() / 16 * 4);
}

// A block as a product leaves it: column lane % 16, rows 4 (lane / 16) and the three behind.
K3_DEVICE f32x4 column_part(const float* block) {
    f32x4 made;
#pragma unroll
    for (i32 r = 0; r < 4; ++r) made.at[r] = block[(lane() / 16 * 4 + r) * triangle_pitch + lane() % 16];
    return made;
}
K3_DEVICE void put_column_part(float* block, const f32x4& from, float sign) {
#pragma unroll
    for (i32 r = 0; r < 4; ++r) block[(lane() / 16 * 4 + r) * triangle_pitch + lane() % 16] = sign * from.at[r];
}

// sum + block · right, all of it fp32.
K3_DEVICE f32x4 times(float* block, const f32x4& right, f32x4 sum) {
    const f32x4 left = *row_part(block);
#pragma unroll
    for (i32 r = 0; r < 4; ++r) sum = multiply_fp32(left.at[r], right.at[r], sum);
    return sum;
}

// (I + A)⁻¹ of a diagonal block by forward substitution: a column a lane, four times alike. A above the diagonal, and on
// it, is not looked at. Result: as `column_part`.
K3_DEVICE f32x4 inverse_of_diagonal(const float* block) {
    const i32 column = lane() % 16, group = lane() / 16;
    float t[16];
#pragma unroll
    for (i32 i = 0; i < 16; ++i) {
        float row[16];
#pragma unroll
        for (i32 part = 0; part * 4 < i; ++part) {
            const f32x4 four = *reinterpret_cast<const f32x4*>(block + i * triangle_pitch + part * 4);
#pragma unroll
            for (i32 m = 0; m < 4; ++m) row[part * 4 + m] = four.at[m];
        }
        float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (i32 m = 0; m < i; ++m) sum = fma(-row[m], t[m], sum);
        t[i] = sum;
    }
    f32x4 made;
#pragma unroll
    for (i32 r = 0; r < 4; ++r) {
        const float of[4] = {t[r], t[4 + r], t[8 + r], t[12 + r]};
        const float low = group & 1 ? +of[1] : +of[0], high = group & 1 ? +of[3] : +of[2];  // values, not addresses
        made.at[r] = group & 2 ? +high : +low;
    }
    return made;
}

// A in place to T. Every wave comes here, with A stored and a barrier behind it; T is to be read right after.
K3_DEVICE void invert(float* all) {
    const i32 own = wave();
    constexpr f32x4 zero{};
    const f32x4 diagonal = inverse_of_diagonal(block_of(all, own, own));
    barrier();
    put_column_part(block_of(all, own, own), diagonal, 1.0f);
    barrier();
    if (own < 2) {
        const i32 first = 2 * own;
        float* const between = block_of(all, first + 1, first);
        const f32x4 inner = times(between, column_part(block_of(all, first, first)), zero);
        put_column_part(between, times(block_of(all, first + 1, first + 1), inner, zero), -1.0f);
    }
    barrier();
    const i32 i = 2 + own / 2, j = own % 2;
    f32x4 upper = zero, lower = zero;  // of A T in rows 2 and 3
    for (i32 m = j; m < 2; ++m) {
        const f32x4 right = column_part(block_of(all, m, j));
        upper = times(block_of(all, 2, m), right, upper);
        if (i == 3) lower = times(block_of(all, 3, m), right, lower);
    }
    const f32x4 made = i == 2 ? times(block_of(all, 2, 2), upper, zero)
                              : times(block_of(all, 3, 3), lower, times(block_of(all, 3, 2), upper, zero));
    barrier();  // all have read A
    put_column_part(block_of(all, i, j), made, -1.0f);
    barrier();
}

}  // namespace k3
