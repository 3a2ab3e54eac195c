// int8 numbers four to a lane, for instruction sets with dot_quads. What they are multiplied with, a
// query or softmax weights, is written as whole numbers of some bytes times one unit: three bytes, the
// 24 bits that float has, or two for a bfloat16 call, whose own numbers have 8 bits. Products and sums
// are then whole numbers, and exact.

template <class T>
constexpr int DIGITS = std::is_same_v<T, Bf16> ? 2 : 3;

typedef std::uint8_t DigitOfEach __attribute__((vector_size(BYTES / 4)));

// The largest of each of four vectors, in the first four lanes.
template <int STEP = 2>
HW_INLINE IntOf<float> largest_each(VecOf<float>* v) {
    using All = std::make_integer_sequence<int, W<float>>;
    const auto larger = [](VecOf<float> x, VecOf<float> y) __attribute__((always_inline)) {
        const IntOf<float> a = (IntOf<float>)x, b = (IntOf<float>)y;
        return (VecOf<float>)(a > b ? a : b);
    };
    if constexpr (STEP > 0) {
#pragma GCC unroll 2
        for (int i = 0; i < STEP; ++i)
            v[i] = larger(swap_lanes<STEP, false, float>(v[i], v[i + STEP], All{}),
                          swap_lanes<STEP, true, float>(v[i], v[i + STEP], All{}));
        return largest_each<STEP / 2>(v);
    } else {
        if constexpr (W<float> > 8) v[0] = larger(v[0], turn<8, float>(v[0], All{}));
        if constexpr (W<float> > 4) v[0] = larger(v[0], turn<4, float>(v[0], All{}));
        return (IntOf<float>)v[0];
    }
}

// For each of G heads, their numbers x_row apart: n products x·scale, and zeros up to whole vectors, as
// N digits each, the lowest first, ROW bytes apart; and what 1 stands for. `product` is room for ROW
// numbers of each head. Digits are not negative: SIGNED numbers are lifted by half the range first.
// False where this needs float itself: a product is not finite, or all are too small to have a unit.
template <int G, int N, bool SIGNED, std::int64_t ROW>
HW_INLINE bool write_digits(const float* x, std::int64_t x_row, const float* scale, std::int64_t n,
                            float* product, std::uint8_t* digits, float* unit) {
    static_assert(G <= 4 && W<float> >= 4);
    constexpr int w = W<float>, lift = SIGNED ? 1 << (8 * N - 1) : 0;
    // Some less than there is: the largest number's quotient may be rounded up.
    constexpr float range = (1 << (8 * N - SIGNED)) - (N == 3 ? 256 : 1);
    // As whole numbers the bits of positive floats have the same order, and NaN comes after ∞.
    VecOf<float> high[4] = {};
    for (std::int64_t i = 0; i < n; i += w) {
        const VecOf<float> times = load_some(scale + i, n - i);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
            const VecOf<float> v = load(x + g * x_row + i) * times;
            store(product + g * ROW + i, v);
            const IntOf<float> size = (IntOf<float>)v & 0x7FFFFFFF, before = (IntOf<float>)high[g];
            high[g] = (VecOf<float>)(size > before ? size : before);
        }
    }
    const IntOf<float> most = largest_each(high);
    const VecOf<float> top = (VecOf<float>)most;
    const IntOf<float> zero = most == 0;
    const IntOf<float> fine = (top < INFINITY) & ((top >= 0x1p-100f) | zero);
    const VecOf<float> units = top * (1 / range), inverses = zero ? VecOf<float>{} : range / top;
    float inverse[w];
    store(inverse, inverses);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
        if (!fine[g]) return false;
        unit[g] = units[g];
    }
    const VecOf<float> shift = fill(static_cast<float>(lift) + 0.5f);
    for (std::int64_t i = 0; i < n; i += w)
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
            const IntOf<float> whole = __builtin_convertvector(
                fma(load(product + g * ROW + i), fill(inverse[g]), shift), IntOf<float>);
#pragma GCC unroll 4
            for (int t = 0; t < N; ++t) {
                const DigitOfEach digit = __builtin_convertvector(whole >> (8 * t), DigitOfEach);
                __builtin_memcpy(digits + (g * N + t) * ROW + i, &digit, sizeof digit);
            }
        }
    return true;
}

// Σ_r x[g][r] · from[r][c] for V vectors of columns c, `quads` times four rows r, each four `row` bytes
// apart: put(g, v, sums). The G heads' digits are N · ROW bytes apart. fetch(q) is called for each four.
template <int G, int N, bool SIGNED, std::int64_t ROW, int V, class Fetch, class Put>
HW_INLINE void multiply_quads(const std::uint8_t* digits, const float* unit, const Int8* from,
                              std::int64_t row, std::int64_t quads, const Fetch& fetch,
                              const Put& put) {
    IntOf<float> sums[G][N][V], all[V];  // all: Σ_r from[r][c], where SIGNED
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
        all[v] = IntOf<float>{};
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
            for (int t = 0; t < N; ++t) sums[g][t][v] = IntOf<float>{};
    }
    for (std::int64_t q = 0; q < quads; ++q) {
        fetch(q);
        IntOf<float> four[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) __builtin_memcpy(&four[v], from + q * row + v * BYTES, BYTES);
        if constexpr (SIGNED) {
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v)
                all[v] = dot_quads(IntOf<float>{} + 0x01010101, four[v], all[v]);
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
            for (int t = 0; t < N; ++t) {
                std::int32_t quad;
                __builtin_memcpy(&quad, digits + (g * N + t) * ROW + 4 * q, 4);
                const IntOf<float> digit = IntOf<float>{} + quad;
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) sums[g][t][v] = dot_quads(digit, four[v], sums[g][t][v]);
            }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            IntOf<float> top = sums[g][N - 1][v];
            if constexpr (SIGNED) top -= all[v] * 128;  // the lift, in the highest digit
            VecOf<float> total = __builtin_convertvector(top, VecOf<float>);
#pragma GCC unroll 4
            for (int t = N - 2; t >= 0; --t)
                total = fma(total, fill(256.0f), __builtin_convertvector(sums[g][t][v], VecOf<float>));
            put(g, v, total * unit[g]);
        }
}
