// The vector vocabulary, from what an instruction set says of itself:
//   BYTES            bytes of one vector register
//   fma(a, b, c)     a·b + c for VecOf<float> and VecOf<double>
//   maximum(a, b)    a > b ? a : b, so the second where either is NaN
// and loads of bytes, loads and stores of half types. All else is GCC's and Clang's vector
// extension, which compiles to the same instructions as intrinsics would.

template <class A>
struct Vec {
    static constexpr int lanes = BYTES / static_cast<int>(sizeof(A));
    using type = VecOf<A>;
};

template <class A>
HW_INLINE VecOf<A> fill(A x) {
    return x - VecOf<A>{};  // a broadcast: x − 0 is x, for −0 too
}
template <class A>
HW_INLINE VecOf<A> load(const A* p) {
    VecOf<A> v;
    __builtin_memcpy(&v, p, BYTES);
    return v;
}
template <class A>
HW_INLINE void store(A* p, VecOf<A> v) {
    __builtin_memcpy(p, &v, BYTES);
}

// Memory is fetched ahead of its use, a line at a time.
template <class T>
HW_INLINE void fetch(const T* p, std::int64_t n) {
    const char* line = reinterpret_cast<const char*>(p);
    for (std::int64_t i = 0; i < n * static_cast<std::int64_t>(sizeof(T)); i += 64)
        __builtin_prefetch(line + i, 0, 2);
}

// A vector of arithmetic numbers from storage, and back (rounded to nearest even).
template <class T>
HW_INLINE VecOf<Arithmetic<T>> load_wide(const T* p) {
    if constexpr (sizeof(T) == sizeof(Arithmetic<T>)) {
        return load(p);
    } else if constexpr (sizeof(T) == 1) {
        return load_byte(p);
    } else {
        return load_half(p);
    }
}
template <class T>
HW_INLINE void store_narrow(T* p, VecOf<Arithmetic<T>> v) {
    if constexpr (sizeof(T) == sizeof(Arithmetic<T>)) {
        store(p, v);
    } else {
        store_half(p, v);
    }
}

// 2·lanes bfloat16 numbers at the cost of one load: those at even places, and those at odd ones.
template <class T>
HW_INLINE void load_two(const T* p, VecOf<float>& even, VecOf<float>& odd) {
    IntOf<float> bits;
    __builtin_memcpy(&bits, p, BYTES);
    even = (VecOf<float>)(bits << 16);
    odd = (VecOf<float>)(bits & ~0xFFFF);
}

// The first n lanes (0 ≤ n ≤ lanes), zeros after them; and only those written.
template <class T>
HW_INLINE VecOf<Arithmetic<T>> load_some(const T* p, std::int64_t n) {
    using A = Arithmetic<T>;
    if (n >= Vec<A>::lanes) return load_wide(p);
    A some[Vec<A>::lanes] = {};
    for (std::int64_t i = 0; i < n; ++i) some[i] = widen(p[i]);
    return load(some);
}
template <class T>
HW_INLINE void store_some(T* p, VecOf<Arithmetic<T>> v, std::int64_t n) {
    using A = Arithmetic<T>;
    if (n >= Vec<A>::lanes) return store_narrow(p, v);
    A some[Vec<A>::lanes];
    store(some, v);
    for (std::int64_t i = 0; i < n; ++i) p[i] = narrow<T>(some[i]);
}

// Reductions in a fixed order, halves joined until one lane is left.
template <int STEP, class A, int... I>
HW_INLINE VecOf<A> turn(VecOf<A> v, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(v, v, ((I + STEP) % Vec<A>::lanes)...);
}
template <class A, int STEP = Vec<A>::lanes / 2>
HW_INLINE A sum(VecOf<A> v) {
    using All = std::make_integer_sequence<int, Vec<A>::lanes>;
    if constexpr (STEP == 0) return v[0];
    else return sum<A, STEP / 2>(v + turn<STEP, A>(v, All{}));
}
template <class A, int STEP = Vec<A>::lanes / 2>
HW_INLINE A largest(VecOf<A> v) {
    using All = std::make_integer_sequence<int, Vec<A>::lanes>;
    if constexpr (STEP == 0) return v[0];
    else return largest<A, STEP / 2>(maximum(v, turn<STEP, A>(v, All{})));
}

// 0, 1, 2 … in every lane's own type of integer.
template <class A>
HW_INLINE IntOf<A> indices() {
    IntOf<A> v;
    for (int i = 0; i < Vec<A>::lanes; ++i) v[i] = i;
    return v;
}

// 2^f for f on [−½, ½] as 1 + f·q(f), q fitted for the least largest relative error: 2e-9 before
// rounding; 1e-7 where the result is to be rounded to a half type anyway.
template <bool HALF>
HW_INLINE VecOf<float> exp2_near(VecOf<float> f) {
    VecOf<float> q;
    if constexpr (HALF) {
        q = fill(0x1.5bba14p-10f);
        q = fma(q, f, fill(0x1.3cea88p-7f));
        q = fma(q, f, fill(0x1.c6b752p-5f));
        q = fma(q, f, fill(0x1.ebf9bcp-3f));
        q = fma(q, f, fill(0x1.62e42ap-1f));
    } else {
        q = fill(0x1.41fbbcp-13f);
        q = fma(q, f, fill(0x1.5f3e52p-10f));
        q = fma(q, f, fill(0x1.3b2d4cp-7f));
        q = fma(q, f, fill(0x1.c6aee8p-5f));
        q = fma(q, f, fill(0x1.ebfbdcp-3f));
        q = fma(q, f, fill(0x1.62e43p-1f));
    }
    return fma(q, f, fill(1.0f));
}
template <bool>
HW_INLINE VecOf<double> exp2_near(VecOf<double> f) {
    // Taylor: ln(2)^k / k!. The first term left out is 4e-18 at ½.
    constexpr double terms[] = {
        1.3691488853904124e-12, 2.5678435993488196e-11, 4.44553827187081e-10,
        7.054911620801121e-09,  1.0178086009239696e-07, 1.3215486790144305e-06,
        1.5252733804059838e-05, 0.00015403530393381606, 0.0013333558146428441,
        0.009618129107628477,   0.055504108664821576,   0.2402265069591007,
        0.6931471805599453,     1.0};
    VecOf<double> p = fill(terms[0]);
    for (int i = 1; i < 14; ++i) p = fma(p, f, fill(terms[i]));
    return p;
}

// 2^x for x ≤ 0 (and a little above), good to 1 ulp where the result is normal; 0 below the normal
// range, so also for −∞; NaN stays NaN. The same in every lane and in the tail.
template <bool HALF = false, class V>
HW_INLINE V exp2(V x) {
#if defined(HEADWISE_SCALES)
    const V n = nearest(x);
    return scale(exp2_near<HALF>(x - n), n);
#else
    constexpr bool wide = std::is_same_v<V, VecOf<double>>;
    using A = std::conditional_t<wide, double, float>;
    constexpr int bias = wide ? 1023 : 127, mantissa = wide ? 52 : 23;
    const V magic = fill(wide ? A(0x1.8p52) : A(0x1.8p23));
    x = maximum(fill(A(-bias)), x);
    const V shifted = x + magic;  // its low bits are round(x)
    const V f = x - (shifted - magic);
    const IntOf<A> power = ((IntOf<A>)shifted + bias) << mantissa;  // 2^round(x); 0 at −bias
    return exp2_near<HALF>(f) * (V)power;
#endif
}

// One number, with the vectors' own arithmetic.
template <class A>
HW_INLINE A exp2_one(A x) {
    return exp2(fill(x))[0];
}

// tanh to a few ulp: a polynomial near 0, where 1 − 2/(e^{2x} + 1) would cancel.
template <class A>
HW_INLINE VecOf<A> tanh(VecOf<A> x) {
    const VecOf<A> size = x < A(0) ? -x : x;
    // e^{−2|x|} ≤ 1: never overflows. (1 − e)/(1 + e) is exact enough from 0.1 on.
    const VecOf<A> e = exp2(size * A(-2.8853900817779268));
    const VecOf<A> far = (A(1) - e) / (A(1) + e);
    // Series x − x³/3 + 2x⁵/15 − … to x^(2·count + 1).
    constexpr A series[] = {A(-1.0 / 3.0),           A(2.0 / 15.0),
                            A(-17.0 / 315.0),        A(62.0 / 2835.0),
                            A(-1382.0 / 155925.0),   A(21844.0 / 6081075.0),
                            A(-929569.0 / 638512875.0), A(6404582.0 / 10854718875.0)};
    const VecOf<A> square = size * size;
    VecOf<A> p = fill(series[7]);
    for (int i = 6; i >= 0; --i) p = fma(p, square, fill(series[i]));
    const VecOf<A> near = fma(p * square, size, size);
    const VecOf<A> t = size < A(0.125) ? near : far;
    return x < A(0) ? -t : t;
}
