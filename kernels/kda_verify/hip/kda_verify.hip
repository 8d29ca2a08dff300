// A verify window of a KDA layer, from its projections to the input of its output projection, in one launch.
//
//   weights   taps, bias, rate, norm: after the wait for the kernel before, which may have made them (taps are put
//             together in every step where nothing has done so beforehand)
//   inputs    what needs no slot; then the state that the window starts from; then the past of the lines
//   q, k, v   of every token, convolved; decay of each key; beta                    a channel a thread, to shared memory
//   S         for each token: decayed, updated, stored; read out in the same pass   8 lanes a value's row, in registers
//   y         of every token, normalised over the head, gated
//   lines     moved on                                                              when all have read them
//
// Between the tokens there is no barrier: what a token needs beside the state is in shared memory before the first, and a
// row of the state is of one group of lanes.
//
// One workgroup takes one head of a sequence, or on NVIDIA (sm_90 and later) a cluster of KDA_SPLIT workgroups does, each
// with its part of the values: they share the sums of squares of the output norm, and all read q's and k's lines, which
// the first of them moves on. What is read out of the updated state is taken from the decayed one, q.S' + u (q.k), so
// that both sums over the keys are one exchange.
//
// A row of nobody loads no state, stores none, and gives zeros, whatever it holds; so does what is past a window's end.
//
//   KDA_HEADS, KDA_SIZE    heads of a sequence; keys, and values, of a head: 64 or 128
//   KDA_TOKENS             of a window
//   KDA_SPLIT              workgroups of a head; 1 on AMD
//   KDA_WAVES              of a workgroup
//   KDA_IDS                bits of slots, columns and lengths: 32 or 64
//   KDA_RAGGED             1: windows have lengths of their own
//   KDA_NULL               1: slots at or below zero are nobody's
//   KDA_SILU               1: the gate goes through SiLU; 0: through a sigmoid
//   KDA_INNER_BF16         1: results of the convolution and of the recurrence are rounded to bf16
//   KDA_DEPENDENT          1: launched while the kernel before it may still run (sm_90 and later); 0 on AMD
//
// Inputs, lines and the result are bf16, weights and states fp32. Strides are in elements; states and taps are 16-byte
// aligned, a head's state lies in one piece.

#include "cluster.h"
#include "portability.h"

#include "kda.h"

namespace {

using namespace k3;

constexpr i32 size = KDA_SIZE, split = KDA_SPLIT, waves = KDA_WAVES, tokens = KDA_TOKENS;
constexpr i32 threads = waves * wave_size;
constexpr i32 values = size / split;                  // of this workgroup
constexpr i32 quads = 4, lanes = size / (4 * quads);  // lanes that share a row of the state, 16 keys each
constexpr i32 wave_rows = wave_size / lanes;          // of a wave in a pass
constexpr i32 passes = (values + waves * wave_rows - 1) / (waves * wave_rows);
constexpr i32 channels = 2 * size + values;  // q, k and the own part of v
constexpr i32 rounds = (channels + threads - 1) / threads;
constexpr i32 results = (tokens * values + threads - 1) / threads;
constexpr i32 keys = (tokens * size + threads - 1) / threads;
constexpr i32 history = 3;
constexpr bool dependent = KDA_DEPENDENT, has_null = KDA_NULL, ragged = KDA_RAGGED;

static_assert(size == 64 || size == 128, "KDA_SIZE");
static_assert(split == 1 || K3_NVIDIA, "only NVIDIA has clusters of workgroups");
static_assert(size % split == 0 && values % wave_rows == 0, "values come out even");
static_assert(tokens >= 1 && tokens <= 8 && tokens <= wave_size, "a lane sends the sum of a token");
static_assert(threads % size == 0 || size % threads == 0, "a thread keeps its key");

#if KDA_IDS == 64
typedef i64 id_type;
#else
typedef i32 id_type;
#endif

// One store of 16 bytes: NVRTC takes apart the first of a row.
K3_DEVICE void keep(float* to, const four& from) {
#if defined(__CUDA_ARCH__)
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(from.at[0]), "f"(from.at[1]), "f"(from.at[2]), "f"(from.at[3]));
#else
    store16(to, packed_of(from));
#endif
}

}  // namespace

// Grid: (sequences * HEADS * SPLIT).
K3_KERNEL(threads)
K3_CLUSTER(KDA_SPLIT) kda_verify(
    const bf16* qkv, i32 qkv_row, i32 qkv_token, const bf16* f, i32 f_row, i32 f_token, const bf16* b, i32 b_row, i32 b_token,
    const bf16* gate, i32 gate_row, i32 gate_token, i32 gate_head, const float* conv_weight, const float* a_log,
    const float* dt_bias, const float* norm_weight, bf16* conv_state, i32 conv_slot, i32 conv_column, float* state,
    i32 state_slot, i32 state_head, const id_type* start, const id_type* table, i32 table_row, const id_type* past_columns,
    i32 past_row, const id_type* lengths, bf16* out, float bound, float q_scale, float l2_eps, float norm_eps) {
    __shared__ u32x4 q_room[tokens * size / 4], k_room[tokens * size / 4], decay_room[tokens * size / 4];
    float *const q_of = reinterpret_cast<float*>(q_room), *const k_of = reinterpret_cast<float*>(k_room);
    float* const decay_of = reinterpret_cast<float*>(decay_room);
    __shared__ float v_of[tokens * values], read_of[tokens * values];
    __shared__ float squares[tokens * split * waves];
    __shared__ arrivals of_squares;
    const i32 part = block_x() % split;
    const i32 head = block_x() / split % KDA_HEADS;
    const i64 row = block_x() / split / KDA_HEADS;
    const i32 me = thread_x();
    if (split > 1 && me == 0) expect(of_squares, sizeof(squares));
    cluster_arrive<split>();
    wait_for_earlier_kernel<dependent>();
    release_later_kernel<dependent>();

    const auto channel_of = [&](i32 n) {  // among those of the row
        return n < size ? head * size + n : n < 2 * size ? (KDA_HEADS + head) * size + n - size
                                                         : (2 * KDA_HEADS + head) * size + part * values + n - 2 * size;
    };
    u32x4 taps[rounds];
#pragma unroll
    for (i32 r = 0; r < rounds; ++r) {
        const i32 n = me + r * threads;
        if (n < channels) taps[r] = load16(conv_weight + static_cast<i64>(channel_of(n)) * (history + 1));
    }
    const float rate = fast_exp(a_log[head]);
    float bias[keys], norm[results];
#pragma unroll
    for (i32 r = 0; r < keys; ++r) bias[r] = dt_bias[head * size + (me + r * threads) % size];
#pragma unroll
    for (i32 r = 0; r < results; ++r) norm[r] = norm_weight[part * values + (me + r * threads) % values];

    bf16 token[rounds][tokens];
    bf16 moved[keys], z[results];
#pragma unroll
    for (i32 t = 0; t < tokens; ++t) {
#pragma unroll
        for (i32 r = 0; r < rounds; ++r) {
            const i32 n = me + r * threads;
            if (n < channels) token[r][t] = qkv[row * qkv_row + static_cast<i64>(t) * qkv_token + channel_of(n)];
        }
    }
#pragma unroll
    for (i32 r = 0; r < keys; ++r) {
        const i32 n = me + r * threads;
        if (n < tokens * size) moved[r] = f[row * f_row + static_cast<i64>(n / size) * f_token + head * size + n % size];
    }
#pragma unroll
    for (i32 r = 0; r < results; ++r) {
        const i32 n = me + r * threads;
        if (n < tokens * values) {
            z[r] = gate[row * gate_row + static_cast<i64>(n / values) * gate_token + static_cast<i64>(head) * gate_head +
                        part * values + n % values];
        }
    }
    float beta[tokens];
#pragma unroll
    for (i32 t = 0; t < tokens; ++t) beta[t] = to_float(b[row * b_row + static_cast<i64>(t) * b_token + head]);

    const i64 own = table[row * table_row], begin = start[row];
    i64 columns[history];
#pragma unroll
    for (i32 j = 0; j < history; ++j) columns[j] = past_columns[row * past_row + j];
    const i32 length = ragged ? static_cast<i32>(lengths[row]) : tokens;

    bf16* const result = out + (row * tokens * KDA_HEADS + head) * size + part * values;
    const i64 result_token = static_cast<i64>(KDA_HEADS) * size;
    const i32 count = length < tokens ? length : tokens;
    if ((has_null && own <= 0) || count <= 0) {
#pragma unroll
        for (i32 r = 0; r < results; ++r) {
            const i32 n = me + r * threads;
            if (n < tokens * values) result[n / values * result_token + n % values] = to_bf16(0.0f);
        }
        cluster_wait<split>();
        return;
    }

    // Rows of the state. Those of a wave lie one after the other.
    const i32 first_value = wave() * passes * wave_rows + lane() / lanes;
    const i32 first_key = lane() % lanes * 4;
    float* const cells = state + static_cast<i64>(head) * state_head + static_cast<i64>(part) * values * size;
    four held[passes][quads];
#pragma unroll
    for (i32 p = 0; p < passes; ++p) {
        const i32 value = first_value + p * wave_rows;
        const bool here = value < values && !(has_null && begin <= 0);
#pragma unroll
        for (i32 j = 0; j < quads; ++j) {
            u32x4 loaded = {0, 0, 0, 0};
            if (here) loaded = load16(cells + begin * state_slot + value * size + first_key + j * 4 * lanes);
            held[p][j] = four_of(loaded);
        }
    }

    // A channel a thread: its line, then its convolution over the window.
    bf16* const line = conv_state + own * conv_slot;
    bf16 past[rounds][history];
#pragma unroll
    for (i32 r = 0; r < rounds; ++r) {
        const i32 n = me + r * threads;
        if (n >= channels) continue;
#pragma unroll
        for (i32 j = 0; j < history; ++j) past[r][j] = line[columns[j] * conv_column + channel_of(n)];
    }
#pragma unroll
    for (i32 r = 0; r < keys; ++r) {
        const i32 n = me + r * threads;
        if (n < tokens * size) decay_of[n] = fast_exp(fast_sigmoid(rate * (to_float(moved[r]) + bias[r])) * bound);
    }
#pragma unroll
    for (i32 r = 0; r < rounds; ++r) {
        const i32 n = me + r * threads;
        if (n >= channels) continue;
        const four weight = four_of(taps[r]);
        float x0 = to_float(past[r][0]), x1 = to_float(past[r][1]), x2 = to_float(past[r][2]);
#pragma unroll
        for (i32 t = 0; t < tokens; ++t) {
            const float x3 = to_float(token[r][t]);
            const float total = k3::fma(x0, weight.at[0], k3::fma(x1, weight.at[1], k3::fma(x2, weight.at[2], x3 * weight.at[3])));
            const float convolved = inner<KDA_INNER_BF16>(total * fast_sigmoid(total));
            (n < size       ? q_of[t * size + n]
             : n < 2 * size ? k_of[t * size + n - size]
                            : v_of[t * values + n - 2 * size]) = convolved;
            x0 = x1, x1 = x2, x2 = x3;
        }
    }
    const auto move_on = [&](i32 r) {
        const i32 channel = channel_of(me + r * threads);
        line[channel] = past[r][1];
        line[static_cast<i64>(conv_column) + channel] = past[r][2];
#pragma unroll
        for (i32 t = 0; t < tokens; ++t) {
            if (t < count) line[static_cast<i64>(t + 2) * conv_column + channel] = token[r][t];
        }
    };
#pragma unroll
    for (i32 r = 0; r < rounds; ++r) {
        const i32 n = me + r * threads;
        if (n < channels && (split == 1 || n >= 2 * size)) move_on(r);
    }
    barrier();

    float square[tokens];
#pragma unroll
    for (i32 t = 0; t < tokens; ++t) {
        square[t] = 0.0f;
        if (ragged && t >= count) continue;
        const i64 place = table[row * table_row + t];
        four q[quads], k[quads], decay[quads];
        float of_q = 0.0f, of_k = 0.0f, of_both = 0.0f;
#pragma unroll
        for (i32 j = 0; j < quads; ++j) {
            const i32 key = t * size + first_key + j * 4 * lanes;
            q[j] = four_of(load16(q_of + key)), k[j] = four_of(load16(k_of + key)), decay[j] = four_of(load16(decay_of + key));
#pragma unroll
            for (i32 i = 0; i < 4; ++i) {
                of_q = k3::fma(q[j].at[i], q[j].at[i], of_q);
                of_k = k3::fma(k[j].at[i], k[j].at[i], of_k);
                of_both = k3::fma(q[j].at[i], k[j].at[i], of_both);
            }
        }
        const float unit_q = fast_rsqrt(group_sum<lanes>(of_q) + l2_eps) * q_scale;
        const float unit_k = fast_rsqrt(group_sum<lanes>(of_k) + l2_eps);
        of_both = group_sum<lanes>(of_both) * unit_q * unit_k;
        const float taken = fast_sigmoid(beta[t]);
#pragma unroll
        for (i32 p = 0; p < passes; ++p) {
            const i32 value = first_value + p * wave_rows;
            const bool here = value < values;
            float predicted = 0.0f, read = 0.0f;
#pragma unroll
            for (i32 j = 0; j < quads; ++j) {
#pragma unroll
                for (i32 i = 0; i < 4; ++i) {
                    held[p][j].at[i] *= decay[j].at[i];
                    predicted = k3::fma(held[p][j].at[i], k[j].at[i], predicted);
                    read = k3::fma(held[p][j].at[i], q[j].at[i], read);
                }
            }
            predicted = group_sum<lanes>(predicted) * unit_k, read = group_sum<lanes>(read) * unit_q;
            const float update = here ? taken * (v_of[t * values + (here ? value : 0)] - predicted) : 0.0f;
            const float along = update * unit_k;
#pragma unroll
            for (i32 j = 0; j < quads; ++j) {
#pragma unroll
                for (i32 i = 0; i < 4; ++i) held[p][j].at[i] = k3::fma(along, k[j].at[i], held[p][j].at[i]);
            }
            if (here && !(has_null && place <= 0)) {
                float* const to = cells + place * state_slot + value * size + first_key;
#pragma unroll
                for (i32 j = 0; j < quads; ++j) keep(to + j * 4 * lanes, held[p][j]);
            }
            read = inner<KDA_INNER_BF16>(k3::fma(update, of_both, read));
            if (here && lane() % lanes == 0) read_of[t * values + value] = read, square[t] = k3::fma(read, read, square[t]);
        }
    }

#pragma unroll
    for (i32 t = 0; t < tokens; ++t) square[t] = wave_sum(square[t]);
    cluster_wait<split>();  // all workgroups of the head have started: their shared memory may be written
#pragma unroll
    for (i32 t = 0; t < tokens; ++t) {
        if (lane() == t) leave<split, (split > 1)>(&squares[(t * split + part) * waves + wave()], square[t], of_squares);
    }
    if (split > 1) barrier();  // of what was read out; those of other workgroups are waited for below
    meet<split, (split > 1)>(of_squares);
#pragma unroll
    for (i32 r = 0; r < results; ++r) {
        const i32 n = me + r * threads, t = n / values;
        if (n >= tokens * values) continue;
        float sum = 0.0f;
#pragma unroll
        for (i32 w = 0; w < split * waves; ++w) sum += squares[t * split * waves + w];
        const float given = to_float(z[r]);
        const float normed = read_of[n] * fast_rsqrt(sum * (1.0f / size) + norm_eps) * norm[r];
        const float y = normed * (KDA_SILU ? given * fast_sigmoid(given) : fast_sigmoid(given));
        result[t * result_token + n % values] = to_bf16(t < count ? y : 0.0f);
    }

    // Everyone has read the lines of q and k before its squares arrived here.
#pragma unroll
    for (i32 r = 0; r < rounds; ++r) {
        if (split > 1 && part == 0 && me + r * threads < 2 * size) move_on(r);
    }
}
