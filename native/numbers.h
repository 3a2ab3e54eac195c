// Storage types and how they become arithmetic. Each instruction set includes this inside its own
// namespace, so that no inline function compiled for one CPU is ever linked into another's code.

struct Bf16 {
    std::uint16_t bits;
};
struct F16 {
    std::uint16_t bits;
};
struct Int8 {  // −127 … 127; what it stands for is told by a scale beside it
    std::int8_t bits;
};

template <class T>
struct ArithmeticOf {
    using type = float;
};
template <>
struct ArithmeticOf<double> {
    using type = double;
};
template <class T>
using Arithmetic = typename ArithmeticOf<T>::type;

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(Int8 x) { return static_cast<float>(x.bits); }
inline float widen(Bf16 x) {
    const std::uint32_t u = static_cast<std::uint32_t>(x.bits) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
inline float widen(F16 x) {
    // Shift exponent and mantissa into place and scale by 2^112; subnormals come out right, because
    // the product is exact. Infinity and NaN need their exponent filled.
    const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
    std::uint32_t u = static_cast<std::uint32_t>(x.bits & 0x7FFFu) << 13;
    float f;
    std::memcpy(&f, &u, 4);
    f *= 0x1p112f;
    std::memcpy(&u, &f, 4);
    if ((x.bits & 0x7C00u) == 0x7C00u) u |= 0x7F800000u;
    u |= sign;
    std::memcpy(&f, &u, 4);
    return f;
}

template <class T>
inline T narrow(double x);
template <>
inline float narrow<float>(double x) {
    return static_cast<float>(x);
}
template <>
inline double narrow<double>(double x) {
    return x;
}
template <>
inline Bf16 narrow<Bf16>(double x) {
    const float f = static_cast<float>(x);
    std::uint32_t u;
    std::memcpy(&u, &f, 4);
    if (f != f) return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};
    return {static_cast<std::uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16)};
}
template <>
inline F16 narrow<F16>(double x) {
    const float f = static_cast<float>(x);
    std::uint32_t u;
    std::memcpy(&u, &f, 4);
    const std::uint16_t sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
    u &= 0x7FFFFFFFu;
    std::uint32_t half;
    if (u > 0x7F800000u) {
        half = 0x7E00u;  // NaN
    } else if (u >= 0x477FF000u) {
        half = 0x7C00u;  // 65520 and above round to infinity
    } else if (u < 0x38800000u) {
        // Subnormal: adding 0.5 puts the rounding where float's own rounding does it.
        float g;
        std::memcpy(&g, &u, 4);
        g += 0.5f;
        std::memcpy(&half, &g, 4);
        half -= 0x3F000000u;
    } else {
        half = (u + 0xFFFu + ((u >> 13) & 1u) - 0x38000000u) >> 13;
    }
    return {static_cast<std::uint16_t>(sign | half)};
}

template <class T>
inline T least(T a, T b) {
    return b < a ? b : a;
}
template <class T>
inline T most(T a, T b) {
    return a < b ? b : a;
}
inline std::int64_t round_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }
