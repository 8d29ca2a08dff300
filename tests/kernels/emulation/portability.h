// kernels/portability.h for the CPU: the same names, on k3_emulator's fibers.
#pragma once

#include <cmath>
#include <tuple>
#include <type_traits>

#include "emulator.h"

#define K3_NVIDIA 1
#define K3_AMD 0
#define __global__
#define __device__
#define __shared__ static
#define K3_KERNEL(THREADS) extern "C" void
#define K3_KERNEL_OCCUPANCY(THREADS, WAVES_PER_SIMD) extern "C" void
#define K3_DEVICE static inline

namespace k3 {

using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
using u16 = unsigned short;
using u8 = unsigned char;

constexpr i32 wave_size = K3_EMULATED_WAVE;

K3_DEVICE i32 thread_x() { return k3_emulator::block->current; }
K3_DEVICE i32 thread_y() { return 0; }
K3_DEVICE i32 block_x() { return k3_emulator::index[0]; }
K3_DEVICE i32 block_y() { return k3_emulator::index[1]; }
K3_DEVICE i32 block_z() { return k3_emulator::index[2]; }
K3_DEVICE i32 lane() { return thread_x() % wave_size; }
K3_DEVICE i32 wave() { return thread_x() / wave_size; }
K3_DEVICE void barrier() { k3_emulator::meet(k3_emulator::block->all); }

template <typename To, typename From>
K3_DEVICE To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast: sizes differ");
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

struct bf16 {
    u16 bits;
};
K3_DEVICE float to_float(bf16 value) { return bit_cast<float>(static_cast<u32>(value.bits) << 16); }
K3_DEVICE float low_to_float(u32 pair) { return bit_cast<float>(pair << 16); }
K3_DEVICE float high_to_float(u32 pair) { return bit_cast<float>(pair & 0xffff0000u); }
K3_DEVICE u32 nearest_bf16(float value) {
    const u32 bits = bit_cast<u32>(value);
    if (value != value) return 0x7fffu;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
K3_DEVICE u32 pack2(float low, float high) { return nearest_bf16(low) | nearest_bf16(high) << 16; }
K3_DEVICE bf16 to_bf16(float value) { return bf16{static_cast<u16>(nearest_bf16(value))}; }
K3_DEVICE float round_to_bf16(float value) { return low_to_float(nearest_bf16(value)); }

struct alignas(16) u32x4 {
    u32 x, y, z, w;
};
struct alignas(8) u32x2 {
    u32 x, y;
};

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

K3_DEVICE void unpack8(const u32x4& packed, float (&values)[8]) {
    const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
    for (i32 i = 0; i < 4; ++i) values[2 * i] = low_to_float(words[i]), values[2 * i + 1] = high_to_float(words[i]);
}
K3_DEVICE u32x4 pack8(const float (&v)[8]) {
    return u32x4{pack2(v[0], v[1]), pack2(v[2], v[3]), pack2(v[4], v[5]), pack2(v[6], v[7])};
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

template <i32 Width>
K3_DEVICE float group_sum(float value) {
    if constexpr (Width > 1) {
        value = group_sum<Width / 2>(value);
        value += shuffle_xor<Width / 2>(value);
    }
    return value;
}
template <i32 Width>
K3_DEVICE float group_max(float value) {
    if constexpr (Width > 1) {
        value = group_max<Width / 2>(value);
        value = maximum_number(value, shuffle_xor<Width / 2>(value));
    }
    return value;
}
K3_DEVICE float wave_sum(float value) { return group_sum<wave_size>(value); }
K3_DEVICE float wave_max(float value) { return group_max<wave_size>(value); }

}  // namespace k3
