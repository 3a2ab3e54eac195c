// bfloat16 numbers two to a lane, for instruction sets with dot_pairs: matrix products at twice the
// rate of float. Products of two bfloat16 numbers are exact in float, and sums are float, so only the
// softmax weights are rounded, to bfloat16, as every fused kernel does. Numbers below float's normal
// range count as 0: the instruction has it so.

struct Pairs {
    static constexpr int PER = 2;
    static HW_INLINE VecOf<float> along(const Bf16* row, std::int64_t lane, std::int64_t dim) {
        const std::int64_t left = dim - 2 * lane;
        VecOf<float> v{};
        if (left >= 2 * W<float>)
            __builtin_memcpy(&v, row + 2 * lane, BYTES);
        else
            __builtin_memcpy(&v, row + 2 * lane, static_cast<std::size_t>(2 * left));
        return v;
    }
    // Two rows, one column a lane: the upper row in the lower half.
    static HW_INLINE VecOf<float> across(const Bf16* p, std::int64_t apart, std::int64_t rows,
                                         std::int64_t width) {
        const IntOf<float> first = (IntOf<float>)load_some(p, width);
        const IntOf<float> second =
            rows > 1 ? (IntOf<float>)load_some(p + apart, width) : IntOf<float>{};
        return (VecOf<float>)(((first >> 16) & 0xFFFF) | second);
    }
    static HW_INLINE void put(float* row, std::int64_t d, VecOf<float> x) {
        store_narrow(reinterpret_cast<Bf16*>(row) + d, x);
    }
    static HW_INLINE IntOf<float> spread(const float* lane) {
        std::int32_t bits;
        __builtin_memcpy(&bits, lane, 4);
        return IntOf<float>{} + bits;
    }
    static HW_INLINE VecOf<float> multiply(IntOf<float> x, VecOf<float> y, VecOf<float> sum) {
        return dot_pairs(x, (IntOf<float>)y, sum);
    }
};

// The numbers of two vectors, as narrow_pairs leaves them, side by side: a₀ b₀ a₁ b₁ …
typedef std::int16_t PairLanes __attribute__((vector_size(BYTES)));
template <int... I>
HW_INLINE IntOf<float> interleave(IntOf<float> both, std::integer_sequence<int, I...>) {
    constexpr int n = sizeof...(I);
    const PairLanes x = (PairLanes)both;
    return (IntOf<float>)__builtin_shufflevector(x, x, (I / 2 + (I & 1) * n / 2)...);
}
HW_INLINE IntOf<float> interleave(IntOf<float> both) {
    return interleave(both, std::make_integer_sequence<int, BYTES / 2>{});
}

// As weigh_row, but the weights are rounded to bfloat16 and laid side by side from `to` on, which may
// be where the scores lie. Two sums are kept: state.l of the weights as they are, for the logsumexp,
// and `weighed` of the rounded ones, for the output, whose weights then sum to 1. The maximum is not
// rounded up: the largest weight is then 1 and loses nothing.
HW_INLINE float weigh_pairs(const float* s, std::int64_t n, float slope, float high,
                            RowState<float>& state, float& weighed, float* to) {
    constexpr int w = W<float>;
    const float top = high * slope;
    const float m = top > state.m ? top : state.m;
    const float shift = m == -INFINITY ? 0.0f : m;
    const VecOf<float> less = fill(-shift), times = fill(slope);
    const IntOf<float> ones = IntOf<float>{} + 0x3F803F80;
    VecOf<float> total[2] = {}, rounded{};
    for (std::int64_t j = 0; j < n; j += 2 * w) {
        const VecOf<float> a = exp2<true>(fma(load(s + j), times, less));
        const VecOf<float> b = exp2<true>(fma(load(s + j + w), times, less));
        total[0] += a;
        total[1] += b;
        const IntOf<float> pairs = narrow_pairs(a, b);
        rounded = dot_pairs(pairs, ones, rounded);
        store(to + j / 2, (VecOf<float>)pairs);
    }
    const float shrink = m == state.m ? 1.0f : exp2_one(state.m - m);
    state.l = state.l * shrink + sum<float>(total[0] + total[1]);
    weighed = weighed * shrink + sum<float>(rounded);
    state.m = m;
    return shrink;
}
