// Memory for one call's own use, kept by each thread between calls: a fresh page costs more than a
// small call's arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headwise {

class Scratch {
  public:
    // Aligned to 64 bytes, contents undefined. Throws std::bad_alloc, also where bytes overflowed.
    explicit Scratch(std::int64_t bytes);
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    template <class A>
    A* as() const {
        return static_cast<A*>(data_);
    }

  private:
    void* data_ = nullptr;
    std::int64_t bytes_ = 0;
};

}  // namespace headwise
