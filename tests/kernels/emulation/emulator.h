// Runs a kernel on the CPU: every thread of a workgroup is a fiber, workgroups come one after the other.
//
// A fiber runs until it meets the others (a barrier, an exchange across the wave) and then hands over; whoever arrives last
// lets the others go on. Threads that have returned are not waited for. Exchanges need all lanes of a wave that have not
// returned, as the hardware does. It is compiled once for all kernels: nothing here may hang on a kernel's macros.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <type_traits>
#include <utility>
#include <vector>

namespace k3_emulator {

constexpr int largest_wave = 64, most_words = 8;
inline int looks = 0;  // 0: right, 1: every other one wrong, 2: wrong

struct Meeting {
    int expected = 0, arrived = 0;
    long generation = 0;
};

struct Thread {
    ucontext_t context;
    std::vector<char> stack;
    bool done = false;
    // of a kernel that may start before the one before it ends
    bool dependent = false, waited = false;
};

struct Block {
    std::vector<Thread> threads;
    Meeting all;
    std::vector<Meeting> waves;
    // what lanes exchange: two sets in turn, as a lane may come to the next exchange before others have read this one
    std::vector<uint32_t> exchanged[2];
    std::vector<int> turns;
    ucontext_t scheduler;
    int current = 0;
};

inline Block* block = nullptr;
inline long progress = 0;  // of what is waited for apart from meetings
inline int index[3];
inline int wave_width = 32;
inline std::function<void()> body;

[[noreturn]] inline void fail(const char* why) {
    std::fprintf(stderr, "%s\n", why);
    std::abort();
}

inline void hand_over() { swapcontext(&block->threads[block->current].context, &block->scheduler); }

inline void release_if_complete(Meeting& meeting) {
    if (meeting.arrived >= meeting.expected && meeting.arrived > 0) meeting.arrived = 0, ++meeting.generation;
}

inline void meet(Meeting& meeting) {
    const long generation = meeting.generation;
    ++meeting.arrived;
    release_if_complete(meeting);
    while (meeting.generation == generation) hand_over();
}

inline Meeting& wave_meeting() { return block->waves[block->current / wave_width]; }

// Every lane's `count` words; the result is at word w of lane l: [l * most_words + w].
inline const uint32_t* exchange(const uint32_t* words, int count) {
    const int wave = block->current / wave_width, lane = block->current % wave_width;
    std::vector<uint32_t>& slots = block->exchanged[block->turns[block->current]++ % 2];
    uint32_t* const own = &slots[(wave * wave_width + lane) * most_words];
    std::memcpy(own, words, count * sizeof(uint32_t));
    meet(wave_meeting());
    return &slots[wave * wave_width * most_words];
}

inline void start() {
    body();
    Thread& thread = block->threads[block->current];
    if (thread.dependent && !thread.waited) fail("a thread of a dependent kernel ends and has not waited");
    thread.done = true;
    --block->all.expected, --wave_meeting().expected;
    release_if_complete(block->all), release_if_complete(wave_meeting());
    hand_over();
}

// 0, or 1 if no thread can go on: they wait for one another in different places.
inline int run(int gx, int gy, int gz, int threads, int wave, const std::function<void()>& kernel) {
    constexpr size_t stack_bytes = 64 * 1024;
    wave_width = wave, body = kernel;
    Block made;
    block = &made;
    made.threads.resize(threads);
    for (Thread& thread : made.threads) thread.stack.resize(stack_bytes);
    for (index[2] = 0; index[2] < gz; ++index[2]) {
        for (index[1] = 0; index[1] < gy; ++index[1]) {
            for (index[0] = 0; index[0] < gx; ++index[0]) {
                made.all = Meeting{threads, 0, 0};
                made.waves.assign((threads + wave - 1) / wave, Meeting{});
                for (int t = 0; t < threads; ++t) ++made.waves[t / wave].expected;
                for (auto& slots : made.exchanged) slots.assign(threads * most_words, 0xdeadbeefu);
                made.turns.assign(threads, 0);
                for (Thread& thread : made.threads) {
                    thread.done = thread.dependent = thread.waited = false;
                    getcontext(&thread.context);
                    thread.context.uc_stack.ss_sp = thread.stack.data(), thread.context.uc_stack.ss_size = stack_bytes;
                    thread.context.uc_link = &made.scheduler;
                    makecontext(&thread.context, start, 0);
                }
                int left = threads;
                while (left > 0) {
                    long before = made.all.generation + progress;
                    for (const Meeting& meeting : made.waves) before += meeting.generation + meeting.arrived;
                    before += made.all.arrived;
                    const int left_before = left;
                    for (made.current = 0; made.current < threads; ++made.current) {
                        if (made.threads[made.current].done) continue;
                        swapcontext(&made.scheduler, &made.threads[made.current].context);
                        left -= made.threads[made.current].done;
                    }
                    long after = made.all.generation + progress;
                    for (const Meeting& meeting : made.waves) after += meeting.generation + meeting.arrived;
                    after += made.all.arrived;
                    if (after == before && left == left_before) return 1;
                }
            }
        }
    }
    return 0;
}

template <typename... Parameters, size_t... At>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<At...>) {
    kernel(*static_cast<std::remove_const_t<Parameters>*>(arguments[At])...);
}

template <typename... Parameters>
std::function<void()> bound(void (*kernel)(Parameters...), void** arguments) {
    return [=] { call(kernel, arguments, std::index_sequence_for<Parameters...>()); };
}

}  // namespace k3_emulator
