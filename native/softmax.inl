// What happens to one row of a tile's scores between the two matrix products.
//
// Scores are kept in units of log2, and the running maximum is rounded up to a whole number: every
// rescaling is then by a power of two, exact, and most tiles need none.

template <class A>
constexpr A LOG2E = A(1.4426950408889634);

// How raw dot products become scores in log2 units: t = s · slope for a plain row. With a soft cap
// or a bias each score is computed in natural units first (`plain` is false) and slope is log2 e.
template <class A>
struct Scores {
    bool plain;
    A query_factor;  // a power of two, applied to the query: a large product must not overflow
    A natural;       // raw dot product → natural score
    A slope;
    A cap, uncap;    // soft cap c and 1/c; c == 0: none
};

template <class A>
Scores<A> scores_of(const Call& call) {
    int exponent = 0;
    // scale · log2 e = fraction · 2^exponent with fraction in [½, 1)
    const double fraction = std::frexp(call.scale * 1.4426950408889634, &exponent);
    Scores<A> s;
    s.plain = !call.bias.data && !(call.softcap > 0);
    // The factor stays where float can hold it; what is left goes into the slope.
    const int limit = sizeof(A) == 4 ? 100 : 900;
    const int e = exponent > limit ? limit : exponent < -limit ? -limit : exponent;
    s.query_factor = static_cast<A>(std::ldexp(1.0, e));
    const double rest = std::ldexp(fraction, exponent - e);
    s.natural = static_cast<A>(rest / 1.4426950408889634);
    s.slope = s.plain ? static_cast<A>(rest) : LOG2E<A>;
    s.cap = static_cast<A>(call.softcap);
    s.uncap = call.softcap > 0 ? static_cast<A>(1.0 / call.softcap) : A(0);
    return s;
}

// Soft cap and bias, in place, over n scores of keys from `key` on.
template <class T, class A>
void adjust_scores(A* s, std::int64_t n, const Scores<A>& how, const T* bias, std::int64_t stride) {
    constexpr int w = W<A>;
    for (std::int64_t j = 0; j < n; j += w) {
        const std::int64_t some = least<std::int64_t>(w, n - j);
        VecOf<A> x = load(s + j) * how.natural;  // the row is padded to whole vectors
        if (how.cap > 0) x = tanh<A>(x * how.uncap) * how.cap;
        if (bias) {
            VecOf<A> added;
            if (stride == 1) {
                added = load_some(bias + j, some);
            } else {
                A one[w] = {};
                for (std::int64_t i = 0; i < some; ++i) one[i] = widen(bias[(j + i) * stride]);
                added = load(one);
            }
            // A bias of −∞ hides, whatever stands at the hidden key.
            x = added == A(-INFINITY) ? fill(A(-INFINITY)) : x + added;
        }
        store(s + j, x);
    }
}

// −∞ over what the row may not see among n scores of keys from `key` on.
template <class A>
void hide_scores(A* s, std::int64_t n, std::int64_t key, const RowMask& mask) {
    constexpr int w = W<A>;
    using Integer = std::remove_reference_t<decltype(std::declval<IntOf<A>>()[0])>;
    const IntOf<A> lane = indices<A>();
    const auto at = [](std::int64_t x) { return IntOf<A>{} + static_cast<Integer>(x); };
    for (std::int64_t j = 0; j < n; j += w) {
        if (mask.all(key + j, key + j + w)) continue;
        const IntOf<A> k = lane + static_cast<Integer>(key + j);
        const IntOf<A> in = ((k >= at(mask.start[0])) & (k < at(mask.end[0]))) |
                            ((k >= at(mask.start[1])) & (k < at(mask.end[1])));
        store(s + j, in ? load(s + j) : fill(A(-INFINITY)));
    }
    if (mask.bits)
        for (std::int64_t j = 0; j < n; ++j)
            if (s[j] != A(-INFINITY) && !mask.sees(key + j)) s[j] = A(-INFINITY);
}

// The running state of a row: m, its maximum rounded up (log2 units), and l = Σ 2^(t − m).
template <class A>
struct RowState {
    A m, l;
};

// The largest of n scores (a whole number of vectors).
template <class A>
HW_INLINE A highest(const A* s, std::int64_t n) {
    constexpr int w = W<A>;
    VecOf<A> high[2] = {fill(A(-INFINITY)), fill(A(-INFINITY))};
    std::int64_t j = 0;
    for (; j + 2 * w <= n; j += 2 * w) {
        high[0] = maximum(load(s + j), high[0]);
        high[1] = maximum(load(s + j + w), high[1]);
    }
    if (j < n) high[0] = maximum(load(s + j), high[0]);
    return largest<A>(maximum(high[0], high[1]));
}

// n raw scores (a whole number of vectors), the largest of them `high`, become weights 2^(t − m).
// Returns the factor for what was summed before.
template <class A>
HW_INLINE A weigh_row(A* s, std::int64_t n, A slope, A high, RowState<A>& state) {
    constexpr int w = W<A>;
    const A top = high * slope;
    A m = state.m;
    if (top > m) m = std::ceil(top);
    // A row that has seen nothing: weights 2^(−∞ − 0) = 0.
    const A shift = m == A(-INFINITY) ? A(0) : m;
    const VecOf<A> less = fill(-shift), times = fill(slope);
    VecOf<A> total[2] = {};
    std::int64_t j = 0;
    for (; j + 2 * w <= n; j += 2 * w) {
        const VecOf<A> a = exp2(fma(load(s + j), times, less));
        const VecOf<A> b = exp2(fma(load(s + j + w), times, less));
        store(s + j, a);
        store(s + j + w, b);
        total[0] += a;
        total[1] += b;
    }
    if (j < n) {
        const VecOf<A> a = exp2(fma(load(s + j), times, less));
        store(s + j, a);
        total[0] += a;
    }
    const A shrink = m == state.m ? A(1) : exp2_one(state.m - m);
    state.l = state.l * shrink + sum<A>(total[0] + total[1]);
    state.m = m;
    return shrink;
}
