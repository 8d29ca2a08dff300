// Matrix instructions of CDNA and moves within a row of 16 lanes, for a wave of 64. The bf16 one is gfx950's.
//
// Of a product of 16 by 16, lane l, with r = l % 16 and g = l / 16, holds
//
//   left operand     row r        columns g, or 8 g .. 8 g + 7 of bf16
//   right operand    column r     rows g, or 8 g .. 8 g + 7
//   result           column r     rows 4 g .. 4 g + 3
//
// So a result in fp32 is the right operand of four more products as it is, if these take the left operand's columns
// 4 g, 4 g + 1, 4 g + 2 and 4 g + 3: `times` does.
#pragma once

#include "portability.h"

#if !K3_AMD
#error "matrix.h: matrix instructions of CDNA"
#endif

namespace k3 {

struct alignas(16) f32x4 {
    float at[4];
};

typedef float f32x4_native __attribute__((ext_vector_type(4)));
typedef __bf16 bf16x8_native __attribute__((ext_vector_type(8)));

// v_mfma_f32_16x16x4_f32: left [16, 4] right [4, 16] + sum, all of it fp32.
K3_DEVICE f32x4 multiply_fp32(float left, float right, const f32x4& sum) {
    return bit_cast<f32x4>(__builtin_amdgcn_mfma_f32_16x16x4f32(left, right, bit_cast<f32x4_native>(sum), 0, 0, 0));
}

// v_mfma_f32_16x16x32_bf16: left [16, 32] right [32, 16] + sum, products and sums in fp32.
K3_DEVICE f32x4 multiply_bf16(const u32x4& left, const u32x4& right, const f32x4& sum) {
    return bit_cast<f32x4>(__builtin_amdgcn_mfma_f32_16x16x32_bf16(
        bit_cast<bf16x8_native>(left), bit_cast<bf16x8_native>(right), bit_cast<f32x4_native>(sum), 0, 0, 0));
}

// What the lane Distance below holds, in the same row of 16; zero if there is none.
template <i32 Distance>
K3_DEVICE float from_lane_below(float value) {
    static_assert(Distance > 0 && Distance < 16, "row_shr");
    return bit_cast<float>(dpp<0x110 + Distance>(bit_cast<u32>(value)));
}

// What lane Lane of the row of 16 holds.
template <i32 Lane>
K3_DEVICE float from_lane_of_row(float value) {
    static_assert(Lane >= 0 && Lane < 16, "row_newbcast");
    return bit_cast<float>(dpp<0x150 + Lane>(bit_cast<u32>(value)));
}

}  // namespace k3
