// Sums and maxima over a wave and a workgroup, by a butterfly. Part of portability.h, from which it has `shuffle_xor`,
// `lane`, `wave` and `barrier`.
#pragma once

namespace k3 {

struct sum_of {
    static __device__ float apply(float a, float b) { return a + b; }
};
struct maximum_of {
    static __device__ float apply(float a, float b) { return maximum_number(a, b); }
};

// Combine with the lane at distance Mask. On gfx950 v_permlane32_swap and v_permlane16_swap give both halves at once,
// in registers; the operation is commutative, so it does not matter which lane got which half.
template <typename Operation, i32 Mask>
K3_DEVICE float butterfly_step(float value) {
#if K3_AMD && defined(__gfx950__)
    const u32 bits = bit_cast<u32>(value);
    if constexpr (Mask == 32) {
        const auto both = __builtin_amdgcn_permlane32_swap(bits, bits, false, false);
        return Operation::apply(bit_cast<float>(both[0]), bit_cast<float>(both[1]));
    } else if constexpr (Mask == 16) {
        const auto both = __builtin_amdgcn_permlane16_swap(bits, bits, false, false);
        return Operation::apply(bit_cast<float>(both[0]), bit_cast<float>(both[1]));
    }
#endif
    return Operation::apply(value, shuffle_xor<Mask>(value));
}

// Reduce groups of Width neighbouring lanes (a power of two); every lane of a group gets the result. The tree is the
// same on every target: pairs, then quads, and so on, so two targets differ only in the part above a warp.
template <typename Operation, i32 Width>
K3_DEVICE float group_reduce(float value) {
    static_assert(Width > 0 && (Width & (Width - 1)) == 0 && Width <= wave_size, "group_reduce: Width");
    if constexpr (Width >= 2) value = butterfly_step<Operation, 1>(value);
    if constexpr (Width >= 4) value = butterfly_step<Operation, 2>(value);
#if K3_AMD
    // Quads are uniform by now, so a mirror does what xor 4 would, in one move; likewise above.
    if constexpr (Width >= 8) value = butterfly_step<Operation, 7>(value);
    if constexpr (Width >= 16) value = butterfly_step<Operation, 15>(value);
#else
    if constexpr (Width >= 8) value = butterfly_step<Operation, 4>(value);
    if constexpr (Width >= 16) value = butterfly_step<Operation, 8>(value);
#endif
    if constexpr (Width >= 32) value = butterfly_step<Operation, 16>(value);
    if constexpr (Width >= 64) value = butterfly_step<Operation, 32>(value);
    return value;
}

template <i32 Width>
K3_DEVICE float group_sum(float value) { return group_reduce<sum_of, Width>(value); }
template <i32 Width>
K3_DEVICE float group_max(float value) { return group_reduce<maximum_of, Width>(value); }
// Over the groups of Width lanes of a wave: the sum of the lanes that have the same place in their groups.
template <i32 Width>
K3_DEVICE float sum_over_groups(float value) {
    static_assert(Width >= 4 && (Width & (Width - 1)) == 0 && Width <= wave_size, "sum_over_groups: Width");
    if constexpr (Width <= 4) value = butterfly_step<sum_of, 4>(value);
    if constexpr (Width <= 8) value = butterfly_step<sum_of, 8>(value);
    if constexpr (Width <= 16) value = butterfly_step<sum_of, 16>(value);
    if constexpr (Width <= 32 && wave_size == 64) value = butterfly_step<sum_of, wave_size / 2>(value);
    return value;
}
K3_DEVICE float wave_sum(float value) { return group_reduce<sum_of, wave_size>(value); }
K3_DEVICE float wave_max(float value) { return group_reduce<maximum_of, wave_size>(value); }

// Reduce over a block of Threads; every thread gets the result. `scratch`: Threads / wave_size floats of shared memory.
// Leave a barrier between two uses of one scratch.
template <typename Operation, i32 Threads>
K3_DEVICE float block_reduce(float value, float* scratch) {
    static_assert(Threads % wave_size == 0, "block_reduce: whole waves");
    constexpr i32 waves = Threads / wave_size;
    value = group_reduce<Operation, wave_size>(value);
    if constexpr (waves == 1) return value;
    if (lane() == 0) scratch[wave()] = value;
    barrier();
    float result = scratch[0];
#pragma unroll
    for (i32 i = 1; i < waves; ++i) result = Operation::apply(result, scratch[i]);
    return result;
}

template <i32 Threads>
K3_DEVICE float block_sum(float value, float* scratch) { return block_reduce<sum_of, Threads>(value, scratch); }
template <i32 Threads>
K3_DEVICE float block_max(float value, float* scratch) { return block_reduce<maximum_of, Threads>(value, scratch); }

}  // namespace k3
