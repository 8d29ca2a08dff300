// Eight channels of a token in registers: loads, roundings, moves by gates. Part of kda_chunk_prologue.hip.
#pragma once

#include "matrix.h"

namespace k3 {

K3_DEVICE u32 word(const u32x4& of, i32 i) { return i < 2 ? (i ? of.y : of.x) : i == 2 ? of.z : of.w; }

struct eight {
    float at[8];
};
K3_DEVICE eight floats(const float* from) {
    const f32x4 low = reinterpret_cast<const f32x4*>(from)[0], high = reinterpret_cast<const f32x4*>(from)[1];
    return {{low.at[0], low.at[1], low.at[2], low.at[3], high.at[0], high.at[1], high.at[2], high.at[3]}};
}
K3_DEVICE void put_floats(float* to, const eight& from) {
    reinterpret_cast<f32x4*>(to)[0] = {{from.at[0], from.at[1], from.at[2], from.at[3]}};
    reinterpret_cast<f32x4*>(to)[1] = {{from.at[4], from.at[5], from.at[6], from.at[7]}};
}
K3_DEVICE u32x4 rounded(const eight& from) { return pack8(from.at); }
K3_DEVICE eight unpacked(const u32x4& from) {
    eight made;
    unpack8(from, made.at);
    return made;
}
K3_DEVICE eight scaled(eight of, float by) {
#pragma unroll
    for (i32 e = 0; e < 8; ++e) of.at[e] *= by;
    return of;
}
// of · 2^(a x + b y)
K3_DEVICE eight moved(eight of, float a, const eight& x, float b, const eight& y) {
#pragma unroll
    for (i32 e = 0; e < 8; ++e) of.at[e] *= fast_exp2(a * x.at[e] + b * y.at[e]);
    return of;
}
// Four neighbours, rounded, times sign.
K3_DEVICE void put_four(bf16* to, const f32x4& from, float sign) {
    *reinterpret_cast<u32x2*>(to) = {pack2(sign * from.at[0], sign * from.at[1]), pack2(sign * from.at[2], sign * from.at[3])};
}
K3_DEVICE float sum_of_squares(const eight& of) {
    float sum = 0.0f;
#pragma unroll
    for (i32 e = 0; e < 8; ++e) sum = fma(of.at[e], of.at[e], sum);
    return sum;
}

}  // namespace k3
