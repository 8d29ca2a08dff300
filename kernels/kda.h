// What the kernels of KDA steps share: four floats of a row of a state, and roundings on the way. Included behind
// portability.h: behind the emulation's, where a kernel is emulated.
#pragma once

namespace k3 {

// What the convolution or the recurrence gives.
template <bool Bf16>
K3_DEVICE float inner(float value) { return Bf16 ? round_to_bf16(value) : value; }

// log(1 + exp(x)), and x above 20, as torch has it; a series where 1 + exp(x) would lose digits.
K3_DEVICE float softplus(float x) {
    if (x > 20.0f) return x;
    const float e = fast_exp(x);
    if (e < 1.0f / 64) return e * (1.0f - e * (0.5f - e * (1.0f / 3 - e * 0.25f)));
    return fast_log2(1.0f + e) * 0.6931471805599453f;
}

struct four {
    float at[4];
};
K3_DEVICE four four_of(const u32x4& packed) {
    return {{bit_cast<float>(packed.x), bit_cast<float>(packed.y), bit_cast<float>(packed.z), bit_cast<float>(packed.w)}};
}
K3_DEVICE u32x4 packed_of(const four& from) {
    return {bit_cast<u32>(from.at[0]), bit_cast<u32>(from.at[1]), bit_cast<u32>(from.at[2]), bit_cast<u32>(from.at[3])};
}

// Channel n of a workgroup, counted through q, k and its own part of v, which begins at `first_value`: its place among all
// channels of a row. Without a branch.
template <i32 Heads, i32 Size>
K3_DEVICE i32 channel_of_row(i32 n, i32 head, i32 first_value) {
    const i32 third = static_cast<u32>(n) / Size;
    return (third * Heads + head) * Size + static_cast<i32>(static_cast<u32>(n) % Size) + (third / 2) * first_value;
}

}  // namespace k3
