// kernels/matrix.h for the CPU: the layout of operands and results that its head names, products summed in order.
#pragma once

#include "portability.h"

namespace k3 {

static_assert(wave_size == 64, "matrix instructions of CDNA are a wave of 64");

struct alignas(16) f32x4 {
    float at[4];
};

K3_DEVICE f32x4 multiply_fp32(float left, float right, const f32x4& sum) {
    const float own[2] = {left, right};
    const u32* const all = k3_emulator::exchange(reinterpret_cast<const u32*>(own), 2);
    f32x4 made = sum;
    for (i32 r = 0; r < 4; ++r) {
        for (i32 k = 0; k < 4; ++k) {
            const i32 row = lane() / 16 * 4 + r;
            const float a = bit_cast<float>(all[(k * 16 + row) * k3_emulator::most_words]);
            const float b = bit_cast<float>(all[(k * 16 + lane() % 16) * k3_emulator::most_words + 1]);
            made.at[r] = std::fmaf(a, b, made.at[r]);
        }
    }
    return made;
}

K3_DEVICE f32x4 multiply_bf16(const u32x4& left, const u32x4& right, const f32x4& sum) {
    const u32 own[8] = {left.x, left.y, left.z, left.w, right.x, right.y, right.z, right.w};
    const u32* const all = k3_emulator::exchange(own, 8);
    f32x4 made = sum;
    for (i32 r = 0; r < 4; ++r) {
        for (i32 k = 0; k < 32; ++k) {
            const i32 row = lane() / 16 * 4 + r, word = k % 8 / 2;
            const u32 a = all[(k / 8 * 16 + row) * k3_emulator::most_words + word];
            const u32 b = all[(k / 8 * 16 + lane() % 16) * k3_emulator::most_words + 4 + word];
            made.at[r] += k % 2 ? high_to_float(a) * high_to_float(b) : low_to_float(a) * low_to_float(b);
        }
    }
    return made;
}

template <i32 Distance>
K3_DEVICE float from_lane_below(float value) {
    const u32 bits = bit_cast<u32>(value);
    const u32* const all = k3_emulator::exchange(&bits, 1);
    return lane() % 16 < Distance ? 0.0f : bit_cast<float>(all[(lane() - Distance) * k3_emulator::most_words]);
}
template <i32 Lane>
K3_DEVICE float from_lane_of_row(float value) { return shuffle(value, lane() / 16 * 16 + Lane); }

}  // namespace k3
