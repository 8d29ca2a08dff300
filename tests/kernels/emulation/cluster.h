// kernels/cluster.h for the CPU, where a workgroup is alone: clusters are not emulated.
#pragma once

#include "portability.h"

#define K3_CLUSTER(SPLIT)

namespace k3 {

template <i32 Split>
K3_DEVICE void cluster_arrive() { static_assert(Split == 1, "clusters are not emulated"); }
template <i32 Split>
K3_DEVICE void cluster_wait() {}
struct arrivals {};
K3_DEVICE void expect(arrivals&, u32) {}
template <i32 Split, bool Async>
K3_DEVICE void meet(arrivals&) { barrier(); }
template <i32 Split, bool Async>
K3_DEVICE void leave(float* place, float value, arrivals&) { *place = value; }

}  // namespace k3
