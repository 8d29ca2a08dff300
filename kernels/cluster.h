// Workgroups of a cluster, which reach each other's shared memory: NVIDIA, sm_90 and later. Elsewhere, and where `Split`
// is 1, a workgroup is alone, and the same calls are a barrier and a store.
//
//   __shared__ arrivals of_sums;
//   if (Async && thread_x() == 0) expect(of_sums, sizeof(sums));
//   cluster_arrive<split>();
//   ...
//   cluster_wait<split>();                       all workgroups have started: their shared memory may be written
//   leave<split, Async>(&sums[own], value, of_sums);
//   meet<split, Async>(of_sums);                 the values of all workgroups are here
//
// Async: a write and the word that it is there travel together, and a workgroup waits for bytes instead of the others.
#pragma once

#include "portability.h"

#if K3_NVIDIA
#define K3_CLUSTER(SPLIT) __cluster_dims__(SPLIT, 1, 1)
#else
#define K3_CLUSTER(SPLIT)
#endif

namespace k3 {

#if K3_NVIDIA
template <i32 Split>
K3_DEVICE void cluster_arrive() {
    if constexpr (Split > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
template <i32 Split>
K3_DEVICE void cluster_wait() {
    if constexpr (Split > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The bytes of an exchange that have arrived here.
struct arrivals {
    u64 barrier;
};
K3_DEVICE void expect(arrivals& here, u32 bytes) {
    const u32 at = static_cast<u32>(__cvta_generic_to_shared(&here.barrier));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
template <i32 Split, bool Async>
K3_DEVICE void meet(arrivals& here) {
    if constexpr (Split == 1) {
        barrier();
    } else if constexpr (Async) {
        const u32 at = static_cast<u32>(__cvta_generic_to_shared(&here.barrier));
        u32 done = 0;
        while (!done) {
            asm volatile(
                "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                : "=r"(done)
                : "r"(at)
                : "memory");
        }
    } else {
        cluster_arrive<Split>();
        cluster_wait<Split>();
    }
}
K3_DEVICE u32 address_in(i32 workgroup, u32 here) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(workgroup));
    return there;
}
// A value at this place of every workgroup's shared memory.
template <i32 Split, bool Async>
K3_DEVICE void leave(float* place, float value, arrivals& with) {
    if constexpr (Split == 1) {
        *place = value;
    } else {
        const u32 here = static_cast<u32>(__cvta_generic_to_shared(place));
        const u32 word = static_cast<u32>(__cvta_generic_to_shared(&with.barrier));
#pragma unroll
        for (i32 i = 0; i < Split; ++i) {
            const u32 there = address_in(i, here);
            if constexpr (Async) {
                asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                    ::"r"(there), "r"(bit_cast<u32>(value)), "r"(address_in(i, word)) : "memory");
            } else {
                asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
            }
        }
    }
}
#else
template <i32 Split>
K3_DEVICE void cluster_arrive() {}
template <i32 Split>
K3_DEVICE void cluster_wait() {}
struct arrivals {};
K3_DEVICE void expect(arrivals&, u32) {}
template <i32 Split, bool Async>
K3_DEVICE void meet(arrivals&) { barrier(); }
template <i32 Split, bool Async>
K3_DEVICE void leave(float* place, float value, arrivals&) { *place = value; }
#endif

}  // namespace k3
