// Work shared out over the OpenMP threads that torch already has.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>

namespace headwise {

// Runs body(context, thread) once on each of `threads` threads, this one included. The body must
// not throw. Runs on this thread alone where there is no OpenMP runtime, or in a forked child.
void run_threads(int threads, void (*body)(void* context, int thread), void* context);

// The name of the runtime found: "OpenMP", or "none".
const char* threads_name();

// f(item) for each item. Thread t takes t, t + threads, … in this order, then what is left of the
// others': the same items go to the same core in call after call, and find its cache warm.
// Throws std::bad_alloc if any f did.
template <class F>
void parallel_for(int threads, std::int64_t items, F& f) {
    constexpr int MOST = 64;  // threads with items of their own
    if (items <= 0) return;
    if (threads > items) threads = static_cast<int>(items);
    if (threads <= 1) {
        for (std::int64_t item = 0; item < items; ++item) f(item);
        return;
    }
    struct alignas(64) Turn {
        std::atomic<std::int64_t> next{0};
    };
    struct Shared {
        F& f;
        std::int64_t items;
        int owners;
        Turn turns[MOST];
        std::atomic<bool> failed{false};
    } shared{f, items, threads < MOST ? threads : MOST, {}, {false}};
    run_threads(
        threads,
        [](void* context, int thread) {
            Shared& s = *static_cast<Shared*>(context);
            try {
                for (int k = 0; k < s.owners; ++k) {
                    const int owner = (thread + k) % s.owners;
                    std::atomic<std::int64_t>& next = s.turns[owner].next;
                    while (!s.failed.load(std::memory_order_relaxed)) {
                        const std::int64_t item =
                            owner + s.owners * next.fetch_add(1, std::memory_order_relaxed);
                        if (item >= s.items) break;
                        s.f(item);
                    }
                }
            } catch (const std::bad_alloc&) {
                s.failed.store(true, std::memory_order_relaxed);
            }
        },
        &shared);
    if (shared.failed.load()) throw std::bad_alloc();
}

}  // namespace headwise
