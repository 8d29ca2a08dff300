// Types, bits and bf16 of a kernel: what is the same wherever it is compiled, the CPU's emulation included. Part of
// portability.h, which defines K3_DEVICE, K3_AMD and `pack2` for its compiler.
#pragma once

namespace k3 {

using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
using u16 = unsigned short;
using u8 = unsigned char;

// ---------------------------------------------------------------------------------------------- bits

template <typename To, typename From>
K3_DEVICE To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast: sizes differ");
    To to;
#if K3_AMD
    __builtin_memcpy(&to, &from, sizeof(To));
#else
    memcpy(&to, &from, sizeof(To));  // NVRTC knows this name only
#endif
    return to;
}

// ---------------------------------------------------------------------------------------------- bf16

struct bf16 {
    u16 bits;
};

K3_DEVICE float to_float(float value) { return value; }
K3_DEVICE float to_float(bf16 value) { return bit_cast<float>(static_cast<u32>(value.bits) << 16); }
K3_DEVICE float low_to_float(u32 pair) { return bit_cast<float>(pair << 16); }
K3_DEVICE float high_to_float(u32 pair) { return bit_cast<float>(pair & 0xffff0000u); }

// Two floats to two bf16 in one register, `low` in bits 0-15. Round to nearest even; overflow gives infinity; a NaN
// stays a NaN (its payload is the hardware's business).
K3_DEVICE u32 pack2(float low, float high);

K3_DEVICE bf16 to_bf16(float value) { return bf16{static_cast<u16>(pack2(value, 0.0f) & 0xffffu)}; }
// The value that a store to bf16 and a load back would give.
K3_DEVICE float round_to_bf16(float value) { return low_to_float(pack2(value, 0.0f)); }

// ---------------------------------------------------------------------------------------------- vectors

struct alignas(16) u32x4 {
    u32 x, y, z, w;
};
struct alignas(8) u32x2 {
    u32 x, y;
};

// Eight bf16 in 16 bytes, in memory order.
K3_DEVICE void unpack8(const u32x4& packed, float (&values)[8]) {
    values[0] = low_to_float(packed.x), values[1] = high_to_float(packed.x);
    values[2] = low_to_float(packed.y), values[3] = high_to_float(packed.y);
    values[4] = low_to_float(packed.z), values[5] = high_to_float(packed.z);
    values[6] = low_to_float(packed.w), values[7] = high_to_float(packed.w);
}

K3_DEVICE u32x4 pack8(const float (&values)[8]) {
    return u32x4{pack2(values[0], values[1]), pack2(values[2], values[3]), pack2(values[4], values[5]),
                 pack2(values[6], values[7])};
}

}  // namespace k3
