// kernels/portability.h for the CPU: the same names, on k3_emulator's fibers.
#pragma once

#include "emulator.h"

#define K3_NVIDIA 1
#define K3_AMD 0
#define __global__
#define __device__
#define __shared__ static
// static: of the kernels of a file only the one that is asked for is compiled
#define K3_KERNEL(THREADS) static void
#define K3_KERNEL_OCCUPANCY(THREADS, WAVES_PER_SIMD) static void
#define K3_DEVICE static inline

#include "numbers.h"

namespace k3 {

constexpr i32 wave_size = K3_EMULATED_WAVE;

K3_DEVICE i32 thread_x() { return k3_emulator::block->current; }
K3_DEVICE i32 thread_y() { return 0; }
K3_DEVICE i32 block_x() { return k3_emulator::index[0]; }
K3_DEVICE i32 block_y() { return k3_emulator::index[1]; }
K3_DEVICE i32 block_z() { return k3_emulator::index[2]; }
K3_DEVICE i32 lane() { return thread_x() % wave_size; }
K3_DEVICE i32 wave() { return thread_x() / wave_size; }
K3_DEVICE void barrier() { k3_emulator::meet(k3_emulator::block->all); }

K3_DEVICE u32 nearest_bf16(float value) {
    const u32 bits = bit_cast<u32>(value);
    if (value != value) return 0x7fffu;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
K3_DEVICE u32 pack2(float low, float high) { return nearest_bf16(low) | nearest_bf16(high) << 16; }
// As the hardware, these refuse what does not lie at a multiple of its size.
template <typename Vector>
K3_DEVICE Vector load_aligned(const void* address) {
    if (reinterpret_cast<uintptr_t>(address) % sizeof(Vector)) {
        std::fprintf(stderr, "a load of %zu bytes at an address that is no multiple of it\n", sizeof(Vector));
        std::abort();
    }
    Vector made;
    std::memcpy(&made, address, sizeof(Vector));
    return made;
}
template <typename T>
K3_DEVICE u32x4 load16(const T* address) { return load_aligned<u32x4>(address); }
template <typename T>
K3_DEVICE u32x4 load16_stream(const T* address) { return load_aligned<u32x4>(address); }
template <typename T>
K3_DEVICE void store16_whole(T* address, const u32x4& value) { store16(address, value); }
template <typename T>
K3_DEVICE u32x4 load16_early(const T* address) { return load_aligned<u32x4>(address); }
template <typename T>
K3_DEVICE u32x4 load16_written(const T* address) {
    const k3_emulator::Thread& own = k3_emulator::block->threads[thread_x()];
    if (own.dependent && !own.waited) k3_emulator::fail("what the kernel before wrote is loaded without a wait");
    return load_aligned<u32x4>(address);
}
template <typename T>
K3_DEVICE void store16(T* address, const u32x4& value) {
    load_aligned<u32x4>(address);
    std::memcpy(static_cast<void*>(address), &value, sizeof(value));
}

template <bool Dependent>
K3_DEVICE void wait_for_earlier_kernel() { k3_emulator::block->threads[thread_x()].waited = true; }
template <bool Dependent>
K3_DEVICE void release_later_kernel() { k3_emulator::block->threads[thread_x()].dependent = Dependent; }

K3_DEVICE float fma(float a, float b, float c) { return std::fmaf(a, b, c); }
K3_DEVICE float maximum_number(float a, float b) { return std::fmax(a, b); }
K3_DEVICE float fast_exp2(float x) { return std::exp2(x); }
K3_DEVICE float fast_exp(float x) { return fast_exp2(x * 1.4426950408889634f); }
K3_DEVICE float fast_log2(float x) { return std::log2(x); }
K3_DEVICE float fast_reciprocal(float x) { return 1.0f / x; }
K3_DEVICE float fast_rsqrt(float x) { return 1.0f / std::sqrt(x); }
K3_DEVICE float fast_sigmoid(float x) { return fast_reciprocal(1.0f + fast_exp(-x)); }

// What is not yet what it will be is a slot of someone else's.
template <typename T>
K3_DEVICE T peek(const T* address) {
    const bool odd = reinterpret_cast<u64>(address) / sizeof(T) % 2;
    return *address ^ static_cast<T>(k3_emulator::looks == 2 || (k3_emulator::looks == 1 && odd));
}
K3_DEVICE void bring_nearer(const void*) {}
template <typename T>
K3_DEVICE void work_out(T*&, bool) {}
template <i32 Threads>
K3_DEVICE i32 thread_of() { return thread_x(); }
K3_DEVICE void bring_nearer(const void*, u32) {}
template <i32 Mask>
K3_DEVICE u32 shuffle_xor(u32 value) {
    static_assert(Mask > 0 && Mask < wave_size, "shuffle_xor: the mask must be within the wave");
    return k3_emulator::exchange(&value, 1)[(lane() ^ Mask) * k3_emulator::most_words];
}
template <i32 Mask>
K3_DEVICE float shuffle_xor(float value) { return bit_cast<float>(shuffle_xor<Mask>(bit_cast<u32>(value))); }
K3_DEVICE float shuffle(float value, i32 source) {
    const u32 bits = bit_cast<u32>(value);
    return bit_cast<float>(k3_emulator::exchange(&bits, 1)[source * k3_emulator::most_words]);
}
template <i32 Lane>
K3_DEVICE i32 broadcast(i32 value) {
    return bit_cast<i32>(bit_cast<u32>(shuffle(bit_cast<float>(value), Lane)));
}

}  // namespace k3

#include "wave.h"
