#include "scratch.h"

#include <cstdlib>
#include <new>
#if defined(_MSC_VER)
#include <malloc.h>
#endif

namespace headwise {

namespace {

constexpr std::int64_t ALIGN = 64;
// Larger blocks go back to the system at once; four of these a thread are the most that is kept.
constexpr std::int64_t KEEP = std::int64_t{32} << 20;
constexpr std::int64_t MOST = std::int64_t{1} << 46;

void* allocate(std::int64_t bytes) {
#if defined(_MSC_VER)
    void* p = _aligned_malloc(static_cast<std::size_t>(bytes), ALIGN);
#else
    void* p = std::aligned_alloc(ALIGN, static_cast<std::size_t>(bytes));
#endif
    if (!p) throw std::bad_alloc();
    return p;
}

void release(void* p) {
#if defined(_MSC_VER)
    _aligned_free(p);
#else
    std::free(p);
#endif
}

struct Block {
    void* data = nullptr;
    std::int64_t bytes = 0;
};

struct Kept {
    Block blocks[4];
    ~Kept() {
        for (Block& block : blocks) release(block.data);
    }
};

Kept& kept() {
    thread_local Kept blocks;
    return blocks;
}

}  // namespace

Scratch::Scratch(std::int64_t bytes) {
    if (bytes < 0 || bytes > MOST) throw std::bad_alloc();
    bytes_ = (bytes + ALIGN) / ALIGN * ALIGN;
    Block* best = nullptr;
    for (Block& block : kept().blocks)
        if (block.data && block.bytes >= bytes_ && (!best || block.bytes < best->bytes))
            best = &block;
    if (best) {
        data_ = best->data;
        bytes_ = best->bytes;
        *best = {};
    } else {
        data_ = allocate(bytes_);
    }
}

Scratch::~Scratch() {
    if (bytes_ <= KEEP) {
        // Into an empty place, or in place of the smallest.
        Block* place = &kept().blocks[0];
        for (Block& block : kept().blocks)
            if (block.bytes < place->bytes) place = &block;
        if (place->bytes < bytes_) {
            release(place->data);
            *place = {data_, bytes_};
            return;
        }
    }
    release(data_);
}

}  // namespace headwise
