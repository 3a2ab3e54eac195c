// AVX2, FMA and F16C: 32-byte registers, sixteen of them.

constexpr int BYTES = 32;
constexpr int REGISTERS = 16;

typedef float F32x8 __attribute__((vector_size(32)));
typedef double F64x4 __attribute__((vector_size(32)));
typedef std::int32_t I32x8 __attribute__((vector_size(32)));
typedef std::int64_t I64x4 __attribute__((vector_size(32)));

template <class A>
struct VecTypes;
template <>
struct VecTypes<float> {
    using real = F32x8;
    using integer = I32x8;
};
template <>
struct VecTypes<double> {
    using real = F64x4;
    using integer = I64x4;
};
template <class A>
using VecOf = typename VecTypes<A>::real;
template <class A>
using IntOf = typename VecTypes<A>::integer;

HW_INLINE F32x8 fma(F32x8 a, F32x8 b, F32x8 c) {
    return (F32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
HW_INLINE F64x4 fma(F64x4 a, F64x4 b, F64x4 c) {
    return (F64x4)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
HW_INLINE F32x8 maximum(F32x8 a, F32x8 b) { return (F32x8)_mm256_max_ps((__m256)a, (__m256)b); }
HW_INLINE F64x4 maximum(F64x4 a, F64x4 b) { return (F64x4)_mm256_max_pd((__m256d)a, (__m256d)b); }

HW_INLINE F32x8 load_byte(const Int8* p) {
    const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return (F32x8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b));
}
HW_INLINE F32x8 load_half(const Bf16* p) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (F32x8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16);
}
HW_INLINE F32x8 load_half(const F16* p) {
    return (F32x8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
HW_INLINE void store_half(Bf16* p, F32x8 v) {
    const I32x8 u = (I32x8)v;
    const I32x8 rounded = u + 0x7FFF + ((u >> 16) & 1);
    const I32x8 quiet = u | 0x400000;
    const I32x8 chosen = v != v ? quiet : rounded;
    const __m256i high = _mm256_srli_epi32((__m256i)chosen, 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
HW_INLINE void store_half(F16* p, F32x8 v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
