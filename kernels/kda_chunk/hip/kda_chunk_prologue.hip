// The prologue of k3::kda_chunk for gfx950: what ../triton_prologue.py computes, into the same memory. form.py has the
// formulas and their names.
//
//   values   Uᵀ [V, 64]     keys    -W [64, K]        queries   q ⊙ exp G [64, K]
//   scores   Q  [64, 64]    ends     k ⊙ exp(G_last - G) [64, K]     decay  exp G_last [K], fp32
//
// A workgroup of four waves takes one chunk of one head. A wave has sixteen tokens; lane l has eight channels in every 32
// of token l % 16, which is an operand of a bf16 product as it stands. So q, k and the gates stay in registers from their
// loads to the last product, and q comes to no LDS at all.
//
//   G        sums over the sixteen lanes of a row, by DPP; between blocks by what the gates of whole blocks come to
//   scores   exponents are referenced to the first row of i's block: q_i exp(G_i - G_first), k_j exp(G_first - G_j).
//            The right side is stored once, referenced to the block behind j's; the left one takes the rest of the way,
//            which no later token has a part in
//   T        triangle.h: fp32, native products of 16x16x4; times beta, then rounded
//   U, W     bf16 products, transposed or not as results lie in memory: four neighbours a lane
//
// LDS: one tile of 16 KiB, which is k referenced to the end of its block, then (k ⊙ exp G)ᵀ, then vᵀ, one after the other;
// ten blocks of the triangle in 12.5 KiB; sums of gates in 6 KiB; beta. 34.75 KiB, so that LDS would let four workgroups
// live in the 160 KiB of a CU.
//
//   KDA_HEADS                     heads of a token, 128 keys and 128 values each
//   KDA_RAW                       1: f and b are raw; 0: they are gates and rates
//   KDA_NORMED                    1: q and k have unit length
//   KDA_SLOTS, _LENGTHS, _OFFSETS 0: none; else the type: 32 or 64
//   KDA_NULL                      1: slots at or below zero are nobody's
//
// q, k, v and f begin at multiples of 16 bytes, and so do their tokens; dt_bias too. Strides are in elements.

#include "eights.h"
#include "triangle.h"

namespace {

using namespace k3;

constexpr i32 size = 128, chunk_tokens = 64, parts = 4, threads = 256;
constexpr i32 right_pitch = size + 8;  // in bf16
constexpr float log2_e = 1.4426950408889634f;

static_assert(wave_size == 64, "four waves are 64 tokens");

template <i32 Bits>
struct integer {
    typedef i32 type;
};
template <>
struct integer<64> {
    typedef i64 type;
};
typedef integer<KDA_SLOTS>::type slot_type;
typedef integer<KDA_LENGTHS>::type length_type;
typedef integer<KDA_OFFSETS>::type offset_type;

// Where token and channel lie in the transposed tile [size, 64]: eight tokens stay together, and these eights change
// places from channel to channel, so that neither reads nor writes meet in a bank.
K3_DEVICE i32 place(i32 channel, i32 token) {
    return channel * chunk_tokens + ((token / 8 ^ channel ^ channel / 8) & 7) * 8 + token % 8;
}

K3_DEVICE float unit_length(float squares, float eps) {
    squares = butterfly_step<sum_of, 16>(squares);
    squares = butterfly_step<sum_of, 32>(squares);
    return KDA_NORMED ? 1.0f : fast_rsqrt(squares + eps);
}

// A length or an offset, not below 0 and not above the number of tokens.
template <class Number>
K3_DEVICE i32 within(Number n, i32 tokens) {
    return n < 0 ? 0 : n > tokens ? tokens : static_cast<i32>(n);
}

struct span {
    i64 batch, token;  // of the chunk's first token
    i32 left;          // tokens of the row from there on; 0: nothing is to be done
};
K3_DEVICE span span_of(
    i32 number, const slot_type* slots, const length_type* lengths, const offset_type* offsets, i32 rows, i32 tokens,
    i32 chunks) {
    i32 row = number / chunks, index = number % chunks, length = tokens;
    i64 batch = row, first = 0;
    if constexpr (KDA_OFFSETS != 0) {  // row n has the numbers from offsets[n] / 64 + n on
        row = 0;
        for (i32 behind = rows; behind - row > 1;) {
            const i32 middle = (row + behind) / 2;
            if (within(offsets[middle], tokens) / chunk_tokens + middle <= number) row = middle;
            else behind = middle;
        }
        batch = 0, first = within(offsets[row], tokens);
        length = within(offsets[row + 1], tokens) - static_cast<i32>(first);
        index = number - (static_cast<i32>(first) / chunk_tokens + row);
    } else if constexpr (KDA_LENGTHS != 0) {
        length = within(lengths[row], tokens);
    }
    if constexpr (KDA_NULL != 0) length = slots[row] > 0 ? length : 0;
    const i32 before = index * chunk_tokens;
    return {batch, first + before, length > 1 && before >= 0 && before < length ? length - before : 0};  // one token is no chunk
}

}  // namespace

// Grid: HEADS · numbers of chunks; only the first number of a grid may be above 65,535.
K3_KERNEL_OCCUPANCY(threads, 2) kda_chunk_prologue(
    const bf16* q, const bf16* k, const bf16* v, const bf16* f, const bf16* b, const float* a_log, const float* dt_bias,
    const slot_type* slots, const length_type* lengths, const offset_type* offsets, bf16* values, bf16* keys,
    bf16* queries, bf16* scores, bf16* ends, float* decay, i32 q_batch, i32 k_batch, i32 v_batch, i32 f_batch,
    i32 b_batch, i32 q_token, i32 k_token, i32 v_token_stride, i32 f_token, i32 b_token, i32 rows, i32 tokens, i32 chunks,
    float bound, float q_scale, float l2_eps) {
    __shared__ u32x4 tile_room[size * chunk_tokens / 8];
    __shared__ f32x4 triangle_room[triangle_floats / 4], sums_room[3 * 4 * size / 4], beta_room[chunk_tokens / 4];
    u16* const tile = reinterpret_cast<u16*>(tile_room);
    float* const all = reinterpret_cast<float*>(triangle_room);
    float* const starts = reinterpret_cast<float*>(sums_room);  // of a block: its first row's G; before: its first gate
    float* const steps = starts + 4 * size;   // from its first row to that of the next, or to the end; before: in it
    float* const rests = steps + 4 * size;    // from its first row to the end
    float* const betas = reinterpret_cast<float*>(beta_room);
    static_assert(3 * 16 * right_pitch <= size * chunk_tokens, "three blocks of the right side fit the tile");

    const i32 head = block_x() % KDA_HEADS, number = block_x() / KDA_HEADS, own = wave(), r = lane() % 16, g = lane() / 16;
    const span here = span_of(number, slots, lengths, offsets, rows, tokens, chunks);
    if (here.left == 0) return;
    const i32 token = own * 16 + r;  // of the chunk
    const bool live = token < here.left;
    const i64 at = static_cast<i64>(number) * KDA_HEADS + head;
    const i64 line = here.token + token;
    const bf16* const q_row = q + here.batch * q_batch + line * q_token + head * size;
    const bf16* const k_row = k + here.batch * k_batch + line * k_token + head * size;
    const bf16* const f_row = f + here.batch * f_batch + line * f_token + head * size;

    u32x4 q_packed[parts], k_packed[parts];
    eight local[parts];  // G less that of the block's first row
    const float rate = KDA_RAW ? fast_exp(a_log[head]) : 0.0f;
    float k_squares = 0.0f, q_squares = 0.0f;
#pragma unroll
    for (i32 s = 0; s < parts; ++s) {
        const i32 c = 32 * s + 8 * g;
        const u32x4 nothing{};
        k_packed[s] = live ? load16(k_row + c) : nothing;
        q_packed[s] = live ? load16(q_row + c) : nothing;
        eight gate = unpacked(live ? load16(f_row + c) : nothing), first, bias{};
        if (KDA_RAW) bias = floats(dt_bias + head * size + c);
#pragma unroll
        for (i32 e = 0; e < 8; ++e) {
            const float f_value = gate.at[e];
            float x = (KDA_RAW ? fast_sigmoid(rate * (f_value + bias.at[e])) * bound : f_value) * log2_e;
            x = live ? x : 0.0f;
            first.at[e] = from_lane_of_row<0>(x);
            x = r == 0 ? 0.0f : x;
            x += from_lane_below<1>(x);
            x += from_lane_below<2>(x);
            x += from_lane_below<4>(x);
            x += from_lane_below<8>(x);
            local[s].at[e] = x;
        }
        if (r == 0) put_floats(starts + own * size + c, first);
        if (r == 15) put_floats(steps + own * size + c, local[s]);
        k_squares += sum_of_squares(unpacked(k_packed[s]));
        q_squares += sum_of_squares(unpacked(q_packed[s]));
    }
    const float k_length = unit_length(k_squares, l2_eps), q_length = unit_length(q_squares, l2_eps) * q_scale;
    float beta = live ? to_float(b[here.batch * b_batch + line * b_token + head]) : 0.0f;
    if (KDA_RAW) beta = live ? fast_sigmoid(beta) : 0.0f;
    if (g == 0) betas[token] = beta;
    barrier();

    if (thread_x() < size) {  // sums of whole blocks, a channel a thread
        const i32 c = thread_x();
        float first[4], step[4];
#pragma unroll
        for (i32 i = 0; i < 4; ++i) first[i] = starts[i * size + c], step[i] = steps[i * size + c];
#pragma unroll
        for (i32 i = 0; i < 3; ++i) step[i] += first[i + 1];
        float start = first[0], rest = 0.0f;
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            starts[i * size + c] = start, steps[i * size + c] = step[i];
            start += step[i], rest += step[3 - i];
            rests[(3 - i) * size + c] = rest;
        }
        decay[at * size + c] = fast_exp2(start);
    }
    barrier();

    u32x4 k_start[parts];
#pragma unroll
    for (i32 s = 0; s < parts; ++s) {
        const i32 c = 32 * s + 8 * g;
        const i64 cells = (at * chunk_tokens + token) * size + c;
        const eight key = scaled(unpacked(k_packed[s]), k_length), query = scaled(unpacked(q_packed[s]), q_length);
        const eight start = floats(starts + own * size + c);
        if (own < 3) {
            const eight step = floats(steps + own * size + c);
            store16(tile + token * right_pitch + c, rounded(moved(key, 1.0f, step, -1.0f, local[s])));
        }
        k_start[s] = rounded(moved(key, 1.0f, start, 1.0f, local[s]));
        store16(queries + cells, rounded(moved(query, 1.0f, start, 1.0f, local[s])));
        store16(ends + cells, rounded(moved(key, 1.0f, floats(rests + own * size + c), -1.0f, local[s])));
    }
    barrier();

    // Both transposed: lane l has row r of A and Q, and of these four neighbouring columns of each block.
    f32x4 a[3]{}, p[3]{}, a_own{}, p_own{};
#pragma unroll
    for (i32 s = 0; s < parts; ++s) {
        const i32 c = 32 * s + 8 * g;
        const eight zero{}, key = scaled(unpacked(k_packed[s]), k_length);
        const eight k_left = moved(key, 1.0f, local[s], 0.0f, zero);
        const eight q_left = moved(scaled(unpacked(q_packed[s]), q_length), 1.0f, local[s], 0.0f, zero);
        const u32x4 right_own = rounded(moved(key, -1.0f, local[s], 0.0f, zero));
        a_own = multiply_bf16(right_own, rounded(k_left), a_own);
        p_own = multiply_bf16(right_own, rounded(q_left), p_own);
        eight way{};  // from the first row behind block j to that of the own one
#pragma unroll
        for (i32 j = 2; j >= 0; --j) {
            if (j >= own) continue;
            if (j + 1 < own) {
                const eight step = floats(steps + (j + 1) * size + c);
#pragma unroll
                for (i32 e = 0; e < 8; ++e) way.at[e] += step.at[e];
            }
            const u32x4 right = load16(tile + (j * 16 + r) * right_pitch + c);
            a[j] = multiply_bf16(right, rounded(moved(k_left, 1.0f, way, 0.0f, zero)), a[j]);
            p[j] = multiply_bf16(right, rounded(moved(q_left, 1.0f, way, 0.0f, zero)), p[j]);
        }
    }
    bf16* const score_row = scores + (at * chunk_tokens + token) * chunk_tokens + 4 * g;
#pragma unroll
    for (i32 e = 0; e < 4; ++e) {
        const i32 j = 4 * g + e;
        a_own.at[e] = j < r ? beta * a_own.at[e] : 0.0f, p_own.at[e] = j <= r ? p_own.at[e] : 0.0f;
#pragma unroll
        for (i32 block = 0; block < 3; ++block) a[block].at[e] *= beta;
    }
    *row_part(block_of(all, own, own)) = a_own;
    put_four(score_row + own * 16, p_own, 1.0f);
#pragma unroll
    for (i32 j = 0; j < 4; ++j) {
        if (j > own) put_four(score_row + j * 16, f32x4{}, 1.0f);
        if (j < 3 && j < own) *row_part(block_of(all, own, j)) = a[j], put_four(score_row + j * 16, p[j], 1.0f);
    }
    barrier();

    // Two neighbouring tokens change places with two channels, so that 32 bits are written at a time.
#pragma unroll
    for (i32 s = 0; s < parts; ++s) {
#pragma unroll
        for (i32 e = 0; e < 4; ++e) {
            const u32 pair = word(k_start[s], e), other = shuffle_xor<1>(pair);
            const i32 odd = r & 1, c = 32 * s + 8 * g + 2 * e + odd;
            const u32 both = odd ? other >> 16 | (pair & 0xffff0000u) : (pair & 0xffffu) | other << 16;
            *reinterpret_cast<u32*>(tile + place(c, token - odd)) = both;
        }
    }
    invert(all);

    // T ⊙ beta as left or right operand: row r of block i, eight columns of every 32.
    u32x4 solved[4][2];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
#pragma unroll
        for (i32 s = 0; s <= i / 2; ++s) {
            const i32 j = 2 * s + g / 2, column = g % 2 * 8;
            eight t{};
            if (j <= i) {
                t = floats(block_of(all, i, j) + r * triangle_pitch + column);
                const eight rates = floats(betas + j * 16 + column);
#pragma unroll
                for (i32 e = 0; e < 8; ++e) t.at[e] *= rates.at[e];
            }
            solved[i][s] = rounded(t);
        }
    }
    const i32 v_channel = thread_x() % 16 * 8, v_token = thread_x() / 16 * 4;
    u32x4 v_packed[4];  // eight channels of four tokens
#pragma unroll
    for (i32 t = 0; t < 4; ++t) {
        const i64 v_line = here.token + v_token + t;
        v_packed[t] = u32x4{};
        if (v_token + t < here.left) {
            v_packed[t] = load16(v + here.batch * v_batch + v_line * v_token_stride + head * size + v_channel);
        }
    }
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
        const i32 c = (2 * own + half) * 16;
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            f32x4 sum{};
#pragma unroll
            for (i32 s = 0; s <= i / 2; ++s) {
                sum = multiply_bf16(load16(tile + place(c + r, 32 * s + 8 * g)), solved[i][s], sum);
            }
            put_four(keys + (at * chunk_tokens + i * 16 + r) * size + c + 4 * g, sum, -1.0f);
        }
    }
    barrier();
#pragma unroll
    for (i32 e = 0; e < 8; ++e) {
        u32 of[4];
#pragma unroll
        for (i32 t = 0; t < 4; ++t) {
            of[t] = e % 2 ? word(v_packed[t], e / 2) >> 16 : word(v_packed[t], e / 2) & 0xffffu;
        }
        *reinterpret_cast<u32x2*>(tile + place(v_channel + e, v_token)) = {of[0] | of[1] << 16, of[2] | of[3] << 16};
    }
    barrier();
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
        const i32 c = (2 * own + half) * 16;
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
            f32x4 sum{};
#pragma unroll
            for (i32 s = 0; s <= i / 2; ++s) {
                sum = multiply_bf16(solved[i][s], load16(tile + place(c + r, 32 * s + 8 * g)), sum);
            }
            put_four(values + (at * size + c + r) * chunk_tokens + i * 16 + 4 * g, sum, 1.0f);
        }
    }
}
