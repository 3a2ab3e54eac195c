// Plain 16-byte vectors: NEON on arm64, SSE2 on x86-64, whatever the compiler has elsewhere.

constexpr int BYTES = 16;
#if defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif

typedef float F32x4 __attribute__((vector_size(16)));
typedef double F64x2 __attribute__((vector_size(16)));
typedef std::int32_t I32x4 __attribute__((vector_size(16)));
typedef std::int64_t I64x2 __attribute__((vector_size(16)));

template <class A>
struct VecTypes;
template <>
struct VecTypes<float> {
    using real = F32x4;
    using integer = I32x4;
};
template <>
struct VecTypes<double> {
    using real = F64x2;
    using integer = I64x2;
};
template <class A>
using VecOf = typename VecTypes<A>::real;
template <class A>
using IntOf = typename VecTypes<A>::integer;

#if defined(__aarch64__)
HW_INLINE F32x4 fma(F32x4 a, F32x4 b, F32x4 c) {
    return (F32x4)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
HW_INLINE F64x2 fma(F64x2 a, F64x2 b, F64x2 c) {
    return (F64x2)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}
#else
// No fused instruction to rely on: rounded twice, everywhere alike.
HW_INLINE F32x4 fma(F32x4 a, F32x4 b, F32x4 c) { return a * b + c; }
HW_INLINE F64x2 fma(F64x2 a, F64x2 b, F64x2 c) { return a * b + c; }
#endif
HW_INLINE F32x4 maximum(F32x4 a, F32x4 b) { return a > b ? a : b; }
HW_INLINE F64x2 maximum(F64x2 a, F64x2 b) { return a > b ? a : b; }

template <class T>
HW_INLINE F32x4 load_half(const T* p) {
    return F32x4{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])};
}
template <class T>
HW_INLINE void store_half(T* p, F32x4 v) {
    for (int i = 0; i < 4; ++i) p[i] = narrow<T>(v[i]);
}
