// The kernels, once. Each isa_*.cpp names its namespace and vectors and includes this.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "attention.h"
#include "scratch.h"
#include "threads.h"

#define HW_INLINE inline __attribute__((always_inline))

namespace headwise::HEADWISE_ISA {
// Unnamed inside: nothing compiled for one instruction set can be linked into another's code.
namespace {

#include "numbers.h"
#include HEADWISE_VECTORS
#include "vec.h"

#include "pack.inl"
#include "rows.inl"
#include "slow.inl"
#include "softmax.inl"
#if defined(HEADWISE_PAIRS)
#include "pairs.inl"
#endif
#include "tile.inl"

#include "finish.inl"
#include "forward.inl"
#include "decode.inl"
#if defined(HEADWISE_QUADS)
#include "quads.inl"
#endif
#include "decode_int8.inl"
#include "backward.inl"
#include "statistics.inl"

}  // namespace

extern const Kernels kernels;
#define HEADWISE_WORD_(x) #x
#define HEADWISE_WORD(x) HEADWISE_WORD_(x)
const Kernels kernels{HEADWISE_WORD(HEADWISE_ISA), forward, decode, backward, draws, statistics,
                      decode_int8};

}  // namespace headwise::HEADWISE_ISA
