// kernels/nvidia.h for the CPU. A copy is made when it is waited for, and poison lies there until then, so that what is
// read too early shows.
#pragma once

#include "portability.h"

#define K3_DYNAMIC_SHARED(TYPE, NAME) static TYPE NAME[256 * 1024 / sizeof(TYPE)]

namespace k3 {

K3_DEVICE u32 load4_early(const void* address) { return load_aligned<u32>(address); }
K3_DEVICE u32x2 load8_early(const void* address) { return load_aligned<u32x2>(address); }

struct pending_copy {
    void* to;
    const void* from;
    i32 bytes;
};
using pending_groups = std::vector<std::vector<pending_copy>>;

// The open group of the current thread is the last one.
static pending_groups& pending() {
    static std::vector<pending_groups> by_thread;
    static long seen = -1;
    const long now = (static_cast<long>(block_z()) * 65536 + block_y()) * 65536 + block_x();
    if (seen != now || by_thread.size() != k3_emulator::block->threads.size()) {
        by_thread.assign(k3_emulator::block->threads.size(), pending_groups(1)), seen = now;
    }
    return by_thread[thread_x()];
}
K3_DEVICE void ask_for_copy(void* to, const void* from, i32 bytes) {
    if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes) {
        std::fprintf(stderr, "a copy of %d bytes at an address that is no multiple of it\n", bytes);
        std::abort();
    }
    std::memset(to, 0xff, bytes);
    pending().back().push_back({to, from, bytes});
}
K3_DEVICE void copy16_once(void* to, const void* from) { ask_for_copy(to, from, 16); }
K3_DEVICE void copy16(void* to, const void* from) { ask_for_copy(to, from, 16); }
K3_DEVICE void copy4(void* to, const void* from) { ask_for_copy(to, from, 4); }
K3_DEVICE void close_group_of_copies() { pending().emplace_back(); }
template <i32 Latest>
K3_DEVICE void wait_for_copies_but() {
    pending_groups& groups = pending();
    while (static_cast<i32>(groups.size()) - 1 > Latest) {
        for (const pending_copy& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
        groups.erase(groups.begin());
    }
}
K3_DEVICE void wait_for_all_copies() { close_group_of_copies(), wait_for_copies_but<0>(); }

// What is expected and what was asked for, by arrival; a copy is made when somebody waits for it.
struct pending_arrival {
    i32 passed = 0;
    bool expecting = false;
    u64 bytes = 0;
    std::vector<pending_copy> copies;
};
typedef u64 arrival;
static pending_arrival& pending_at(const arrival* at) {
    static std::map<const arrival*, pending_arrival> every;
    return every[at];
}
K3_DEVICE void make_arrival(arrival* made) { pending_at(made) = pending_arrival{}; }
K3_DEVICE void arrivals_are_made() {}
K3_DEVICE void expect_bytes(arrival* at, u32 bytes) {
    pending_arrival& there = pending_at(at);
    if (there.expecting) k3_emulator::fail("an arrival is told what to expect before it has passed");
    there.expecting = true, there.bytes = bytes;
    ++k3_emulator::progress;
}
K3_DEVICE void copy_bulk(void* to, const void* from, u32 bytes, arrival* at) {
    if (bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) {
        k3_emulator::fail("a bulk copy of bytes, or at an address, that is no multiple of 16");
    }
    std::memset(to, 0xff, bytes);
    pending_at(at).copies.push_back({to, from, static_cast<i32>(bytes)});
}
K3_DEVICE void copy_bulk_once(void* to, const void* from, u32 bytes, arrival* at) { copy_bulk(to, from, bytes, at); }
K3_DEVICE void bring_nearer_once(const void*, u32) {}
K3_DEVICE void wait_for(arrival* at, i32 turn) {
    pending_arrival& there = pending_at(at);
    while (there.passed % 2 == turn) {
        if (!there.expecting) {
            k3_emulator::hand_over();
            continue;
        }
        u64 bytes = 0;
        for (const pending_copy& copy : there.copies) std::memcpy(copy.to, copy.from, copy.bytes), bytes += copy.bytes;
        if (bytes != there.bytes) k3_emulator::fail("what was copied is not what was expected");
        there.copies.clear(), there.expecting = false, ++there.passed;
        ++k3_emulator::progress;
    }
}

// A store is made when its thread waits for it: what is overwritten before then, or never waited for, shows.
static std::vector<pending_copy>& pending_stores() {
    static std::map<i32, std::vector<pending_copy>> by_thread;
    return by_thread[thread_x()];
}
K3_DEVICE void show_to_bulk_copies() {}
K3_DEVICE void store_bulk(void* to, const void* from, u32 bytes) {
    if (bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) {
        k3_emulator::fail("a bulk copy of bytes, or at an address, that is no multiple of 16");
    }
    pending_stores().push_back({to, from, static_cast<i32>(bytes)});
}
K3_DEVICE void store_bulk_once(void* to, const void* from, u32 bytes) { store_bulk(to, from, bytes); }
K3_DEVICE void wait_until_stores_have_read() {
    for (const pending_copy& copy : pending_stores()) std::memcpy(copy.to, copy.from, copy.bytes);
    pending_stores().clear();
}

K3_DEVICE u32 permute_bytes(u32 low, u32 high, u32 selectors) {
    const u64 bytes = static_cast<u64>(high) << 32 | low;
    u32 made = 0;
    for (i32 i = 0; i < 4; ++i) {
        const u32 selector = selectors >> 4 * i & 15u, byte = static_cast<u32>(bytes >> 8 * (selector & 7u)) & 255u;
        made |= (selector & 8u ? (byte & 128u ? 255u : 0u) : byte) << 8 * i;
    }
    return made;
}
K3_DEVICE i32 add_bytes(u32 bytes, i32 sum) {
    for (i32 i = 0; i < 4; ++i) sum += static_cast<signed char>(bytes >> 8 * i);
    return sum;
}
K3_DEVICE u32 high_product(u32 a, u32 b) { return static_cast<u32>(static_cast<u64>(a) * b >> 32); }
K3_DEVICE i32 count_bits(u32 value) { return __builtin_popcount(value); }
K3_DEVICE i32 lowest_bit(u32 value) { return __builtin_ctz(value); }

K3_DEVICE void wave_barrier() { k3_emulator::meet(k3_emulator::wave_meeting()); }
K3_DEVICE u32 wave_max_of_bits(u32 value) {
    const u32* const all = k3_emulator::exchange(&value, 1);
    for (i32 l = 0; l < wave_size; ++l) value = all[l * k3_emulator::most_words] > value ? all[l * k3_emulator::most_words] : value;
    return value;
}
K3_DEVICE u32 wave_ballot(bool condition) {
    const u32 own = condition;
    const u32* const all = k3_emulator::exchange(&own, 1);
    u32 bits = 0;
    for (i32 l = 0; l < wave_size; ++l) bits |= all[l * k3_emulator::most_words] << l;
    return bits;
}
K3_DEVICE i32 wave_sum_of_integers(i32 value) {
    const u32* const all = k3_emulator::exchange(reinterpret_cast<const u32*>(&value), 1);
    i32 sum = 0;
    for (i32 l = 0; l < wave_size; ++l) sum += static_cast<i32>(all[l * k3_emulator::most_words]);
    return sum;
}

K3_DEVICE void multiply_bytes(i32 (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const u32 own[6] = {a0, a1, a2, a3, b0, b1};
    const u32* const all = k3_emulator::exchange(own, 6);
    for (i32 i = 0; i < 4; ++i) {
        const i32 row = lane() / 4, column = lane() % 4 * 2 + i % 2;
        for (i32 k = 0; k < 32; ++k) {
            const i32 holder = k % 16 / 4, byte = 8 * (k % 4);
            const u32 a = all[(row * 4 + holder) * k3_emulator::most_words + i / 2 + k / 16 * 2] >> byte & 255u;
            const u32 b = all[(column * 4 + holder) * k3_emulator::most_words + 4 + k / 16] >> byte & 255u;
            sum[i] += static_cast<i32>(a) * static_cast<signed char>(b);
        }
    }
}

}  // namespace k3
