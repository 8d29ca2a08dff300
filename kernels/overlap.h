// Launches that overlap, and loads that stand where they are written. Part of portability.h, from which it has the types
// and `load16`.
//
// NVIDIA, sm_90 and later: a kernel that was launched as dependent may start while the one before it still runs. Until
// it has waited it may load what no kernel writes, weights say. Elsewhere a kernel starts when the one before it ends.
#pragma once

namespace k3 {

template <bool Dependent>
K3_DEVICE void wait_for_earlier_kernel() {
#if K3_NVIDIA
    if constexpr (Dependent) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The kernel after this one may be launched once all workgroups have come here.
template <bool Dependent>
K3_DEVICE void release_later_kernel() {
#if K3_NVIDIA
    if constexpr (Dependent) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until it has waited a kernel may also bring into the L2 whatever it will read, since that changes no value. A number that
// says where, a slot, may be looked at: it may be old, or not yet written. It is checked to lie within before it is used,
// and loaded again behind the wait; what was loaded behind the wait from where it said counts only if it was right.
template <typename T>
K3_DEVICE T peek(const T* address) {
#if K3_NVIDIA
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "peek: integers");
    if constexpr (sizeof(T) == 4) {
        u32 v;
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(address)));
        return bit_cast<T>(v);
    } else {
        u64 v;
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(__cvta_generic_to_global(address)));
        return bit_cast<T>(v);
    }
#else
    return *address;
#endif
}
// The 128 bytes around an address; many bytes (sm_90 and later), a multiple of 16 from an address that is one.
K3_DEVICE void bring_nearer(const void* address) {
#if K3_NVIDIA
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
#endif
}
K3_DEVICE void bring_nearer(const void* address, u32 bytes) {
#if K3_NVIDIA
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "r"(bytes));
#endif
}

// An address in global memory is worked out where this stands, before a wait say, and not where it is used. NVIDIA's
// assembler holds to that for what an instruction needs, so it gets one, which is not carried out: `never` is false, and the
// compiler must not know it.
template <typename T>
K3_DEVICE void work_out(T*& address, bool never) {
#if K3_NVIDIA
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; @p prefetch.global.L2 [%0]; }"
        ::"l"(__cvta_generic_to_global(address)), "r"(static_cast<u32>(never)));
    asm volatile("" : "+l"(address));
    __builtin_assume(__isGlobal(address));  // the compiler has just been made to forget it
#endif
}

// Loads that are made where they stand, before a wait or a preparation that they do not depend on. The assembler would
// move loads through the read-only path (.nc) to behind it.
template <typename T>
K3_DEVICE u32x4 load16_early(const T* address) {
#if K3_NVIDIA
    u32x4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(__cvta_generic_to_global(address)));
    return v;
#else
    return load16_stream(address);
#endif
}

// What the kernel before wrote. The load is made where it stands: not in several branches, one after the other.
template <typename T>
K3_DEVICE u32x4 load16_written(const T* address) {
#if K3_NVIDIA
    u32x4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(__cvta_generic_to_global(address)));
    return v;
#else
    return load16(address);
#endif
}

}  // namespace k3
