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

// f(item) for each item, in order of their numbers as threads become free.
// Throws std::bad_alloc if any f did.
template <class F>
void parallel_for(int threads, std::int64_t items, F& f) {
    if (items <= 0) return;
    if (threads > items) threads = static_cast<int>(items);
    if (threads <= 1) {
        for (std::int64_t item = 0; item < items; ++item) f(item);
        return;
    }
    struct Shared {
        F& f;
        std::int64_t items;
        std::atomic<std::int64_t> next{0};
        std::atomic<bool> failed{false};
    } shared{f, items};
    run_threads(
        threads,
        [](void* context, int) {
            Shared& s = *static_cast<Shared*>(context);
            try {
                while (!s.failed.load(std::memory_order_relaxed)) {
                    const std::int64_t item = s.next.fetch_add(1, std::memory_order_relaxed);
                    if (item >= s.items) break;
                    s.f(item);
                }
            } catch (const std::bad_alloc&) {
                s.failed.store(true, std::memory_order_relaxed);
            }
        },
        &shared);
    if (shared.failed.load()) throw std::bad_alloc();
}

}  // namespace headwise
