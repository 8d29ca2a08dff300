// One kernel for each xor mask within a wave, and one for each reduction: what moves between lanes, and by which path.
#include "portability.h"

#define XOR(MASK) \
    K3_KERNEL(64) xor_##MASK(float* x) { \
        const float value = x[k3::thread_x()]; \
        x[k3::thread_x()] = k3::shuffle_xor<MASK>(value); \
    }
XOR(1) XOR(2) XOR(3) XOR(4) XOR(5) XOR(6) XOR(7) XOR(8) XOR(9) XOR(10) XOR(11) XOR(12) XOR(13) XOR(14) XOR(15)
XOR(16) XOR(17) XOR(21) XOR(31)
#if K3_AMD
XOR(32) XOR(63)
#endif

#define SUM(WIDTH) \
    K3_KERNEL(64) sum_##WIDTH(float* x) { \
        const float value = x[k3::thread_x()]; \
        x[k3::thread_x()] = k3::group_sum<WIDTH>(value); \
    } \
    K3_KERNEL(64) max_##WIDTH(float* x) { \
        const float value = x[k3::thread_x()]; \
        x[k3::thread_x()] = k3::group_max<WIDTH>(value); \
    }
SUM(1) SUM(2) SUM(4) SUM(8) SUM(16) SUM(32)

K3_KERNEL(64) wave_total(float* x) { x[k3::thread_x()] = k3::wave_sum(x[k3::thread_x()]); }

K3_KERNEL(256) block_total(float* x) {
    __shared__ float scratch[256 / k3::wave_size];
    const float value = x[k3::thread_x()];
    x[k3::thread_x()] = k3::block_sum<256>(value, scratch);
}

K3_KERNEL(64) reversed(float* x) {
    const float value = x[k3::thread_x()];
    x[k3::thread_x()] = k3::shuffle(value, k3::wave_size - 1 - k3::lane());
}
