// A verify window of a KDA layer, from its projections to the input of its output projection, in one launch.
//
//   ahead     while the kernel before still runs, what is known already is brought into the L2
//   inputs    slots; the state and the past of the lines from where a look at the slots before the wait said, and again
//             where it was wrong; what needs no slot, weights included: the kernel before may have made them (taps are put
//             together in every step where nothing has done so beforehand)
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
// the first of them moves on. What is read out of the updated state is betas from the decayed one, q.S' + u (q.k), so
// that both sums over the keys are one exchange.
//
// A row of nobody uses no state, stores none, and gives zeros, whatever it holds; so does what is past a window's end.
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
//   KDA_AHEAD              1: slots are looked at, and state, lines and weights brought into the L2, while the kernel
//                          before still runs
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
constexpr i32 value_rounds = (tokens * values + threads - 1) / threads;
constexpr i32 key_rounds = (tokens * size + threads - 1) / threads;
constexpr i32 history = 3;
constexpr i32 turns = (tokens + wave_rows - 1) / wave_rows;  // of a wave's groups, a token each
constexpr bool dependent = KDA_DEPENDENT, ahead = KDA_AHEAD, has_null = KDA_NULL, ragged = KDA_RAGGED;

static_assert(size == 64 || size == 128, "KDA_SIZE");
static_assert(split == 1 || K3_NVIDIA, "only NVIDIA has clusters of workgroups");
static_assert(size % split == 0 && values % wave_rows == 0, "values come out even");
static_assert(tokens >= 1 && tokens <= 8, "a lane sends the sum of a token");

#if KDA_IDS == 64
typedef i64 id_type;
#else
typedef i32 id_type;
#endif

// A slot, a column or a length in 32 bits: what is below zero, or beyond, stays so.
K3_DEVICE i32 narrow(id_type id) {
    if constexpr (sizeof(id_type) == sizeof(i32)) return id;
    constexpr id_type most = 0x7fffffff;
    return static_cast<i32>(id < 0 ? -1 : id > most ? most : id);
}

template <i32 From>
K3_DEVICE void take_columns(i32 (&columns)[history], i32 number) {
    columns[0] = broadcast<From>(number), columns[1] = broadcast<From + 1>(number), columns[2] = broadcast<From + 2>(number);
}
template <i32 Tokens, i32 Token = 0>
K3_DEVICE void take_places(i32 (&places)[Tokens], i32 number) {
    places[Token] = broadcast<Token>(number);
    if constexpr (Token + 1 < Tokens) take_places<Tokens, Token + 1>(places, number);
}

K3_DEVICE float sum_of_quads(const float (&part)[quads]) { return (part[0] + part[1]) + (part[2] + part[3]); }

}  // namespace

// Grid: (sequences * HEADS * SPLIT).
K3_KERNEL(threads)
K3_CLUSTER(KDA_SPLIT) kda_verify(
    const bf16* qkv, i32 qkv_row, i32 qkv_token, const bf16* f, i32 f_row, i32 f_token, const bf16* b, i32 b_row, i32 b_token,
    const bf16* gate, i32 gate_row, i32 gate_token, i32 gate_head, const float* conv_weight, const float* a_log,
    const float* dt_bias, const float* norm_weight, bf16* conv_state, i32 conv_slot, i32 conv_column, float* state,
    i32 state_slot, i32 state_head, const id_type* start, const id_type* table, i32 table_row, const id_type* past_columns,
    i32 past_row, const id_type* lengths, i32 pool, i32 line_columns, bf16* out, float bound, float q_scale, float l2_eps,
    float norm_eps) {
    constexpr i32 room = 2 * size + values;  // of a token: q, k, the own values
    __shared__ u32x4 convolved_room[tokens * room / 4], decay_room[tokens * size / 4];
    float *const q_of = reinterpret_cast<float*>(convolved_room), *const k_of = q_of + size, *const v_of = k_of + size;
    float* const decay_of = reinterpret_cast<float*>(decay_room);
    __shared__ float read_of[tokens * values];
    __shared__ u32x4 squares_room[(tokens * split * waves + 3) / 4];
    float* const squares = reinterpret_cast<float*>(squares_room);
    __shared__ arrivals of_squares;
    const i32 part = block_x() % split;
    const i32 head = block_x() / split % KDA_HEADS;
    const i64 row = block_x() / split / KDA_HEADS;
    const i32 me = thread_of<threads>();
    if (split > 1 && me == 0) expect(of_squares, tokens * split * waves * sizeof(float));
    cluster_arrive<split>();
    const auto channel_of = [&](i32 n) { return channel_of_row<KDA_HEADS, size>(n, head, part * values); };
    const auto lines_of = [&](i32 slot, i32 column) {
        return conv_state + static_cast<i64>(slot) * conv_slot + static_cast<i64>(column) * conv_column;
    };
    // Rows of the state. Those of a wave lie one after the other.
    const i32 first_value = wave() * passes * wave_rows + lane() / lanes;
    const i32 first_key = lane() % lanes * 4;
    float* const cells = state + static_cast<i64>(head) * state_head + static_cast<i64>(part) * values * size;
    if (ahead) {
#pragma unroll
        for (i32 r = 0; r < rounds; ++r) {
            const i32 n = me + r * threads;
            if (n < channels && n % 8 == 0) bring_nearer(conv_weight + static_cast<i64>(channel_of(n)) * (history + 1));
        }
        if (me < size && me % 32 == 0) bring_nearer(dt_bias + head * size + me);
        if (me < values && me % 32 == 0) bring_nearer(norm_weight + part * values + me);
        if (me == 0) bring_nearer(a_log + head);
    }
    // Lane t has the slot of token t, those behind it that of the start, the columns of the past, the length.
    constexpr i32 start_lane = tokens, column_lane = tokens + 1, length_lane = tokens + 1 + history;
    const id_type* number_at = start + row;
    if (lane() < tokens) number_at = table + row * table_row + lane();
    if (lane() >= column_lane && lane() < length_lane) number_at = past_columns + row * past_row + (lane() - column_lane);
    if (ragged && lane() == length_lane) number_at = lengths + row;
    // What these say now. They may be old, or not yet written.
    i32 begin_seen = 0, own_seen = 0, columns_seen[history] = {};
    bool state_seen = false, lines_seen = false;
    if (ahead) {
        const i32 seen = narrow(peek(number_at));
        begin_seen = broadcast<start_lane>(seen), own_seen = broadcast<0>(seen);
        state_seen = begin_seen >= has_null && begin_seen < pool;
        lines_seen = own_seen >= has_null && own_seen < pool;
        take_columns<column_lane>(columns_seen, seen);
#pragma unroll
        for (i32 j = 0; j < history; ++j) lines_seen &= columns_seen[j] >= 0 && columns_seen[j] < line_columns;
        begin_seen = state_seen ? begin_seen : 0, own_seen = lines_seen ? own_seen : 0;
#pragma unroll
        for (i32 j = 0; j < history; ++j) columns_seen[j] = lines_seen ? columns_seen[j] : 0;
    }
    if (ahead && wave() == waves - 1) {
        if (lane() == 0 && state_seen) {
            bring_nearer(cells + static_cast<i64>(begin_seen) * state_slot, values * size * sizeof(float));
        }
        constexpr i32 pieces = 3 * size / 64;  // of 128 bytes, in a column
        const i32 at = lane() % pieces * 64;
#pragma unroll
        for (i32 j = 0; j < history; ++j) {
            if (lane() >= pieces || !lines_seen) continue;
            bring_nearer(lines_of(own_seen, columns_seen[j]) + (at / size * KDA_HEADS + head) * size + at % size);
        }
    }
    const auto token_of = [&](i32 turn) {  // of this lane's group
        const i32 own_turn = turn * wave_rows + lane() / lanes;
        return own_turn < tokens ? own_turn : tokens - 1;
    };
    const bf16 *token_at[rounds], *f_at[key_rounds], *gate_at[value_rounds], *b_at[turns];
    bf16* seen_lines_at[rounds][history];
    const float *bias_at = dt_bias + head * size, *norm_at = norm_weight + part * values, *rate_at = a_log + head;
    const float* taps_at[rounds];
    const bool never = pool < 0;
    work_out(bias_at, never), work_out(norm_at, never), work_out(rate_at, never), work_out(number_at, never);
#pragma unroll
    for (i32 r = 0; r < rounds; ++r) {
        const i32 channel = channel_of(me + r * threads);
        token_at[r] = qkv + row * qkv_row + channel;
        taps_at[r] = conv_weight + static_cast<i64>(channel) * (history + 1);
        work_out(token_at[r], never), work_out(taps_at[r], never);
#pragma unroll
        for (i32 j = 0; j < history; ++j) {
            seen_lines_at[r][j] = lines_of(own_seen, columns_seen[j]) + channel;
            if (ahead) work_out(seen_lines_at[r][j], never);
        }
    }
#pragma unroll
    for (i32 r = 0; r < turns; ++r) {
        b_at[r] = b + row * b_row + static_cast<i64>(token_of(r)) * b_token + head;
        work_out(b_at[r], never);
    }
#pragma unroll
    for (i32 r = 0; r < key_rounds; ++r) {
        const i32 n = me + r * threads;
        f_at[r] = f + row * f_row + static_cast<i64>(n / size) * f_token + head * size + n % size;
        work_out(f_at[r], never);
    }
#pragma unroll
    for (i32 r = 0; r < value_rounds; ++r) {
        const i32 n = me + r * threads;
        gate_at[r] = gate + row * gate_row + static_cast<i64>(n / values) * gate_token + static_cast<i64>(head) * gate_head +
                     part * values + n % values;
        work_out(gate_at[r], never);
    }
    float* seen_at = cells + static_cast<i64>(begin_seen) * state_slot + first_value * size + first_key;
    if (ahead) work_out(seen_at, never);
    wait_for_earlier_kernel<dependent>();
    release_later_kernel<dependent>();

    const id_type told = *number_at;
    u32x4 loaded[passes][quads];
    if (state_seen) {
#pragma unroll
        for (i32 p = 0; p < passes; ++p) {
            if (first_value + p * wave_rows >= values) continue;
#pragma unroll
            for (i32 j = 0; j < quads; ++j) loaded[p][j] = load16_early(seen_at + p * wave_rows * size + j * 4 * lanes);
        }
    }
    // A channel a thread: its line, then its convolution over the window.
    bf16 past[rounds][history];
    if (lines_seen) {
#pragma unroll
        for (i32 r = 0; r < rounds; ++r) {
            const i32 n = me + r * threads;
            if (n >= channels) continue;
#pragma unroll
            for (i32 j = 0; j < history; ++j) past[r][j] = *seen_lines_at[r][j];
        }
    }

    bf16 token[rounds][tokens];
    bf16 moved[key_rounds], z[value_rounds];
#pragma unroll
    for (i32 t = 0; t < tokens; ++t) {
#pragma unroll
        for (i32 r = 0; r < rounds; ++r) {
            const i32 n = me + r * threads;
            if (n < channels) token[r][t] = token_at[r][static_cast<i64>(t) * qkv_token];
        }
    }
#pragma unroll
    for (i32 r = 0; r < key_rounds; ++r) {
        const i32 n = me + r * threads;
        if (n < tokens * size) moved[r] = *f_at[r];
    }
#pragma unroll
    for (i32 r = 0; r < value_rounds; ++r) {
        const i32 n = me + r * threads;
        if (n < tokens * values) z[r] = *gate_at[r];
    }
    bf16 raw_beta[turns];
#pragma unroll
    for (i32 r = 0; r < turns; ++r) raw_beta[r] = *b_at[r];

    u32x4 taps[rounds];
#pragma unroll
    for (i32 r = 0; r < rounds; ++r) {
        const i32 n = me + r * threads;
        if (n < channels) taps[r] = load16(taps_at[r]);
    }
    const float speed = *rate_at;
    float bias[key_rounds], norm[value_rounds];
#pragma unroll
    for (i32 r = 0; r < key_rounds; ++r) bias[r] = bias_at[(me + r * threads) % size];
#pragma unroll
    for (i32 r = 0; r < value_rounds; ++r) norm[r] = norm_at[(me + r * threads) % values];

    const i32 number = narrow(told), begin = broadcast<start_lane>(number);
    i32 places[tokens], columns[history];
    take_places(places, number);
    take_columns<column_lane>(columns, number);
    const i32 own = places[0], length = ragged ? broadcast<length_lane>(number) : tokens;
    const i32 count = length < tokens ? length : tokens;
    const bool nobody = (has_null && own <= 0) || count <= 0;
    const bool starts = !(has_null && begin <= 0);
    if (!nobody && !(state_seen && begin == begin_seen && starts)) {
#pragma unroll
        for (i32 p = 0; p < passes; ++p) {
            const i32 value = first_value + p * wave_rows;
            const float* const from = cells + static_cast<i64>(begin) * state_slot + value * size + first_key;
#pragma unroll
            for (i32 j = 0; j < quads; ++j) {
                loaded[p][j] = {0, 0, 0, 0};
                if (starts && value < values) loaded[p][j] = load16(from + j * 4 * lanes);
            }
        }
    }
    bool lines_right = lines_seen && own == own_seen;
#pragma unroll
    for (i32 j = 0; j < history; ++j) lines_right &= columns[j] == columns_seen[j];
    if (!nobody && !lines_right) {
#pragma unroll
        for (i32 r = 0; r < rounds; ++r) {
            const i32 n = me + r * threads;
            if (n >= channels) continue;
#pragma unroll
            for (i32 j = 0; j < history; ++j) past[r][j] = lines_of(own, columns[j])[channel_of(n)];
        }
    }
    four held[passes][quads];
#pragma unroll
    for (i32 p = 0; p < passes; ++p) {
#pragma unroll
        for (i32 j = 0; j < quads; ++j) held[p][j] = four_of(loaded[p][j]);
    }

    const float rate = fast_exp(speed);
#pragma unroll
    for (i32 r = 0; r < key_rounds; ++r) {
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
            const float nearer = k3::fma(x2, weight.at[2], x3 * weight.at[3]);
            const float total = k3::fma(x0, weight.at[0], k3::fma(x1, weight.at[1], nearer));
            q_of[t * room + n] = inner<KDA_INNER_BF16>(total * fast_sigmoid(total));  // or k's, or v's behind them
            x0 = x1, x1 = x2, x2 = x3;
        }
    }
    const auto move_on = [&](i32 r) {
        bf16* const line = lines_of(own, 0) + channel_of(me + r * threads);
        line[0] = past[r][1];
        line[conv_column] = past[r][2];
#pragma unroll
        for (i32 t = 0; t < tokens; ++t) {
            if (t < count) line[static_cast<i64>(t + 2) * conv_column] = token[r][t];
        }
    };
#pragma unroll
    for (i32 r = 0; r < rounds; ++r) {
        const i32 n = me + r * threads;
        if (!nobody && n < channels && (split == 1 || n >= 2 * size)) move_on(r);
    }
    float scale[value_rounds];  // of what is normalised
#pragma unroll
    for (i32 r = 0; r < value_rounds; ++r) {
        const float given = to_float(z[r]);
        scale[r] = norm[r] * (KDA_SILU ? given * fast_sigmoid(given) : fast_sigmoid(given));
    }
    float betas[turns];
#pragma unroll
    for (i32 r = 0; r < turns; ++r) betas[r] = fast_sigmoid(to_float(raw_beta[r]));
    barrier();
    // Not before here: whether a row is somebody's is known last, and nothing that is loaded waits for it.
    bf16* const result = out + (row * tokens * KDA_HEADS + head) * size + part * values;
    const i64 result_token = static_cast<i64>(KDA_HEADS) * size;
    if (nobody) {
#pragma unroll
        for (i32 r = 0; r < value_rounds; ++r) {
            const i32 n = me + r * threads;
            if (n < tokens * values) result[n / values * result_token + n % values] = to_bf16(0.0f);
        }
        cluster_wait<split>();
        return;
    }

    // Lengths of q and k, and q.k, of every token: each group of lanes has one of the first, one of the next, ...
    float units_q[turns], units_k[turns], products[turns];
#pragma unroll
    for (i32 r = 0; r < turns; ++r) {
        const i32 t = token_of(r);
        float of_q[quads], of_k[quads], of_both[quads];
#pragma unroll
        for (i32 j = 0; j < quads; ++j) {
            const i32 key = t * room + first_key + j * 4 * lanes;
            const four q = four_of(load16(q_of + key)), k = four_of(load16(k_of + key));
            of_q[j] = q.at[0] * q.at[0], of_k[j] = k.at[0] * k.at[0], of_both[j] = q.at[0] * k.at[0];
#pragma unroll
            for (i32 i = 1; i < 4; ++i) {
                of_q[j] = k3::fma(q.at[i], q.at[i], of_q[j]);
                of_k[j] = k3::fma(k.at[i], k.at[i], of_k[j]);
                of_both[j] = k3::fma(q.at[i], k.at[i], of_both[j]);
            }
        }
        units_q[r] = fast_rsqrt(group_sum<lanes>(sum_of_quads(of_q)) + l2_eps) * q_scale;
        units_k[r] = fast_rsqrt(group_sum<lanes>(sum_of_quads(of_k)) + l2_eps);
        products[r] = group_sum<lanes>(sum_of_quads(of_both)) * units_q[r] * units_k[r];
    }

    float square[tokens];
#pragma unroll
    for (i32 t = 0; t < tokens; ++t) {
        square[t] = 0.0f;
        if (ragged && t >= count) continue;
        const i32 from = t % wave_rows * lanes;
        const float unit_q = shuffle(units_q[t / wave_rows], from), unit_k = shuffle(units_k[t / wave_rows], from);
        const float of_both = shuffle(products[t / wave_rows], from), beta = shuffle(betas[t / wave_rows], from);
        four q[quads], k[quads], decay[quads];
#pragma unroll
        for (i32 j = 0; j < quads; ++j) {
            const i32 key = first_key + j * 4 * lanes;
            q[j] = four_of(load16(q_of + t * room + key)), k[j] = four_of(load16(k_of + t * room + key));
            decay[j] = four_of(load16(decay_of + t * size + key));
        }
#pragma unroll
        for (i32 p = 0; p < passes; ++p) {
            const i32 value = first_value + p * wave_rows;
            const bool here = value < values;
            float along_k[quads], along_q[quads];
#pragma unroll
            for (i32 j = 0; j < quads; ++j) {
                along_k[j] = 0.0f, along_q[j] = 0.0f;
#pragma unroll
                for (i32 i = 0; i < 4; ++i) {
                    held[p][j].at[i] *= decay[j].at[i];
                    along_k[j] = k3::fma(held[p][j].at[i], k[j].at[i], along_k[j]);
                    along_q[j] = k3::fma(held[p][j].at[i], q[j].at[i], along_q[j]);
                }
            }
            const float predicted = group_sum<lanes>(sum_of_quads(along_k)) * unit_k;
            float read = group_sum<lanes>(sum_of_quads(along_q)) * unit_q;
            const float update = here ? beta * (v_of[t * room + (here ? value : 0)] - predicted) : 0.0f;
            const float along = update * unit_k;
#pragma unroll
            for (i32 j = 0; j < quads; ++j) {
#pragma unroll
                for (i32 i = 0; i < 4; ++i) held[p][j].at[i] = k3::fma(along, k[j].at[i], held[p][j].at[i]);
            }
            if (here && !(has_null && places[t] <= 0)) {
                float* const to = cells + static_cast<i64>(places[t]) * state_slot + value * size + first_key;
#pragma unroll
                for (i32 j = 0; j < quads; ++j) store16_whole(to + j * 4 * lanes, packed_of(held[p][j]));
            }
            read = inner<KDA_INNER_BF16>(k3::fma(update, of_both, read));
            if (here) square[t] = k3::fma(read, read, square[t]);
            if (here && lane() % lanes == 0) read_of[t * values + value] = read;
        }
    }

#pragma unroll
    for (i32 t = 0; t < tokens; ++t) square[t] = sum_over_groups<lanes>(square[t]);
    cluster_wait<split>();  // all workgroups of the head have started: their shared memory may be written
#pragma unroll
    for (i32 t = 0; t < tokens; ++t) {
        if (lane() == t) leave<split, (split > 1)>(&squares[(t * split + part) * waves + wave()], square[t], of_squares);
    }
    if (split > 1) barrier();  // of what was read out; those of other workgroups are waited for below
    meet<split, (split > 1)>(of_squares);
#pragma unroll
    for (i32 r = 0; r < value_rounds; ++r) {
        const i32 n = me + r * threads, t = n / values;
        if (n >= tokens * values) continue;
        float sum = 0.0f;
#pragma unroll
        for (i32 w = 0; w < split * waves; ++w) sum += squares[t * split * waves + w];
        const float y = read_of[n] * fast_rsqrt(sum * (1.0f / size) + norm_eps) * scale[r];
        result[t * result_token + n % values] = to_bf16(t < count ? y : 0.0f);
    }

    // Everyone has read the lines of q and k before its squares arrived here.
#pragma unroll
    for (i32 r = 0; r < rounds; ++r) {
        if (split > 1 && part == 0 && me + r * threads < 2 * size) move_on(r);
    }
}
