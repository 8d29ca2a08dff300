// What only NVIDIA has (sm_90 and later), each instruction under a name: beside portability.h, for kernels that exist for
// NVIDIA alone.
#pragma once

#include "portability.h"

#if !K3_NVIDIA
#error "nvidia.h is for NVIDIA"
#endif

// Shared memory whose size the launch gives.
#define K3_DYNAMIC_SHARED(TYPE, NAME) extern __shared__ TYPE NAME[]

namespace k3 {

// ---------------------------------------------------------------------------------------------- loads

// As load16_early, through the nearest cache: for what the next load finds in the same sector.
K3_DEVICE u32 load4_early(const void* address) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(address)));
    return v;
}
K3_DEVICE u32x2 load8_early(const void* address) {
    u32x2 v;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(__cvta_generic_to_global(address)));
    return v;
}

// Asynchronous copies from global to shared memory. What a thread asked for is there, for that thread, once it has
// waited; for others, once they have met it behind that.
K3_DEVICE u32 shared_address(const void* address) { return static_cast<u32>(__cvta_generic_to_shared(address)); }
// Through the L2 only: for what one wave reads once.
K3_DEVICE void copy16_once(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
        ::"r"(shared_address(to)), "l"(__cvta_generic_to_global(from)) : "memory");
}
K3_DEVICE void copy16(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;"
        ::"r"(shared_address(to)), "l"(__cvta_generic_to_global(from)) : "memory");
}
K3_DEVICE void copy4(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
        ::"r"(shared_address(to)), "l"(__cvta_generic_to_global(from)) : "memory");
}
// The copies since the last call are one group, also if there are none.
K3_DEVICE void close_group_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All groups but the latest `Latest` are there.
template <i32 Latest>
K3_DEVICE void wait_for_copies_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Latest) : "memory");
}
K3_DEVICE void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Bulk copies from global to shared memory: one thread asks for any multiple of 16 bytes, and an arrival, eight bytes of
// shared memory, counts those that have come. It passes once for each time that it is told what to expect; the n-th time
// is waited for with `turn` n % 2. Whoever waits on it must have met the thread that made it.
typedef u64 arrival;
K3_DEVICE void make_arrival(arrival* made) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(made)) : "memory");
}
// Once, behind the last one: the copies see them.
K3_DEVICE void arrivals_are_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
K3_DEVICE void expect_bytes(arrival* at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(at)), "r"(bytes) : "memory");
}
K3_DEVICE void copy_bulk(void* to, const void* from, u32 bytes, arrival* at) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(at)) : "memory");
}
// As copy_bulk, and store_bulk below, of what is needed once: it leaves the L2 first.
K3_DEVICE u64 leaves_first() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
K3_DEVICE void copy_bulk_once(void* to, const void* from, u32 bytes, arrival* at) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(at)),
        "l"(leaves_first()) : "memory");
}
K3_DEVICE void bring_nearer_once(const void* address, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;"
        ::"l"(__cvta_generic_to_global(address)), "r"(bytes), "l"(leaves_first()));
}
K3_DEVICE void wait_for(arrival* at, i32 turn) {
    u32 passed = 0;
    while (passed == 0) {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(passed) : "r"(shared_address(at)), "r"(turn) : "memory");
    }
}

// Bulk copies from shared to global memory, of any multiple of 16 bytes. What threads wrote before is shown to the copies
// by each of them, which then meet the thread that stores; that thread waits before the memory is used for anything else.
K3_DEVICE void show_to_bulk_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
K3_DEVICE void store_bulk(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
        ::"l"(__cvta_generic_to_global(to)), "r"(shared_address(from)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
K3_DEVICE void store_bulk_once(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;"
        ::"l"(__cvta_generic_to_global(to)), "r"(shared_address(from)), "r"(bytes), "l"(leaves_first()) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
K3_DEVICE void wait_until_stores_have_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// ---------------------------------------------------------------------------------------------- bytes

// Byte i of the result is the byte of (low, high) that nibble i of `selectors` names with three bits. With its fourth,
// it is that byte's top bit, eight times. (__byte_perm would clear the fourth bits.)
K3_DEVICE u32 permute_bytes(u32 low, u32 high, u32 selectors) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
    return bytes;
}

// The sum of four signed bytes, and `sum`.
K3_DEVICE i32 add_bytes(u32 bytes, i32 sum) { return __dp4a(static_cast<i32>(bytes), 0x01010101, sum); }

// The upper 32 bits of a product.
K3_DEVICE u32 high_product(u32 a, u32 b) {
    u32 high;
    asm("mul.hi.u32 %0, %1, %2;" : "=r"(high) : "r"(a), "r"(b));
    return high;
}

K3_DEVICE i32 count_bits(u32 value) { return __popc(value); }
// The number of the lowest bit that is set, of a value that is not zero.
K3_DEVICE i32 lowest_bit(u32 value) { return __ffs(static_cast<i32>(value)) - 1; }

// ---------------------------------------------------------------------------------------------- the wave

// All lanes arrive; what they wrote is visible to the wave.
K3_DEVICE void wave_barrier() { __syncwarp(); }
K3_DEVICE u32 wave_max_of_bits(u32 value) { return __reduce_max_sync(0xffffffffu, value); }
// Bit l of the result is the condition of lane l.
K3_DEVICE u32 wave_ballot(bool condition) { return __ballot_sync(0xffffffffu, condition); }
K3_DEVICE i32 wave_sum_of_integers(i32 value) { return __reduce_add_sync(0xffffffffu, value); }

// sum[16, 8] += a[16, 32] times b[32, 8], a of unsigned and b of signed bytes. Lane 4 g + q has of a the columns 4 q to
// 4 q + 3 of rows g and g + 8 (a0, a1), the same 16 columns further on (a2, a3), of b those rows of column g (b0, b1),
// of the sum columns 2 q and 2 q + 1 of row g (0, 1) and of row g + 8 (2, 3).
K3_DEVICE void multiply_bytes(i32 (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace k3
