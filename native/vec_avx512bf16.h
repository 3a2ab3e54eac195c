// AVX-512 with its dot products of bfloat16 pairs, and of byte quads (VNNI).
#include "vec_avx512.h"

#define HEADWISE_PAIRS 1
#define HEADWISE_QUADS 1

// c + a₁·b₁ + a₀·b₀ in each lane, rounded after each addition; a₀ is a lane's lower half.
HW_INLINE F32x16 dot_pairs(I32x16 a, I32x16 b, F32x16 c) {
    return (F32x16)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}
// Rounded to nearest even: the numbers of a, then those of b.
HW_INLINE I32x16 narrow_pairs(F32x16 a, F32x16 b) {
    return (I32x16)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
}

// c + Σ aᵢ·bᵢ over the four bytes of each lane, a's without sign and b's with one.
HW_INLINE I32x16 dot_quads(I32x16 a, I32x16 b, I32x16 c) {
    return (I32x16)_mm512_dpbusd_epi32((__m512i)c, (__m512i)a, (__m512i)b);
}
