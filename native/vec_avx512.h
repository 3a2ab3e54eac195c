// AVX-512 F, BW, DQ and VL: 64-byte registers, thirty-two of them.

constexpr int BYTES = 64;
constexpr int REGISTERS = 32;

typedef float F32x16 __attribute__((vector_size(64)));
typedef double F64x8 __attribute__((vector_size(64)));
typedef std::int32_t I32x16 __attribute__((vector_size(64)));
typedef std::int64_t I64x8 __attribute__((vector_size(64)));

template <class A>
struct VecTypes;
template <>
struct VecTypes<float> {
    using real = F32x16;
    using integer = I32x16;
};
template <>
struct VecTypes<double> {
    using real = F64x8;
    using integer = I64x8;
};
template <class A>
using VecOf = typename VecTypes<A>::real;
template <class A>
using IntOf = typename VecTypes<A>::integer;

HW_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    return (F32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
HW_INLINE F64x8 fma(F64x8 a, F64x8 b, F64x8 c) {
    return (F64x8)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
HW_INLINE F32x16 maximum(F32x16 a, F32x16 b) { return (F32x16)_mm512_max_ps((__m512)a, (__m512)b); }
HW_INLINE F64x8 maximum(F64x8 a, F64x8 b) { return (F64x8)_mm512_max_pd((__m512d)a, (__m512d)b); }

#define HEADWISE_SCALES 1
// The nearest whole number; and q · 2^n for a whole n, 0 where that power is below the normal range.
HW_INLINE F32x16 nearest(F32x16 x) { return (F32x16)_mm512_roundscale_ps((__m512)x, 8); }
HW_INLINE F64x8 nearest(F64x8 x) { return (F64x8)_mm512_roundscale_pd((__m512d)x, 8); }
HW_INLINE F32x16 scale(F32x16 q, F32x16 n) {
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)n, _mm512_set1_ps(-126), _CMP_NLT_UQ);
    return (F32x16)_mm512_maskz_scalef_ps(normal, (__m512)q, (__m512)n);  // NaN stays NaN
}
HW_INLINE F64x8 scale(F64x8 q, F64x8 n) {
    const __mmask8 normal = _mm512_cmp_pd_mask((__m512d)n, _mm512_set1_pd(-1022), _CMP_NLT_UQ);
    return (F64x8)_mm512_maskz_scalef_pd(normal, (__m512d)q, (__m512d)n);
}

HW_INLINE F32x16 load_byte(const Int8* p) {
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (F32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b));
}
HW_INLINE F32x16 load_half(const Bf16* p) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return (F32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
}
HW_INLINE F32x16 load_half(const F16* p) {
    return (F32x16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
HW_INLINE void store_half(Bf16* p, F32x16 v) {
    const I32x16 u = (I32x16)v;
    const I32x16 rounded = u + 0x7FFF + ((u >> 16) & 1);
    const I32x16 quiet = u | 0x400000;
    const I32x16 chosen = v != v ? quiet : rounded;
    const __m512i high = _mm512_srli_epi32((__m512i)chosen, 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
}
HW_INLINE void store_half(F16* p, F32x16 v) {
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(p),
        _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
