// Rings of shared memory: weights on their way, a ring for each wave.
//
// A wave has few registers to spare, and what it has in flight bounds what memory delivers: at 2 KB for each of 24 waves
// about 60 % of it. Here each wave has a ring of stages of its own, which it fills with asynchronous copies and empties
// in order: no other wave waits for it, and no workgroup does.
//
//   MXFP4_RING   the stages of a ring; they are dynamic shared memory, waves * ring * stage
#pragma once

#include "mxfp4.h"

namespace k3 {

constexpr i32 ring = MXFP4_RING;
constexpr i32 down_steps = MXFP4_WIDTH / span;

// Weights by the lane that has them, `Vectors` of 16 bytes each, and `Words` of four scales of each of 16 rows.
template <i32 Vectors, i32 Words>
struct alignas(16) stage {
    u32x4 weights[Vectors][32];
    u32 scales[tile][Words];
};
using gate_up_stage = stage<4, 2>;                         // 16 rows and 256 columns of one of the two matrices
using down_stage = stage<2 * down_steps, down_steps>;      // 16 rows of one expert
static_assert(sizeof(gate_up_stage) == 2176, "as mxfp4/shared.py counts it");
static_assert(sizeof(down_stage) == (1024 + 64) * down_steps, "as mxfp4/shared.py counts it");

// Where a lane reads its part of gate/up's stages: 16 bytes of a row and, 8 rows further on, of another; four scales.
struct gate_up_source {
    const unsigned char* stored;
    const unsigned char* scale;
    i32 down8;
};

K3_DEVICE gate_up_source gate_up_rows(const unsigned char* weights, i32 row_stride, const unsigned char* scales,
                                      i32 scale_row_stride, i32 first_row) {
    return {weights + static_cast<i64>(first_row + lane() / 4) * row_stride + lane() % 4 * 16,
            scales + static_cast<i64>(first_row + lane() / 2) * scale_row_stride + lane() % 2 * 4, 8 * row_stride};
}

K3_DEVICE void fetch_pair(gate_up_stage& to, const gate_up_source& from, i32 pair) {
#pragma unroll
    for (i32 v = 0; v < 4; ++v) {
        copy16_once(&to.weights[v][lane()], from.stored + (v % 2 == 0 ? 0 : from.down8) + pair * 128 + v / 2 * 64);
    }
    copy4(&to.scales[lane() / 2][lane() % 2], from.scale + pair * 8);
}

// 16 rows of an expert, from the first of them.
K3_DEVICE void fetch_rows(down_stage& to, const unsigned char* weights, i32 row_stride, const unsigned char* scales,
                          i32 scale_row_stride) {
    const unsigned char* const from = weights + static_cast<i64>(lane() / 4) * row_stride + lane() % 4 * 16;
#pragma unroll
    for (i32 v = 0; v < 2 * down_steps; ++v) {
        copy16_once(&to.weights[v][lane()], from + (v % 2 == 0 ? 0 : 8 * row_stride) + v / 2 * 64);
    }
    for (i32 word = lane(); word < tile * down_steps; word += 32) {
        const i32 r = word / down_steps, s = word % down_steps;
        copy4(&to.scales[r][s], scales + static_cast<i64>(r) * scale_row_stride + s * 4);
    }
}

// The oldest stage is there: a lane knows of its own copies only, so the lanes meet.
K3_DEVICE void wait_for_oldest_stage() {
    wait_for_copies_but<ring - 1>();
    wave_barrier();
}

// Digits come after what is in flight has been asked for, and are not one of its groups.
K3_DEVICE void bring_digits(digits* to, const digits* from, i32 count) {
#pragma unroll 2
    for (i32 at = thread_x(); at < count * 5; at += threads) {
        store16(reinterpret_cast<u32x4*>(to) + at, load16(reinterpret_cast<const u32x4*>(from) + at));
    }
}

}  // namespace k3
