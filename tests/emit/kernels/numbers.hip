// Conversions, wide accesses and fast functions of portability.h, elementwise over n values (n a multiple of 8).
#include "portability.h"

K3_KERNEL(256) to_bf16(const float* x, k3::bf16* out, k3::i32 n) {
    const k3::i32 i = k3::block_x() * 256 + k3::thread_x();
    if (i < n) out[i] = k3::to_bf16(x[i]);
}

// Eight bf16 a thread: load, widen, add one, narrow, store.
K3_KERNEL(256) plus_one(const k3::bf16* x, k3::bf16* out, k3::i32 n) {
    const k3::i32 i = (k3::block_x() * 256 + k3::thread_x()) * 8;
    if (i >= n) return;
    float value[8];
    k3::unpack8(k3::load16(x + i), value);
    for (int j = 0; j < 8; ++j) value[j] += 1.0f;
    k3::store16(out + i, k3::pack8(value));
}

K3_KERNEL(256) streamed_copy(const float* x, float* out, k3::i32 n) {
    const k3::i32 i = (k3::block_x() * 256 + k3::thread_x()) * 4;
    if (i < n) k3::store16(out + i, k3::load16_stream(x + i));
}

// out[6 * i ...] = exp2, exp, log2 of |x|, 1 / x, 1 / sqrt |x|, sigmoid
K3_KERNEL(256) fast(const float* x, float* out, k3::i32 n) {
    const k3::i32 i = k3::block_x() * 256 + k3::thread_x();
    if (i >= n) return;
    const float value = x[i], size = k3::maximum_number(value, -value);
    out[6 * i + 0] = k3::fast_exp2(value);
    out[6 * i + 1] = k3::fast_exp(value);
    out[6 * i + 2] = k3::fast_log2(size);
    out[6 * i + 3] = k3::fast_reciprocal(value);
    out[6 * i + 4] = k3::fast_rsqrt(size);
    out[6 * i + 5] = k3::fast_sigmoid(value);
}

K3_KERNEL_OCCUPANCY(256, 4) multiply_add(const float* x, const float* y, float* out, k3::i32 n) {
    const k3::i32 i = k3::block_x() * 256 + k3::thread_x();
    if (i < n) out[i] = x[i] * y[i] + 1.0f;
}
