// Plain vectors: NEON on arm64, SSE2 on x86-64, whatever the compiler has elsewhere. A build for tests
// makes them as wide as AVX-512's, so that its shapes run on any machine.

#if !defined(HEADWISE_BYTES)
#define HEADWISE_BYTES 16
#endif
#if !defined(HEADWISE_REGISTERS)
#if defined(__aarch64__)
#define HEADWISE_REGISTERS 32
#else
#define HEADWISE_REGISTERS 16
#endif
#endif

constexpr int BYTES = HEADWISE_BYTES;
constexpr int REGISTERS = HEADWISE_REGISTERS;

typedef float F32 __attribute__((vector_size(HEADWISE_BYTES)));
typedef double F64 __attribute__((vector_size(HEADWISE_BYTES)));
typedef std::int32_t I32 __attribute__((vector_size(HEADWISE_BYTES)));
typedef std::int64_t I64 __attribute__((vector_size(HEADWISE_BYTES)));

template <class A>
struct VecTypes;
template <>
struct VecTypes<float> {
    using real = F32;
    using integer = I32;
};
template <>
struct VecTypes<double> {
    using real = F64;
    using integer = I64;
};
template <class A>
using VecOf = typename VecTypes<A>::real;
template <class A>
using IntOf = typename VecTypes<A>::integer;

#if defined(__aarch64__) && HEADWISE_BYTES == 16
HW_INLINE F32 fma(F32 a, F32 b, F32 c) {
    return (F32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
HW_INLINE F64 fma(F64 a, F64 b, F64 c) {
    return (F64)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}
#else
// No fused instruction to rely on: rounded twice, everywhere alike.
HW_INLINE F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }
HW_INLINE F64 fma(F64 a, F64 b, F64 c) { return a * b + c; }
#endif
HW_INLINE F32 maximum(F32 a, F32 b) { return a > b ? a : b; }
HW_INLINE F64 maximum(F64 a, F64 b) { return a > b ? a : b; }

#if defined(HEADWISE_PAIRS)
// As AVX512-BF16 has it: the upper product first. Products of bfloat16 numbers are exact.
HW_INLINE F32 dot_pairs(I32 a, I32 b, F32 c) {
    c += (F32)(a & ~0xFFFF) * (F32)(b & ~0xFFFF);
    return c + (F32)(a << 16) * (F32)(b << 16);
}
HW_INLINE I32 narrow_pairs(F32 a, F32 b) {
    std::uint16_t bits[BYTES / 2];
    for (int i = 0; i < BYTES / 4; ++i) {
        bits[i] = narrow<Bf16>(a[i]).bits;
        bits[BYTES / 4 + i] = narrow<Bf16>(b[i]).bits;
    }
    I32 v;
    __builtin_memcpy(&v, bits, BYTES);
    return v;
}
#endif

#if defined(HEADWISE_QUADS)
HW_INLINE I32 dot_quads(I32 a, I32 b, I32 c) {
    for (int t = 0; t < 32; t += 8) c += ((a >> t) & 0xFF) * ((b << (24 - t)) >> 24);
    return c;
}
#endif

HW_INLINE F32 load_byte(const Int8* p) {
    typedef std::int8_t Bytes __attribute__((vector_size(HEADWISE_BYTES / 4)));
    Bytes b;
    __builtin_memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, F32);
}
template <class T>
HW_INLINE F32 load_half(const T* p) {
    F32 v;
    for (int i = 0; i < BYTES / 4; ++i) v[i] = widen(p[i]);
    return v;
}
template <class T>
HW_INLINE void store_half(T* p, F32 v) {
    for (int i = 0; i < BYTES / 4; ++i) p[i] = narrow<T>(v[i]);
}
