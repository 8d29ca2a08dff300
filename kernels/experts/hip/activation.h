// The gated activations of routed experts, and the roundings of a model's own arithmetic.
#pragma once

#include "portability.h"

namespace k3 {

// A series near 0, where the quotient cancels.
K3_DEVICE float tanh_of(float x) {
    const float square = x * x;
    float near = fma(square, 62.0f / 2835, -17.0f / 315);
    near = fma(square, near, 2.0f / 15);
    near = fma(square, near, -1.0f / 3);
    near = x * fma(square, near, 1.0f);
    const float magnitude = x < 0.0f ? -x : x;
    const float decay = fast_exp(-2.0f * magnitude);
    const float far = (1.0f - decay) * fast_reciprocal(1.0f + decay);
    return square < 0.09f ? near : x < 0.0f ? -far : far;
}

K3_DEVICE float when_bf16(bool round, float value) { return round ? round_to_bf16(value) : value; }

// ProductBf16 rounds the two products, ComputeBf16 each operator of a SiLU; SiTU is computed in fp32. Linear: the up half
// goes through a tanh of its own.
template <bool Situ, bool Linear, bool ProductBf16, bool ComputeBf16>
K3_DEVICE float activated(float gate, float up, float beta, float linear_beta) {
    gate = when_bf16(ProductBf16, gate);
    up = when_bf16(ProductBf16, up);
    if constexpr (Situ) {
        if constexpr (Linear) up = linear_beta * tanh_of(up / linear_beta);
        return beta * tanh_of(gate / beta) * fast_sigmoid(gate) * up;
    } else {
        return when_bf16(ComputeBf16, when_bf16(ComputeBf16, gate * fast_sigmoid(gate)) * up);
    }
}

}  // namespace k3
