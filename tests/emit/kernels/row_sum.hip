// out[row] = sum of x[row, :]; one block a row, bf16 in, fp32 out. A small kernel for the tests of k3rewrite.emit.
#include "portability.h"

#ifndef THREADS
#define THREADS 256
#endif

K3_KERNEL(THREADS) row_sum(const k3::bf16* x, float* out, k3::i32 columns) {
    __shared__ float scratch[THREADS / k3::wave_size];
    const k3::bf16* row = x + static_cast<k3::i64>(k3::block_x()) * columns;
    float sum = 0.0f;
    for (k3::i32 i = k3::thread_x() * 8; i < columns; i += THREADS * 8) {
        float v[8];
        k3::unpack8(k3::load16(row + i), v);
        for (int j = 0; j < 8; ++j) sum += v[j];
    }
    sum = k3::block_sum<THREADS>(sum, scratch);
    if (k3::thread_x() == 0) out[k3::block_x()] = sum;
}
