#include "threads.h"

#include <cstddef>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <pthread.h>
#define HEADWISE_UNIX 1
#endif

namespace headwise {

namespace {

// Both GNU's and LLVM's runtime have these two. They are looked up, not linked: a link would load a
// second runtime beside torch's, and the two would fight for the cores.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using ThreadNumber = int (*)();

struct Runtime {
    Parallel parallel = nullptr;
    ThreadNumber number = nullptr;
};

std::atomic<bool> forked{false};

Runtime find() {
    Runtime found;
#if defined(HEADWISE_UNIX)
    found.parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    found.number = reinterpret_cast<ThreadNumber>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
    // A forked child has the parent's thread pool in memory, but not its threads: using it hangs.
    pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
#endif
    return found;
}

const Runtime& runtime() {
    static const Runtime found = find();
    return found;
}

struct Entry {
    void (*body)(void*, int);
    void* context;
};

}  // namespace

const char* threads_name() { return runtime().parallel ? "OpenMP" : "none"; }

void run_threads(int threads, void (*body)(void*, int), void* context) {
    const Runtime& found = runtime();
    if (threads <= 1 || !found.parallel || !found.number || forked.load()) {
        body(context, 0);
        return;
    }
    Entry entry{body, context};
    found.parallel(
        [](void* data) {
            const Entry& e = *static_cast<Entry*>(data);
            e.body(e.context, runtime().number());
        },
        &entry, static_cast<unsigned>(threads), 0);
}

}  // namespace headwise
