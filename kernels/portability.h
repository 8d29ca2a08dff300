// One HIP C++ source, four compilers: what a kernel of this project may use instead of a vendor's headers.
//
//   clang -x hip -nogpuinc -nogpulib    ahead of time for gfx942 and gfx950, on a machine without ROCm
//   hiprtc, hipcc                       on ROCm (their own headers may be there; nothing here clashes with them)
//   NVRTC, nvcc                         on NVIDIA, sm_80 and later: the same source, executed
//
// A kernel looks like this:
//
//   #include "portability.h"
//   K3_KERNEL(256) row_sum(const k3::bf16* x, float* out, k3::i32 columns) {
//       const k3::i64 row = k3::block_x();
//       float sum = 0.0f;
//       for (k3::i32 i = k3::thread_x() * 8; i < columns; i += 256 * 8) {
//           float v[8];
//           k3::unpack8(k3::load16(x + row * columns + i), v);
//           for (int j = 0; j < 8; ++j) sum += v[j];
//       }
//       sum = k3::wave_sum(sum);  // every lane of the wave holds the sum
//       ...
//   }
//
// Block sizes are compile-time constants (K3_KERNEL's argument); grid sizes are kernel arguments. No macro of the
// compiler's command line is needed. Nothing here is approximate unless its name says `fast`.
#pragma once

#if defined(__CUDACC__)
#define K3_NVIDIA 1
#define K3_AMD 0
#elif defined(__HIP__)
#define K3_NVIDIA 0
#define K3_AMD 1
#else
#error "portability.h: compile as HIP (clang -x hip, hipcc, hiprtc) or as CUDA (nvcc, NVRTC)"
#endif

#if K3_AMD
// The keywords are macros in HIP's own headers, and these are what they expand to.
#ifndef __global__
#define __global__ __attribute__((global))
#endif
#ifndef __device__
#define __device__ __attribute__((device))
#endif
#ifndef __shared__
#define __shared__ __attribute__((shared))
#endif
#define K3_KERNEL(THREADS) \
    extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(THREADS, THREADS)))
#define K3_KERNEL_OCCUPANCY(THREADS, WAVES_PER_SIMD) \
    extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(THREADS, THREADS), \
                                              amdgpu_waves_per_eu(WAVES_PER_SIMD)))
#else
#define K3_KERNEL(THREADS) extern "C" __global__ void __launch_bounds__(THREADS)
// A "SIMD" is one of the four schedulers of an SM: THREADS / 32 warps a block, 4 * WAVES_PER_SIMD warps an SM.
#define K3_KERNEL_OCCUPANCY(THREADS, WAVES_PER_SIMD) \
    extern "C" __global__ void __launch_bounds__( \
        THREADS, (WAVES_PER_SIMD) * 128 / (THREADS) > 0 ? (WAVES_PER_SIMD) * 128 / (THREADS) : 1)
#endif

#define K3_DEVICE static __device__ __attribute__((always_inline)) inline

#include "numbers.h"

namespace k3 {

// Lanes of a wave (AMD) or warp (NVIDIA). The host pass of hipcc has no device architecture; it takes 64.
#if K3_NVIDIA || defined(__GFX10__) || defined(__GFX11__) || defined(__GFX12__)
constexpr i32 wave_size = 32;
#else
constexpr i32 wave_size = 64;
#endif

// ---------------------------------------------------------------------------------------------- where am I

#if K3_AMD
K3_DEVICE i32 thread_x() { return static_cast<i32>(__builtin_amdgcn_workitem_id_x()); }
K3_DEVICE i32 thread_y() { return static_cast<i32>(__builtin_amdgcn_workitem_id_y()); }
K3_DEVICE i32 block_x() { return static_cast<i32>(__builtin_amdgcn_workgroup_id_x()); }
K3_DEVICE i32 block_y() { return static_cast<i32>(__builtin_amdgcn_workgroup_id_y()); }
K3_DEVICE i32 block_z() { return static_cast<i32>(__builtin_amdgcn_workgroup_id_z()); }
// Position within the wave, from the hardware: also right for two-dimensional blocks.
K3_DEVICE i32 lane() {
    const u32 low = __builtin_amdgcn_mbcnt_lo(~0u, 0u);
    return static_cast<i32>(wave_size == 64 ? __builtin_amdgcn_mbcnt_hi(~0u, low) : low);
}
#else
K3_DEVICE i32 thread_x() { return static_cast<i32>(threadIdx.x); }
K3_DEVICE i32 thread_y() { return static_cast<i32>(threadIdx.y); }
K3_DEVICE i32 block_x() { return static_cast<i32>(blockIdx.x); }
K3_DEVICE i32 block_y() { return static_cast<i32>(blockIdx.y); }
K3_DEVICE i32 block_z() { return static_cast<i32>(blockIdx.z); }
K3_DEVICE i32 lane() {
    u32 id;
    asm("mov.u32 %0, %%laneid;" : "=r"(id));
    return static_cast<i32>(id);
}
#endif

// thread_x() of a one-dimensional block of Threads: the compiler then knows which tests of it always hold.
template <i32 Threads>
K3_DEVICE i32 thread_of() {
    const i32 me = thread_x();
    __builtin_assume(me >= 0 && me < Threads);
    return me;
}

// Index of the wave within a one-dimensional block. No lane exchange, so it may stand inside a branch; AMD's compiler is
// told that it is the same in all lanes.
K3_DEVICE i32 wave() {
#if K3_AMD
    return __builtin_amdgcn_readfirstlane(thread_x() / wave_size);
#else
    return thread_x() / wave_size;
#endif
}

// All threads of the block arrive; their earlier writes to shared and global memory are visible to the block.
K3_DEVICE void barrier() {
#if K3_AMD
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
#else
    __syncthreads();
#endif
}

// ---------------------------------------------------------------------------------------------- bf16

K3_DEVICE u32 pack2(float low, float high) {
#if K3_AMD
    // One v_cvt_pk_bf16_f32 on gfx950; the compiler's own integer sequence, NaN included, on gfx942.
    typedef __bf16 pair_t __attribute__((ext_vector_type(2)));
    pair_t pair;
    pair.x = static_cast<__bf16>(low);
    pair.y = static_cast<__bf16>(high);
    return bit_cast<u32>(pair);
#else
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}

// ---------------------------------------------------------------------------------------------- 16-byte memory access

#if K3_AMD
typedef u32 u32x4_native __attribute__((ext_vector_type(4)));
#endif

// 16 bytes from a 16-byte aligned address: global_load_dwordx4, ds_read_b128 or ld.v4.u32.
template <typename T>
K3_DEVICE u32x4 load16(const T* address) {
#if K3_AMD
    return bit_cast<u32x4>(*reinterpret_cast<const u32x4_native*>(address));
#else
    // Field by field: through memcpy nvcc would load single bytes.
    const uint4 v = *reinterpret_cast<const uint4*>(address);
    return u32x4{v.x, v.y, v.z, v.w};
#endif
}

// The same for data that is read once (weights): a hint not to keep it in the nearest cache. Global memory only, and
// memory that nothing writes while the kernel runs.
template <typename T>
K3_DEVICE u32x4 load16_stream(const T* address) {
#if K3_AMD
    const u32x4_native v = __builtin_nontemporal_load(reinterpret_cast<const u32x4_native*>(address));
    return u32x4{v.x, v.y, v.z, v.w};  // field by field: memcpy loses the hint
#else
    u32x4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(__cvta_generic_to_global(address)));
    return v;
#endif
}

template <typename T>
K3_DEVICE void store16(T* address, const u32x4& value) {
#if K3_AMD
    *reinterpret_cast<u32x4_native*>(address) = bit_cast<u32x4_native>(value);
#else
    *reinterpret_cast<uint4*>(address) = make_uint4(value.x, value.y, value.z, value.w);
#endif
}

// The same as one instruction: NVRTC takes apart some stores of a row. The compiler may move it across accesses to other
// memory, also to the same: it is for what the kernel does not load again.
template <typename T>
K3_DEVICE void store16_whole(T* address, const u32x4& value) {
#if K3_AMD
    store16(address, value);
#else
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
        ::"l"(__cvta_generic_to_global(address)), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w));
#endif
}

// ---------------------------------------------------------------------------------------------- arithmetic

K3_DEVICE float fma(float a, float b, float c) {
#if K3_AMD
    return __builtin_fmaf(a, b, c);
#else
    return __fmaf_rn(a, b, c);
#endif
}

// IEEE: a NaN operand gives the other operand.
K3_DEVICE float maximum_number(float a, float b) {
#if K3_AMD
    return __builtin_fmaxf(a, b);
#else
    return fmaxf(a, b);
#endif
}

// One instruction each, one or two units in the last place; a subnormal argument or result may become zero.
K3_DEVICE float fast_exp2(float x) {
#if K3_AMD
    return __builtin_amdgcn_exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// Relative error about 2^-23 + |x| * 2^-24, from the rounding of the product.
K3_DEVICE float fast_exp(float x) { return fast_exp2(x * 1.4426950408889634f); }

K3_DEVICE float fast_log2(float x) {
#if K3_AMD
    return __builtin_amdgcn_logf(x);  // v_log_f32: base two
#else
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

K3_DEVICE float fast_reciprocal(float x) {
#if K3_AMD
    return __builtin_amdgcn_rcpf(x);
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

K3_DEVICE float fast_rsqrt(float x) {
#if K3_AMD
    return __builtin_amdgcn_rsqf(x);
#else
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// 1 / (1 + e^-x). A large negative x gives +0, not NaN: the reciprocal of infinity.
K3_DEVICE float fast_sigmoid(float x) { return fast_reciprocal(1.0f + fast_exp(-x)); }

// ---------------------------------------------------------------------------------------------- across the wave

#if K3_AMD
// Data-parallel primitives: a move that reads another lane of the same row of 16, at no cost in shared memory.
template <i32 Control>
K3_DEVICE u32 dpp(u32 value) {
    return static_cast<u32>(
        __builtin_amdgcn_update_dpp(static_cast<i32>(value), static_cast<i32>(value), Control, 0xf, 0xf, true));
}
constexpr i32 dpp_row_half_mirror = 0x141;  // lane ^ 7
constexpr i32 dpp_row_mirror = 0x140;       // lane ^ 15
constexpr i32 dpp_row_rotate_8 = 0x128;     // lane ^ 8
constexpr i32 dpp_quad_xor(i32 mask) { return (0 ^ mask) | (1 ^ mask) << 2 | (2 ^ mask) << 4 | (3 ^ mask) << 6; }

// lane ^ Mask for Mask in 1..15, as at most three DPP moves: any such mask is a xor of 1..3, 7, 8 and 15.
template <i32 Mask>
K3_DEVICE u32 shuffle_xor_in_row(u32 value) {
    if constexpr (Mask == 0) {
        return value;
    } else if constexpr (Mask < 4) {
        return dpp<dpp_quad_xor(Mask)>(value);
    } else if constexpr (Mask == 7) {
        return dpp<dpp_row_half_mirror>(value);
    } else if constexpr (Mask == 8) {
        return dpp<dpp_row_rotate_8>(value);
    } else if constexpr (Mask == 15) {
        return dpp<dpp_row_mirror>(value);
    } else if constexpr (Mask < 8) {
        return shuffle_xor_in_row<Mask ^ 7>(dpp<dpp_row_half_mirror>(value));
    } else if constexpr (Mask < 12) {
        return shuffle_xor_in_row<Mask ^ 8>(dpp<dpp_row_rotate_8>(value));
    } else {
        return shuffle_xor_in_row<Mask ^ 15>(dpp<dpp_row_mirror>(value));
    }
}
#endif

// The value of lane (lane ^ Mask). All lanes of the wave must be active.
template <i32 Mask>
K3_DEVICE u32 shuffle_xor(u32 value) {
    static_assert(Mask > 0 && Mask < wave_size, "shuffle_xor: the mask must be within the wave");
#if K3_AMD
    if constexpr (Mask < 16) {
        return shuffle_xor_in_row<Mask>(value);
    } else if constexpr (Mask < 32) {
        // ds_swizzle_b32 in bit mode: (lane & 0x1f) ^ Mask; it uses the crossbar of the LDS, no LDS memory.
        return static_cast<u32>(__builtin_amdgcn_ds_swizzle(static_cast<i32>(value), 0x1f | Mask << 10));
    } else {
        return static_cast<u32>(__builtin_amdgcn_ds_bpermute((lane() ^ Mask) * 4, static_cast<i32>(value)));
    }
#else
    return __shfl_xor_sync(0xffffffffu, value, Mask);
#endif
}

template <i32 Mask>
K3_DEVICE float shuffle_xor(float value) {
    return bit_cast<float>(shuffle_xor<Mask>(bit_cast<u32>(value)));
}

// The value of lane `source`, which may differ from lane to lane.
K3_DEVICE float shuffle(float value, i32 source) {
#if K3_AMD
    return bit_cast<float>(__builtin_amdgcn_ds_bpermute(source * 4, bit_cast<i32>(value)));
#else
    return __shfl_sync(0xffffffffu, value, source);
#endif
}

// The value of one lane, in all.
template <i32 Lane>
K3_DEVICE i32 broadcast(i32 value) {
    static_assert(Lane >= 0 && Lane < wave_size, "broadcast: a lane of the wave");
#if K3_AMD
    return __builtin_amdgcn_readlane(value, Lane);
#else
    return __shfl_sync(0xffffffffu, value, Lane);
#endif
}

}  // namespace k3

#include "overlap.h"
#include "wave.h"
