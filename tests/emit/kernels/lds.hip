// A workgroup that asks for LDS_BYTES of LDS: for the tests of rounding and occupancy.
#include "portability.h"

K3_KERNEL(256) uses_lds(float* x) {
    __shared__ float tile[LDS_BYTES / 4];
    for (k3::i32 i = k3::thread_x(); i < LDS_BYTES / 4; i += 256) tile[i] = x[i];
    k3::barrier();
    for (k3::i32 i = k3::thread_x(); i < LDS_BYTES / 4; i += 256) x[i] = tile[LDS_BYTES / 4 - 1 - i];
}
