// 160 live values a thread in a block of 1,024 threads: more than the 128 (AMD) or 64 (NVIDIA) registers that fit.
#include "portability.h"

K3_KERNEL(1024) spills(float* x, k3::i32 rounds) {
    float value[160];
#pragma unroll
    for (k3::i32 i = 0; i < 160; ++i) value[i] = x[k3::thread_x() + i * 1024];
    for (k3::i32 round = 0; round < rounds; ++round) {
        const float factor = x[round];
#pragma unroll
        for (k3::i32 i = 0; i < 160; ++i) value[i] = value[i] * value[(i + 7) % 160] + factor;
    }
#pragma unroll
    for (k3::i32 i = 0; i < 160; ++i) x[k3::thread_x() + i * 1024] = value[i];
}
