// int8 numbers four to a lane, for instruction sets with dot_quads. What they are multiplied with, a
// query or softmax weights, is written as whole numbers of some bytes times one unit: three bytes, the
// 24 bits that float has, or two for a bfloat16 call, whose own numbers have 8 bits. Products and sums
// are then whole numbers, and exact.

template <class T>
constexpr int DIGITS = std::is_same_v<T, Bf16> ? 2 : 3;

typedef std::uint8_t DigitOfEach __attribute__((vector_size(BYTES / 4)));
typedef std::int8_t ByteLanes __attribute__((vector_size(BYTES)));
typedef std::int16_t PairLanes __attribute__((vector_size(BYTES)));

// One head's numbers as digits, the lowest first, `row` bytes apart; and what 1 stands for.
struct Digits {
    std::uint8_t* bytes;
    std::int64_t row;  // a multiple of W<float>
    float unit;
};

template <int STEP = W<float> / 2>
HW_INLINE std::int32_t highest(IntOf<float> v) {
    if constexpr (STEP == 0) {
        return v[0];
    } else {
        using All = std::make_integer_sequence<int, W<float>>;
        const IntOf<float> turned = (IntOf<float>)turn<STEP, float>((VecOf<float>)v, All{});
        return highest<STEP / 2>(v > turned ? v : turned);
    }
}

// n products x·scale, and zeros up to `row`. Digits are not negative: SIGNED numbers are lifted by half
// the range first. False where this needs float itself: a product is not finite, or all are too small
// to have a unit.
template <int N, bool SIGNED>
HW_INLINE bool write_digits(const float* x, const float* scale, std::int64_t n, Digits& to) {
    constexpr int w = W<float>, lift = SIGNED ? 1 << (8 * N - 1) : 0;
    // Some less than there is: the largest number's quotient may be rounded up.
    constexpr float range = (1 << (8 * N - SIGNED)) - (N == 3 ? 256 : 1);
    const auto product = [&](std::int64_t i) __attribute__((always_inline)) {
        return load_some(x + i, n - i) * load_some(scale + i, n - i);
    };
    // As whole numbers the bits of positive floats have the same order, and NaN comes after ∞.
    IntOf<float> high{};
    for (std::int64_t i = 0; i < n; i += w) {
        const IntOf<float> size = (IntOf<float>)product(i) & 0x7FFFFFFF;
        high = size > high ? size : high;
    }
    const std::int32_t bits = highest(high);
    float top;
    __builtin_memcpy(&top, &bits, 4);
    if (!(top < INFINITY) || (top > 0 && top < 0x1p-100f)) return false;
    to.unit = top / range;
    const VecOf<float> inverse = fill(top > 0 ? range / top : 0.0f);
    const VecOf<float> shift = fill(static_cast<float>(lift) + 0.5f);
    for (std::int64_t i = 0; i < to.row; i += w) {
        const VecOf<float> v = i < n ? product(i) : VecOf<float>{};
        const IntOf<float> whole = __builtin_convertvector(fma(v, inverse, shift), IntOf<float>);
#pragma GCC unroll 4
        for (int t = 0; t < N; ++t) {
            const DigitOfEach digit =
                __builtin_convertvector((whole >> (8 * t)) & 0xFF, DigitOfEach);
            __builtin_memcpy(to.bytes + t * to.row + i, &digit, sizeof digit);
        }
    }
    return true;
}

// In each 16 bytes: a₀ b₀ a₁ b₁ … of their lower (or upper) halves, SIZE bytes being one number.
template <int SIZE, bool UPPER, int... I>
HW_INLINE IntOf<float> zip_bytes(IntOf<float> a, IntOf<float> b, std::integer_sequence<int, I...>) {
    using Parts = std::conditional_t<SIZE == 1, ByteLanes, PairLanes>;
    constexpr int n = sizeof...(I), lane = 16 / SIZE;
    return (IntOf<float>)__builtin_shufflevector(
        (Parts)a, (Parts)b,
        ((I & 1) * n + I / lane * lane + I % lane / 2 + (UPPER ? lane / 2 : 0))...);
}
template <int SIZE, bool UPPER>
HW_INLINE IntOf<float> zip_bytes(IntOf<float> a, IntOf<float> b) {
    return zip_bytes<SIZE, UPPER>(a, b, std::make_integer_sequence<int, BYTES / SIZE>{});
}

// out[g][c] = Σ_r x[g][r] · from[r][c] for 64 columns c, heads `out_row` apart; `fetch(r)` is called for
// every fourth r.
template <int G, int N, bool SIGNED, class Fetch>
HW_INLINE void multiply_bytes(const Digits* x, const Int8* from, std::int64_t row, std::int64_t rows,
                              float* out, std::int64_t out_row, const Fetch& fetch) {
    static_assert(BYTES == INT8_BLOCK);
    constexpr int parts = G == 1 ? 1 : 2, vectors = 4 / parts;
    constexpr std::int64_t lane = 4;
    const auto broadcast = [](const std::uint8_t* p) __attribute__((always_inline)) {
        std::int32_t quad;
        __builtin_memcpy(&quad, p, 4);
        return IntOf<float>{} + quad;
    };
#pragma GCC unroll 2
    for (int part = 0; part < parts; ++part) {
        IntOf<float> sums[G][N][vectors], all[vectors];  // all: Σ_r from[r][c], where SIGNED
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            all[v] = IntOf<float>{};
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
                for (int t = 0; t < N; ++t) sums[g][t][v] = IntOf<float>{};
        }
        const auto four = [&](std::int64_t r, const IntOf<float>* b) __attribute__((always_inline)) {
            IntOf<float> quads[vectors];
            const auto both = [&](auto upper, int v) __attribute__((always_inline)) {
                const IntOf<float> low = zip_bytes<1, upper.value>(b[0], b[1]);
                const IntOf<float> high = zip_bytes<1, upper.value>(b[2], b[3]);
                quads[v] = zip_bytes<2, false>(low, high);
                quads[v + 1] = zip_bytes<2, true>(low, high);
            };
            if (part == 0) both(std::false_type{}, 0);
            if (parts == 1 || part == 1) both(std::true_type{}, vectors - 2);
            if constexpr (SIGNED) {
#pragma GCC unroll 4
                for (int v = 0; v < vectors; ++v)
                    all[v] = dot_quads(IntOf<float>{} + 0x01010101, quads[v], all[v]);
            }
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
                for (int t = 0; t < N; ++t) {
                    const IntOf<float> digit = broadcast(x[g].bytes + t * x[g].row + r);
#pragma GCC unroll 4
                    for (int v = 0; v < vectors; ++v)
                        sums[g][t][v] = dot_quads(digit, quads[v], sums[g][t][v]);
                }
        };
        const auto take = [&](std::int64_t r) __attribute__((always_inline)) {
            IntOf<float> b;
            __builtin_memcpy(&b, from + r * row, BYTES);
            return b;
        };
        std::int64_t r = 0;
        for (; r + 4 <= rows; r += 4) {
            if (part == 0) fetch(r);
            const IntOf<float> b[4] = {take(r), take(r + 1), take(r + 2), take(r + 3)};
            four(r, b);
        }
        if (r < rows) {
            if (part == 0) fetch(r);
            IntOf<float> b[4] = {};
            for (std::int64_t i = r; i < rows; ++i) b[i - r] = take(i);
            four(r, b);
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
            VecOf<float> found[vectors];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                IntOf<float> top = sums[g][N - 1][v];
                if constexpr (SIGNED) top -= all[v] * 128;  // the lift, in the highest digit
                VecOf<float> total = __builtin_convertvector(top, VecOf<float>);
#pragma GCC unroll 4
                for (int t = N - 2; t >= 0; --t)
                    total = fma(total, fill(256.0f), __builtin_convertvector(sums[g][t][v], VecOf<float>));
                found[v] = total * x[g].unit;
            }
            // Each 16 bytes of a vector are four columns of sixteen.
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v += 2) {
                using All = std::make_integer_sequence<int, W<float>>;
                const VecOf<float> even = swap_lanes<lane, false, float>(found[v], found[v + 1], All{});
                const VecOf<float> odd = swap_lanes<lane, true, float>(found[v], found[v + 1], All{});
                float* to = out + g * out_row + 4 * (part * vectors + v);
                const auto put = [&](int i, const VecOf<float>& y, int half) __attribute__((always_inline)) {
                    __builtin_memcpy(to + 16 * i, reinterpret_cast<const char*>(&y) + half * BYTES / 2,
                                     BYTES / 2);
                };
                put(0, even, 0);
                put(1, odd, 0);
                put(2, even, 1);
                put(3, odd, 1);
            }
        }
    }
}
