// AVX-512 with its bfloat16 instructions: dot products of pairs.
#include "vec_avx512.h"

#define HEADWISE_PAIRS 1

// c + a₁·b₁ + a₀·b₀ in each lane, rounded after each addition; a₀ is a lane's lower half.
HW_INLINE F32x16 dot_pairs(I32x16 a, I32x16 b, F32x16 c) {
    return (F32x16)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}
// Rounded to nearest even: the numbers of a, then those of b.
HW_INLINE I32x16 narrow_pairs(F32x16 a, F32x16 b) {
    return (I32x16)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
}
