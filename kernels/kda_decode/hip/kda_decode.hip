// One token of a KDA layer, from its projections to the input of its output projection: the schedule of ../triton.py.
//
//   ahead     while the kernel before still runs, state and lines are brought into the L2
//   inputs    what needs no slot is asked for first; then the state, which is nearly all of what is read; then the lines
//   q, k, v   convolved from the line of past inputs; decay of each key; beta                 a channel a thread
//   S         decayed, updated, stored; read out in the same pass                             8 lanes a value's row
//   y         normalised over the head, gated
//   lines     moved on by one                                                                 when all have read them
//
// One workgroup takes one head of a row, or on NVIDIA (sm_90 and later) a cluster of KDA_SPLIT workgroups does, each with
// its part of the values: they share the sum of squares of the output norm, and all read q's and k's lines, which the first
// of them moves on. What is read out of the updated state is taken from the decayed one, q.S' + u (q.k), so that both sums
// over the keys are one exchange.
//
// A null row loads no state, stores none, and gives zeros, whatever it holds.
//
//   KDA_HEADS, KDA_SIZE    heads of a row; keys, and values, of a head: 64 or 128
//   KDA_TAPS, KDA_COLUMNS  of the convolution; columns of a line, TAPS - 1 or more, the oldest first
//   KDA_SPLIT              workgroups of a head; 1 on AMD
//   KDA_WAVES              of a workgroup
//   KDA_KEYS               of a row of the state that a lane has: 8 or 16
//   KDA_SLOTS              0: row n has slot n; else the type of the slots: 32 or 64
//   KDA_NULL               1: slots at or below zero are nobody's
//   KDA_SILU               1: the gate goes through SiLU; 0: through a sigmoid
//   KDA_INNER_BF16         1: results of the convolution and of the recurrence are rounded to bf16
//   KDA_BOUNDED            1: a decay with a bound; 0: softplus
//   KDA_DEPENDENT          1: launched while the kernel before it may still run (sm_90 and later); 0 on AMD
//   KDA_BULK               1: the state waits in shared memory, where bulk copies bring it and from where they take it
//                          back, so that several workgroups' states are under way in a multiprocessor (sm_90 and later);
//                          0: in registers
//   KDA_ONCE               1: bulk copies tell the L2 that a state is not needed again soon
//   KDA_AHEAD              1: state and lines are brought into the L2 while the kernel before still runs
//
// Inputs, lines and the result are bf16, weights and states fp32. Strides are in elements; states and taps are 16-byte
// aligned, a head's state lies in one piece.

#include "cluster.h"
#include "portability.h"

#include "kda.h"
#if KDA_BULK
#include "nvidia.h"
#endif

namespace {

using namespace k3;

constexpr i32 size = KDA_SIZE, split = KDA_SPLIT, waves = KDA_WAVES;
constexpr i32 threads = waves * wave_size;
constexpr i32 values = size / split;                 // of this workgroup
constexpr i32 quads = KDA_KEYS / 4, lanes = size / KDA_KEYS;  // lanes that share a row of the state, so many keys each
constexpr i32 wave_rows = wave_size / lanes;           // of a wave in a pass
constexpr i32 passes = (values + waves * wave_rows - 1) / (waves * wave_rows);
constexpr i32 channels = 2 * size + values;  // q, k and the own part of v
constexpr i32 rounds = (channels + threads - 1) / threads;
constexpr i32 history = KDA_TAPS - 1;
constexpr i32 unrolled = KDA_BULK ? 4 : passes;  // what lies in shared memory needs no registers ahead of its pass
constexpr bool alone = split == 1;               // each line is one thread's
constexpr bool dependent = KDA_DEPENDENT, ahead = KDA_AHEAD, has_null = KDA_NULL, bulk = KDA_BULK;

static_assert(size == 64 || size == 128, "KDA_SIZE");
static_assert(split == 1 || K3_NVIDIA, "only NVIDIA has clusters of workgroups");
static_assert(size % split == 0 && values % (passes * wave_rows) == 0, "values come out even");
static_assert(!bulk || values == waves * passes * wave_rows, "every wave has rows of its own");
static_assert(KDA_COLUMNS >= history && KDA_TAPS == 4, "taps are read as one vector");
static_assert(threads >= size, "a thread finishes a value, and decays a key");

#if KDA_SLOTS == 64
typedef i64 slot_type;
#else
typedef i32 slot_type;
#endif

}  // namespace

// Grid: (rows * HEADS * SPLIT).
#if KDA_BULK  // three workgroups' states fit the shared memory of a multiprocessor
K3_KERNEL_OCCUPANCY(threads, 3 * KDA_WAVES / 4)
#else
K3_KERNEL(threads)
#endif
K3_CLUSTER(KDA_SPLIT) kda_decode(
    const bf16* qkv, i32 qkv_row, const bf16* f, i32 f_row, const bf16* b, i32 b_row, const bf16* gate, i32 gate_row,
    i32 gate_head, const float* conv_weight, const float* a_log, const float* dt_bias, const float* norm_weight,
    bf16* conv_state, i32 conv_slot, i32 conv_column, float* state, i32 state_slot, i32 state_head, const slot_type* slots,
    i32 pool, bf16* out, float bound, float q_scale, float l2_eps, float norm_eps) {
    __shared__ u32x4 convolved_room[(2 * size + values) / 4], decay_room[size / 4];
    float *const q_of = reinterpret_cast<float*>(convolved_room), *const k_of = q_of + size, *const v_of = k_of + size;
    float* const decay_of = reinterpret_cast<float*>(decay_room);
    __shared__ float read_of[values];
    __shared__ float squares[split * waves];
    __shared__ arrivals of_squares;
#if KDA_BULK
    K3_DYNAMIC_SHARED(u32x4, rows_room);
    __shared__ arrival of_rows[waves];
    if (thread_x() == 0) {
#pragma unroll
        for (i32 w = 0; w < waves; ++w) make_arrival(&of_rows[w]);
        arrivals_are_made();
    }
#endif
    const i32 part = block_x() % split;
    const i32 head = block_x() / split % KDA_HEADS;
    const i64 row = block_x() / split / KDA_HEADS;
    if (split > 1 && thread_x() == 0) expect(of_squares, sizeof(squares));
    cluster_arrive<split>();
    const i32 me = thread_of<threads>();
    const auto channel_of = [&](i32 n) { return channel_of_row<KDA_HEADS, size>(n, head, part * values); };
    if (ahead && wave() == waves - 1) {
        const i64 expected = KDA_SLOTS ? static_cast<i64>(peek(slots + row)) : row;
        if (expected >= has_null && expected < pool) {
            if (lane() == 0) {
                const float* const cells = state + expected * state_slot + static_cast<i64>(head) * state_head +
                                           static_cast<i64>(part) * values * size;
#if KDA_BULK && KDA_ONCE
                bring_nearer_once(cells, values * size * sizeof(float));
#else
                bring_nearer(cells, values * size * sizeof(float));
#endif
            }
            constexpr i32 pieces = 3 * size / 64;  // of 128 bytes, in a column
            for (i32 n = lane(); n < KDA_COLUMNS * pieces; n += wave_size) {
                const i32 at = n % pieces * 64;
                bring_nearer(conv_state + expected * conv_slot + static_cast<i64>(n / pieces) * conv_column +
                             (at / size * KDA_HEADS + head) * size + at % size);
            }
        }
    }
    wait_for_earlier_kernel<dependent>();
    release_later_kernel<dependent>();

    bf16 token[rounds];
    u32x4 taps[rounds];
#pragma unroll
    for (i32 r = 0; r < rounds; ++r) {
        const i32 n = me + r * threads;
        if (n >= channels) continue;
        token[r] = qkv[row * qkv_row + channel_of(n)];
        taps[r] = load16(conv_weight + static_cast<i64>(channel_of(n)) * KDA_TAPS);
    }
    const i32 key = me % size, own_value = part * values + me % values;
    const float moved = to_float(f[row * f_row + head * size + key]) + dt_bias[head * size + key];
    const float rate = a_log[head], raw_beta = to_float(b[row * b_row + head]), norm = norm_weight[own_value];
    const float z = to_float(gate[row * gate_row + static_cast<i64>(head) * gate_head + own_value]);

    const i64 slot = KDA_SLOTS ? static_cast<i64>(slots[row]) : row;
    bf16* const result = out + (row * KDA_HEADS + head) * size + part * values;
    if (has_null && slot <= 0) {
        if (me < values) result[me] = to_bf16(0.0f);
        cluster_wait<split>();
        return;
    }

    // Rows of the state. Those of a wave lie one after the other.
    const i32 first_value = wave() * passes * wave_rows + lane() / lanes;
    const i32 first_key = lane() % lanes * 4;
    float* const cells =
        state + slot * state_slot + static_cast<i64>(head) * state_head + static_cast<i64>(part) * values * size;
#if KDA_BULK
    constexpr i32 wave_cells = passes * wave_rows * size;
    float *const held = reinterpret_cast<float*>(rows_room), *const kept = held;
    if (me == 0) {
#pragma unroll
        for (i32 w = 0; w < waves; ++w) {
            expect_bytes(&of_rows[w], wave_cells * sizeof(float));
            (KDA_ONCE ? copy_bulk_once : copy_bulk)(
                held + w * wave_cells, cells + w * wave_cells, wave_cells * sizeof(float), &of_rows[w]);
        }
    }
#else
    u32x4 held[passes][quads];
    float* const kept = cells;
#pragma unroll
    for (i32 p = 0; p < passes; ++p) {
        const i32 value = first_value + p * wave_rows;
#pragma unroll
        for (i32 j = 0; j < quads; ++j) {
            if (value < values) held[p][j] = load16(cells + value * size + first_key + j * 4 * lanes);
        }
    }
#endif

    // A channel a thread: its line, then its convolution.
    bf16* const line = conv_state + slot * conv_slot;
    bf16 past[rounds][KDA_COLUMNS];
#pragma unroll
    for (i32 r = 0; r < rounds; ++r) {
        const i32 n = me + r * threads;
        if (n >= channels) continue;
#pragma unroll
        for (i32 j = 0; j < KDA_COLUMNS; ++j) past[r][j] = line[static_cast<i64>(j) * conv_column + channel_of(n)];
    }
    const float speed = fast_exp(rate);
    if (me < size) decay_of[me] = fast_exp(KDA_BOUNDED ? fast_sigmoid(speed * moved) * bound : -speed * softplus(moved));
    const float beta = fast_sigmoid(raw_beta);
#pragma unroll
    for (i32 r = 0; r < rounds; ++r) {
        const i32 n = me + r * threads;
        if (n >= channels) continue;
        const four weight = four_of(taps[r]);
        float total = to_float(token[r]) * weight.at[history];
#pragma unroll
        for (i32 j = 0; j < history; ++j) {
            total = k3::fma(to_float(past[r][KDA_COLUMNS - history + j]), weight.at[j], total);
        }
        q_of[n] = inner<KDA_INNER_BF16>(total * fast_sigmoid(total));  // or k's, or v's behind them
    }
    const auto move_on = [&](i32 r) {
        const i32 channel = channel_of(me + r * threads);
#pragma unroll
        for (i32 j = 1; j < KDA_COLUMNS; ++j) line[static_cast<i64>(j - 1) * conv_column + channel] = past[r][j];
        line[static_cast<i64>(KDA_COLUMNS - 1) * conv_column + channel] = token[r];
    };
#pragma unroll
    for (i32 r = 0; r < rounds; ++r) {
        const i32 n = me + r * threads;
        if (n < channels && (alone || n >= 2 * size)) move_on(r);
    }
    barrier();

    four q[quads], k[quads], decay[quads];
    float of_q = 0.0f, of_k = 0.0f, of_both = 0.0f;
#pragma unroll
    for (i32 j = 0; j < quads; ++j) {
        const i32 key = first_key + j * 4 * lanes;
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
#pragma unroll
    for (i32 j = 0; j < quads; ++j) {
#pragma unroll
        for (i32 i = 0; i < 4; ++i) q[j].at[i] *= unit_q, k[j].at[i] *= unit_k;
    }

    float square = 0.0f;
#if KDA_BULK
    wait_for(&of_rows[wave()], 0);
#endif
#pragma unroll unrolled
    for (i32 p = 0; p < passes; ++p) {
        const i32 value = first_value + p * wave_rows;
        const bool here = value < values;
        float predicted = 0.0f, read = 0.0f;
        four decayed[quads];
#pragma unroll
        for (i32 j = 0; j < quads; ++j) {
#if KDA_BULK
            decayed[j] = four_of(load16(held + value * size + first_key + j * 4 * lanes));
#else
            decayed[j] = four_of(here ? held[p][j] : u32x4{0, 0, 0, 0});
#endif
#pragma unroll
            for (i32 i = 0; i < 4; ++i) {
                decayed[j].at[i] *= decay[j].at[i];
                predicted = k3::fma(decayed[j].at[i], k[j].at[i], predicted);
                read = k3::fma(decayed[j].at[i], q[j].at[i], read);
            }
        }
        predicted = group_sum<lanes>(predicted), read = group_sum<lanes>(read);
        const float update = here ? beta * (v_of[here ? value : 0] - predicted) : 0.0f;
#pragma unroll
        for (i32 j = 0; j < quads; ++j) {
#pragma unroll
            for (i32 i = 0; i < 4; ++i) decayed[j].at[i] = k3::fma(update, k[j].at[i], decayed[j].at[i]);
            if (here) store16(kept + value * size + first_key + j * 4 * lanes, packed_of(decayed[j]));
        }
        read = inner<KDA_INNER_BF16>(k3::fma(update, of_both, read));
        if (here && lane() % lanes == 0) read_of[value] = read, square = k3::fma(read, read, square);
    }
#if KDA_BULK
    show_to_bulk_copies();
    wave_barrier();
    if (lane() == 0) {
        (KDA_ONCE ? store_bulk_once : store_bulk)(
            cells + wave() * wave_cells, held + wave() * wave_cells, wave_cells * sizeof(float));
    }
#endif
    square = wave_sum(square);
    cluster_wait<split>();  // all workgroups of the head have started: their shared memory may be written
    if (lane() == 0) leave<split, (split > 1)>(&squares[part * waves + wave()], square, of_squares);
    if (split > 1) barrier();  // of what was read out; those of other workgroups are waited for below
    meet<split, (split > 1)>(of_squares);
    float sum = 0.0f;
#pragma unroll
    for (i32 w = 0; w < split * waves; ++w) sum += squares[w];
    if (me < values) {
        const float normed = read_of[me] * fast_rsqrt(sum * (1.0f / size) + norm_eps) * norm;
        result[me] = to_bf16(normed * (KDA_SILU ? z * fast_sigmoid(z) : fast_sigmoid(z)));
    }

    // Everyone has read the lines of q and k before its squares arrived here.
#pragma unroll
    for (i32 r = 0; r < rounds; ++r) {
        if (!alone && part == 0 && me + r * threads < 2 * size) move_on(r);
    }
#if KDA_BULK
    if (lane() == 0) wait_until_stores_have_read();  // the memory is given away with the workgroup
#endif
}
